"""Adapters beside one base model on a GPU: packed, held at places, and added to products.

What: `pack_adapter` reads a PEFT folder (any thread); LoraBank holds packed adapters in tables of
the device, by place, and adds them behind the linear layers of transformers' module, by hooks:

    y[r] += (x[r] @ A) @ B        for rows r with an adapter; B has the adapter's scale

x @ A is kept in float32; the sum is rounded once, to the model's dtype. A row without an adapter
is not touched, so it has the bits that it has in a step without adapters.

Rows of the embedding and of the LM head that adapters bring (OwnRows):

    embedding   a row whose adapter has a row of its own for its id takes that one, else the base's
    head        the logits of a row whose adapter has head rows are as wide as the widest adapter's
                ids: its own rows' products in the columns of their ids, the base's logits in the
                others, -inf where neither has a row

Tokens of an adapter's own come from PEFT's `trainable_token_indices` (server.model.adapter). All
tables are read by CUDA graphs where they are.

Products are grouped as in S-LoRA and Punica (arXiv 2311.03285, 2310.18547): rows of one adapter
that follow each other share a program and its reads of the adapter's matrix. `grouped_torch` is the
reference of the kernel in triton_kernels.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from server.engine.batch import Batch, Int32, places_of
from server.errors import TailorError
from server.model.adapter import (
    LoraAdapter,
    TokenRows,
    adapter_spans,
    linear_sizes,
    num_ids_with,
    opened_adapter,
    token_rows,
)
from server.model.gpu.attention import power_of_two
from server.model.gpu.lm_head import gathered, soft_capped
from server.model.shape import ModelShape

_log = logging.getLogger(__name__)
_LEAST_RANK = 16  # columns of A, and own rows: those of a tensor core's tile
_LEAST_NEW = 64  # ids beside the base's

SPAN_ROWS = 16
"""Most rows of one span: those of one program's tile."""

SPAN_FIELDS = 3


def spans_of(places: Int32) -> Int32:
    """int32 [n, SPAN_FIELDS]: first row, rows (1 .. SPAN_ROWS), place, of every run of rows of one
    place; of places int32 [R], -1 for the base."""
    return np.array(adapter_spans(places, SPAN_ROWS), np.int32).reshape(-1, SPAN_FIELDS)


class Grouped(Protocol):
    """One grouped product: row r of a span of place p becomes x[r] @ w[p], written to y or, with
    `adds`, added to it and rounded once; other rows are left alone.

    x: [R, K]. spans: int32 [n, SPAN_FIELDS], of spans_of. w: [P, K, N] of any strides. y: [R, N].
    x and y may be strided except in their last dimension.
    """

    def __call__(
        self,
        x: torch.Tensor,
        spans: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        *,
        adds: bool = False,
    ) -> None: ...


def grouped_torch(
    x: torch.Tensor,
    spans: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    *,
    adds: bool = False,
) -> None:
    """Grouped in plain torch, span by span: the reference. The host waits for the spans."""
    for first, num, place in spans.tolist():
        rows = slice(first, first + num)
        # A row at a time: no library's product of several rows then decides a row's bits.
        for row in range(rows.start, rows.stop):
            product = x[row].float() @ w[place].float()
            y[row] = y[row].float() + product if adds else product


def _larger(table: torch.Tensor, *size: int, fill: int = 0) -> torch.Tensor:
    """The table in the first places of a larger one."""
    larger = table.new_full(size, fill)
    larger[tuple(map(slice, table.shape))] = table
    return larger


class OwnPart(NamedTuple):
    """Own rows of one table. P: places, N: rows of a place.

    at: int32 [P, W]: where an id's row lies among its place's `rows`, -1: the base's. rows:
    [P, N, hidden_size], in the model's dtype.
    """

    at: torch.Tensor
    rows: torch.Tensor


def part_sizes(num_base: int, parts: Sequence[TokenRows]) -> tuple[int, int]:
    """(columns of `at`, rows of a place) that parts, at least one, need beside num_base rows."""
    new = max(int(part.ids[-1]) + 1 for part in parts) - num_base
    width = num_base + (power_of_two(max(new, _LEAST_NEW)) if new > 0 else 0)
    return width, power_of_two(max(_LEAST_RANK, *(part.ids.shape[0] for part in parts)))


