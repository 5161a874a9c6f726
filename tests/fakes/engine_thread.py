"""An engine whose loop runs in a thread of the test's process."""

from __future__ import annotations

import multiprocessing
import os
import threading

from server.engine.host import EngineHost, build
from server.engine.process import EngineFactory


class ThreadHandle:
    """channel.EngineHandle of an engine in a thread."""

    def __init__(self, factory: EngineFactory) -> None:
        self.connection, self._theirs = multiprocessing.Pipe()
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(
            target=self._main, args=(factory,), name="engine", daemon=True
        )
        self._thread.start()

    def _main(self, factory: EngineFactory) -> None:
        with self._theirs:
            engine = build(factory, self._theirs)
            if engine is not None:
                EngineHost(engine, self._theirs, self._wake).run()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """Ends it after the step in flight. A thread cannot be killed: RuntimeError if it stays."""
        if self._waker >= 0:
            os.write(self._waker, b"!")
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise RuntimeError(f"the engine is still in a step after {timeout_s} s")
            os.close(self._wake)
            os.close(self._waker)
            self._waker = -1
        self.connection.close()


def start_thread(factory: EngineFactory) -> ThreadHandle:
    """Start an engine. Its first message is ("ready", info)."""
    return ThreadHandle(factory)
