"""EngineHost: an Engine's loop behind a channel, in a process of its own (process.py).

The factory runs inside the child, so torch and the weights live there only. The loop drains the
channel before every step (an abort takes effect within one step), steps while there is work, and
sleeps in poll() when there is none. It ends on ("stop",), on SIGUSR1, and when the API process
dies: an engine never survives its API.

The loop stamps its own progress, and a thread of the engine's process reports the stamps. If the
loop hangs, the reported age grows. If the process is stopped, or holds the interpreter lock, no
report comes, and the API counts the silence by its own clock.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from server import channel
from server.channel import Message
from server.engine.engine import Engine
from server.engine.process import STOP_SIGNAL, EngineFactory
from server.engine.run import RunnerBrokenError
from server.errors import TailorError
from server.types import Delta

_log = logging.getLogger(__name__)

_PREPARING_MS = 1  # between looks at a grammar or adapter on its way, while nothing else is open
_FINAL = (TailorError, ValueError, TypeError, ImportError, NotImplementedError)
"""Errors of a factory after which a restart would not help: a wrong model, a wrong setting. Others
(memory that another process holds, a device that is not there yet) may pass."""

_SWITCH_S = 0.0005
"""What the engine's thread waits for at most while another one has the interpreter: a step is a few
milliseconds, and Python's 5 are one."""

_MOST_OPENED = 1024
"""Choices that are opened between two steps, unless one request brings more; what comes behind them
waits in the channel. Opening one takes some 12 us, for which those that run wait."""

_MAX_STEP_ERRORS = 3  # steps in a row that raise before the engine gives up on itself


# -- how long it is busy ---------------------------------------------------------------------------


BEAT_S = 1.0
"""Seconds between two beats."""


class Heartbeat:
    """Sends ("beat", age_s) while it is entered: with Heartbeat(send): ...

    age_s: seconds since the loop last finished a step or a message; 0 while it waits for work.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        """send: callable from a thread other than the loop's; an OSError from it ends the beats."""
        self._send = send
        self._busy_since_s: float | None = None  # written by the loop alone
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def working(self) -> None:
        """The loop begins its next piece of work."""
        self._busy_since_s = time.monotonic()

    def idle(self) -> None:
        """The loop waits for work."""
        self._busy_since_s = None

    def __enter__(self) -> Heartbeat:
        self.working()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(1.0)  # it may be in a send that nobody reads; it is a daemon

    def _beat(self) -> None:
        while not self._end.wait(BEAT_S):
            since_s = self._busy_since_s
            age_s = 0.0 if since_s is None else time.monotonic() - since_s
            try:
                self._send(("beat", age_s))
            except OSError:
                return  # the API process is gone, or the engine has closed the channel


# -- the loop --------------------------------------------------------------------------------------


