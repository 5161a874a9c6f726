"""On Ray Serve itself: what a replica learned outlives it, and an update loses no request."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.fleet import FleetProcess
from server.machine_code import make_ready
from tests.installed import needs
from tests.waiting import wait_until

pytestmark = needs("ray")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    folder = tmp_path_factory.mktemp("learned")
    # Compiled once here: an engine that compiles while it drafts is taken for one that hangs.
    make_ready()
    options = ["--replicas", "2", "--ingresses", "2", "--step-s", "0.005"]
    with FleetProcess(*options, "--shared", str(Path(folder) / "shared")) as running:
        yield running


def _ask(
    fleet: FleetProcess,
    task: str = "task-1",
    prompt: str = "the quick",
    client: httpx.Client | None = None,
) -> dict[str, Any]:
    body = {
        "model": task, "prompt": prompt, "max_tokens": 40, "temperature": 0.0,
        "ignore_eos": True, "include_speculation": True,
    }  # fmt: skip
    post = httpx.post if client is None else client.post
    response = post(fleet.url + "/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _told(fleet: FleetProcess, series: str) -> dict[str, float]:
    """The series of every engine."""
    text = httpx.get(fleet.url + "/metrics", timeout=30).text
    found = re.findall(rf'^{series}{{engine="([^"]+)"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return {engine: float(value) for engine, value in found}


_wait = partial(wait_until, timeout_s=60.0, pause_s=0.2)


def test_what_a_replica_learned_is_drafted_where_it_is_replaced(fleet: FleetProcess) -> None:
    first = _ask(fleet)
    _wait(lambda: max(_told(fleet, "tailor_learned_version").values(), default=0) >= 1)
    written: dict[str, float] = {}
    # The two ingresses hear of an engine one after the other.
    _wait(lambda: bool(written.update(_told(fleet, "tailor_learned_segments_total")) or written))
    home = max(written, key=lambda name: written[name])
    fleet.ask(f"kill {home}", "KILLED")
    prompts = (f"the quick {i}" for i in itertools.count())

    def has_arrived() -> bool:
        # Each prompt is new: an answer that is held already would not be held twice.
        _ask(fleet, prompt=next(prompts))
        told = json.loads(fleet.ask("learned task-1", "LEARNED"))
        return any(held > 40 * own for held, own in told.values())

    _wait(has_arrived)
    assert _ask(fleet)["choices"][0]["text"] == first["choices"][0]["text"]


def test_an_update_loses_no_request(fleet: FleetProcess) -> None:
    """Engines and ingresses are replaced. Half of the clients keep their connections."""
    wanted = {i: _ask(fleet, f"task-{i}", f"it {i}")["choices"] for i in range(8)}
    stop = threading.Event()
    num_asked: list[int] = []

    def go_on(i: int) -> None:
        with httpx.Client(timeout=60) as kept:
            while not stop.is_set():
                answer = _ask(fleet, f"task-{i}", f"it {i}", kept if i % 2 else None)
                assert answer["choices"] == wanted[i]
                num_asked.append(i)

    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(go_on, i) for i in range(8)]
        try:
            _wait(lambda: len(num_asked) > 12)
            fleet.ask("update", "UPDATED", timeout_s=120)
            before = len(num_asked)
            _wait(lambda: len(num_asked) > before + 12)
        finally:
            stop.set()
        for thread in running:
            thread.result(60)
    status = fleet.ask("status", "STATUS")
    assert status.count("HEALTHY") == 4 and "UNHEALTHY" not in status  # a builder among them


def test_a_stream_ends_on_the_weights_that_began_it(fleet: FleetProcess) -> None:
    """It takes longer than server.yaml's drain_s, and the new model writes another text."""
    body = {
        "model": "task-1", "prompt": "the quick", "max_tokens": 200, "temperature": 0.0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    options = ["--replicas", "1", "--step-s", "0.015", "--drain-s", "0.5"]

    def text(begun: threading.Event | None = None) -> str:
        told = ""
        with httpx.stream("POST", fleet.url + "/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    told += json.loads(line[6:])["choices"][0]["text"]
                    if begun is not None:
                        begun.set()
        return told

    fleet.deploy(*options)
    with ThreadPoolExecutor(1) as threads:
        wanted = text()
        begun = threading.Event()
        answer = threads.submit(text, begun)
        assert begun.wait(30)
        fleet.ask("rewrite", "REWRITTEN", timeout_s=120)
        assert answer.result(60) == wanted
        assert text() != wanted
