"""Fixtures that several suites share, and what a parallel run needs before its workers start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.profiles import register

register()


def pytest_configure(config: pytest.Config) -> None:
    """With xdist (-n), compile the kernels once here instead of once in each worker."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        return
    if config.option.collectonly:
        return
    from tests.compile_kernels import compile_kernels, fingerprint

    kept = fingerprint()
    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    if cache is None or cache.get("tailor/kernels", "") != kept:
        compile_kernels()
        if cache is not None:
            cache.set("tailor/kernels", kept)


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """The converted smollm2-135m-instruct folder. Fetched and converted once into the cache."""
    from server.model.catalog import BUILT_IN, fetch_built_in

    return fetch_built_in(BUILT_IN["smollm2-135m-instruct"])
