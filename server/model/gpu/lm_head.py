"""The LM head: hidden states of rows that draw or are scored -> float32 logits.

Over all ids: LmHead has its weight where the hidden states are; StreamedHead has it in CPU memory
and copies it through two buffers on the device, a chunk being copied while the one before is
multiplied. Over the ids of slices, TorchSlices:

    load_table, load_rows   head rows copied on a side stream, beside the prompt's forward pass
    logits                  [a table's rows | dynamic rows] times hidden states: two products for
                            all sequences of a table, whatever the number of their slices
    place, pick             a slice's ids and columns, kept on the device while its sequence runs;
                            the logits of each draw's own slice in id order, -inf past its ids

Elsewhere: which rows a slice has, who holds them, and when they are forgotten (vocab_store's
SliceCacheIndex, in the engine), draws (sampler.py).

A table's T is copied once, when the engine names it, and never for a request. Nothing waits on the
host: a product waits on the device for the copies that it reads. No result depends on other rows of
the batch but for the last bits that a library's product may choose by its shape.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from server.engine.batch import HeadSlice, Int32
from server.model.gpu.transfers import Fence, HostTable, SideStream, Upload

Array = npt.NDArray[Any]

_CPU_SLAB = 8192  # vocabulary rows upcast at once where there is no float32-output product
CHUNK_BYTES = 16 << 20
"""Bytes of one of StreamedHead's two buffers: long enough for a copy to run at full speed."""
_ROWS = 64  # tables and pool are rounded up to it: products of odd sizes are slow
_COPY_BYTES = 4 << 20  # head rows gathered in CPU memory and copied at once
_FIRST_SLOTS = 8


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
    """All rows of the head, its weight where the hidden states are.

    weight: [V, hidden_size], may be the tied embedding table (never copied). bias: [V] or None.
    num_token_ids: ids that exist; rows of the weight from there on are padding, multiplied (odd
    sizes are slow) but never shown, so that no such id can be drawn or listed. cap: logits are
    soft_capped by it, 0 = not. is_streamed: whether every product reads the head over the bus, so
    that rows should share one.
    """

    is_streamed = False

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_token_ids: int | None = None,
        cap: float = 0.0,
    ) -> None:
        num_rows = int(weight.shape[0])
        size = num_rows if num_token_ids is None else num_token_ids
        if not 0 < size <= num_rows:
            raise ValueError(f"{num_token_ids} token ids, but the head has {num_rows} rows")
        self.weight, self.vocab_size, self.cap = weight, size, cap
        self.bias = None if bias is None else bias.float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] in the weight's dtype -> float32 [n, vocab_size]; no sync."""
        logits = self._product(hidden)[:, : self.vocab_size]
        if self.bias is not None:
            logits += self.bias[: self.vocab_size]
        return soft_capped(logits, self.cap)

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab_size or more]."""
        return product(hidden, self.weight)


class StreamedHead(LmHead):
    """A head that stays in CPU memory and is copied through two buffers at every product, but for
    its padding.

    table: its weight. bias: [V] on the device, or None. side: the stream of the copies. The buffers
    are allocated at the first product.
    """

    is_streamed = True

    def __init__(
        self,
        table: HostTable,
        bias: torch.Tensor | None,
        num_token_ids: int | None,
        side: SideStream,
        *,
        cap: float = 0.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__(table.tensor, bias, num_token_ids, cap)
        self._side = side
        row_bytes = self.weight.shape[1] * self.weight.element_size()
        self._chunk_rows = max(1, min(self.vocab_size, chunk_bytes // row_bytes))
        self._buffers: list[torch.Tensor] = []

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        size, step = self.vocab_size, self._chunk_rows
        if not self._buffers:
            shape = (step, self.weight.shape[1])
            self._buffers = [
                torch.empty(shape, dtype=self.weight.dtype, device=hidden.device) for _ in range(2)
            ]
        logits = torch.empty((hidden.shape[0], size), dtype=torch.float32, device=hidden.device)
        starts = range(0, size, step)
        fences = [self._copy(i, start) for i, start in enumerate(starts[:2])]
        for i, start in enumerate(starts):
            end = min(start + step, size)
            fences[i].wait()
            logits[:, start:end] = product(hidden, self._buffers[i % 2][: end - start])
            if i + 2 < len(starts):
                # Queued behind the product that has just read this buffer, and not behind the next.
                fences.append(self._copy(i + 2, starts[i + 2]))
        return logits

    def _copy(self, nth: int, start: int) -> Fence:
        rows = self.weight[start : min(start + self._chunk_rows, self.vocab_size)]
        target = self._buffers[nth % 2][: rows.shape[0]]
        return self._side.run(lambda: target.copy_(rows, non_blocking=True))


def _round_up(num: int) -> int:
    return -(-num // _ROWS) * _ROWS


@dataclass(slots=True)
class _Rows:
    """`num` head rows on the device, the last of them zeros; fence: the end of the last copy."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    num: int
    fence: Fence


