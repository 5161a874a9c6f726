"""tests/api/test_chat.py through a fleet."""

from tests.api.test_chat import *  # noqa: F403
