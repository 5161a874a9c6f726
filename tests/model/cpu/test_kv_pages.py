"""KV pages are ready before they are written, a stretch ahead of what is in use."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import resource
import sys
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from server.model.cpu.kv_pages import KvPages
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")

PLANES = 6
NUM_BLOCKS = 3000  # of 4 KiB: two short stretches of 128, then 512 make one


def num_faults() -> int:
    """Of this thread: the pages' own thread and other tests' have faults too."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def untouched_planes() -> np.ndarray:
    """float32 zeros that no one has written: np.zeros may give pages that the heap has used."""
    shape = (PLANES, NUM_BLOCKS, 64, 16)
    return np.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), np.float32).reshape(shape)


def wait_ready(pages: KvPages, num_blocks: int) -> None:
    wait_until(lambda: pages.num_ready >= num_blocks, 30.0)


def test_blocks_are_ready_a_stretch_ahead_and_keep_what_they_hold() -> None:
    keys, untouched = untouched_planes(), untouched_planes()
    pages = KvPages((keys,))
    if pages.num_ready == 0:
        pytest.skip("this kernel cannot populate pages")
    assert pages.num_ready == 128
    pages.use(100)
    wait_ready(pages, 229)
    assert pages.num_ready == 256  # whole stretches, and none that nobody is near
    pages.use(200)
    wait_ready(pages, 713)
    assert pages.num_ready == 768
    before = num_faults()
    keys[:, :768] = 1.0
    ready = num_faults() - before
    before = num_faults()
    untouched[:, :768] = 1.0
    assert ready <= 2 < PLANES <= num_faults() - before
    keys[:, 800:810] = 7.0  # no one said so: an ordinary fault, and its content stays
    pages.use(NUM_BLOCKS - 1)
    wait_ready(pages, NUM_BLOCKS)
    assert (keys[:, 800:810] == 7.0).all() and (keys[:, :768] == 1.0).all()
    assert not keys[:, 810:].any()
    pages.close()
    pages.close()


def test_pages_are_made_in_turn_with_steps_and_never_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel holds the map of the process's memory meanwhile: one that waited for a core would
    have every step wait that allocates."""
    calls: list[tuple[float, float]] = []

    def madvise(address: int, size: int, advice: int) -> int:
        began_s = time.monotonic()
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
        time.sleep(0.002)
        calls.append((began_s, time.monotonic()))
        return 0

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
    pages = KvPages((np.zeros((PLANES, NUM_BLOCKS, 64, 16), np.float32),))
    first = len(calls)
    pages.use(200)
    wait_ready(pages, 768)
    pages.close()
    assert len(calls) - first == 2 * PLANES
    for (began_s, ended_s), (next_s, _) in pairwise(calls[first:]):
        assert next_s - ended_s >= 3.0 * (ended_s - began_s)


def test_closing_does_not_wait_for_pages_that_are_not_ready() -> None:
    pages = KvPages((np.zeros((8, NUM_BLOCKS, 64, 16), np.float32),))
    pages.use(NUM_BLOCKS - 1)
    began = time.monotonic()
    pages.close()
    assert time.monotonic() - began < 5.0