class OwnRows:
    """The own rows of the adapters on a device, by place. Changed between steps alone.

    num_base: rows of the base's tables, of `size` numbers. product: of own head rows. width:
    columns of logits with own rows: at least the ids of every adapter; 0 while none was held.
    """

    def __init__(
        self, num_base: int, size: int, dtype: torch.dtype, device: torch.device, product: Grouped
    ) -> None:
        self.width = 0
        self._num_base, self._size = num_base, size
        self._product = product
        self.embeddings: dict[int, TokenRows] = {}
        self.heads: dict[int, TokenRows] = {}
        at = torch.zeros((0, 0), dtype=torch.int32, device=device)
        rows = torch.zeros((0, 0, size), dtype=dtype, device=device)
        self._embedding = self._head = OwnPart(at, rows)

    def hold(self, place: int, embedding: TokenRows | None, head: TokenRows | None) -> bool:
        """Put an adapter's rows at a free place; whether the tables have moved for it."""
        parts = [part for part in (embedding, head) if part is not None]
        if not parts:
            return False
        num_places, num_rows = self._embedding.rows.shape[:2]
        width, most = part_sizes(self._num_base, parts)
        moves = place >= num_places or width > self.width or most > num_rows
        if moves:
            places = max(num_places, power_of_two(place + 1))
            self.width = max(width, self.width)
            shape = places, max(most, num_rows)
            self._embedding = self._grown(self._embedding, *shape)
            self._head = self._grown(self._head, *shape)
        for own, held, part in (
            (embedding, self.embeddings, self._embedding),
            (head, self.heads, self._head),
        ):
            if own is not None:
                num = own.ids.shape[0]
                part.rows[place, :num] = own.rows.to(part.rows.device)
                at = torch.from_numpy(own.ids).to(part.at.device)
                part.at[place, at] = torch.arange(num, dtype=torch.int32, device=part.at.device)
                held[place] = own
        return moves

    def bytes_for(self, parts: Sequence[TokenRows], places: int) -> int:
        """Bytes of the tables of so many places with room for each of these parts."""
        width, num = part_sizes(self._num_base, parts)
        a_place = 4 * width + num * self._size * self._embedding.rows.element_size()
        return 2 * places * a_place

    def drop(self, place: int) -> None:
        """Forget what is at a place; an empty one is fine."""
        for held, part in ((self.embeddings, self._embedding), (self.heads, self._head)):
            if held.pop(place, None) is not None:
                part.at[place] = -1

    def _grown(self, part: OwnPart, places: int, num: int) -> OwnPart:
        return OwnPart(
            _larger(part.at, places, self.width, fill=-1),
            _larger(part.rows, places, num, self._size),
        )

    # -- which rows ---------------------------------------------------------------------------

    @staticmethod
    def places(
        batch: Batch, held: Mapping[int, TokenRows], rows: Int32 | slice = slice(None)
    ) -> Int32 | None:
        """int32 [n]: the place of each of these rows of the batch whose adapter is in `held`
        (`embeddings` or `heads`), else -1; None where no row has one."""
        of_seq = batch.seq_adapters
        if of_seq is None or not held:
            return None
        of_rows = np.where(np.isin(of_seq, list(held)), of_seq, -1)[batch.seq_ids[rows]]
        return of_rows.astype(np.int32) if (of_rows >= 0).any() else None

    # -- the embedding ------------------------------------------------------------------------

    def embed(self, table: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size]: rows of the base's table and own ones, not scaled yet. ids, places:
        int32 [R]."""
        part, ids, place = self._embedding, ids.long(), places.clamp(min=0).long()
        at = torch.where(places >= 0, part.at[place, ids.clamp(max=part.at.shape[1] - 1)], -1)
        base = table.index_select(0, ids.clamp(max=table.shape[0] - 1))
        return torch.where(at[:, None] >= 0, part.rows[place, at.clamp(min=0).long()], base)

    def gathered(self, table: torch.Tensor, batch: Batch, token_ids: Int32) -> npt.NDArray[Any]:
        """The same where the base's table is in CPU memory: as lm_head.gathered has them."""
        found = gathered(table, np.where(token_ids < table.shape[0], token_ids, 0))
        places = self.places(batch, self.embeddings)
        if places is not None:
            for place in np.unique(places[places >= 0]).tolist():
                own, rows = self.embeddings[place], np.flatnonzero(places == place)
                at, has_own = places_of(own.ids, token_ids[rows])
                found[rows[has_own]] = gathered(own.rows, at)
        return found

    # -- the head -----------------------------------------------------------------------------

    def widened(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        spans: torch.Tensor,
        places: torch.Tensor,
        cap: float,
    ) -> torch.Tensor:
        """float32 [n, width] of hidden [n, hidden_size] whose logits over the base's ids are there.

        places: of `heads`; spans: their spans_of. cap: soft-capping of logits, 0 = none.
        """
        num, part = hidden.shape[0], self._head
        out = torch.empty((num, self.width), dtype=torch.float32, device=hidden.device)
        shape = num, part.rows.shape[1]
        own = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        self._product(hidden, spans, part.rows.transpose(1, 2), own)
        # Rows without a place have anything in `own`, which nothing reads.
        at = part.at.index_select(0, places.clamp(min=0)).masked_fill_(places[:, None] < 0, -1)
        out[:, : logits.shape[1]] = logits
        out[:, logits.shape[1] :] = float("-inf")
        mine = soft_capped(own, cap).gather(1, at.clamp(min=0).long())
        return out.copy_(torch.where(at >= 0, mine, out))


