"""SlicedHead: the rows of the LM head that slices need, packed as the full head is.

What: one contiguous packed matrix per table (a task's T, copied once and never per request), one
pool of dynamic rows that sequences share, their products, and the logits of one slice gathered in
id order. What not: which rows a slice has and who holds them (the engine's SliceCacheIndex), draws
(draws.py).

A row's logit is the same to the last bit here and in the full head: the values are the same and
every product sums over k in order (kernels/vectors.py), wherever the row lies and whatever lies
beside it. Pad columns are never gathered, so a pad cannot win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from server.engine.batch import Batch, HeadSlice, Int32
from server.model.cpu.kernels import copy_bytes, gather_logits, product
from server.model.cpu.linear import float_linear
from server.model.cpu.records import Int64, Linear, Work
from server.model.cpu.sizes import LANES, PANEL

Float32 = npt.NDArray[np.float32]
_EMPTY_ROW = np.empty(0, np.float32)
Panels = npt.NDArray[Any]
"""float32, or uint16 with bfloat16 bits: [panels, K, PANEL]."""


class PackedHead(Protocol):
    """An LM head as its weight kind packs it: what products and slices need of it.

    outputs_per_panel: rows in each of a panel. width: K. row_bytes: memory of one row. in_file:
    whether the rows stay in the model's file, and are packed when they are asked for.
    """

    outputs_per_panel: int
    width: int
    row_bytes: int
    in_file: bool

    def empty(self, num_rows: int) -> Any:
        """Zeroed panels for num_rows rows, on a cache line's boundary."""

    def copy_rows(self, token_ids: Int64, out: Any, places: Int64) -> None:
        """Row token_ids[i] of the head to row places[i] of `out`, from `empty`."""

    def record(self, panels: Any, num_panels: int) -> Linear:
        """The first num_panels of some panels as a product's weights."""

    def pieces(self) -> Iterator[Linear]:
        """All rows as products' weights, one piece after the other; each is good until the next."""


