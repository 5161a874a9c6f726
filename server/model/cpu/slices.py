"""SlicedHead: the rows of the LM head that slices need, packed as the full head is.

What: one contiguous packed matrix per table (a task's T, copied once and never per request), one
pool of dynamic rows that sequences share, their products, and the logits of one slice gathered in
id order. What not: which rows a slice has and who holds them (the engine's SliceCacheIndex), draws
(cpu_sampler.py).

A row's logit is the same to the last bit here and in the full head: the values are the same and
every product sums over k in order (cpu_kernels.py), wherever the row lies and whatever lies beside
it. Pad columns are never gathered, so a pad cannot win.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from server.engine.batch import HeadSlice, Int32
from server.model.cpu import forward as cpu_forward
from server.model.cpu.kernels import LANES, PANEL

Float32 = npt.NDArray[np.float32]
Panels = npt.NDArray[Any]
"""float32, or uint16 with bfloat16 bits: [panels, K, PANEL]."""


@njit(nogil=True, cache=True, error_model="numpy")
def _copy_rows(head: Any, token_ids: Any, out: Any, places: Any) -> None:
    """Column places[i] of `out` = column token_ids[i] of `head`, both in panels."""
    size = head.shape[2]
    for i in range(token_ids.shape[0]):
        source = head[token_ids[i] // size]
        target = out[places[i] // size]
        a = token_ids[i] % size
        b = places[i] % size
        for k in range(head.shape[1]):
            target[k, b] = source[k, a]


@njit(nogil=True, cache=True, error_model="numpy")
def _gather(static: Any, pool: Any, columns: Any, num_static: int, out: Any) -> None:
    """out[i] = the logit of column i of a slice; -inf past the last, up to a whole vector."""
    num = columns.shape[0]
    for i in range(num):
        column = columns[i]
        if column < num_static:
            out[i] = static[column]
        else:
            out[i] = pool[column - num_static]
    for i in range(num, out.shape[0]):
        out[i] = -np.inf


def _empty_panels(num_rows: int, width: int, dtype: Any) -> Panels:
    """Zeroed panels for num_rows rows of `width` values, on a cache line's boundary."""
    num_panels = -(-num_rows // PANEL)
    arena = np.zeros(num_panels * width * PANEL + 64, dtype)
    skip = (-arena.ctypes.data % 64) // arena.itemsize
    size = num_panels * width * PANEL
    return arena[skip : skip + size].reshape(num_panels, width, PANEL)


def padded(num: int) -> int:
    """num rounded up to whole vectors."""
    return -(-num // LANES) * LANES


@dataclass(slots=True)
class _Table:
    panels: Panels
    logits: Float32  # [rows, panels * PANEL], grown as needed


class SlicedHead:
    """Tables and the dynamic pool over one packed head. Used from one thread at a time.

    head: [panels, K, PANEL], the packed full head. `num_bytes` counts what is held beside it.
    """

    def __init__(self, head: Panels, threads: int, counter: npt.NDArray[np.int64]) -> None:
        self._head = head
        self._width = int(head.shape[1])
        self._bf16 = head.dtype == np.uint16
        self._threads = threads
        self._counter = counter
        self._tables: dict[int, _Table] = {}
        self._pool = _empty_panels(0, self._width, head.dtype)
        self._pool_logits = np.zeros((0, 0), np.float32)

    @property
    def num_bytes(self) -> int:
        """Bytes of copied head rows, pads included."""
        return self._pool.nbytes + sum(t.panels.nbytes for t in self._tables.values())

    def load_table(self, table: int, token_ids: Int32) -> None:
        """Copy the rows of ascending ids into one matrix. Raises ValueError for a taken number."""
        if table in self._tables:
            raise ValueError(f"table {table} is loaded already")
        panels = _empty_panels(token_ids.shape[0], self._width, self._head.dtype)
        places = np.arange(token_ids.shape[0], dtype=np.int64)
        _copy_rows(self._head, token_ids.astype(np.int64), panels, places)
        self._tables[table] = _Table(panels, np.zeros((0, 0), np.float32))

    def drop_table(self, table: int) -> None:
        """Forget a table; unknown numbers are fine."""
        self._tables.pop(table, None)

    def load_rows(self, token_ids: Int32, places: Int32) -> None:
        """Copy head rows into places of the pool, which doubles when it is too small."""
        if not places.shape[0]:
            return
        most = int(places.max()) + 1
        if most > self._pool.shape[0] * PANEL:
            grown = _empty_panels(max(most, 2 * self._pool.shape[0] * PANEL), self._width,
                                  self._head.dtype)  # fmt: skip
            grown[: self._pool.shape[0]] = self._pool
            self._pool = grown
        _copy_rows(self._head, token_ids.astype(np.int64), self._pool, places.astype(np.int64))

    def static_logits(self, table: int, states: Float32, num: int) -> Float32:
        """Logits of states[:num] ([*, K], C order) over a table: [*, panels * PANEL].

        Valid until the next call for the same table. Columns past its rows are no logits.
        """
        held = self._tables[table]
        held.logits = self._product(held.panels, held.panels.shape[0], states, num, held.logits)
        return held.logits

    def pool_logits(self, num_rows: int, states: Float32, num: int) -> Float32:
        """Logits of states[:num] over the first num_rows dynamic rows; as static_logits."""
        panels = -(-num_rows // PANEL)
        self._pool_logits = self._product(self._pool, panels, states, num, self._pool_logits)
        return self._pool_logits

    def _product(
        self, panels: Panels, num_panels: int, states: Float32, num: int, out: Float32
    ) -> Float32:
        if out.shape[0] < num or out.shape[1] < num_panels * PANEL:
            out = np.zeros((max(num, 2 * out.shape[0]), panels.shape[0] * PANEL), np.float32)
        if num and num_panels:
            cpu_forward.product(
                states, num, panels.ctypes.data, num_panels, out, self._bf16, self._counter,
                self._threads,
            )  # fmt: skip
        return out


def gather(static: Float32, pool: Float32, slice_: HeadSlice, out: Float32) -> None:
    """The logits of a slice in id order into out[:padded(n)], -inf past its n ids.

    static, pool: one row each of static_logits and pool_logits.
    """
    size = padded(slice_.ids.shape[0])
    _gather(static, pool, slice_.columns, slice_.num_static, out[:size])