class EngineHost:
    """Runs one engine over one end of a channel, on the calling thread."""

    def __init__(self, engine: Engine, connection: Connection, wake_fd: int) -> None:
        """wake_fd: a file descriptor that becomes readable when the loop must stop."""
        self._engine = engine
        self._connection = connection
        self._wake_fd = wake_fd
        self._pending: list[Delta] = []
        self._num_errors = 0
        self._num_opened = 0  # since the last step
        # On an accelerator Deltas are sent while the next step computes. On the CPU the next step
        # would delay them by its whole length, so they are sent before it.
        self._sends_late = not engine.info.device.startswith("cpu")
        self._sending = threading.Lock()  # other threads send, too
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="control")

    def run(self) -> None:
        """The loop, until it is told to end or cannot go on."""
        engine, connection = self._engine, self._connection
        poller = select.poll()
        poller.register(connection.fileno(), select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        try:
            self._tell(("ready", engine.info))
            with Heartbeat(self._tell) as heartbeat:
                self._loop(poller, heartbeat)
        except (EOFError, BrokenPipeError, ConnectionError):
            pass  # the API process is gone
        finally:
            self._slow.shutdown(wait=False, cancel_futures=True)
            engine.close()

    def _loop(self, poller: select.poll, heartbeat: Heartbeat) -> None:
        engine = self._engine
        while True:
            heartbeat.working()
            self._num_opened = 0
            while self._num_opened < _MOST_OPENED and (ready := poller.poll(0)):
                if any(fd == self._wake_fd for fd, _ in ready) or not self._take():
                    engine.abort_all()
                    self._pending.extend(engine.take_deltas())
                    self._flush()
                    return
            if engine.has_work:
                if not self._step():
                    return
                continue
            self._pending.extend(engine.take_deltas())
            self._flush()
            wait_ms = engine.tend()
            heartbeat.idle()
            poller.poll(_PREPARING_MS if engine.is_preparing else wait_ms)

    def _tell(self, message: channel.Message) -> None:
        """Send one message; from any thread. Raises as channel.send."""
        data = channel.encode(message)
        with self._sending:
            self._connection.send_bytes(data)

    def _take(self) -> bool:
        """Handle one message. False: stop now."""
        engine = self._engine
        message = channel.receive(self._connection)
        kind = message[0]
        if kind == "submit":
            engine.submit(message[1])
            self._num_opened += message[1].num_choices
        elif kind == "abort":
            engine.abort(message[1])
        elif kind == "control":
            self._control(message[1], message[2], message[3])
        return bool(kind != "stop")

    def _control(self, call_id: int, name: str, payload: Any) -> None:
        """Call a control; send {"ok": True, "value": ...} or {"ok": False, "error": message}."""
        self._engine.tend()  # what has ended is told of
        controls = self._engine.controls

        def call() -> Any:
            if name not in controls:
                raise ValueError(f"unknown control {name!r}")
            return controls[name](payload)

        self._answer(call_id, call)

    def _answer(self, call_id: int, call: Callable[[], Any]) -> None:
        """Send what `call` gives. What that gives to be called takes long: in a thread."""
        try:
            value = call()
            if callable(value):
                self._slow.submit(self._answer, call_id, value)
                return
            self._tell(("control", call_id, {"ok": True, "value": value}))
        except Exception as error:  # of the control, or nothing that msgspec encodes
            self._tell(("control", call_id, {"ok": False, "error": str(error)[:300]}))

    def _step(self) -> bool:
        """Do one step and send its Deltas. False: the engine cannot go on."""
        engine = self._engine
        try:
            deltas = engine.step(self._flush if self._sends_late else None)
        except (BrokenPipeError, ConnectionError):
            raise
        except Exception as error:
            self._num_errors += 1
            _log.exception("the step failed")
            broken = isinstance(error, RunnerBrokenError) or self._num_errors >= _MAX_STEP_ERRORS
            try:
                engine.fail_all("the engine failed on this step")
                engine.check()
            except Exception:
                _log.exception("the engine's state is damaged")
                broken = True
            self._pending.extend(engine.take_deltas())
            self._flush()
            if broken:
                text = f"{type(error).__name__}: {error}"[:300]
                self._tell(("failed", text, False))
                return False
            return True
        self._num_errors = 0
        self._pending.extend(deltas)  # only now: _flush has replaced the list
        if not self._sends_late:
            self._flush()
        return True

    def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, []
            self._tell(("deltas", pending))


def build(factory: EngineFactory, connection: Connection) -> Engine | None:
    """The engine, or None after telling the API why not."""
    try:
        return factory()
    except Exception as error:
        _log.exception("the engine could not be built")
        try:
            text = f"{type(error).__name__}: {error}"[:500]
            channel.send(connection, ("failed", text, isinstance(error, _FINAL)))
        except OSError:
            pass
        return None


# -- its own process ------------------------------------------------------------------------------


def _end_with(lives: int) -> None:
    """End this process when the one that began it ends, whatever the main thread is doing."""
    os.read(lives, 1)
    os._exit(1)


def process_main() -> None:
    """What an EngineProcess runs. Its arguments: two file descriptors, and modules to import."""
    fd, lives = map(int, sys.argv[1:3])
    threading.Thread(target=_end_with, args=(lives,), name="parent-watch", daemon=True).start()
    connection = Connection(fd)
    for module in sys.argv[3:]:
        importlib.import_module(module)
    try:
        factory = pickle.loads(connection.recv_bytes())
    except EOFError:
        return  # nobody needs it
    engine = build(factory, connection)
    if engine is not None:
        sys.setswitchinterval(_SWITCH_S)
        gc.freeze()  # what loading has made stays: a collection between steps need not look at it
        wake, waker = os.pipe()
        signal.signal(STOP_SIGNAL, lambda *_: os.write(waker, b"!"))
        EngineHost(engine, connection, wake).run()
        gc.unfreeze()  # libraries may report what is left at the end of the process as leaked
    connection.close()
