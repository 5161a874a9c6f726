"""Requests that fail, engines that die, queues that fill up, servers that are told to stop.

What happens under load and by signals is in test_faults.py, to clients that leave in
test_leaving.py.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from server.api.engines.client import EngineClient, EngineSpec
from server.config import RestartConfig, TaskConfig
from server.errors import NoEngineError
from server.metrics import Metrics
from server.types import Delta, Request, SamplingParams
from tests.api.fixtures import served_by
from tests.api.live import LiveServer, as_bytes, encode, keyed, post_bytes
from tests.fakes.scripted_engine import ScriptedEngine, ScriptedHandle, saying, steps_of, together
from tests.waiting import wait_until

IDS = encode(" over the lazy dog")
QUICK = TaskConfig.model_validate({"name": "quick", "limits": {"total_timeout_s": 1.0}})


engine, server = served_by(lambda: ScriptedEngine(saying(IDS)), tasks={"quick": QUICK})


def send_request(port: int, **body: Any) -> socket.socket:
    """A raw completion request; the socket stays open."""
    s = socket.create_connection(("127.0.0.1", port), timeout=10)
    s.sendall(post_bytes("/v1/completions", {"model": "tiny", "prompt": "the", **body}))
    return s


# --- failures ---


@pytest.mark.server_error
def test_an_error_before_the_first_token_has_its_status(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    def script(request: Request) -> Any:
        code = "queue_full" if request.sampling.max_tokens == 1 else "nan_logits"
        return [
            [Delta(request.request_id, 0, (), finish_reason="error", error="no", error_code=code)]
        ]

    engine.script = script

    def counted() -> list[float]:
        name = "tailor_request_outcomes_total"
        return [server.sample(name, outcome=outcome) for outcome in ("error", "refused")]

    before = counted()
    for stream in (False, True):
        response = server.post(stream=stream, max_tokens=1)
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        response = server.post(stream=stream, max_tokens=2)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_error"
    assert counted() == [num + 2 for num in before], "a client's fault is no failure"


@pytest.mark.server_error
def test_one_failed_choice_fails_its_request_and_no_other(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    long = IDS * 8  # under way when the other choice fails, on a busy machine too

    def script(request: Request) -> Any:
        good = steps_of(request, long, choice_id=0)
        if request.num_choices == 1:
            return good
        bad = steps_of(request, IDS[:2], choice_id=1)
        bad[-1] = [bad[-1][0]._replace(finish_reason="error", error="broke")]
        return together([good, bad])

    engine.script, engine.step_s = script, 0.02
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(server.post, max_tokens=len(long))
        assert server.post(n=2, max_tokens=len(long)).status_code == 500
        assert other.result().status_code == 200
    (failed,) = (r.request_id for r in engine.submitted if r.num_choices == 2)
    # Beside requests that tests before left, whose aborts come when they come.
    wait_until(lambda: engine.aborted.count(failed) == 1)


def test_a_clock_that_is_set_back_an_hour_changes_no_answer_and_no_timeout(
    server: LiveServer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    with ThreadPoolExecutor(2) as threads:
        before = server.post(max_tokens=4).json()
        engine.gate.clear()
        waiting = threads.submit(server.post, max_tokens=4)
        late = threads.submit(server.post, model="quick", max_tokens=4)
        wait_until(lambda: server.client.num_open == 2)
        monkeypatch.setattr(time, "time", lambda: now() - 3600.0)
        assert late.result(10).status_code == 504
        assert httpx.get(server.url + "/health").json()["engines"][0]["state"] == "ready"
        engine.gate.set()
        assert waiting.result(10).json()["choices"] == before["choices"]
        assert server.post(max_tokens=4).json()["choices"] == before["choices"]


# --- queues ---


def test_a_key_that_fills_the_queue_leaves_another_its_share() -> None:
    engine = ScriptedEngine(saying(IDS))
    engine.gate.clear()
    limits = {"max_queued_requests": 4, "max_queued_tokens": 100}
    config = keyed("a", "b", "c", limits=limits)
    with LiveServer([engine], config=config) as live, ThreadPoolExecutor(20) as threads:

        def ask(key: str, **body: Any) -> httpx.Response:
            return live.post("/v1/completions", f"sk-{key}", max_tokens=1, **body)

        open_ones = []

        def held(key: str, **body: Any) -> None:
            num = live.client.num_open
            open_ones.append(threads.submit(ask, key, **body))
            wait_until(lambda: live.client.num_open > num)

        held("a", prompt=[[5] * 24] * 4)
        refused = ask("a", prompt=[5])
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert ask("b", prompt=[[5]] * 3).status_code == 429  # half of four
        assert live.client.num_open == 4  # all prompts of a list, or none
        assert ask("b", prompt=[5] * 51).status_code == 429
        held("b", prompt=[[5] * 25] * 2)
        assert ask("b", prompt=[5]).status_code == 429
        held("c", prompt=[5] * 33)
        assert ask("c", prompt=[5]).status_code == 429
        engine.gate.set()
        assert [answer.result().status_code for answer in open_ones] == [200] * 3
        assert ask("a", prompt=[[5]] * 4).status_code == 200
        assert len(live.client.waiting) == live.client.waiting.num_tokens == 0


# --- engines ---


def test_while_loading_the_server_answers_and_refuses() -> None:
    engine = ScriptedEngine(saying(IDS), ready=False)
    with LiveServer([engine], wait_ready=False) as live:
        health = httpx.get(live.url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert health.headers["retry-after"] == "1"
        assert httpx.get(live.url + "/ping").status_code == 200
        assert httpx.get(live.url + "/ready").status_code == 503
        refused = live.post()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
        assert refused.headers["retry-after"]
        assert httpx.get(live.url + "/v1/models").status_code == 200
        engine.may_be_ready.set()
        wait_until(lambda: httpx.get(live.url + "/ready").status_code == 200)
        assert live.post(max_tokens=1).status_code == 200


@pytest.mark.server_error
def test_the_only_engine_dies_and_comes_back() -> None:
    engine = ScriptedEngine(saying(IDS), step_s=0.02)
    policy = RestartConfig(first_delay_s=0.5)
    with LiveServer([engine], restart=policy) as live, ThreadPoolExecutor(1) as threads:
        cut = threads.submit(live.post, max_tokens=200)
        wait_until(lambda: engine.num_steps >= 2)
        engine.die()
        assert cut.result().json()["error"]["code"] == "engine_died"
        health = httpx.get(live.url + "/health")
        assert health.status_code == 503 and health.json()["status"] == "loading", "again"
        assert httpx.get(live.url + "/ping").status_code == 200, "it will recover"
        refused = live.post()
        assert refused.json()["error"]["code"] == "no_engine"
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        wait_until(lambda: httpx.get(live.url + "/ready").status_code == 200)
        assert live.post(max_tokens=3).status_code == 200


def test_too_many_deaths_end_the_server_with_a_status() -> None:
    engine = ScriptedEngine(saying(IDS))
    policy = RestartConfig(max_restarts=2, first_delay_s=0.02)
    live = LiveServer([engine], restart=policy)
    with live:
        for start in (1, 2, 3):
            wait_until(partial(lambda n: engine.num_starts == n and live.client.is_ready, start))
            engine.die()
        assert live.join() == 1
        assert engine.num_starts == 3


def test_an_engine_that_cannot_be_built_ends_the_server() -> None:
    engine = ScriptedEngine(saying(IDS), refuses="ModelError: no such model")
    live = LiveServer([engine], wait_ready=False)
    live.thread.start()
    assert live.join() == 1
    assert engine.num_starts == 1


def test_an_engine_that_dies_on_its_first_way_up_is_started_until_it_can_be() -> None:
    engine = ScriptedEngine(saying(IDS), ready=False)
    engine.fail_starts = 1  # no memory for the process, say
    with LiveServer([engine], wait_ready=False) as live:
        wait_until(lambda: engine.num_starts == 1)
        engine.fail_starts = 1
        engine.die()  # without a word, while it loads
        wait_until(lambda: engine.num_starts == 2)
        engine.may_be_ready.set()
        wait_until(lambda: httpx.get(live.url + "/ready").status_code == 200)
        assert live.post(max_tokens=1).status_code == 200
        assert live.client.engines()[0]["restarts"] == 3


def test_ready_waits_for_all_engines_at_first_and_for_one_of_each_model_later() -> None:
    early, late = ScriptedEngine(saying(IDS)), ScriptedEngine(saying(IDS), name="b", ready=False)
    policy = RestartConfig(first_delay_s=30.0)
    with LiveServer([early, late], wait_ready=False, restart=policy) as live:
        wait_until(lambda: live.client.engines()[0]["state"] == "ready")
        assert httpx.get(live.url + "/ready").status_code == 503
        assert live.post(max_tokens=1).status_code == 200  # it can be used meanwhile
        late.may_be_ready.set()
        wait_until(lambda: httpx.get(live.url + "/ready").status_code == 200)
        late.die()
        wait_until(lambda: httpx.get(live.url + "/health").json()["status"] == "degraded")
        assert httpx.get(live.url + "/ready").status_code == 200
        for i in range(6):
            assert live.post(prompt=f"{i}", max_tokens=1).status_code == 200
        early.die()
        wait_until(lambda: httpx.get(live.url + "/ready").status_code == 503)


async def test_a_task_stays_on_its_home_engine_until_that_is_full() -> None:
    engines = [ScriptedEngine(saying(IDS), name=f"engine-{i}") for i in range(4)]
    for engine in engines:
        engine.gate.clear()
    client = EngineClient(
        [EngineSpec(e.name, "tiny", "cpu", e.factory) for e in engines], metrics=Metrics()
    )
    await client.start()
    async with asyncio.timeout(5):
        await client.wait_ready()

    def request(task: str, i: int) -> Request:
        return Request(f"{task}-{i}", task, "tiny", (5,), SamplingParams())

    homes = set()
    for task in ("a", "b", "c", "d", "e", "f", "g", "h"):
        used = set()
        for i in range(3):  # one at a time: always the same engine
            submission = client.submit([request(task, i)])
            used |= {e["name"] for e in client.engines() if e["open_requests"]}
            submission.abort()
        assert len(used) == 1
        homes |= used
    assert len(homes) > 1

    for i in range(40):
        client.submit([request("busy", i)])
    loads = sorted(e["open_requests"] for e in client.engines())
    assert sum(loads) == 40 and loads[-1] <= 1.25 * 10 + 1 and loads[0] >= 8
    for i in range(8):  # a list of prompts is spread too
        client.submit([request(f"list{i}", k) for k in range(4)])
    loads = sorted(e["open_requests"] for e in client.engines())
    assert sum(loads) == 72 and loads[-1] <= 1.25 * 18 + 1
    client.abort_all(NoEngineError("over"))
    assert client.num_open == 0 and len(client.waiting) == client.waiting.num_tokens == 0
    await client.stop()


# --- stopping ---


async def test_an_engine_that_is_being_started_ends_with_the_client() -> None:
    engine, begins, goes_on = ScriptedEngine(saying(IDS)), threading.Event(), threading.Event()
    handles: list[ScriptedHandle] = []

    def slow() -> ScriptedHandle:
        begins.set()
        goes_on.wait(10)
        handles.append(engine.factory())
        return handles[0]

    client = EngineClient([EngineSpec("slow", "tiny", "cpu", slow)], metrics=Metrics())
    await client.start()
    await asyncio.to_thread(begins.wait)
    stopping = asyncio.create_task(client.stop())
    await asyncio.sleep(0)
    goes_on.set()
    await stopping
    assert not handles[0].is_alive()


def test_a_drain_finishes_what_is_open_and_takes_nothing_new() -> None:
    engine = ScriptedEngine(saying(IDS), step_s=0.03)
    live = LiveServer([engine])
    with live, ThreadPoolExecutor(2) as threads:
        whole = threads.submit(live.post, max_tokens=30)
        stream = threads.submit(live.post, max_tokens=30, stream=True)
        wait_until(lambda: len(engine.submitted) == 2)
        live.terminate()
        wait_until(lambda: live.client.is_draining)
        ready = httpx.get(live.url + "/ready")
        assert ready.status_code == 503 and ready.json() == {"status": "draining"}
        assert httpx.get(live.url + "/health").status_code == 200
        refused = live.post()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert refused.headers["retry-after"]
        assert whole.result().json()["usage"]["completion_tokens"] == 30
        assert '"finish_reason":"length"' in stream.result().text
        assert live.join() == 0
    assert engine.aborted == []


def test_a_drain_that_takes_too_long_aborts_with_an_error() -> None:
    engine = ScriptedEngine(saying(IDS), step_s=0.05)
    live = LiveServer([engine], drain_s=0.2)
    with live, ThreadPoolExecutor(2) as threads:
        whole = threads.submit(live.post, max_tokens=200)
        stream = threads.submit(live.post, max_tokens=200, stream=True)
        wait_until(lambda: engine.num_steps >= 2)
        live.terminate()
        assert live.join() == 0
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "draining"
        assert '"code":"draining"' in stream.result().text
        assert stream.result().text.endswith("data: [DONE]\n\n")


def test_a_server_that_is_replaced_serves_its_connections_and_ends_each_with_an_answer() -> None:
    with LiveServer([ScriptedEngine(saying(as_bytes("abcdefgh")))], leave_s=30.0) as live:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 8}
        with httpx.Client(base_url=live.url) as kept:
            first = kept.post("/v1/completions", json=body)
            assert first.status_code == 200 and "connection" not in first.headers
            live.loop.call_soon_threadsafe(live.stop.set)
            wait_until(lambda: not live.answers("/ready"))  # it takes no new connection
            last = kept.post("/v1/completions", json=body)
            assert (last.status_code, last.headers["connection"]) == (200, "close")
        wait_until(lambda: not live.thread.is_alive())  # and ends when it has none
        assert live.status == 0
