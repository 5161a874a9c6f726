"""Fixtures that several suites share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """The converted smollm2-135m-instruct folder. Fetched and converted once into the cache."""
    from server.model.catalog import BUILT_IN, fetch_built_in

    return fetch_built_in(BUILT_IN["smollm2-135m-instruct"])
