"""Faults under load: no client hangs, nobody else's request fails, and the server comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server.config import RestartConfig
from server.engine.batch import Batch
from server.engine.process import start_process
from tests.api.live import BYTE_IDS, LiveServer
from tests.api.real_engine import CONTEXT, spec
from tests.fakes.scripted_engine import ScriptedEngine, saying
from tests.waiting import until, wait_until

pytestmark = pytest.mark.slow

MARK = BYTE_IDS[b"~"]
SECRET = "CUDA out of memory. Tried to allocate 2.00 GiB on device-7"
PROMPTS = ["the quick brown fox", "Once upon a time", "SELECT name FROM users", "hello world"]
OFF = {"speculation": {"drafter": "off"}}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.server_error
def test_an_out_of_memory_fails_the_request_that_causes_it_and_no_other() -> None:
    def fail(batch: Batch) -> None:
        if MARK in batch.token_ids.tolist():
            raise MemoryError(SECRET)

    ask: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    ask["logit_bias"] = {str(MARK): -100}  # nobody draws it
    with LiveServer([spec(fail=fail, step_s=0.002)], max_model_len=CONTEXT) as live:
        alone = {p: text_of(live.post(prompt=p, **ask)) for p in PROMPTS}
        with ThreadPoolExecutor(12) as threads:
            good = [(p, threads.submit(live.post, prompt=p, **ask)) for p in PROMPTS * 2]
            bad = [
                threads.submit(live.post, prompt=f"too ~ much {i}", stream=i % 2 == 1, **ask)
                for i in range(4)
            ]
            for prompt, answer in good:
                assert text_of(answer.result()) == alone[prompt]
            for i, late in enumerate(bad):
                refused = late.result()
                # A stream that waits for a second has its headers, and the error is an event.
                assert refused.status_code == 500 or (i % 2 and refused.status_code == 200)
                assert '"engine_error"' in refused.text
                assert "GiB" not in refused.text and "device-7" not in refused.text
        assert live.client.engines()[0]["restarts"] == 0
        wait_until(lambda: live.sample("tailor_kv_cache_usage_perc") == 0)
        assert live.sample("tailor_request_outcomes_total", outcome="error") == 4


@pytest.mark.server_error
def test_a_device_that_is_lost_fails_what_is_open_and_the_engine_is_made_anew() -> None:
    lost = threading.Event()

    def fail(batch: Batch) -> None:
        if lost.is_set():
            raise RuntimeError(SECRET)

    def lose(count: int) -> list[httpx.Response]:
        with ThreadPoolExecutor(count) as threads:
            answers = [
                threads.submit(live.post, max_tokens=200, ignore_eos=True, stream=i % 2 == 1)
                for i in range(count)
            ]
            wait_until(lambda: live.sample("tailor_num_requests_running") == count)
            lost.set()
            return [a.result(timeout=20) for a in answers]

    with LiveServer([spec(fail=fail, step_s=0.02)], max_model_len=CONTEXT) as live:
        for answer in lose(8):
            assert answer.status_code == 500 or '"error"' in answer.text
            assert "device-7" not in answer.text
        live.post(max_tokens=1)  # one more step that fails, if it was not given up yet
        wait_until(lambda: live.client.engines()[0]["restarts"] >= 1, 10)
        lost.clear()
        wait_until(lambda: httpx.get(live.url + "/ready").status_code == 200, 10)
        assert text_of(live.post(max_tokens=3))
        assert live.client.num_open == 0


@pytest.mark.server_error
def test_an_engine_killed_under_load_fails_what_it_held_and_no_client_hangs() -> None:
    engines = [spec(start_process, step_s=0.02, drafts=False), spec(i=1, step_s=0.02)]
    policy = RestartConfig(first_delay_s=0.05)
    with LiveServer(engines, max_model_len=CONTEXT, restart=policy) as live:

        def one(i: int) -> str:
            answer = live.post(
                prompt=f"request {i}", max_tokens=150, ignore_eos=True, stream=i % 2 == 0, **OFF
            )
            text = answer.text
            if "engine_died" in text:
                assert answer.status_code in (200, 500)
                return "died"
            assert answer.status_code == 200, text
            assert text.endswith("data: [DONE]\n\n") if i % 2 == 0 else '"usage"' in text
            return "ok"

        with ThreadPoolExecutor(16) as threads:
            results = [threads.submit(one, i) for i in range(16)]
            wait_until(lambda: live.client.num_open == 16, 20)
            held = live.client.engines()[0]["open_requests"]
            handle: Any = live.client.slots[0].handle
            os.kill(handle.pid, signal.SIGKILL)
            outcomes = [r.result(timeout=30) for r in results]
        assert outcomes.count("died") == held and outcomes.count("ok") == 16 - held
        wait_until(lambda: all(e["state"] == "ready" for e in live.client.engines()), 20)
        assert [e["restarts"] for e in live.client.engines()] == [1, 0]
        assert live.sample("tailor_engine_restarts_total", engine="engine-0") == 1
        assert live.sample("tailor_engine_up") == 2
        assert (
            live.client.num_open == 0
            and len(live.client.waiting) == live.client.waiting.num_tokens == 0
        )
        assert text_of(live.post(max_tokens=2, **OFF))


async def test_a_second_signal_ends_the_drain_that_the_first_one_began() -> None:
    """What a drain is else is in test_lifecycle.py."""
    engine = ScriptedEngine(saying([5] * 9))
    engine.gate.clear()
    live = LiveServer([engine], wait_ready=False, drain_s=60.0)
    serving = asyncio.create_task(live.serve())  # in this thread, which signals come to
    await until(lambda: hasattr(live, "client") and live.client.is_ready)
    async with asyncio.timeout(30), httpx.AsyncClient(base_url=live.url, timeout=30) as client:
        body = {"model": "tiny", "prompt": "the", "max_tokens": 9}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: live.client.num_open)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: live.client.is_draining)
        assert live.client.num_open == 1
        os.kill(os.getpid(), signal.SIGINT)
        assert (await asked).json()["error"]["code"] == "draining"
        assert await serving == 0
