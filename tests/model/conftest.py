"""Runners of a parallel run share the cores with other workers' runners; code for other CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.model.cpu import team


@pytest.fixture(scope="session")
def other_cpu_s_code(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """NUMBA_CACHE_DIR for processes that compile for another CPU than this one: that is nearly all
    they do. What they leave is kept from run to run, as long as the sources are the same."""
    cache = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    folder: Path = cache.mkdir("numba-other-cpu") if cache else tmp_path_factory.mktemp("numba")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _barriers_sleep_in_a_parallel_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads that spin at a barrier are in the way of those of another worker. Bits are the same
    either way, which a run in one process tests too."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(request.config, "workerinput"):
            patch.setattr(team, "_BARRIER_SPINS", 0)
        yield
