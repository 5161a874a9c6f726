"""The threads of a CPU: the team that runs a step together, the caller its first, and where they
run after they have slept.

A step is one share (kernels/team.py), which every thread of a team runs at the same time, each with
its own number (Work.thread), so work is handed out once a step and not some 200 times. What the
threads share is one int64 array, `sync`; they end when nothing refers to it any more.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from server.machine import cores
from server.model.cpu.kernels import serve, stop
from server.model.cpu.records import EACH, SPINS, THREADS, Int64

# Some 2 ms. The kernel's scheduler leaves threads that sleep at every barrier where they are.
_BARRIER_SPINS = 50_000


class Team:
    """The other threads of a team of `threads`; whoever calls `run` is its first.

    One job at a time. Threads spin at barriers only where each can have a core, and OMP_WAIT_POLICY
    is not PASSIVE, which OpenMP's threads sleep for as well. `sync`: for Work.
    thread_ids: the kernel's ids of the other threads.
    """

    def __init__(self, threads: int) -> None:
        num_words = (THREADS + threads * EACH) // 8
        memory = np.zeros(num_words + 16, np.int64)
        skip = -memory.ctypes.data % 128 // 8
        words = memory[skip : skip + num_words]
        sleep = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" or threads > cores()
        words[SPINS // 8] = 0 if sleep else _BARRIER_SPINS
        self.sync: Int64 = words.view()
        members = [
            threading.Thread(
                target=_member, args=(words, thread, threads), name=f"cpu-team-{thread}",
                daemon=True,
            )
            for thread in range(1, threads)
        ]  # fmt: skip
        for member in members:
            member.start()
        self.thread_ids = tuple(member.native_id or 0 for member in members)
        if members:
            weakref.finalize(self.sync, _end, words).atexit = False


def _member(words: Int64, thread: int, threads: int) -> None:
    serve(words.ctypes.data, thread, threads)


def _end(words: Int64) -> None:
    stop(words.ctypes.data)


@contextlib.contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """torch's operations inside are not shared between threads. The number is partly the process's,
    so it is put back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class KernelThreads:
    """The thread that makes it and its team: spreads them over the cores when they have slept.

    Linux often wakes a team that has slept on the waker's core, and takes 25 ms of the next step
    to spread it out (docs/benchmarks, "The first token after a pause"). So the first milliseconds
    after a pause run pinned, one thread a core, until the scheduler has seen that both are busy;
    then all float again, because a pinned thread cannot get out of the way of another busy
    process. Does nothing where there are other than as many threads as cores: then the scheduler
    has room, or no choice.

    Made on the thread that runs steps, with the team's others (Team.thread_ids). pause_s: sleep
    after which threads are spread. pinned_s: for how long; less than pause_s. thread_ids: the
    kernel's, of the threads that are spread; empty when none are.
    """

    def __init__(
        self, thread_ids: Sequence[int], *, pause_s: float = 0.05, pinned_s: float = 0.04
    ) -> None:
        self._pause_s = pause_s
        self._pinned_s = pinned_s
        self._rested_s = time.monotonic()
        self._cores: list[int] = []
        self.thread_ids: tuple[int, ...] = ()
        if not hasattr(os, "sched_getaffinity") or not thread_ids:
            return
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) == len(thread_ids) + 1:
            self._cores = cores
            self.thread_ids = (threading.get_native_id(), *thread_ids)

    def wake(self) -> None:
        """Call before a step."""
        if not self.thread_ids or time.monotonic() - self._rested_s < self._pause_s:
            return
        with contextlib.suppress(OSError):  # cores were taken away, or a sandbox forbids it
            for core, thread_id in zip(self._cores, self.thread_ids, strict=True):
                os.sched_setaffinity(thread_id, {core})
        timer = threading.Timer(self._pinned_s, self._float)
        timer.daemon = True
        timer.start()

    def rest(self) -> None:
        """Call after a step."""
        self._rested_s = time.monotonic()

    def _float(self) -> None:
        for thread_id in self.thread_ids:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread_id, self._cores)
