"""FleetProcess: tests.fleet.run_fleet in a process of its own, for tests too; always ended."""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from loadtest.peer import free_port

ROOT = Path(__file__).parents[1]


class FleetProcess:
    """A context manager. options: tests.fleet.run_fleet's, which says what it can be asked.

    Ray starts some ten processes; on a busy machine one of them may miss its time. So a start that
    takes longer than start_s is ended, all its processes with it, and tried once more.
    """

    def __init__(self, *options: str, start_s: float = 100.0) -> None:
        self._options = options
        self._start_s = start_s
        self._lines: queue.Queue[str] = queue.Queue()
        self._process: subprocess.Popen[str]
        self.port = 0
        self.told: list[str] = []
        """What it said of its start."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process, and the session of all that it has started."""
        return self._process.pid

    def __enter__(self) -> FleetProcess:
        for last in (False, True):
            self._start()
            try:
                told = self.wait_for("READY", self._start_s)
                self.port = int(told or self.port)
                return self
            except TimeoutError:
                self._end()
                if last:
                    raise
        raise AssertionError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(40)
        self._end()

    def ask(self, line: str, answer: str, timeout_s: float = 30.0) -> str:
        """Tell it something; returns the rest of the line that begins with `answer`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.wait_for(answer, timeout_s)

    def deploy(self, *options: str) -> None:
        """Another fleet on the same Ray: run_fleet's options for it."""
        self.ask(f"deploy {shlex.join(options)}", "READY", 2 * self._start_s)

    def wait_for(self, start: str, timeout_s: float) -> str:
        """The rest of the next line that begins so. Raises TimeoutError."""
        said: list[str] = []
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no {start} in {timeout_s} s; it said: {said[-20:]}") from None
            if line.startswith(start):
                return line[len(start) :].strip()
            if line == "":
                raise TimeoutError(f"it ended; it said: {said[-20:]}")
            said.append(line)
            if line.startswith("TOLD "):
                self.told.append(line[5:])

    def _start(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "tests.fleet.run_fleet", str(self.port), *self._options]
        self._lines = queue.Queue()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        process, lines = self._process, self._lines
        self._reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        self._reader.start()

    def _end(self) -> None:
        """End every process of its session: Ray's among them."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self._reader.join(10)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.close()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n") or " ")
    lines.put("")
