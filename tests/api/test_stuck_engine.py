"""An engine that hangs is told from one that works: by its heartbeat, or by its silence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from server.api.engines.pulse import Pulse
from server.api.engines.supervisor import RestartPolicy
from server.engine.process import start_process
from tests.api.live import LiveServer, wait_until
from tests.api.real_engine import hang, spec

POLICY = RestartPolicy(stuck_after_s=2.5)
OFF: dict[str, Any] = {"speculation": {"drafter": "off"}, "ignore_eos": True, "max_tokens": 8}


@contextmanager
def _stopped(live: LiveServer, name: str) -> Iterator[None]:
    """The engine's process is stopped, as a debugger or a frozen container does it."""
    slot = next(s for s in live.client.slots if s.spec.name == name)
    pid: int = slot.handle.pid  # type: ignore[union-attr]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _health(live: LiveServer) -> tuple[int, str, dict[str, str]]:
    answer = httpx.get(live.url + "/health")
    body = answer.json()
    return answer.status_code, body["status"], {e["name"]: e["state"] for e in body["engines"]}


def test_a_stopped_engine_is_told_and_goes_on() -> None:
    with LiveServer([spec(start_process, drafts=False)], restart=POLICY) as live:
        assert live.post(**OFF).status_code == 200
        time.sleep(3.0)  # idle for longer than the limit: that is no hang
        assert _health(live) == (200, "ok", {"engine-0": "ready"})
        with _stopped(live, "engine-0"):
            wait_until(lambda: _health(live)[0] == 503, 6.0)
            assert _health(live) == (503, "stuck", {"engine-0": "stuck"})
            assert httpx.get(live.url + "/ping").status_code == 503
            ready = httpx.get(live.url + "/ready")
            assert (ready.status_code, ready.json()) == (
                503, {"status": "stuck", "stuck": ["engine-0"]},
            )  # fmt: skip
            wait_until(lambda: live.sample("tailor_engine_heartbeat_age_seconds") > 2.5, 3.0)
        wait_until(lambda: _health(live) == (200, "ok", {"engine-0": "ready"}), 4.0)
        assert httpx.get(live.url + "/ready").json() == {"status": "ready"}
        assert live.post(**OFF).status_code == 200


def test_while_one_engine_is_stopped_the_other_serves() -> None:
    specs = [spec(start_process, i, drafts=False) for i in range(2)]
    with LiveServer(specs, restart=POLICY) as live, _stopped(live, "engine-1"):
        wait_until(lambda: _health(live)[0] == 503, 6.0)
        assert _health(live)[1:] == ("stuck", {"engine-0": "ready", "engine-1": "stuck"})
        ready = httpx.get(live.url + "/ready")
        assert (ready.status_code, ready.json()) == (
            200, {"status": "ready", "stuck": ["engine-1"]},
        )  # fmt: skip
        for i in range(6):
            assert live.post(prompt=f"{i}", **OFF).status_code == 200


def test_a_step_that_never_ends_is_told_although_its_process_speaks() -> None:
    engine = spec(start_process, drafts=False, fail=hang)
    with LiveServer([engine], restart=POLICY) as live:
        assert _health(live) == (200, "ok", {"engine-0": "ready"})
        try:
            httpx.post(
                live.url + "/v1/completions", json={"model": "tiny", "prompt": "a", **OFF},
                timeout=0.5,
            )  # fmt: skip
        except httpx.ReadTimeout:
            pass
        wait_until(lambda: _health(live)[1] == "stuck", 6.0)
        slot = live.client.slots[0]
        os.kill(slot.handle.pid, signal.SIGKILL)  # type: ignore[union-attr]


def test_a_pulse_takes_the_age_that_a_beat_says_and_grows_in_silence() -> None:
    pulse = Pulse(7.2)
    pulse.heard(7.0)
    assert 7.0 <= pulse.age_s < 7.5
    time.sleep(0.05)
    assert pulse.age_s >= 7.05
    time.sleep(0.2)
    assert pulse.is_late
    pulse.heard()
    assert pulse.age_s < 0.5 and not pulse.is_late
