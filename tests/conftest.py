"""Fixtures that several suites share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no failing test.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """The converted smollm2-135m-instruct folder. Fetched and converted once into the cache."""
    from server.model.catalog import BUILT_IN, fetch_built_in

    return fetch_built_in(BUILT_IN["smollm2-135m-instruct"])
