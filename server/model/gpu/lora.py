"""Adapters beside one base model on a GPU: packed, held at places, and added to products.

What: `pack_adapter` reads a PEFT folder (any thread); LoraBank holds packed adapters in tables of
the device, by place, and adds them behind the linear layers of transformers' module, by hooks:

    y[r] += ((x[r] @ A) * scale) @ B        for rows r with an adapter

t = (x @ A) * scale is kept in float32; the sum is rounded once, to the model's dtype. A row without
an adapter is not touched, so it has the bits that it has in a step without adapters.

The products: grouped.py. Rows of embedding and head of an adapter's own: own_rows.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from server.engine.batch import Batch, Int32
from server.errors import TailorError
from server.model.adapter import (
    LoraAdapter,
    TokenRows,
    has_own_head,
    linear_sizes,
    num_ids_with,
    opened_adapter,
    token_rows,
)
from server.model.gpu.grouped import SPAN_FIELDS, Grouped, power_of_two, spans_of
from server.model.gpu.own_rows import OwnRows
from server.model.shape import ModelShape

_log = logging.getLogger(__name__)
_LEAST_COLUMNS = 16  # of a tensor core's tile


class LoraTable(NamedTuple):
    """One linear layer's adapters. P: places, C: columns.

    a: [P, inputs, C]; scales: float32 [P, C]; b: [P, C, outputs]. a and b have the model's dtype;
    what an adapter does not use is 0.
    """

    a: torch.Tensor
    scales: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class GpuAdapter:
    """One adapter in CPU memory. parts: of each linear layer that it changes, by name: (A [inputs,
    rank], scale, B [rank, outputs]). columns: of its place in every table. vocab_size: ids that a
    request with it may have. num_bytes: of its place on the device. embedding, head: its own rows,
    in the base's dtype, or None."""

    parts: Mapping[str, tuple[torch.Tensor, float, torch.Tensor]]
    columns: int
    vocab_size: int
    num_bytes: int
    embedding: TokenRows | None = None
    head: TokenRows | None = None


def check_adapter(folder: Path, shape: ModelShape) -> bool:
    """Whether an adapter's head has rows of its own; reads no weights. Raises as pack_adapter."""
    lora, _ = opened_adapter(folder, shape, shape.vocab_size)
    return has_own_head(lora, shape)


def pack_adapter(folder: Path, shape: ModelShape, dtype: torch.dtype, num_ids: int) -> GpuAdapter:
    """Read a PEFT adapter for a base model. Called from any thread.

    shape: its vocab_size is the rows of the base's tables, num_ids of them real ids. dtype: of the
    base, which everything is rounded to. Raises ModelError for one that does not fit,
    UnsupportedModelError for what is not computed.
    """
    lora, num_rows = opened_adapter(folder, shape, shape.vocab_size)
    known = lora.names()
    parts = {}
    for name in adapted_sizes(shape):
        if name in known:
            a, b = lora.pair(name)
            parts[name] = (a.t().to(dtype).contiguous(), lora.scale(name), b.t().to(dtype))
    columns = _columns(lora)
    own = [
        None if part is None else TokenRows(part.ids, part.rows.to(dtype))
        for part in token_rows(lora, shape, num_rows)
    ]
    num_bytes = _column_values(shape) * columns * dtype.itemsize
    for part in own:
        num_bytes += 0 if part is None else part.rows.nbytes + 4 * num_rows
    return GpuAdapter(parts, columns, num_ids_with(lora, num_ids), num_bytes, *own)


def adapted_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """adapter.linear_sizes of the matrices that the layers have: a short convolution's layer has no
    attention."""
    of_attention, of_convolution = {*shape.names.qkv, shape.names.out}, set(shape.names.conv)

    def is_there(name: str) -> bool:
        _, _, layer, module = name.removesuffix(".weight").split(".", 3)
        lacks = of_attention if shape.convolutions[int(layer)] else of_convolution
        return module not in lacks

    return {name: size for name, size in linear_sizes(shape).items() if is_there(name)}


def _columns(lora: LoraAdapter) -> int:
    """GpuAdapter.columns of an adapter: its largest rank, rounded up."""
    ranks = [lora.rank(name) for name in lora.names()]
    return power_of_two(max(_LEAST_COLUMNS, *ranks)) if ranks else _LEAST_COLUMNS


def _column_values(shape: ModelShape) -> int:
    """Numbers of A and of B that one column has at a place, in all layers."""
    return sum(outputs + inputs for outputs, inputs in adapted_sizes(shape).values())


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
        self._device = device
        self._product = product
        self._sizes = adapted_sizes(shape)
        self._held: dict[int, GpuAdapter] = {}
        self._tables: dict[str, LoraTable] = {}
        self._places = self._columns = 0
        for name in self._sizes:
            linear = module.get_submodule(name.removesuffix(".weight"))
            linear.register_forward_hook(self._adding(name))

    def _adding(self, name: str) -> Any:
        """The hook that adds a step's adapters to a linear layer's result, in place."""

        def hook(_: nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
            if self.spans is None:
                return
            x, y, table = given[0].flatten(0, -2), result.flatten(0, -2), self._tables[name]
            shape = x.shape[0], table.a.shape[2]
            t = torch.empty(shape, dtype=torch.float32, device=x.device)
            self._product(x, self.spans, table.a, t, table.scales)
            self._product(t, self.spans, table.b, y, adds=True)

        return hook

    def bytes_for(self, folders: Iterable[str], most: int) -> int:
        """Bytes of the tables once `most` adapters are held, in the lowest places, each as large as
        the largest of these folders, or as small as one can be where there is none. Reads no
        matrices; a folder that cannot be served counts nothing.
        """
        if not most:
            return 0
        columns, own = _LEAST_COLUMNS, list[TokenRows]()
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
        a_column = _column_values(self.shape) * self.dtype.itemsize + 4 * len(self._sizes)
        own_bytes = self.own.bytes_for(own, places) if own else 0
        return places * columns * a_column + own_bytes

    def hold(self, place: int, adapter: GpuAdapter) -> bool:
        """Put a packed adapter at a free place; whether the tables have moved for it. No step may
        be in flight."""
        if place in self._held:
            raise ValueError(f"place {place} is taken")
        moves = place >= self._places or adapter.columns > self._columns
        if moves:
            places = max(self._places, power_of_two(place + 1))
            self._grow(places, max(adapter.columns, self._columns))
        for name, table in self._tables.items():
            for part in table:
                part[place] = 0
            if name in adapter.parts:
                a, scale, b = adapter.parts[name]
                rank = a.shape[1]
                table.a[place, :, :rank] = a.to(self._device)
                table.scales[place, :rank] = scale
                table.b[place, :rank] = b.to(self._device)
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

    def _grow(self, places: int, columns: int) -> None:
        """Larger tables with what the old ones hold; one at a time is there twice."""
        for name, (outputs, inputs) in self._sizes.items():
            table = LoraTable(
                self._zeros(places, inputs, columns),
                torch.zeros((places, columns), device=self._device),
                self._zeros(places, columns, outputs),
            )
            before = self._tables.get(name)
            if before is not None:
                num, width = before.scales.shape
                table.a[:num, :, :width] = before.a
                table.scales[:num, :width] = before.scales
                table.b[:num, :width] = before.b
            self._tables[name] = table
        self._places, self._columns = places, columns

    def _zeros(self, *size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self._device)
