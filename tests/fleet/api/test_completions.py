"""tests/api/test_completions.py through a fleet."""

from tests.api.test_completions import *  # noqa: F403
