"""What products are given: weights as records, the memory that they lie in, and what the threads of
a team share."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from server.model.cpu.integers.forms import BLOCK
from server.model.cpu.integers.forms import PANEL as INTEGER_PANEL
from server.model.cpu.records import (
    BFLOAT16,
    FLOAT32,
    NO_ROWS,
    NO_TILES,
    PANEL,
    ROW_SPAN,
    Activations,
    Float32,
    Int64,
    Linear,
    Work,
)
from server.model.cpu.threads import Team


def float_linears(addresses: Int64, num_panels: int, width: int, bf16: bool) -> Linear:
    """The record of matrices of floats, one a layer, in panels [num_panels, width, PANEL] at int64
    addresses [layers], which the caller keeps alive; bf16: uint16 with bfloat16 bits."""
    num, outputs = addresses.shape[0], num_panels * PANEL
    parts = np.zeros((num, 1, 6), np.int64)
    parts[:, 0, 0], parts[:, 0, 5] = addresses, outputs
    none: Float32 = np.zeros((num, 0), np.float32)
    kind = BFLOAT16 if bf16 else FLOAT32
    return Linear(kind, parts, width, outputs, np.zeros(num, np.bool_), NO_ROWS, none, NO_TILES)


def float_linear(panels: npt.NDArray[Any]) -> Linear:
    """The record of one matrix: panels [num_panels, k, PANEL], float32 or uint16 (bfloat16)."""
    address = np.array([panels.ctypes.data], np.int64)
    num_panels, width = int(panels.shape[0]), int(panels.shape[1])
    return float_linears(address, num_panels, width, panels.dtype == np.uint16)


def pack_panels(weight: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Write `weight` [N, K] into the first panels of `out` [panels, K, PANEL].

    Both float32, or both uint16 holding bfloat16 bits. Columns past N are zero.
    """
    num, k = weight.shape
    for p in range(-(-num // PANEL)):
        rows = weight[p * PANEL : (p + 1) * PANEL]
        target = out[p]
        target[:, : rows.shape[0]] = rows.T
        target[:, rows.shape[0] :] = 0
    assert out.shape[1:] == (k, PANEL)


def packed(weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A matrix [N, K], float32 or uint16 with bfloat16 bits, in panels of its own."""
    shape = -(-weight.shape[0] // PANEL), weight.shape[1], PANEL
    panels = aligned(math.prod(shape) * weight.itemsize).view(weight.dtype).reshape(shape)
    pack_panels(weight, panels)
    return panels


def new_work(threads: int, team: Team | None = None, inputs: int = 0) -> Work:
    """What products with so many threads share; team: of that size, made here when None. inputs:
    the most that a product of integers has."""
    # Of the widest panels of any weight kind: floats' are narrower than integers' without AVX-512.
    # A row that integers are made of lies there too, behind a block.
    room = max(2 * ROW_SPAN * max(PANEL, INTEGER_PANEL), inputs + 64)
    pairs = np.zeros((threads, -(-room // 16) * 16), np.float32)
    return Work((team or Team(threads)).sync, pairs, threads, 0)


# -- Memory of weights ----------------------------------------------------------------------------
#
# A few large pieces instead of many small ones. numpy asks Linux for pages of 2 MB where an array
# has 4 MB or more. A matrix of a small model has less, and in pages of 4 KB a core reads its
# weights at two thirds of the speed: it looks up every page, and the prefetcher stops at a page's
# end.

_PIECE = 64 << 20  # address space: pages that nobody writes take no memory
_LINE = 64
_M_MMAP_THRESHOLD = -3  # of mallopt


def keep_heap_small() -> None:
    """Have malloc map whatever is large by itself from now on. Left alone, glibc raises that bound
    to what was freed last, at most 32 MiB, and zeroes freed memory for arrays of which few rows are
    ever written: their pages are then taken, too. Elsewhere nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 128 << 10)


def aligned(num_bytes: int, boundary: int = _LINE) -> npt.NDArray[np.uint8]:
    """Zeroed bytes on a boundary, by default a cache line's."""
    memory = np.zeros(num_bytes + boundary, np.uint8)
    skip = -memory.ctypes.data % boundary
    return memory[skip : skip + num_bytes]


def grown(array: npt.NDArray[Any], num: int) -> npt.NDArray[Any]:
    """The array at the beginning of a longer one, of `num` lines, with zeros behind it."""
    longer = np.zeros((num, *array.shape[1:]), array.dtype)
    longer[: array.shape[0]] = array
    return longer


def activations(num_rows: int, num_inputs: int) -> Activations:
    """Empty buffers for num_rows rows of num_inputs values, as integer products read them."""
    padded = -(-num_inputs // BLOCK) * BLOCK
    numbers = aligned(num_rows * padded).view(np.int8).reshape(num_rows, padded)
    figures = aligned(num_rows * padded // BLOCK * 16).view(np.int32)
    return Activations(numbers, figures.reshape(num_rows, padded // BLOCK, 4))


class Arena:
    """Hands out zeroed bytes on cache lines' boundaries; they live as long as an array of them."""

    def __init__(self) -> None:
        self._room = np.zeros(0, np.uint8)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The next bytes: uint8 [num_bytes]."""
        size = -(-num_bytes // _LINE) * _LINE
        if size > _PIECE // 4:  # behind it, a page of 2 MB would be taken and not used
            return aligned(num_bytes)
        if size > self._room.shape[0]:
            self._room = aligned(_PIECE)
        taken, self._room = self._room[:num_bytes], self._room[size:]
        return taken
