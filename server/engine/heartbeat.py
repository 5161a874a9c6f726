"""Heartbeat: tells the API how long the step loop has been busy with its current piece of work.

The loop stamps its own progress (`working`, `idle`), and a thread of the engine's process reports
the stamps. If the loop hangs, the reported age grows. If the process is stopped, or holds the
interpreter lock, no report comes, and the API counts the silence by its own clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from server.channel import Message

BEAT_S = 1.0
"""Seconds between two beats."""


class Heartbeat:
    """Sends ("beat", age_s) while it is entered: with Heartbeat(send): ...

    age_s: seconds since the loop last finished a step or a message; 0 while it waits for work.
    """

    def __init__(self, send: Callable[[Message], None], every_s: float = BEAT_S) -> None:
        """send: callable from a thread other than the loop's; an OSError from it ends the beats."""
        self._send = send
        self._every_s = every_s
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
        while not self._end.wait(self._every_s):
            since_s = self._busy_since_s
            age_s = 0.0 if since_s is None else time.monotonic() - since_s
            try:
                self._send(("beat", age_s))
            except OSError:
                return  # the API process is gone, or the engine has closed the channel