class LoraTable(NamedTuple):
    """One linear layer's adapters, in the model's dtype: a [P, inputs, C] and b [P, C, outputs] of
    P places and C columns; what an adapter does not use is 0."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class GpuAdapter:
    """One adapter in CPU memory. parts: of each linear layer that it changes, by name: A [inputs,
    rank] and B [rank, outputs], which has its scale. columns: of its place in every table.
    vocab_size: ids that a request with it may have. num_bytes: of its place on the device.
    embedding, head: its own rows, in the base's dtype, or None."""

    parts: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    columns: int
    vocab_size: int
    num_bytes: int
    embedding: TokenRows | None = None
    head: TokenRows | None = None


def pack_adapter(folder: Path, shape: ModelShape, dtype: torch.dtype, num_ids: int) -> GpuAdapter:
    """Read a PEFT adapter for a base model. Called from any thread.

    shape: its vocab_size is the rows of the base's tables, num_ids of them real ids. dtype: of the
    base, which everything is rounded to. Raises ModelError for one that does not fit,
    UnsupportedModelError for what is not computed.
    """
    lora, num_rows = opened_adapter(folder, shape, shape.vocab_size)
    known = lora.names()
    parts = {}
    for name in linear_sizes(shape):
        if name in known:
            a, b = lora.pair(name)
            b = lora.scale(name) * b.float()
            parts[name] = (a.t().to(dtype).contiguous(), b.t().to(dtype))
    columns = _columns(lora)
    own = [
        None if part is None else TokenRows(part.ids, part.rows.to(dtype))
        for part in token_rows(lora, shape, num_rows)
    ]
    num_bytes = _column_values(shape) * columns * dtype.itemsize
    for part in own:
        num_bytes += 0 if part is None else part.rows.nbytes + 4 * num_rows
    return GpuAdapter(parts, columns, num_ids_with(lora, num_ids), num_bytes, *own)


def _columns(lora: LoraAdapter) -> int:
    """GpuAdapter.columns of an adapter: its largest rank, rounded up."""
    ranks = [lora.rank(name) for name in lora.names()]
    return power_of_two(max(_LEAST_RANK, *ranks)) if ranks else _LEAST_RANK


def _column_values(shape: ModelShape) -> int:
    """Numbers of A and of B that one column has at a place, in all layers."""
    return sum(outputs + inputs for outputs, inputs in linear_sizes(shape).values())


def lora_spans(batch: Batch) -> Int32:
    """int32 [n, SPAN_FIELDS]: first row, rows (1 .. SPAN_ROWS), place, of every run of rows of one
    adapter. Empty where no row has one."""
    if batch.seq_adapters is None:
        return np.zeros((0, SPAN_FIELDS), np.int32)
    return spans_of(batch.seq_adapters[batch.seq_ids])


