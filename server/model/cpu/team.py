"""Team: the threads that run a step on a CPU together, with barriers of their own.

A step is one share (kernels/team.py), which every thread of a team runs at the same time, each with
its own number (Work.thread), so work is handed out once a step and not some 200 times. What the
threads share is one int64 array, `sync`; they end when nothing refers to it any more.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np

from server.machine import cores
from server.model.cpu.kernels import serve, stop
from server.model.cpu.records import Int64

__all__ = ["EACH", "SPINS", "THREADS", "Team"]

# Bytes from the start of `sync` to how often a thread looks at a barrier before it sleeps, and to
# the words of the threads; the bytes of each.
SPINS, THREADS, EACH = 8 * 5, 128 * 6, 256

# Some 2 ms. The kernel's scheduler leaves threads that sleep at every barrier where they are.
_BARRIER_SPINS = 50_000


class Team:
    """The other threads of a team of `threads`; whoever calls `run` is its first.

    One job at a time. Threads spin at barriers only where each can have a core. `sync`: for Work.
    thread_ids: the kernel's ids of the other threads.
    """

    def __init__(self, threads: int) -> None:
        num_words = (THREADS + threads * EACH) // 8
        memory = np.zeros(num_words + 16, np.int64)
        skip = -memory.ctypes.data % 128 // 8
        words = memory[skip : skip + num_words]
        words[SPINS // 8] = _BARRIER_SPINS if threads <= cores() else 0
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
