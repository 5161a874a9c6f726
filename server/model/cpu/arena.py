"""Arena: memory for weights in a few large pieces instead of many small ones.

numpy asks Linux for pages of 2 MB where an array has 4 MB or more. A matrix of a small model has
less, and in pages of 4 KB a core reads its weights at two thirds of the speed: it looks up every
page, and the prefetcher stops at a page's end.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_PIECE = 64 << 20  # address space: pages that nobody writes take no memory
_LINE = 64


def aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes on a cache line's boundary."""
    memory = np.zeros(num_bytes + _LINE, np.uint8)
    skip = -memory.ctypes.data % _LINE
    return memory[skip : skip + num_bytes]


class Arena:
    """Hands out zeroed bytes on cache lines' boundaries; they live as long as an array of them."""

    def __init__(self) -> None:
        self._room = np.zeros(0, np.uint8)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The next bytes: uint8 [num_bytes]."""
        size = -(-num_bytes // _LINE) * _LINE
        if size > self._room.shape[0]:
            self._room = aligned(max(size, _PIECE))
        taken, self._room = self._room[:num_bytes], self._room[size:]
        return taken
