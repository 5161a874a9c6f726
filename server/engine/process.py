"""Engines in processes of their own, seen from the process that starts them.

    handle = start_process(factory)     # factory: picklable, () -> Engine

What runs inside is host.py's. Importing this imports nothing of an engine.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING

from drafters.library import own_path

if TYPE_CHECKING:
    from server.engine.engine import Engine

EngineFactory = Callable[[], "Engine"]
"""Builds the engine inside its process. For start_process it must be picklable."""

STOP_SIGNAL = signal.SIGUSR1

# Ctrl-C and what a supervisor sends to the whole group are the API's to handle: it drains while
# the engines go on. It ends them with STOP_SIGNAL, which ends one that is still building at once.
_CHILD = """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
from server.engine.host import process_main
process_main()
"""


class EngineProcess:
    """channel.EngineHandle of an engine in a process of its own. It imports what engines need, and
    then waits for the engine that it is to be.

    Its imports take as long as all else that a start does, so that it is begun first. imports:
    modules. It ends with the process that began it, whatever it is doing. A plain process and not
    one of multiprocessing's, which would import this process's main module, too.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self.connection, theirs = Pipe()
        self._life, lives = Pipe()
        fds = (theirs.fileno(), lives.fileno())
        with theirs, lives:  # then the child's ends are the only ones, and its death is an EOF
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, *map(str, fds), *imports],
                stdin=subprocess.DEVNULL, pass_fds=fds, env=own_path(),
            )  # fmt: skip
        self.pid = self._process.pid

    def build(self, factory: EngineFactory) -> None:
        """Have it build an engine; once."""
        with contextlib.suppress(OSError):  # it died: its end of the connection says so
            self.connection.send_bytes(pickle.dumps(factory))

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def stop(self, timeout_s: float) -> None:
        """Ends it after the step in flight; SIGKILL when it has not ended by timeout_s."""
        if self.is_alive():
            self._process.send_signal(STOP_SIGNAL)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(5.0)
        self.connection.close()
        self._life.close()


def start_process(factory: EngineFactory, process: EngineProcess | None = None) -> EngineProcess:
    """Start an engine in a process, one that waits or a new one. Its first message is ("ready",
    info)."""
    process = process or EngineProcess()
    process.build(factory)
    return process
