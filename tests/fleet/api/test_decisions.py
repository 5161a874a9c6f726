"""tests/api/test_decisions.py through a fleet."""

from tests.api.test_decisions import *  # noqa: F403
