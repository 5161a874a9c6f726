"""Runners of a parallel run share the cores with other workers' runners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.model.cpu import threads


@pytest.fixture(scope="session", autouse=True)
def _barriers_sleep_in_a_parallel_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads that spin at a barrier are in the way of those of another worker. Bits are the same
    either way, which a run in one process tests too."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(request.config, "workerinput"):
            patch.setattr(threads, "_BARRIER_SPINS", 0)
        yield
