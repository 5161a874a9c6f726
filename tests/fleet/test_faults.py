"""Replicas die under load: no answer is lost, none is given twice, none is another text."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from loadtest.peer import total
from server import channel
from server.api.engines.client import EngineClient, EngineSpec
from server.config import LimitsConfig, RestartConfig
from server.engine.process import start_process
from server.fleet.desk import FleetState
from server.fleet.ingress import FleetMetrics, IngressApp
from server.fleet.replica import EngineReplica
from server.metrics import Metrics
from server.types import Delta, Request, SamplingParams
from tests.api.live import LiveServer, as_bytes
from tests.api.real_engine import CONTEXT, spec
from tests.fakes.scripted_engine import ScriptedEngine, saying, steps_of
from tests.fleet.local_replicas import LocalReplicas, fleet_spec
from tests.waiting import until, wait_until


def _scripted(i: int, step_s: float = 0.005) -> tuple[ScriptedEngine, EngineSpec]:
    engine = ScriptedEngine(saying(as_bytes("abcdefgh")), name=f"engine-{i}", step_s=step_s)
    return engine, EngineSpec(engine.name, "tiny", "cpu", engine.factory)


def _live(replicas: LocalReplicas, **options: Any) -> LiveServer:
    live = LiveServer([fleet_spec(replicas, lambda: live.loop, **options)], max_model_len=CONTEXT)
    return live


def _says_its_seed(request: Request) -> list[list[Delta]]:
    seed = request.sampling.seed
    ids = [(seed * 7 + i * i) % 400 for i in range(request.sampling.max_tokens)]
    return steps_of(request, ids, per_step=1 + seed % 3)


@pytest.fixture(scope="module")
def single() -> Iterator[LiveServer]:
    """The server that a fleet must equal."""
    with LiveServer([spec()], max_model_len=CONTEXT) as live:
        yield live


class _Halting(ScriptedEngine):
    """It makes so many steps, too few for any answer, and then hangs."""

    halts_after = 2

    def _step(self, connection: Connection) -> None:
        super()._step(connection)
        if self.num_steps == self.halts_after:
            self.gate.clear()


async def test_three_hundred_requests_outlive_two_of_three_replicas() -> None:
    engines: list[ScriptedEngine] = [
        _Halting(_says_its_seed, name="engine-0"),
        _Halting(_says_its_seed, name="engine-1"),
        ScriptedEngine(_says_its_seed, name="engine-2", step_s=0.01),
    ]
    specs = [EngineSpec(e.name, "tiny", "cpu", e.factory) for e in engines]
    requests = [
        Request(
            f"r{i}", f"task-{i % 24}", "tiny", (1, 2, 3),
            SamplingParams(max_tokens=8 + i % 24, seed=i),
        )
        for i in range(300)
    ]  # fmt: skip

    replicas = LocalReplicas(specs)
    loop = asyncio.get_running_loop()
    client = EngineClient(
        [fleet_spec(replicas, lambda: loop)],
        metrics=Metrics(),
        limits=LimitsConfig(max_queued_requests=500),
    )
    await client.start()
    await client.wait_ready()
    told: dict[str, list[int]] = {}

    async def collect(request: Request) -> None:
        ids = told.setdefault(request.request_id, [])
        async for arrived in client.submit([request]):
            for _, delta in arrived:
                ids.extend(delta.token_ids)

    collecting = [asyncio.create_task(collect(request)) for request in requests]

    async def lose(engine: ScriptedEngine) -> None:
        await until(lambda: len(told) == len(requests) and not engine.gate.is_set(), 100)
        assert replicas.num_open[engine.name] > 50  # it has work, and will not end it
        replicas.kill(engine.name)
        await until(lambda: not replicas.num_open[engine.name])

    for engine in engines[:2]:
        await lose(engine)
    await asyncio.gather(*collecting)
    assert replicas.num_streams > 350  # so many were run again
    assert client.num_open == 0
    await client.stop()
    for request in requests:
        steps = _says_its_seed(request)
        assert told[request.request_id] == [i for [d] in steps for i in d.token_ids]


@pytest.mark.parametrize("body", [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 2}])
def test_a_stream_goes_on_where_it_stopped_with_the_text_of_a_single_server(
    single: LiveServer, body: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        "prompt": "the quick", "max_tokens": 120, "ignore_eos": True, "logprobs": 2, **body,
    }  # fmt: skip
    wanted = [(c["text"], c["logprobs"]) for c in single.post(**options).json()["choices"]]
    replicas = LocalReplicas([spec(i=i, step_s=0.02) for i in range(2)])
    with _live(replicas) as live, httpx.Client(timeout=30) as client:
        ask = {"model": "tiny", "stream": True, **options}
        texts: dict[int, str] = {}
        tokens: dict[int, list[str]] = {}
        with client.stream("POST", live.url + "/v1/completions", json=ask) as response:
            killed = False
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            for line in lines:
                for choice in json.loads(line[6:])["choices"]:
                    i = choice["index"]
                    texts[i] = texts.get(i, "") + choice["text"]
                    tokens.setdefault(i, []).extend((choice["logprobs"] or {}).get("tokens", ()))
                if not killed and len(tokens.get(0, ())) > 20:
                    killed = True
                    busy = next(n for n, num in replicas.num_open.items() if num)
                    replicas.kill(busy)
        assert killed and replicas.num_streams == 2
        assert [texts[i] for i in sorted(texts)] == [text for text, _ in wanted]
        assert [tokens[i] for i in sorted(tokens)] == [lp["tokens"] for _, lp in wanted]


def test_a_client_that_leaves_is_aborted_at_its_replica() -> None:
    engine, only = _scripted(0, step_s=0.02)
    replicas = LocalReplicas([only])
    with _live(replicas) as live:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "stream": True}
        with httpx.stream("POST", live.url + "/v1/completions", json=body) as response:
            next(response.iter_raw())
        wait_until(lambda: len(engine.aborted) == 1 and live.client.num_open == 0)
        assert engine.steps_of_request[engine.aborted[0]] < 100
        assert not engine.running


def test_without_any_replica_a_request_waits_for_one_and_then_is_answered() -> None:
    first, one = _scripted(0)
    _, two = _scripted(1)
    replicas = LocalReplicas([one])
    with _live(replicas) as live, ThreadPoolExecutor(1) as threads:
        replicas.kill("engine-0")
        wait_until(lambda: not replicas.there)
        answer = threads.submit(live.post, max_tokens=8)
        time.sleep(0.1)
        assert not answer.done()
        replicas.add(two)
        assert answer.result(20).json()["choices"][0]["text"] == "abcdefgh"
        assert not first.submitted


def test_what_an_engine_that_hangs_had_begun_goes_on_at_another_replica(
    single: LiveServer,
) -> None:
    body: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.9, "seed": 5}
    body["speculation"] = {"drafter": "off"}
    prompts = [f"{i} jumps over" for i in range(8)]
    wanted = [single.post(prompt=p, **body).json()["choices"][0]["text"] for p in prompts]
    options: dict[str, Any] = {"step_s": 0.02, "drafts": False}
    engines = [spec(start_process, 0, **options), spec(i=1, **options)]  # both get some
    replicas = LocalReplicas(engines, restart=RestartConfig(stuck_after_s=2.0))
    with _live(replicas) as live, ThreadPoolExecutor(8) as threads:
        began_s = time.monotonic()
        answers = [threads.submit(live.post, prompt=p, **body) for p in prompts]
        wait_until(lambda: sum(replicas.num_open.values()) == 8)
        assert replicas.num_open["engine-0"] > 1
        slot = replicas.there["engine-0"].client.slots[0]
        os.kill(slot.handle.pid, signal.SIGSTOP)  # type: ignore[union-attr]
        texts = [answer.result(30).json()["choices"][0]["text"] for answer in answers]
        assert texts == wanted and replicas.num_streams > 8
        assert time.monotonic() - began_s < 15.0
        wait_until(lambda: slot.serves and slot.num_restarts == 1, 30.0)
        replicas.there["engine-0"].check_health()  # the replica stays


async def test_a_replica_tells_that_a_first_step_is_longer_than_the_queue_time_out() -> None:
    """Else its ingress would take a long prompt for one that waits."""
    engine, spec = _scripted(0)
    replica = EngineReplica(spec)
    await replica.start()
    engine.gate.clear()
    request = Request("r", "task", "tiny", (1,), SamplingParams(max_tokens=1), queue_timeout_s=0.01)
    stream = replica.stream(channel.encode(("submit", request)), 0.0)
    assert channel.decode(await anext(stream)) == ("deltas", [])
    engine.gate.set()
    [(_, [delta])] = [channel.decode(message) async for message in stream]
    assert len(delta.token_ids) == 1 and delta.finish_reason == "length"
    await replica.stop()


async def test_what_is_told_of_a_replica_whose_engine_dies_and_of_one_that_leaves() -> None:
    engine, spec = _scripted(0)
    replica = EngineReplica(spec, restart=RestartConfig(first_delay_s=60.0))
    metrics = FleetMetrics(None, False)
    ingress: Any = SimpleNamespace(_known={}, _metrics=metrics)

    def told(*there: str, left: tuple[str, ...] = ()) -> dict[str, float]:
        """Of tiny/0, where only these are there."""
        figures = dict.fromkeys(there, replica.figures)
        IngressApp.note(ingress, "tiny", FleetState(replica.info, figures, frozenset(left)))
        text = metrics.exposition().decode()
        assert '"fleet"' not in text and "/fleet" not in text  # their sum, under vLLM's names too
        assert total(text, "tailor_engine_up") == sum(map(bool, figures.values()))
        labels = r'tailor_((?!model)\w+){engine="tiny/0",model="tiny"} (.*)'
        return {name: float(value) for name, value in re.findall(labels, text)}

    await replica.start()
    metrics.engine_ready("tiny/fleet", "tiny", replica.info)
    engine.gate.clear()
    engine.running["held"] = [[]]
    engine.num_steps = 50
    await replica.look()
    first = told("tiny/0")
    assert first["engine_up"] == 1.0 and first["num_preemptions_total"] == 5.0
    assert replica.work["num_running"] == 1.0
    # A new desk does not know it, and then it does again: nothing is counted twice.
    IngressApp.note(ingress, "tiny", FleetState(None, {}))
    assert told() == {"engine_up": 0.0} and told("tiny/0") == first
    assert told(left=("tiny/0",)) == {} and told("tiny/0") == first
    engine.die()
    await until(lambda: not replica.serves)
    await replica.look()
    last = told("tiny/0")
    assert (last["engine_up"], last["engine_restarts_total"]) == (0.0, 1.0)
    assert last["num_preemptions_total"] == 5.0 and replica.work["num_running"] == 0.0
    assert "engine_up" not in told(left=("tiny/0",))
    await replica.stop()
