"""Every server of the tests in this folder has a fleet where its engines were.

The tests are those of tests/api, unchanged; what they ask of a single server must hold through
an ingress and its replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest

from server.api.engines.client import EngineSpec
from server.fleet.desk import FleetState
from server.metrics import Metrics
from tests.api import live
from tests.fleet.local_replicas import LocalReplicas, fleet_spec


def _as_fleets(
    specs: Sequence[EngineSpec],
    loop: Callable[[], asyncio.AbstractEventLoop],
    metrics: Metrics,
) -> list[EngineSpec]:
    """Each engine as the only replica of a fleet with its name."""

    def tell(state: FleetState) -> None:
        for name, values in state.figures.items():
            metrics.engine_told(name, values)

    fleets = ((spec.name, LocalReplicas([spec], max_messages_per_s=2000.0)) for spec in specs)
    return [fleet_spec(replicas, loop, name, on_state=tell) for name, replicas in fleets]


@pytest.fixture(scope="package", autouse=True)
def fleets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "between", _as_fleets)
        yield
