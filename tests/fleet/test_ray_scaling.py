"""On Ray Serve itself: replicas come and go by what waits, down to none, and lose no request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from loadtest.fleet import FleetProcess, num_up
from tests.installed import needs
from tests.waiting import wait_until

pytestmark = needs("ray")


@pytest.fixture(scope="module")
def fleet() -> Iterator[FleetProcess]:
    with FleetProcess("--least", "0", "--replicas", "2", "--step-s", "0.03") as running:
        yield running


def _num_engines(fleet: FleetProcess) -> int:
    return num_up(httpx.get(fleet.url + "/metrics", timeout=30).text)


_wait = partial(wait_until, timeout_s=90.0, pause_s=0.3)


def _ask(fleet: FleetProcess, i: int = 0, max_tokens: int = 8) -> Any:
    body = {
        "model": f"task-{i % 24}", "prompt": f"it {i}", "max_tokens": max_tokens,
        "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    response = httpx.post(fleet.url + "/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def test_an_update_switches_scaling_off_and_on(fleet: FleetProcess) -> None:
    fleet.ask("become --replicas 1 --step-s 0.03", "BECAME", 120.0)
    first = _ask(fleet)
    _wait(lambda: _num_engines(fleet) == 1)
    fleet.ask("become --least 0 --replicas 2 --step-s 0.03", "BECAME", 120.0)
    _wait(lambda: _num_engines(fleet) == 0)
    assert _ask(fleet) == first


def test_a_model_sleeps_wakes_and_grows(fleet: FleetProcess) -> None:
    first = _ask(fleet)
    _wait(lambda: _num_engines(fleet) == 0)
    assert _ask(fleet) == first  # it waited for a replica
    grew = threading.Event()

    def go_on(i: int) -> None:
        while not grew.is_set():
            assert _ask(fleet, i, 40)

    with ThreadPoolExecutor(48) as threads:
        answers = [threads.submit(go_on, i) for i in range(48)]
        try:
            _wait(lambda: _num_engines(fleet) == 2)
        finally:
            grew.set()
        for answer in answers:
            answer.result()
