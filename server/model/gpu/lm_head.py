"""The LM head: hidden states of rows that draw or are scored -> float32 logits.

LmHead has all ids, its weight where the hidden states are or in CPU memory, from which every
product copies it piece by piece. TorchSlices has the rows of slices: a table's T, copied once, when
the engine names it, and one pool of dynamic rows. They are copied beside what the device computes
(VocabTailor, arXiv 2508.15229: loading overlaps the forward pass). What the slices of a table see
in a step is a SliceView: T's ids and the dynamic ones of all of them, ascending, and for each slice
which of these columns are its own. It is made anew when a sequence comes, goes or has another
slice.

Elsewhere: which rows a slice has, who holds them, and when they are forgotten (vocab_store's
SliceCacheIndex, in the engine), draws (sampler.py). No result depends on other rows of the batch
but for the last bits that a library's product may choose by its shape.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from server.engine.batch import HeadSlice, Int32
from server.model.gpu.transfers import Array, Beside

_CPU_SLAB = 8192  # vocabulary rows upcast at once where there is no float32-output product
CHUNK_BYTES = 16 << 20
"""Bytes of a head in CPU memory that are copied at once: long enough for a copy to run at full
speed, of which the product takes a hundredth."""
_ROWS = 64  # tables and pool are rounded up to it: products of odd sizes are slow


def product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden [n, K] times weight [rows, K], both of one dtype and device: float32 [n, rows].

    Never rounded to the weight's dtype: that would make ties, and ties go to the lowest id.
    """
    if weight.dtype == torch.float32:
        return functional.linear(hidden, weight)
    if weight.device.type == "cuda":
        # cuBLAS keeps its float32 accumulator (torch >= 2.8, CUDA only).
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    out = torch.empty((hidden.shape[0], weight.shape[0]), dtype=torch.float32)
    wide = hidden.float()
    for start in range(0, weight.shape[0], _CPU_SLAB):
        rows = weight[start : start + _CPU_SLAB].float()
        torch.mm(wide, rows.t(), out=out[:, start : start + _CPU_SLAB])
    return out


def soft_capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap) of float32 logits, in place; 0 leaves them as they are."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


