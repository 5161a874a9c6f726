"""Adapters beside one base model on a GPU: packed, held at places, and added to products.

What: `pack_adapter` reads a PEFT folder (any thread); LoraBank holds packed adapters in tables of
the device, by place, and adds them behind the linear layers of transformers' module, by hooks:

    y[r] += (x[r] @ A) @ B        for rows r with an adapter; B has the adapter's scale

x @ A is kept in float32; the sum is rounded once, to the model's dtype. A row without an adapter
is not touched, so it has the bits that it has in a step without adapters.

Rows of the embedding and of the LM head that adapters bring:

    embedding   a row whose adapter has a row of its own for its id takes that one, which travels in
                the step's upload, else the base's
    head        the logits of a row whose adapter has head rows are as wide as the widest adapter's
                ids: its own rows' products in the columns of their ids, the base's logits in the
                others, -inf where neither has a row

Tokens of an adapter's own come from PEFT's `trainable_token_indices` (server.model.adapter). The
tables of LoraBank are read by CUDA graphs where they are.

Products are grouped as in S-LoRA and Punica (arXiv 2311.03285, 2310.18547): rows of one adapter
that follow each other share a program and its reads of the adapter's matrix. `grouped_torch` is the
reference of the kernel in triton_kernels.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from server.engine.batch import Batch, Int32, Int64
from server.errors import TailorError
from server.model.adapter import (
    LoraAdapter,
    TokenRows,
    adapter_spans,
    linear_sizes,
    num_ids_with,
    opened_adapter,
    own_embeddings,
    token_rows,
)
from server.model.gpu.attention import power_of_two
from server.model.gpu.lm_head import product, soft_capped
from server.model.gpu.transfers import Array, gathered
from server.model.shape import ModelShape

_log = logging.getLogger(__name__)
_LEAST_RANK = 16  # columns of A: those of a tensor core's tile

SPAN_ROWS = 16
"""Most rows of one span: those of one program's tile."""

SPAN_FIELDS = 3


Grouped = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], None]
"""One grouped product (x, spans, w, y, adds): row r of a span of place p becomes x[r] @ w[p],
written to y or, with `adds`, added to it and rounded once; other rows are left alone.

x: [R, K]. spans: int32 [n, SPAN_FIELDS], of lora_spans. w: [P, K, N] of any strides. y: [R, N].
x and y may be strided except in their last dimension."""


def grouped_torch(
    x: torch.Tensor, spans: torch.Tensor, w: torch.Tensor, y: torch.Tensor, adds: bool
) -> None:
    """Grouped in plain torch, span by span: the reference. The host waits for the spans."""
    for first, num, place in spans.tolist():
        rows = slice(first, first + num)
        # A row at a time: no library's product of several rows then decides a row's bits.
        for row in range(rows.start, rows.stop):
            product = x[row].float() @ w[place].float()
            y[row] = y[row].float() + product if adds else product


def _larger(table: torch.Tensor, *size: int) -> torch.Tensor:
    """The table in the first places of a larger one of zeros."""
    larger = table.new_zeros(size)
    larger[tuple(map(slice, table.shape))] = table
    return larger


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
    lora = opened_adapter(folder, shape, shape.vocab_size)
    parts = {}
    for name in lora.names():
        a, b = lora.pair(name)
        b = lora.scale(name) * b
        parts[name] = (a.t().to(dtype).contiguous(), b.t().to(dtype))
    columns = _columns(lora)
    own = [
        None if part is None else TokenRows(part.ids, part.rows.to(dtype))
        for part in token_rows(lora, shape)
    ]
    num_bytes = sum(map(sum, linear_sizes(shape).values())) * columns * dtype.itemsize
    num_bytes += sum(part.rows.nbytes for part in own if part is not None)
    return GpuAdapter(parts, columns, num_ids_with(lora, num_ids), num_bytes, *own)


def _columns(lora: LoraAdapter) -> int:
    """GpuAdapter.columns of an adapter: its largest rank, rounded up."""
    return power_of_two(max([_LEAST_RANK, *map(lora.rank, lora.names())]))


def lora_spans(batch: Batch) -> Int32:
    """int32 [n, SPAN_FIELDS], of adapter_spans: what kernels read."""
    return adapter_spans(batch, SPAN_ROWS).astype(np.int32)


