"""Every server of the tests in this folder has a fleet where its engines were.

The tests are those of tests/api, unchanged; what they ask of a single server must hold through
an ingress and its replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from server.api.engines.client import EngineSpec
from server.fleet.far_engine import FleetHandle, FleetState
from server.metrics import Metrics
from tests.api import live
from tests.fleet.local_replicas import LocalReplicas


class _Fleet(FleetHandle):
    """It ends its replicas when it ends, as an engine's handle does."""

    def __init__(
        self, replicas: LocalReplicas, loop: asyncio.AbstractEventLoop, name: str, metrics: Metrics
    ) -> None:
        def tell(state: FleetState) -> None:
            for values in state.figures.values():  # of the only replica
                metrics.engine_told(name, values)

        super().__init__(replicas, name=name, loop=loop, first_pause_s=0.01, on_state=tell)
        self._own = replicas

    def stop(self, timeout_s: float) -> None:
        super().stop(timeout_s)
        asyncio.run_coroutine_threadsafe(self._own.stop(), self._loop).result(timeout_s)


def _as_fleets(
    specs: Sequence[EngineSpec],
    loop: Callable[[], asyncio.AbstractEventLoop],
    metrics: Metrics,
) -> list[EngineSpec]:
    """Each engine as the only replica of a fleet with its name."""

    def start(spec: EngineSpec) -> FleetHandle:
        replicas = LocalReplicas([spec], max_messages_per_s=2000.0)
        return _Fleet(replicas, loop(), spec.name, metrics)

    return [EngineSpec(s.name, s.model, s.device, partial(start, s)) for s in specs]


@pytest.fixture(scope="package", autouse=True)
def fleets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "between", _as_fleets)
        yield