class LoraBank:
    """The adapters on a device, by place. Changed between steps alone.

    module: whose linear layers they change, of this shape. product: how. own: their rows of
    embedding and head. The tables grow for a higher place (to a power of two) and a higher rank,
    and stay: CUDA graphs read them where they are. A step's spans are set before its forward.
    """

    def __init__(
        self,
        module: nn.Module,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        product: Grouped,
    ) -> None:
        self.shape = shape
        self.own = OwnRows(shape.vocab_size, shape.hidden_size, dtype, device, product)
        self.dtype = dtype
        self.spans: torch.Tensor | None = None
        self._product = product
        self._sizes = linear_sizes(shape)
        self._held: dict[int, GpuAdapter] = {}
        none = torch.zeros((0, 0, 0), dtype=dtype, device=device)
        self._tables = {name: LoraTable(none, none) for name in self._sizes}
        self._places = self._columns = 0
        for name in self._sizes:
            linear = module.get_submodule(name.removesuffix(".weight"))
            linear.register_forward_hook(partial(self._add, name))

    def _add(
        self, name: str, _: nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor
    ) -> None:
        """The hook that adds a step's adapters to a linear layer's result, in place."""
        if self.spans is None:
            return
        x, y, table = given[0].flatten(0, -2), result.flatten(0, -2), self._tables[name]
        shape = x.shape[0], table.a.shape[2]
        t = torch.empty(shape, dtype=torch.float32, device=x.device)
        self._product(x, self.spans, table.a, t)
        self._product(t, self.spans, table.b, y, adds=True)

    def bytes_for(self, folders: Iterable[str], most: int) -> int:
        """Bytes of the tables once `most` adapters are held, in the lowest places, each as large as
        the largest of these folders, or as small as one can be where there is none. Reads no
        matrices; a folder that cannot be served counts nothing.
        """
        if not most:
            return 0
        columns, own = _LEAST_RANK, list[TokenRows]()
        for folder in folders:
            try:
                lora, num_rows = opened_adapter(Path(folder), self.shape, self.shape.vocab_size)
                parts = token_rows(lora, self.shape, num_rows)
            except (TailorError, OSError) as error:  # whoever loads it is told
                _log.warning("the reserve has no room for adapter %s: %s", folder, error)
                continue
            columns = max(columns, _columns(lora))
            own += [part for part in parts if part is not None]
        places = power_of_two(most)
        a_column = _column_values(self.shape) * self.dtype.itemsize
        own_bytes = self.own.bytes_for(own, places) if own else 0
        return places * columns * a_column + own_bytes

    def hold(self, place: int, adapter: GpuAdapter) -> bool:
        """Put a packed adapter at a free place; whether the tables have moved for it. No step may
        be in flight."""
        if place in self._held:
            raise ValueError(f"place {place} is taken")
        moves = place >= self._places or adapter.columns > self._columns
        if moves:
            self._places = places = max(self._places, power_of_two(place + 1))
            self._columns = columns = max(adapter.columns, self._columns)
            for name, (outputs, inputs) in self._sizes.items():  # one at a time is there twice
                a, b = self._tables[name]
                self._tables[name] = LoraTable(
                    _larger(a, places, inputs, columns), _larger(b, places, columns, outputs)
                )
        for name, table in self._tables.items():
            for part in table:
                part[place] = 0
            if name in adapter.parts:
                a, b = adapter.parts[name]
                table.a[place, :, : a.shape[1]] = a.to(table.a.device)
                table.b[place, : a.shape[1]] = b.to(table.b.device)
        self._held[place] = adapter
        return self.own.hold(place, adapter.embedding, adapter.head) or moves

    def drop(self, place: int) -> None:
        """Forget what is at a place; an empty one is fine. No step may be in flight."""
        self._held.pop(place, None)
        self.own.drop(place)

    def num_ids(self, batch: Batch, of_base: int) -> Int32 | int:
        """Ids that each row may have, int32 [R]; of_base: a row without adapter. Raises ValueError
        for a row whose place is empty."""
        if batch.seq_adapters is None:
            return of_base
        places = batch.seq_adapters.tolist()
        for place in set(places) - {-1}:
            if place not in self._held:
                raise ValueError(f"no adapter is held at place {place}")
        nums = [of_base if place < 0 else self._held[place].vocab_size for place in places]
        return np.array(nums, np.int32)[batch.seq_ids]
