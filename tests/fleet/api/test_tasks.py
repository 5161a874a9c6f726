"""tests/api/test_tasks.py through a fleet."""

from tests.api.test_tasks import *  # noqa: F403
