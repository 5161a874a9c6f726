"""On Ray Serve itself: replicas come and go by what waits, down to none, and lose no request."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.fleet.fleet_process import FleetProcess

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: the extra `ray`")


@pytest.fixture(scope="module")
def fleet() -> Iterator[FleetProcess]:
    with FleetProcess("--least", "0", "--replicas", "2", "--step-s", "0.03") as running:
        yield running


def _num_engines(fleet: FleetProcess) -> int:
    text = httpx.get(fleet.url + "/metrics", timeout=30).text
    return len(re.findall(r'^tailor_engine_up{engine="tiny/\d+",[^}]*} 1.0$', text, re.MULTILINE))


def _wait(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true in time"
        time.sleep(0.3)


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
    with ThreadPoolExecutor(48) as threads:
        answers = [threads.submit(_ask, fleet, i, 200) for i in range(96)]
        _wait(lambda: _num_engines(fleet) == 2 or all(a.done() for a in answers))
        grew = _num_engines(fleet) == 2
        assert all(answer.result() for answer in answers)
    assert grew
