"""tests/api/test_adapter_routes.py through a fleet."""

from tests.api.test_adapter_routes import *  # noqa: F403