class LmHead:
    """All rows of the head, or some.

    weight: [V, hidden_size], where the hidden states are (may be the tied embedding table, never
    copied) or, with is_streamed, in CPU memory. bias: [V] beside the hidden states, or None.
    num_token_ids: ids that exist; rows of the weight from there on are padding: never shown, so
    that no such id can be drawn or listed. cap: logits are soft_capped by it, 0 = not.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_token_ids: int | None = None,
        cap: float = 0.0,
        *,
        is_streamed: bool = False,
    ) -> None:
        size = int(weight.shape[0]) if num_token_ids is None else num_token_ids
        self.weight, self.vocab_size, self.cap = weight, size, cap
        self.bias = None if bias is None else bias.float()
        self.is_streamed = is_streamed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] in the weight's dtype -> float32 [n, vocab_size]; no sync."""
        size, weight = self.vocab_size, self.weight
        if self.is_streamed:
            logits = hidden.new_empty((hidden.shape[0], size), dtype=torch.float32)
            step = max(1, CHUNK_BYTES // (weight.shape[1] * weight.element_size()))
            for start in range(0, size, step):
                rows = weight[start : min(start + step, size)]
                there = rows.to(hidden.device, non_blocking=True)
                logits[:, start : start + rows.shape[0]] = product(hidden, there)
        else:  # padding is multiplied: odd sizes are slow
            logits = product(hidden, weight)[:, :size]
        if self.bias is not None:
            logits += self.bias[:size]
        return soft_capped(logits, self.cap)


def _round_up(num: int) -> int:
    return -(-num // _ROWS) * _ROWS


@dataclass(frozen=True, slots=True, eq=False)
class SliceView:
    """What slices of one table see. W: columns.

    ids: int32 [W], the columns' vocabulary ids, ascending, and the same on the device; None for
    slices that are not cached: a column of the full head is an id. seen: bool [slices, W]: which
    columns a slice has. pool: int64, places of the dynamic rows. order: int64 [W]: a column's place
    in [the table's rows | those of `pool`].
    """

    slices: tuple[HeadSlice, ...]
    seen: torch.Tensor
    ids: Int32 | None = None
    ids_there: torch.Tensor | None = None
    pool: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Columns."""
        return int(self.seen.shape[1])

    def named(self, columns: torch.Tensor) -> torch.Tensor:
        """int32: the vocabulary ids of columns."""
        return columns if self.ids_there is None else self.ids_there[columns.clamp(min=0).long()]


class TorchSlices:
    """Tables and dynamic rows of one runner. One thread; the runner's stream is current.

    head: the full head that rows are copied from. Their memory is the runner's stream's: before it
    is read or given back, that stream waits for the copies.
    """

    def __init__(self, head: LmHead, device: torch.device) -> None:
        self._head = head
        self._device = device
        self._copies = Beside(device)
        self._tables: dict[int, tuple[LmHead, Int32]] = {}  # and the ids of its rows
        self._pool = self._rows_for(0)
        self._views: dict[int, SliceView] = {}

    # -- head rows --------------------------------------------------------------------------

    def load_table(self, table: int, token_ids: Int32) -> None:
        """Copy the rows of ascending ids into a matrix of their own. Raises ValueError for a number
        that is taken."""
        if table in self._tables:
            raise ValueError(f"table {table} is loaded already")
        rows = self._rows_for(token_ids.shape[0])
        self._copy(rows, token_ids, np.arange(token_ids.shape[0]))
        self._tables[table] = rows, token_ids

    def drop_table(self, table: int) -> None:
        """Forget a table; unknown numbers are fine."""
        self._copies.join()
        self._tables.pop(table, None)
        self._views.pop(table, None)

    def load_rows(self, token_ids: Int32, places: Int32) -> None:
        """Copy head rows into places of the pool, which doubles when it is too small."""
        if not places.shape[0]:
            return
        old, most = self._pool, int(places.max()) + 1
        if most > old.weight.shape[0]:
            self._copies.join()
            self._pool = self._rows_for(max(most, 2 * old.weight.shape[0]))
            self._pool.weight[: old.weight.shape[0]] = old.weight
            if self._pool.bias is not None and old.bias is not None:
                self._pool.bias[: old.bias.shape[0]] = old.bias
        self._copy(self._pool, token_ids, places)

    def _rows_for(self, num: int) -> LmHead:
        """Zeros, on the device."""
        size, weight = _round_up(num), self._head.weight
        rows = torch.zeros((size, weight.shape[1]), dtype=weight.dtype, device=self._device)
        bias = None if self._head.bias is None else torch.zeros(size, device=self._device)
        return LmHead(rows, bias)

    def _copy(self, rows: LmHead, token_ids: Int32, places: Array) -> None:
        """Copy head rows into places of `rows`."""
        weight = self._head.weight
        with self._copies.queued():
            ids, at = (self._there(array.astype(np.int64)) for array in (token_ids, places))
            if self._head.is_streamed:
                found = weight.index_select(0, torch.from_numpy(token_ids.astype(np.int64)))
                found = found.to(self._device, non_blocking=True)
            else:
                found = weight.index_select(0, ids)
            rows.weight.index_copy_(0, at, found)
            if rows.bias is not None and self._head.bias is not None:
                rows.bias.index_copy_(0, at, self._head.bias.index_select(0, ids))

    def _there(self, array: Array) -> torch.Tensor:
        """On the device. Pageable memory is staged before the call returns, which waits for
        nothing."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    # -- slices -----------------------------------------------------------------------------

    def view(self, slices: Sequence[HeadSlice]) -> SliceView:
        """What these slices of one table, or of none, see. Slices are known by identity: the engine
        makes a new one when a sequence's rows change.

        Raises ValueError for a slice over rows that are not there.
        """
        table = slices[0].table
        known = self._views.get(table)
        if (
            known is None
            or len(known.slices) != len(slices)
            or not all(map(operator.is_, known.slices, slices))
        ):
            known = self._views[table] = self._seen_by(tuple(slices))
        return known

    def _seen_by(self, slices: tuple[HeadSlice, ...]) -> SliceView:
        if any(one.ids.shape[0] and one.ids[-1] >= self._head.vocab_size for one in slices):
            raise ValueError("a slice has an id outside the vocabulary")
        if slices[0].table < 0:
            seen = np.zeros((len(slices), self._head.vocab_size), np.bool_)
            for row, one in zip(seen, slices, strict=True):
                row[one.ids] = True
            return SliceView(slices, self._there(seen))
        if slices[0].table not in self._tables:
            raise ValueError(f"table {slices[0].table} is not loaded")
        rows, table_ids = self._tables[slices[0].table]
        num = table_ids.shape[0]
        own = [np.flatnonzero(one.columns >= one.num_static) for one in slices]
        for one, at in zip(slices, own, strict=True):
            if one.num_static != num or one.ids.shape[0] != num + at.shape[0]:
                raise ValueError(f"a slice is not the rows of table {one.table} and dynamic ones")
        dynamic, first = np.unique(
            np.concatenate([one.ids[at] for one, at in zip(slices, own, strict=True)]),
            return_index=True,
        )
        places = np.concatenate([one.columns[at] for one, at in zip(slices, own, strict=True)])
        places = places[first] - num
        if places.shape[0] and places.max() >= self._pool.weight.shape[0]:
            raise ValueError("a slice has columns past the cached rows")
        every = np.concatenate([table_ids, dynamic])
        order = np.argsort(every)
        ids = every[order].astype(np.int32)
        seen = np.zeros((len(slices), ids.shape[0]), np.bool_)
        seen[:, order < num] = True
        for row, one, at in zip(seen, slices, own, strict=True):
            row[np.searchsorted(ids, one.ids[at])] = True
        # Behind the table's own rows are those that it is rounded up with.
        order = order + (order >= num) * (rows.weight.shape[0] - num)
        pool = np.zeros(_round_up(places.shape[0]), np.int64)
        pool[: places.shape[0]] = places
        there = [self._there(array) for array in (ids, pool, order)]
        return SliceView(slices, self._there(seen), ids, *there)

    def logits(self, hidden: torch.Tensor, view: SliceView) -> torch.Tensor:
        """float32 [n, W] of a view over cached rows. hidden: [n, hidden_size] in the weight's
        dtype."""
        assert view.pool is not None and view.order is not None
        self._copies.join()
        parts = [self._tables[view.slices[0].table][0].logits(hidden)]
        if view.pool.shape[0]:
            weight, bias = self._pool.weight, self._pool.bias
            own = None if bias is None else bias.index_select(0, view.pool)
            parts.append(LmHead(weight.index_select(0, view.pool), own).logits(hidden))
        return soft_capped(torch.cat(parts, dim=1).index_select(1, view.order), self._head.cap)
