"""KV pages are ready before they are written, a stretch ahead of what is in use."""

from __future__ import annotations

import math
import mmap
import resource
import sys
import time

import numpy as np
import pytest

from server.model.cpu.kv_pages import KvPages
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")

PLANES = 6
NUM_BLOCKS = 3000  # of 4 KiB: eight short stretches of 16, then 512 make one


def num_faults() -> int:
    """Of this thread: the pages' own thread and other tests' have faults too."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def untouched_planes() -> np.ndarray:
    """float32 zeros that no one has written: np.zeros may give pages that the heap has used."""
    shape = (2, 3, NUM_BLOCKS, 64, 16)
    return np.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), np.float32).reshape(shape)


def wait_ready(pages: KvPages, num_blocks: int) -> None:
    wait_until(lambda: pages.num_ready >= num_blocks, 30.0)


def test_blocks_are_ready_a_stretch_ahead_and_keep_what_they_hold() -> None:
    keys, untouched = untouched_planes(), untouched_planes()
    pages = KvPages((keys,))
    if pages.num_ready == 0:
        pytest.skip("this kernel cannot populate pages")
    assert pages.num_ready == 16
    pages.use(40)
    wait_ready(pages, 57)
    assert pages.num_ready == 64  # whole stretches, and none that nobody is near
    pages.use(120)
    wait_ready(pages, 633)
    assert pages.num_ready == 640
    before = num_faults()
    keys[:, :, :640] = 1.0
    ready = num_faults() - before
    before = num_faults()
    untouched[:, :, :640] = 1.0
    assert ready <= 2 < PLANES <= num_faults() - before
    keys[:, :, 700:710] = 7.0  # no one said so: an ordinary fault, and its content stays
    pages.use(NUM_BLOCKS - 1)
    wait_ready(pages, NUM_BLOCKS)
    assert (keys[:, :, 700:710] == 7.0).all() and (keys[:, :, :640] == 1.0).all()
    assert not keys[:, :, 710:].any()
    pages.close()
    pages.close()


def test_closing_does_not_wait_for_pages_that_are_not_ready() -> None:
    pages = KvPages((np.zeros((8, NUM_BLOCKS, 64, 16), np.float32),))
    pages.use(NUM_BLOCKS - 1)
    began = time.monotonic()
    pages.close()
    assert time.monotonic() - began < 5.0
