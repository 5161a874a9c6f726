"""tests/api/test_responses.py through a fleet."""

from tests.api.test_responses import *  # noqa: F403
