"""MemoryReader: how fast threads read memory here, beside which a step of one row is judged."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import njit


def _sum(numbers: Any) -> Any:
    total = np.int64(0)
    for i in range(numbers.shape[0]):
        total += numbers[i]
    return total


class MemoryReader:
    """Sums of num_bytes (in pages of 2 MB where Linux gives them), cut between the threads.

    Larger than the caches, or it says what those give.
    """

    def __init__(self, num_bytes: int, threads: int) -> None:
        self.num_bytes = num_bytes // (64 * threads) * 64 * threads
        self._shares = np.array_split(np.ones(self.num_bytes // 8, np.int64), threads)
        self._pool = ThreadPoolExecutor(threads)
        self._sum = njit(nogil=True)(_sum)
        self._sum(self._shares[0][:8])  # compiled here

    def read_s(self) -> float:
        """Seconds that all threads take for all bytes."""
        began = time.perf_counter()
        total = sum(int(part) for part in self._pool.map(self._sum, self._shares))
        took = time.perf_counter() - began
        assert total == self.num_bytes // 8
        return took

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
