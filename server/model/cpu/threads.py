"""KernelThreads: where the threads of the CPU kernels run after they have slept."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence


class KernelThreads:
    """The worker thread and its team: spreads them over the cores when they have slept.

    Linux often wakes a team that has slept on the waker's core, and takes 25 ms of the next step
    to spread it out (docs/benchmarks, "The first token after a pause"). So the first milliseconds
    after a pause run pinned, one thread a core, until the scheduler has seen that both are busy;
    then all float again, because a pinned thread cannot get out of the way of another busy
    process. Does nothing where there are other than as many threads as cores: then the scheduler
    has room, or no choice.

    Made on the worker thread. thread_ids: the team's others (Team.thread_ids). pause_s: sleep
    after which threads are spread. pinned_s: for how long; less than pause_s.
    """

    def __init__(
        self, thread_ids: Sequence[int], *, pause_s: float = 0.05, pinned_s: float = 0.04
    ) -> None:
        self._pause_s = pause_s
        self._pinned_s = pinned_s
        self._rested_s = time.monotonic()
        self._cores: list[int] = []
        self._thread_ids: list[int] = []
        if not hasattr(os, "sched_getaffinity") or not thread_ids:
            return
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) == len(thread_ids) + 1:
            self._cores = cores
            self._thread_ids = [threading.get_native_id(), *thread_ids]

    @property
    def thread_ids(self) -> tuple[int, ...]:
        """Kernel ids of the threads that are spread; empty when none are."""
        return tuple(self._thread_ids)

    def wake(self) -> None:
        """Call before a step."""
        if not self._thread_ids or time.monotonic() - self._rested_s < self._pause_s:
            return
        with contextlib.suppress(OSError):  # cores were taken away, or a sandbox forbids it
            for core, thread_id in zip(self._cores, self._thread_ids, strict=True):
                os.sched_setaffinity(thread_id, {core})
        timer = threading.Timer(self._pinned_s, self._float)
        timer.daemon = True
        timer.start()

    def rest(self) -> None:
        """Call after a step."""
        self._rested_s = time.monotonic()

    def _float(self) -> None:
        for thread_id in self._thread_ids:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread_id, self._cores)
