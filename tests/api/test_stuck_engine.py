"""An engine that hangs is told from one that works and from one that has no core, and is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from server.api.engines import client
from server.api.engines.client import EngineSpec, Pulse
from server.config import RestartConfig
from server.engine.process import start_process
from server.machine import core_waits
from tests.api.live import LiveServer
from tests.api.real_engine import HANGS, hang, spec
from tests.waiting import wait_until

POLICY = RestartConfig(stuck_after_s=2.5)
OFF: dict[str, Any] = {
    "speculation": {"drafter": "off"},
    "ignore_eos": True,
    "max_tokens": 8,
    "temperature": 0,
}


def _pid(live: LiveServer, name: str) -> int:
    slot = next(s for s in live.client.slots if s.spec.name == name)
    pid: int = slot.handle.pid  # type: ignore[union-attr]
    return pid


def _health(live: LiveServer) -> tuple[int, str, dict[str, str]]:
    answer = httpx.get(live.url + "/health")
    body = answer.json()
    return answer.status_code, body["status"], {e["name"]: e["state"] for e in body["engines"]}


@pytest.mark.server_error
@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_and_started_again_and_its_request_fails_in_time() -> None:
    """Its process is stopped, or speaks while a step never ends."""
    with LiveServer([spec(start_process, drafts=False, fail=hang)], restart=POLICY) as live:
        assert live.post(**OFF).status_code == 200
        time.sleep(3.0)  # idle for longer than the limit: that is no hang
        assert _health(live) == (200, "ok", {"engine-0": "ready"})
        began_s, pid = time.monotonic(), _pid(live, "engine-0")
        os.kill(pid, signal.SIGSTOP)
        answer = live.post(**OFF)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_died")
        assert time.monotonic() - began_s < POLICY.stuck_after_s + 5.0
        wait_until(lambda: _health(live) == (200, "ok", {"engine-0": "ready"}), 30.0)
        assert live.post(**OFF).status_code == 200
        assert live.sample("tailor_engine_restarts_total") == 1.0
        age = "tailor_engine_heartbeat_age_seconds"
        wait_until(lambda: live.sample(age) < POLICY.stuck_after_s, 10.0)
        pid = _pid(live, "engine-0")
        answer = live.post(prompt=[HANGS], **OFF)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_died")
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 5.0)


def test_an_engine_that_loads_does_not_hold_up_the_end() -> None:
    sleeps: Any = partial(time.sleep, 3600)
    loading = EngineSpec("e", "tiny", "cpu", partial(start_process, sleeps))
    with LiveServer([loading], wait_ready=False) as live:
        wait_until(lambda: live.client.slots[0].handle is not None, 30.0)
        pid, began_s = _pid(live, "e"), time.monotonic()
    assert time.monotonic() - began_s < 5.0 and live.status == 0
    assert not os.path.exists(f"/proc/{pid}")


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """[0] is the time."""
    now = [1000.0]
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_pulse_takes_the_age_that_a_beat_says_and_grows_in_silence(now_s: list[float]) -> None:
    pulse = Pulse(7.2)
    pulse.heard(7.0)
    assert pulse.age_s == 7.0
    now_s[0] += 0.1
    assert pulse.age_s == pytest.approx(7.1) and not pulse.is_late
    now_s[0] += 0.2
    assert pulse.is_late
    pulse.heard()
    assert pulse.age_s == 0.0 and not pulse.is_late


@pytest.mark.usefixtures("now_s")
def test_what_an_engine_waits_for_a_core_is_no_hang() -> None:
    pulse = Pulse(5.0)
    pulse.look(0.0, {"a": 100.0, "b": 3.0})
    pulse.heard(9.0)
    assert pulse.is_late
    pulse.look(0.0, {"a": 104.5, "b": 3.5, "new": 70.0})  # two of its threads, at the same time
    assert not pulse.is_late and pulse.age_s == pytest.approx(4.5)
    pulse.heard(9.4)  # the same work, told again: what it waited still counts
    assert pulse.age_s == pytest.approx(4.9)
    pulse.heard(8.0)  # later work, which has waited for nothing yet
    assert pulse.is_late


def test_what_this_process_itself_was_late_is_no_hang() -> None:
    pulse = Pulse(5.0)
    pulse.heard(9.0)
    pulse.look(6.0, {})
    assert not pulse.is_late


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel tells no waits")
def test_threads_that_share_a_core_wait_for_it() -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        wait_until(lambda: all(max(core_waits(p.pid).values(), default=0) > 0.1 for p in both), 30)
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert core_waits(both[0].pid) == {}
