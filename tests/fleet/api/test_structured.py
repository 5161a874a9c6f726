"""tests/api/test_structured.py through a fleet."""

from tests.api.test_structured import *  # noqa: F403
