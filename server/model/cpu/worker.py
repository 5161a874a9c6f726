"""Worker: one thread that does what it is given, in order, and takes little of the giver's time.

A step of a small model takes a few milliseconds. An executor of the standard library spends a
twentieth of one on its locks and conditions each time, with their code out of the caches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Pending(Generic[_T]):
    """A call whose end is waited for."""

    __slots__ = ("_box",)

    def __init__(self) -> None:
        self._box: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def tell(self, value: Any, error: BaseException | None) -> None:
        """By the worker, once."""
        self._box.put((value, error))

    def result(self) -> _T:
        """Wait for it; raises what the call raised. Called once."""
        value, error = self._box.get()
        if error is not None:
            raise error
        found: _T = value
        return found


class Worker:
    """A thread with a queue of calls, of one thread at a time."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Pending[Any], Callable[..., Any], Any] | None]
        self._calls = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., _T], *arguments: Any) -> Pending[_T]:
        """Call it behind what was submitted before. Raises RuntimeError once it is closed."""
        if self._closed:
            raise RuntimeError("the worker is closed")
        pending: Pending[_T] = Pending()
        self._calls.put((pending, call, arguments))
        return pending

    def close(self) -> None:
        """Do what was submitted and end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            pending, call, arguments = item
            try:
                value = call(*arguments)
            except BaseException as error:
                pending.tell(None, error)
            else:
                pending.tell(value, None)
            del item, pending, call, arguments  # nothing is kept alive until the next one
