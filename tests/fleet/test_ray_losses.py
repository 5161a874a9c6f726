"""On Ray Serve itself: a node is lost, Ray's head dies and comes back, and no request is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator

import pytest

from loadtest.fleet import NUM_TEXTS, FleetProcess, Flight, expected
from tests.fleet.ray_parts import FakeParts
from tests.installed import needs
from tests.waiting import wait_until

pytestmark = needs("ray")

NUM_REPLICAS = 3
NUM_REQUESTS = NUM_TEXTS + 60  # a stream each of the last 60


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    """What a single server with the same engine answers."""
    with FakeParts().single() as live:
        return asyncio.run(expected(live.url))


@pytest.fixture(scope="module")
def fleet() -> Iterator[FleetProcess]:
    options = ["--nodes", "2", "--replicas", str(NUM_REPLICAS), "--step-s", "0.01"]
    with FleetProcess(*options) as running:
        yield running


def _fly(fleet: FleetProcess, wanted: list[str], *events: Callable[[], object]) -> None:
    """Requests in flight; the events come while they are. None is lost, and all are `wanted`."""
    flight = Flight(fleet.url, wanted, NUM_REQUESTS)
    at = [(NUM_REQUESTS * (i + 1) // 8, event) for i, event in enumerate(events)]
    asyncio.run(flight.run(at))
    assert (flight.num_lost, flight.num_wrong) == (0, 0), flight.problems
    assert flight.num_answered == NUM_REQUESTS


def _wait_for_replicas(fleet: FleetProcess) -> None:
    wait_until(
        lambda: len(json.loads(fleet.ask("steps", "STEPS"))) == NUM_REPLICAS,
        60,
        pause_s=0.3,
        told=lambda: fleet.ask("status", "STATUS"),
    )


def test_the_head_dies_in_flight_and_comes_back(fleet: FleetProcess, wanted: list[str]) -> None:
    _fly(
        fleet,
        wanted,
        lambda: fleet.ask("behead", "BEHEADED", 60),
        lambda: fleet.ask("kill", "KILLED"),  # whose replacement needs a head that knows of it
    )
    _wait_for_replicas(fleet)


def test_a_node_is_lost_in_flight(fleet: FleetProcess, wanted: list[str]) -> None:
    num_gone: list[int] = []
    _fly(fleet, wanted, lambda: num_gone.append(int(fleet.ask("lose", "LOST", 60))))
    assert num_gone[0] > 0
    _wait_for_replicas(fleet)
