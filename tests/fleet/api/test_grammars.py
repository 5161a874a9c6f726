"""tests.api.test_grammars.py through a fleet."""

from tests.api.test_grammars import *  # noqa: F403