class LoraBank:
    """The adapters on a device, by place. Changed between steps alone.

    module: whose linear layers they change, of this shape. product: how. The tables grow for a
    higher place (to a power of two) and a higher rank, and stay: CUDA graphs read them where they
    are. A step's spans are set before its forward. Own rows of embeddings stay in CPU memory, from
    which a step's are put into its upload; those of heads are copied to the device.
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
        self.dtype = dtype
        self.width = shape.vocab_size
        """Columns of logits with own rows: the ids of every adapter that was held."""
        self.spans: torch.Tensor | None = None
        self._product = product
        self._sizes = linear_sizes(shape)
        self._device = device
        self._held: dict[int, GpuAdapter] = {}
        self._heads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (ids, rows), of _held
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
        self._product(x, self.spans, table.a, t, False)
        self._product(t, self.spans, table.b, y, True)

    def make_room(self, folders: Iterable[str], most: int) -> None:
        """Tables for `most` adapters in the lowest places, each as large as the largest of these
        folders, or as small as one can be where there is none. Reads no matrices; a folder that
        cannot be served counts nothing.
        """
        columns = _LEAST_RANK
        for folder in folders:
            try:
                lora = opened_adapter(Path(folder), self.shape, self.shape.vocab_size)
            except (TailorError, OSError) as error:  # whoever loads it is told
                _log.warning("there is no room for adapter %s: %s", folder, error)
                continue
            columns = max(columns, _columns(lora))
        if most:
            self._grow(most, columns)

    def _grow(self, places: int, columns: int) -> bool:
        """Room for so many places and columns; whether the tables have moved for it."""
        if places <= self._places and columns <= self._columns:
            return False
        self._places = places = max(self._places, power_of_two(places))
        self._columns = columns = max(columns, self._columns)
        for name, (outputs, inputs) in self._sizes.items():  # one at a time is there twice
            a, b = self._tables[name]
            self._tables[name] = LoraTable(
                _larger(a, places, inputs, columns), _larger(b, places, columns, outputs)
            )
        return True

    def hold(self, place: int, adapter: GpuAdapter) -> bool:
        """Put a packed adapter at a free place; whether the tables have moved for it. No step may
        be in flight."""
        if place in self._held:
            raise ValueError(f"place {place} is taken")
        moves = self._grow(place + 1, adapter.columns)
        for name, table in self._tables.items():
            for part in table:
                part[place] = 0
            if name in adapter.parts:
                a, b = adapter.parts[name]
                table.a[place, :, : a.shape[1]] = a.to(table.a.device)
                table.b[place, : a.shape[1]] = b.to(table.b.device)
        self._held[place] = adapter
        head = adapter.head
        if head is not None:
            ids = torch.from_numpy(head.ids).to(self._device)
            self._heads[place] = ids, head.rows.to(self._device)
            self.width = max(self.width, int(head.ids[-1]) + 1)
        return moves

    def drop(self, place: int) -> None:
        """Forget what is at a place; an empty one is fine. No step may be in flight."""
        self._held.pop(place, None)
        self._heads.pop(place, None)

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

    def embeds(self, batch: Batch) -> tuple[Int64, Array] | None:
        """(rows of a batch whose adapter has a row of the embedding for their ids, these rows as
        transfers.gathered has them), or None where there is none."""
        own_rows = own_embeddings(batch, self._held)
        found = [(rows, gathered(own.rows, at)) for own, rows, at in own_rows]
        if not found:
            return None
        rows, values = zip(*found, strict=True)
        return np.concatenate(rows), np.concatenate(values)

    def head_places(self, batch: Batch, rows: Int32) -> Int32 | None:
        """int32 [n]: the place of each of these rows of the batch whose adapter has head rows, else
        -1; None where no row has one."""
        of_seq = batch.seq_adapters
        if of_seq is None or not self._heads:
            return None
        of_rows = np.where(np.isin(of_seq, list(self._heads)), of_seq, -1)[batch.seq_ids[rows]]
        return of_rows.astype(np.int32) if (of_rows >= 0).any() else None

    def widened(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        held: Iterable[int],
        places: torch.Tensor,
        cap: float,
    ) -> torch.Tensor:
        """float32 [n, width] of hidden [n, hidden_size] whose logits over the base's ids are there.

        places: int32 [n], of head_places; held: which there are among them. cap: soft-capping of
        logits, 0 = none.
        """
        out = logits.new_full((logits.shape[0], self.width), float("-inf"))
        out[:, : logits.shape[1]] = logits
        for place in held:
            ids, rows = self._heads[place]
            own = soft_capped(product(hidden, rows), cap)
            mine = (places == place)[:, None]
            out.index_copy_(1, ids, torch.where(mine, own, out.index_select(1, ids)))
        return out
