"""A prior that a server makes while nobody uses the machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from server.commands import idle_prior
from server.commands.idle_prior import run_when_idle
from server.machine import OtherProcesses
from tests.waiting import until, wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="priors wait on Linux alone")

_TICKS = """
import sys, time
for _ in range(int(sys.argv[2])):
    time.sleep(0.02)
    with open(sys.argv[1], "a") as file:
        file.write(".")
"""


class _Machine:
    """A machine whose other work a test says. file: grows while the command runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        self.cores, self.file = 2.0, file
        monkeypatch.setattr(OtherProcesses, "cores", lambda _: self.cores)
        monkeypatch.setattr(idle_prior, "available_memory", lambda: 64 << 30)
        for name, seconds in {"_WAIT_S": 0.01, "_LOOK_S": 0.01, "_CALM_S": 0.1}.items():
            monkeypatch.setattr(idle_prior, name, seconds)

    def run(self, num_ticks: int) -> asyncio.Task[int]:
        command = [sys.executable, "-c", _TICKS, str(self.file), str(num_ticks)]
        return asyncio.create_task(run_when_idle("m", command, 0.1))

    @property
    def num_ticks(self) -> int:
        return len(self.file.read_text()) if self.file.exists() else 0

    def statuses(self) -> list[str]:
        return [one.status() for one in psutil.Process().children() if self._is_mine(one)]

    def _is_mine(self, process: psutil.Process) -> bool:
        return str(self.file) in process.cmdline()


async def test_it_begins_when_nobody_works_and_halts_when_somebody_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = _Machine(monkeypatch, tmp_path / "ticks")
    running = machine.run(100)
    await asyncio.sleep(0.3)
    assert machine.statuses() == []  # others work
    machine.cores = 0.1
    await until(lambda: machine.num_ticks > 3)
    machine.cores = 1.0
    await until(lambda: machine.statuses() == [psutil.STATUS_STOPPED])
    halted = machine.num_ticks
    await asyncio.sleep(0.3)
    assert machine.num_ticks == halted < 100
    machine.cores = 0.0
    assert await running == 0
    assert machine.num_ticks == 100


async def test_too_little_memory_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = _Machine(monkeypatch, tmp_path / "ticks")
    monkeypatch.setattr(idle_prior, "available_memory", lambda: 1 << 30)
    machine.cores = 0.0
    running = machine.run(1)
    await asyncio.sleep(0.5)
    assert machine.statuses() == []
    running.cancel()


@pytest.mark.parametrize("halted", [False, True])
async def test_it_ends_with_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, halted: bool
) -> None:
    machine = _Machine(monkeypatch, tmp_path / "ticks")
    machine.cores = 0.0
    running = machine.run(10**6)
    await until(lambda: machine.num_ticks > 0)
    if halted:
        machine.cores = 1.0
        await until(lambda: machine.statuses() == [psutil.STATUS_STOPPED])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert machine.statuses() == []


_SERVER = """
import asyncio, sys
from pathlib import Path
from server.commands import idle_prior
idle_prior.OtherProcesses.cores = lambda self: 0.0
idle_prior.available_memory = lambda: 64 << 30
idle_prior._CALM_S = idle_prior.IDLE_S = 0.0
asyncio.run(idle_prior.make_priors({sys.argv[1]: Path(sys.argv[2])}, None))
"""


def test_the_command_gets_only_what_others_leave_and_dies_with_a_killed_server(
    shallow: Path, tmp_path: Path, own_cache: Path
) -> None:
    words = [sys.executable, "-c", _SERVER, str(shallow), str(tmp_path / "none.prior")]
    with subprocess.Popen(words) as server:
        here = psutil.Process(server.pid)
        found: list[psutil.Process] = []

        def is_idle() -> bool:
            found[:] = here.children()
            return any(os.sched_getscheduler(one.pid) == os.SCHED_IDLE for one in found)

        wait_until(is_idle)
        (child,) = found
        assert child.cmdline()[-3:] == ["models", "prior", str(shallow)]
        wait_until(lambda: Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n")
        child.send_signal(signal.SIGSTOP)
        server.kill()
        server.wait()
    child.wait(10.0)