@dataclass(frozen=True, slots=True)
class Placed:
    """A slice whose ids and columns are on the device, in row `slot` of the slot tables.

    Holds the slice, so that no other object can take its identity. pool_width: dynamic rows that a
    product must cover for it, rounded up.
    """

    slice: HeadSlice
    slot: int
    num_ids: int
    pool_width: int


class TorchSlices:
    """Tables, dynamic rows and slots of one runner. One thread; the runner's stream is current.

    head: the full head that rows are copied from: on the device, or gathered in CPU memory and
    copied. side: the stream of the copies. All device memory belongs to the runner's stream: before
    it is given back, that stream waits for the side stream's use of it.
    """

    def __init__(self, head: LmHead, device: torch.device, side: SideStream) -> None:
        self._head = head
        self._device = device
        self._side = side
        self._width = int(head.weight.shape[1])
        self.row_bytes = self._width * head.weight.element_size()
        self._upload: Upload | None = None  # made on the side stream, which its memory belongs to
        self._tables: dict[int, _Rows] = {}
        self._pool = self._empty(0)
        self._placed: OrderedDict[int, Placed] = OrderedDict()  # by the slice's identity, LRU first
        self._free = list(range(_FIRST_SLOTS))
        self._num_slots = _FIRST_SLOTS
        self._ids = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._columns = self._ids

    @property
    def num_bytes(self) -> int:
        """Bytes of copied head rows on the device, rounded-up rows included."""
        rows = [self._pool, *self._tables.values()]
        return sum(r.weight.numel() * r.weight.element_size() for r in rows)

    # -- head rows --------------------------------------------------------------------------

    def load_table(self, table: int, token_ids: Int32) -> None:
        """Copy the rows of ascending ids into a matrix of their own.

        Raises ValueError for a number that is taken, MemoryError when the device has no room.
        """
        if table in self._tables:
            raise ValueError(f"table {table} is loaded already")
        num = int(token_ids.shape[0])
        rows = self._empty(num)
        self._copy(rows, token_ids, np.arange(num, dtype=np.int32))
        self._tables[table] = rows

    def drop_table(self, table: int) -> None:
        """Forget a table and the slices over it; unknown numbers are fine."""
        rows = self._tables.pop(table, None)
        if rows is None:
            return
        rows.fence.wait()
        self.forget([p for p in self._placed.values() if p.slice.table == table])

    def load_rows(self, token_ids: Int32, places: Int32) -> None:
        """Copy head rows into places of the pool, which doubles when it is too small.

        Raises MemoryError when the device has no room.
        """
        if not places.shape[0]:
            return
        most = int(places.max()) + 1
        if most > self._pool.num:
            old = self._pool
            grown = self._empty(max(most, 2 * old.num))
            old.fence.wait()
            grown.weight[: old.weight.shape[0]] = old.weight
            if grown.bias is not None and old.bias is not None:
                grown.bias[: old.bias.shape[0]] = old.bias
            self._pool = grown
        self._copy(self._pool, token_ids, places)

    def _empty(self, num: int) -> _Rows:
        size, weight = _round_up(num), self._head.weight
        try:
            rows = torch.zeros((size, self._width), dtype=weight.dtype, device=self._device)
            bias = None
            if self._head.bias is not None:
                bias = torch.zeros(size, dtype=torch.float32, device=self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"no room for {size} rows of the LM head: {error}") from error
        return _Rows(rows, bias, size, Fence())

    def _copy(self, rows: _Rows, token_ids: Int32, places: Int32) -> None:
        """Queue the copy of head rows into places of `rows`, behind what may still read them."""
        on_device = not self._head.is_streamed

        def copy() -> None:
            if self._upload is None:
                self._upload = Upload(self._device, 2 * _COPY_BYTES)
            at_once = max(1, _COPY_BYTES // (self.row_bytes + 8))
            for start in range(0, token_ids.shape[0], at_once):
                ids = token_ids[start : start + at_once]
                arrays = {"ids": ids, "places": places[start : start + at_once]}
                if not on_device:
                    arrays["rows"] = gathered(self._head.weight, ids)
                there = self._upload(arrays)
                if on_device:
                    found = self._head.weight.index_select(0, there["ids"])
                else:
                    found = there["rows"].view(rows.weight.dtype)
                rows.weight.index_copy_(0, there["places"].long(), found)
                if rows.bias is not None and self._head.bias is not None:
                    bias = self._head.bias.index_select(0, there["ids"])
                    rows.bias.index_copy_(0, there["places"].long(), bias)

        rows.fence = self._side.run(copy)

    # -- slices -----------------------------------------------------------------------------

    def place(self, slices: Iterable[HeadSlice]) -> tuple[list[Placed], list[Placed]]:
        """(where each slice's ids and columns lie, those that `write` must be given first).

        Slices are known by identity: the engine makes a new one when a sequence's rows change. The
        least recently used make room; as many slots exist as one batch ever had slices, or more.
        Raises ValueError for a slice over rows that are not there.
        """
        wanted = {id(s): s for s in slices}
        needed = {key: self._check(s) for key, s in wanted.items() if key not in self._placed}
        for key in wanted.keys() - needed.keys():
            self._placed.move_to_end(key)
        new: list[Placed] = []
        for key, pool_width in needed.items():
            slice_ = wanted[key]
            placed = Placed(slice_, self._slot_for(wanted), slice_.ids.shape[0], pool_width)
            self._placed[key] = placed
            new.append(placed)
        result = [self._placed[key] for key in wanted]
        num_ids = max((p.num_ids for p in result), default=0)
        rows, width = self._ids.shape
        if num_ids and (rows < self._num_slots or width < num_ids):
            shape = self._num_slots, max(width, _round_up(num_ids + num_ids // 4))
            try:
                ids, columns = self._ids.new_zeros(shape), self._ids.new_zeros(shape)
            except torch.OutOfMemoryError:
                self.forget(new)
                raise
            ids[:rows, :width], columns[:rows, :width] = self._ids, self._columns
            self._ids, self._columns = ids, columns
        return result, new

    def forget(self, placed: Iterable[Placed]) -> None:
        """Slices that were never written are new again."""
        for one in placed:
            if self._placed.pop(id(one.slice), None) is not None:
                self._free.append(one.slot)

    def _check(self, slice_: HeadSlice) -> int:
        """The pool's rows that a slice needs. Indices past memory would end the process."""
        if slice_.ids.shape[0] and int(slice_.ids[-1]) >= self._head.vocab_size:
            raise ValueError("a slice has an id outside the vocabulary")
        if slice_.table < 0:
            return 0
        rows = self._tables.get(slice_.table)
        if rows is None:
            raise ValueError(f"table {slice_.table} is not loaded")
        most = int(slice_.columns.max(initial=-1)) + 1 - slice_.num_static
        if most > self._pool.num or slice_.num_static > rows.num:
            raise ValueError("a slice has columns past the cached rows")
        return _round_up(max(0, most))

    def _slot_for(self, wanted: Iterable[int]) -> int:
        if self._free:
            return self._free.pop()
        keep = set(wanted)
        oldest = next((key for key in self._placed if key not in keep), None)
        if oldest is not None:
            return self._placed.pop(oldest).slot
        slot = self._num_slots
        self._free.extend(range(slot + 1, 2 * slot))
        self._num_slots = 2 * slot
        return slot

    def arrays(self, new: Sequence[Placed]) -> dict[str, Array]:
        """What the step's upload carries for `write`."""
        if not new:
            return {}
        columns = []
        for slice_ in (p.slice for p in new):
            if slice_.table < 0:  # looked up in the full head's logits: its columns are ids
                columns.append(slice_.ids)
                continue
            # The dynamic rows begin behind the rows that the table is rounded up with.
            shift = self._tables[slice_.table].num - slice_.num_static
            columns.append(slice_.columns + (slice_.columns >= slice_.num_static) * shift)
        return {
            "slice_ids": np.concatenate([p.slice.ids for p in new]).astype(np.int32),
            "slice_columns": np.concatenate(columns).astype(np.int32),
        }

    def write(self, new: Sequence[Placed], tensors: dict[str, torch.Tensor]) -> None:
        """Fill the slots of new slices from the uploaded `arrays`."""
        start = 0
        for placed in new:
            num = placed.num_ids
            self._ids[placed.slot, :num] = tensors["slice_ids"][start : start + num]
            self._columns[placed.slot, :num] = tensors["slice_columns"][start : start + num]
            start += num

    # -- logits -----------------------------------------------------------------------------

    def num_columns(self, table: int, pool_width: int) -> int:
        """Columns of `logits`."""
        return self._tables[table].num + pool_width

    def logits(self, hidden: torch.Tensor, table: int, pool_width: int) -> torch.Tensor:
        """float32 [n, ...] over [the table's rows | pool_width dynamic rows], for `pick`.

        hidden: [n, hidden_size] in the weight's dtype. The device waits for their copies first.
        """
        rows = self._tables[table]
        parts = [_part(hidden, rows, rows.num)]
        if pool_width:
            parts.append(_part(hidden, self._pool, pool_width))
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return soft_capped(whole, self._head.cap)

    def pick(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        nums: torch.Tensor,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits float32, their vocabulary ids int32), both [draws, width], in id order.

        logits: of `logits`, or of the full head for slices that are not cached. rows, slots, nums:
        int32 of each draw: its row of logits, its slice's slot and number of ids. width: at least
        the most ids; columns from nums on are -inf.
        """
        ids = self._ids.index_select(0, slots)[:, :width]
        columns = self._columns.index_select(0, slots)[:, :width].long()
        inside = torch.arange(width, device=logits.device)[None, :] < nums[:, None]
        # A slot that a longer slice had before holds its columns past the new one's.
        columns = torch.where(inside, columns, 0)
        found = logits[rows[:, None].long(), columns]
        return torch.where(inside, found, float("-inf")), torch.where(inside, ids, 0)


def _part(hidden: torch.Tensor, rows: _Rows, num: int) -> torch.Tensor:
    rows.fence.wait()
    logits = product(hidden, rows.weight[:num])
    if rows.bias is not None:
        logits += rows.bias[:num]
    return logits


def gathered(table: torch.Tensor, token_ids: Array) -> Array:
    """Rows of a table in CPU memory, as numpy has them: float32, or int16 with a half's bits."""
    rows = table.index_select(0, torch.from_numpy(np.ascontiguousarray(token_ids)))
    found: Array = (rows if rows.dtype == torch.float32 else rows.view(torch.int16)).numpy()
    return found