class FloatHead:
    """A PackedHead of floats: panels [panels, K, PANEL], float32 or bfloat16 bits."""

    outputs_per_panel = PANEL
    in_file = False

    def __init__(self, panels: Panels) -> None:
        self.panels = panels
        self.width = int(panels.shape[1])
        self.row_bytes = self.width * panels.itemsize

    def empty(self, num_rows: int) -> Panels:
        """Zeroed panels for num_rows rows, on a cache line's boundary."""
        num_panels = -(-num_rows // PANEL)
        size = num_panels * self.width * PANEL
        arena = np.zeros(size + 64, self.panels.dtype)
        skip = (-arena.ctypes.data % 64) // arena.itemsize
        return arena[skip : skip + size].reshape(num_panels, self.width, PANEL)

    def copy_rows(self, token_ids: Int64, out: Panels, places: Int64) -> None:
        """Row token_ids[i] of the head to row places[i] of `out`."""
        lane = self.panels.itemsize
        starts = np.arange(self.width, dtype=np.int64) * (PANEL * lane)
        runs = np.stack([starts, starts * 0 + lane, starts * 0 + PANEL], axis=1)
        copy_bytes(_bytes(self.panels), token_ids, _bytes(out), places, runs)

    def record(self, panels: Panels, num_panels: int) -> Linear:
        """The first num_panels panels as a product's weights."""
        return float_linear(panels)._replace(outputs=num_panels * PANEL)

    def pieces(self) -> Iterator[Linear]:
        """One, the whole."""
        yield self.record(self.panels, self.panels.shape[0])


class HeadInFile:
    """A PackedHead whose rows stay in the model's file: for a model whose tasks are all slices.

    pack: some rows by their ids, as a PackedHead of their own. What needs all rows packs them
    anew, _PIECE of them at a time: right, and slow.
    """

    in_file = True

    def __init__(self, num_rows: int, pack: Callable[[Int64], PackedHead]) -> None:
        self._num_rows, self._pack = num_rows, pack
        self._one = one = pack(np.zeros(1, np.int64))
        self.outputs_per_panel, self.width = one.outputs_per_panel, one.width
        self.row_bytes = one.row_bytes

    def empty(self, num_rows: int) -> Any:
        """Zeroed panels for num_rows rows, on a cache line's boundary."""
        return self._one.empty(num_rows)

    def copy_rows(self, token_ids: Int64, out: Any, places: Int64) -> None:
        """Row token_ids[i] of the head to row places[i] of `out`."""
        if token_ids.shape[0]:
            own = np.arange(token_ids.shape[0], dtype=np.int64)
            self._pack(token_ids).copy_rows(own, out, places)

    def record(self, panels: Any, num_panels: int) -> Linear:
        """The first num_panels panels as a product's weights."""
        return self._one.record(panels, num_panels)

    def pieces(self) -> Iterator[Linear]:
        """_PIECE rows each, but the last."""
        for first in range(0, self._num_rows, _PIECE):
            last = min(first + _PIECE, self._num_rows)
            piece = self._pack(np.arange(first, last, dtype=np.int64))
            yield from piece.pieces()


_PIECE = 8192


def _bytes(panels: Panels) -> npt.NDArray[np.uint8]:
    return panels.reshape(panels.shape[0], -1).view(np.uint8)


def padded(num: int) -> int:
    """num rounded up to whole vectors."""
    return -(-num // LANES) * LANES


@dataclass(slots=True)
class _Table:
    panels: Any  # of the head's kind
    logits: Float32  # [rows, outputs in whole panels], grown as needed


class SlicedHead:
    """Tables and the dynamic pool over one packed head. Used from one thread at a time.

    head: the packed full head. work: the threads of its products. cap: soft-capping of the logits,
    0 = none. `num_bytes` counts what is held beside it.
    """

    def __init__(self, head: PackedHead, work: Work, cap: float = 0.0) -> None:
        self._head = head
        self._cap = cap
        self._panel = head.outputs_per_panel
        self._work = work
        self._tables: dict[int, _Table] = {}
        self._pool = head.empty(0)
        self._pool_logits = np.zeros((0, 0), np.float32)

    @property
    def num_bytes(self) -> int:
        """Bytes of copied head rows, pads included."""
        return int(self._pool.nbytes) + sum(int(t.panels.nbytes) for t in self._tables.values())

    def load_table(self, table: int, token_ids: Int32) -> None:
        """Copy the rows of ascending ids into one matrix. Raises ValueError for a taken number."""
        if table in self._tables:
            raise ValueError(f"table {table} is loaded already")
        panels = self._head.empty(token_ids.shape[0])
        places = np.arange(token_ids.shape[0], dtype=np.int64)
        self._head.copy_rows(token_ids.astype(np.int64), panels, places)
        self._tables[table] = _Table(panels, np.zeros((0, 0), np.float32))

    def drop_table(self, table: int) -> None:
        """Forget a table; unknown numbers are fine."""
        self._tables.pop(table, None)

    def load_rows(self, token_ids: Int32, places: Int32) -> None:
        """Copy head rows into places of the pool, which doubles when it is too small."""
        if not places.shape[0]:
            return
        most = int(places.max()) + 1
        if most > self._pool.shape[0] * self._panel:
            grown = self._head.empty(max(most, 2 * self._pool.shape[0] * self._panel))
            grown[: self._pool.shape[0]] = self._pool
            self._pool = grown
        self._head.copy_rows(token_ids.astype(np.int64), self._pool, places.astype(np.int64))

    def static_logits(self, table: int, states: Float32, num: int) -> Float32:
        """Logits of states[:num] ([*, K], C order) over a table: [*, outputs in whole panels].

        Valid until the next call for the same table. Columns past its rows are no logits.
        """
        held = self._tables[table]
        held.logits = self._product(held.panels, held.panels.shape[0], states, num, held.logits)
        return held.logits

    def pool_logits(self, num_rows: int, states: Float32, num: int) -> Float32:
        """Logits of states[:num] over the first num_rows dynamic rows; as static_logits."""
        panels = -(-num_rows // self._panel)
        self._pool_logits = self._product(self._pool, panels, states, num, self._pool_logits)
        return self._pool_logits

    def logits_of(self, batch: Batch, hidden: Float32) -> dict[int, tuple[Float32, Float32]]:
        """Per draw from a cached slice: its row's logits over the table and the dynamic rows.

        One product for each table and one over the dynamic rows, whatever the number of slices.
        hidden: [rows of the batch, K].
        """
        if batch.draw_slice is None:
            return {}
        by_table: dict[int, list[int]] = {}
        num_pool = 0
        for d, i in enumerate(batch.draw_slice.tolist()):
            if i >= 0 and batch.slices[i].table >= 0:
                by_table.setdefault(batch.slices[i].table, []).append(d)
        for slice_ in batch.slices:
            if slice_.columns.shape[0]:
                num_pool = max(num_pool, int(slice_.columns.max()) + 1 - slice_.num_static)
        views: dict[int, tuple[Float32, Float32]] = {}
        for table, draws in by_table.items():
            rows, where = np.unique(batch.draw_rows[draws], return_inverse=True)
            num = rows.shape[0]
            states = hidden[rows]
            static = self.static_logits(table, states, num)
            pool = None
            if num_pool > 0:
                pool = self.pool_logits(num_pool, states, num)
                if len(by_table) > 1:  # the next table's rows overwrite it
                    pool = pool[:num].copy()
            for d, place in zip(draws, where.tolist(), strict=True):
                views[d] = static[place], _EMPTY_ROW if pool is None else pool[place]
        return views

    def _product(
        self, panels: Any, num_panels: int, states: Float32, num: int, out: Float32
    ) -> Float32:
        if out.shape[0] < num or out.shape[1] < num_panels * self._panel:
            out = np.zeros((max(num, 2 * out.shape[0]), panels.shape[0] * self._panel), np.float32)
        if num and num_panels:
            weights = self._head.record(panels, num_panels)
            product(states, num, weights, out, self._cap, self._work)
        return out


def gather(static: Float32, pool: Float32, slice_: HeadSlice, out: Float32) -> None:
    """The logits of a slice in id order into out[:padded(n)], -inf past its n ids.

    static, pool: one row each of static_logits and pool_logits.
    """
    size = padded(slice_.ids.shape[0])
    gather_logits(static, pool, slice_.columns, slice_.num_static, out[:size])
