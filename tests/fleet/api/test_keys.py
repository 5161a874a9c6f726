"""tests/api/test_keys.py through a fleet."""

from tests.api.test_keys import *  # noqa: F403
