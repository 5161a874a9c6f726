"""The price of watching: what is booked, what is polled, and what the verdict compares."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loadtest import overhead
from loadtest.overhead import CASES, Turn
from loadtest.peer import CpuMeter, Peer, PeerFailed
from tests.loadtest.scripted_server import WORDS, ScriptedServer

REPOSITORY = Path(__file__).resolve().parents[2]


def turn(case: str, cpu_s: float) -> Turn:
    return Turn(case, num_tokens=2000, cpu_s=cpu_s, wall_s=8.0, num_polls=12 * (case == "watched"))


def test_ratios_are_of_cpu_time_per_token_and_the_goal_is_held_against_the_interval() -> None:
    polls = {path: {"cpu_s": 0.004, "bytes": 1, "number": 1} for path in overhead.POLLS}

    def report(watched: float) -> dict[str, object]:
        rounds = [
            {
                "uncounted": turn("uncounted", 10.0 * machine),
                "counted": turn("counted", 10.1 * machine),
                "watched": turn("watched", watched * machine),
            }
            for machine in (0.9, 1.0, 1.3, 1.1)  # a busy machine moves all three together
        ]
        return overhead.report(rounds, polls, 1.02)

    good, bad = report(10.15), report(10.9)
    assert good["above_goal"] == []
    assert bad["above_goal"] == ["watched / counted", "watched / uncounted"]
    assert good["ratios"]["counted / uncounted"]["median"] == pytest.approx(1.01)  # type: ignore[index]
    assert good["cases"]["uncounted"]["cpu_s_per_1000_tokens"]["low"] == pytest.approx(4.5)  # type: ignore[index]
    assert good["cases"]["watched"]["num_polls"] == 48  # type: ignore[index]
    # 4 ms every second and 4 ms every two, of 10.1 / 8 CPU seconds a second at machine 1.05.
    assert good["poll_share"] == pytest.approx(0.006 / (10.1 * 1.05 / 8))


def run_turn(server: ScriptedServer, case: str) -> Turn:
    peer = Peer("counted", "", "tailor", "m", url=server.url)

    class Meter(CpuMeter):
        def __init__(self) -> None:
            self._roots = {"counted": psutil.Process()}

    async def run() -> Turn:
        async with httpx.AsyncClient() as client:
            return await overhead.one_turn(
                client, Meter(), peer, case, "s", overhead.Amounts(3, 5, 2),
                {"speculation": {"drafter": "off"}},
            )  # fmt: skip

    return asyncio.run(run())


def test_only_the_watched_case_is_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "POLLS", {"/metrics": 0.01})
    asked: list[str] = []

    def metrics() -> str:
        asked.append("x")
        return "tailor_engine_up 1\n"

    watched = threading.Event()

    def answer(body: dict[str, Any]) -> list[str]:
        """The watched case's streams begin when it was polled twice, on a machine of any speed."""
        end_s = time.monotonic() + 20
        while watched.is_set() and len(asked) < 2 and time.monotonic() < end_s:
            time.sleep(0.005)
        return WORDS[: body["max_tokens"]]

    with ScriptedServer(answer=answer, pace_s=0.01, metrics=metrics) as server:
        for case in CASES:
            asked.clear()
            (watched.set if case == "watched" else watched.clear)()
            found = run_turn(server, case)
            assert found.num_tokens == 2 * 3 * 5 and found.cpu_s > 0
            if case == "watched":
                assert found.num_polls >= 2 and len(asked) >= found.num_polls
            else:
                assert found.num_polls == 0 and not asked
    assert server.most_open == 3
    bodies = server.bodies[:6]
    assert len({body["cache_salt"] for body in bodies}) == 6
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in bodies)


def test_a_poll_that_is_refused_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "POLLS", {"/dashboard/data": 0.01})
    with ScriptedServer(pace_s=0.01) as server, pytest.raises(PeerFailed, match="HTTP 404"):
        run_turn(server, "watched")


def test_the_uncounted_server_books_nothing() -> None:
    script = (
        "from server.metrics.series import Metrics\n"
        "from server.types import StepCounts\n"
        "from loadtest import uncounted\n"
        "def booked():\n"
        "    metrics = Metrics()\n"
        "    series = metrics.task('sql', 'auto', 'm')\n"
        "    metrics.count_step(series, 3, StepCounts(num_steps=1))\n"
        "    series.inter_token.observe(0.1)\n"
        "    lines = metrics.exposition().decode().splitlines()\n"
        "    return sum(float(x.split()[-1]) for x in lines if x.startswith('tailor_') "
        "and '_created' not in x)\n"
        "before = booked()\n"
        "uncounted.stop_counting()\n"
        "print(before > 4, booked())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=REPOSITORY
    )
    assert done.stdout.split() == ["True", "0.0"], done.stderr
