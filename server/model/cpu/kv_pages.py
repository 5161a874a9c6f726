"""KvPages: memory pages of a CPU's KV cache, ready before rows are written into them.

The first write to a page costs more than the arithmetic of its rows: in a virtual machine 0.5 to
4 ms for a huge page, 25 to 40 ms for a prompt of 200 tokens (docs/benchmarks, "The first token
after a pause"). The block pool hands out blocks in ascending order while there are fresh ones, so
pages can be made ready one stretch ahead of the highest block in use; memory that a server never
needs is never taken.

While pages are made, the kernel holds the process's map of memory, and whoever maps or unmaps an
array waits. So the thread has the priority of all others and rests between planes instead: at the
lowest, on cores that steps keep busy, a plane's page took 22 ms in the mean and 280 at most, and a
hundredth of the steps with drafts stood for 30 to 70 ms.

Every layer has a plane of its own, and each would begin with a huge page: 60 MB for SmolLM2 before
the first request. So the first megabyte of a plane has small pages and short stretches: 15 MB each,
680 tokens in float16. Many or long histories read huge pages: small ones made a step of eight rows
behind 1,200 tokens a twentieth slower.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

_log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23
"""Linux 5.14: fault pages in as if written to, without changing what they hold."""

_PAGE = 4096
_MADV_NOHUGEPAGE = 15

_STRETCH_BYTES = 2 << 20
"""Of one plane: a huge page."""

_SMALL_BYTES = 1 << 20
"""Of one plane: its beginning, in small pages."""

_SHORTS = 2
"""Stretches of the beginning."""

_REST = 4.0
"""Of what a plane's pages take, before the next plane's: a fifth of a core is taken from steps."""


class KvPages:
    """Makes pages of KV arrays ready, a stretch of blocks at a time, on a thread of its own.

    arrays: each [planes, blocks, x, y], C-contiguous. num_ready: blocks 0 .. num_ready - 1 have
    their pages. The first stretch is ready when the constructor returns. Where the kernel cannot do
    it (not Linux, too old, not enough memory), pages are made by the usual page faults.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        self._arrays = tuple(arrays)
        self._num_blocks = arrays[0].shape[-3]
        block_bytes = max(array.strides[-3] for array in arrays)
        self._stretch = max(1, _STRETCH_BYTES // block_bytes)
        self._short = max(1, _SMALL_BYTES // _SHORTS // block_bytes)
        self.num_ready = 0
        self._wanted = 0
        self._closed = False
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._madvise: Any = None
        if os.path.isdir("/proc/self"):
            self._madvise = getattr(ctypes.CDLL(None), "madvise", None)
        if self._madvise is None:
            return
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for address, size in self._ranges(0, min(_SHORTS * self._short, self._num_blocks)):
            self._madvise(address, size, _MADV_NOHUGEPAGE)  # without it, huge pages are as well
        if self._populate(0, self._short):
            self.num_ready = min(self._short, self._num_blocks)
            self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)
            self._thread.start()

    def use(self, block: int) -> None:
        """Note that `block` is in use: pages up to a stretch after it are made ready soon."""
        ahead = self._short if block < (_SHORTS - 1) * self._short else self._stretch
        wanted = min(self._num_blocks, block + 1 + ahead)
        if wanted > self._wanted:
            with self._news:
                self._wanted = wanted
                self._news.notify()

    def close(self) -> None:
        """End the thread; the arrays may go away afterwards. Idempotent."""
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or self._wanted > self.num_ready)
                if self._closed:
                    return
            length = self._short if self.num_ready < _SHORTS * self._short else self._stretch
            end = min(self._num_blocks, self.num_ready + length)
            if not self._populate(self.num_ready, end):
                return
            self.num_ready = end

    def _populate(self, first: int, end: int) -> bool:
        """Pages of blocks [first, end) of every plane. False: it is closed, or the kernel will
        not."""
        for address, size in self._ranges(first, min(end, self._num_blocks)):
            began_s = time.monotonic()
            if self._madvise(address, size, _MADV_POPULATE_WRITE) != 0:
                _log.debug("KV pages are not made ready ahead: madvise failed")
                return False
            if self._thread is not None:
                with self._news:
                    rest_s = _REST * (time.monotonic() - began_s)
                    if self._news.wait_for(lambda: self._closed, rest_s):
                        return False
        return True

    def _ranges(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """(address, bytes) of whole pages, one a plane; neighbours share the page between them."""
        for array in self._arrays:
            plane = array.strides[-3] * self._num_blocks
            for start in range(array.ctypes.data, array.ctypes.data + array.nbytes, plane):
                low = (start + first * array.strides[-3]) // _PAGE * _PAGE
                high = -(-(start + end * array.strides[-3]) // _PAGE) * _PAGE
                yield low, high - low
