"""Adapters beside one base model on a GPU: packed, held at places, and added to products.

What: `pack_adapter` reads a PEFT folder (any thread); LoraBank holds packed adapters in tables of
the device, by place, and says which rows of a step have one. FusedDecoder adds them to the base's
products:

    y[r] += ((x[r] @ A) * scale) @ B        for rows r with an adapter

t = x @ A is kept in float32; the sum is rounded once, to the model's dtype. A row without an
adapter is not touched, so it has the bits that it has in a step without adapters. Matrices that
stand in one product (q, k and v; gate and up) have their A side by side, and their B as blocks of
one matrix that is 0 elsewhere.

Grouped products as in S-LoRA and Punica (arXiv 2311.03285, 2310.18547): rows of one adapter that
follow each other share a program and its reads of A and B. The torch reference is TorchOps.lora,
the kernels are lora_kernels.py. Rows of embedding and head of an adapter's own: own_rows.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from server.engine.batch import Batch, Int32
from server.errors import TailorError
from server.model.adapter import (
    LoraAdapter,
    TokenRows,
    adapter_spans,
    has_own_head,
    linear_sizes,
    num_ids_with,
    opened_adapter,
    token_rows,
)
from server.model.shape import ModelShape

if TYPE_CHECKING:
    from server.model.gpu.own_rows import OwnRows

KINDS = ("mix", "out", "gate_up", "down")
"""The products of a layer; a kind's place is its number. mix: of q, k and v, or of what a short
convolution reads."""
MIX, OUT, GATE_UP, DOWN = range(len(KINDS))

SPAN_ROWS = 16
"""Most rows of one span: those of one program's tile."""

SPAN_FIELDS = 3
_log = logging.getLogger(__name__)
_LEAST_COLUMNS = 16  # of a tensor core's tile


class LoraTable(NamedTuple):
    """One product's adapters. P: places, C: columns.

    a: [P, K, C]; scales: float32 [P, C]; b: [P, C, outputs]. a and b have the model's dtype; what
    an adapter does not use is 0.
    """

    a: torch.Tensor
    scales: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class GpuAdapter:
    """One adapter in CPU memory. parts[layer][kind]: (A [K, columns], scales [columns],
    B [columns, outputs]) or None where it changes nothing. columns: most of any product.
    vocab_size: ids that a request with it may have. num_bytes: of its place on the device.
    embedding, head: its own rows, in the base's dtype, or None."""

    parts: tuple[tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None, ...], ...]
    columns: int
    vocab_size: int
    num_bytes: int
    embedding: TokenRows | None = None
    head: TokenRows | None = None


def check_adapter(folder: Path, shape: ModelShape) -> bool:
    """Whether an adapter's head has rows of its own; reads no weights. Raises as pack_adapter."""
    lora, _ = opened_adapter(folder, shape, shape.vocab_size)
    return has_own_head(lora, shape)


def _modules(shape: ModelShape, layer: int) -> dict[str, tuple[str, ...]]:
    """Kind -> the modules of a layer that stand in its product, in order."""
    names = shape.names
    mix, out = tuple(names.qkv), names.out
    if shape.convolutions[layer]:
        mix, out = (names.conv[0],), names.conv[2]
    modules = (mix, (out,), tuple(names.gate_up), (names.down,))
    return dict(zip(KINDS, modules, strict=True))


def pack_adapter(folder: Path, shape: ModelShape, dtype: torch.dtype, num_ids: int) -> GpuAdapter:
    """Read a PEFT adapter for a base model. Called from any thread.

    shape: its vocab_size is the rows of the base's tables, num_ids of them real ids. dtype: of the
    base, which everything is rounded to. Raises ModelError for one that does not fit,
    UnsupportedModelError for what is not computed.
    """
    lora, num_rows = opened_adapter(folder, shape, shape.vocab_size)
    sizes, known = linear_sizes(shape), lora.names()
    layers = []
    most = _LEAST_COLUMNS
    for layer in range(shape.num_layers):
        of_kind = []
        for modules in _modules(shape, layer).values():
            weights = [f"model.layers.{layer}.{module}.weight" for module in modules]
            packed = None
            if known.intersection(weights):
                packed = _packed(lora, weights, known, sizes, dtype)
                most = max(most, packed[0].shape[1])
            of_kind.append(packed)
        layers.append(tuple(of_kind))
    columns = power_of_two(most)
    own = [
        None if part is None else TokenRows(part.ids, part.rows.to(dtype))
        for part in token_rows(lora, shape, num_rows)
    ]
    num_bytes = _column_values(shape) * columns * dtype.itemsize
    for part in own:
        num_bytes += 0 if part is None else part.rows.nbytes + 4 * num_rows
    num_ids = num_ids_with(lora, num_ids)
    return GpuAdapter(tuple(layers), columns, num_ids, num_bytes, *own)


def _most_columns(lora: LoraAdapter, shape: ModelShape) -> int:
    """GpuAdapter.columns of an adapter."""
    known, most = lora.names(), _LEAST_COLUMNS
    for layer in range(shape.num_layers):
        for modules in _modules(shape, layer).values():
            weights = [f"model.layers.{layer}.{module}.weight" for module in modules]
            most = max(most, sum(lora.rank(weight) for weight in weights if weight in known))
    return power_of_two(most)


def _column_values(shape: ModelShape) -> int:
    """Numbers of A and of B that one column has at a place, in all products."""
    sizes, num = linear_sizes(shape), 0
    for layer in range(shape.num_layers):
        for modules in _modules(shape, layer).values():
            weights = [sizes[f"model.layers.{layer}.{module}.weight"] for module in modules]
            num += weights[0][1] + sum(outputs for outputs, _ in weights)
    return num


def _packed(
    lora: LoraAdapter,
    weights: list[str],
    known: set[str],
    sizes: dict[str, tuple[int, int]],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One product of one layer; see GpuAdapter."""
    pairs = {weight: lora.pair(weight) for weight in weights if weight in known}
    columns = sum(a.shape[0] for a, _ in pairs.values())
    b = torch.zeros((columns, sum(sizes[weight][0] for weight in weights)))
    first = at = 0
    for weight in weights:
        outputs = sizes[weight][0]
        if weight in pairs:
            rank = pairs[weight][0].shape[0]
            b[first : first + rank, at : at + outputs] = pairs[weight][1].t()
            first += rank
        at += outputs
    a = torch.cat([a.t() for a, _ in pairs.values()], dim=1)
    scales = torch.cat([torch.full((a.shape[0],), lora.scale(w)) for w, (a, _) in pairs.items()])
    return a.to(dtype).contiguous(), scales, b.to(dtype)


def power_of_two(num: int) -> int:
    """The least one that is not below num."""
    return 1 << (num - 1).bit_length()


def lora_spans(batch: Batch) -> Int32:
    """int32 [n, SPAN_FIELDS]: first row, rows (1 .. SPAN_ROWS), place, of every run of rows of one
    adapter. Empty where no row has one."""
    if batch.seq_adapters is None:
        return np.zeros((0, SPAN_FIELDS), np.int32)
    return spans_of(batch.seq_adapters[batch.seq_ids])


def spans_of(places: Int32) -> Int32:
    """The same of places int32 [R], -1 for the base."""
    return np.array(adapter_spans(places, SPAN_ROWS), np.int32).reshape(-1, SPAN_FIELDS)


class LoraBank:
    """The adapters on a device, by place. Changed between steps alone.

    own: their rows of embedding and head. The tables grow for a higher place (to a power of two)
    and a wider adapter, and stay: CUDA graphs read them where they are.
    """

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, device: torch.device, own: OwnRows
    ) -> None:
        self.shape = shape
        self.own = own
        self.dtype = dtype
        self._device = device
        self._held: dict[int, GpuAdapter] = {}
        self._tables: list[list[LoraTable]] = []  # by layer, by kind
        self._places = self._columns = 0

    def bytes_for(self, folders: Iterable[str], most: int, *, has_graphs: bool) -> int:
        """Bytes of the tables once `most` adapters are held, in the lowest places, each as large as
        the largest of these folders, or as small as one can be where there is none; with the wide
        logits that graphs share. Reads no matrices; a folder that cannot be served counts nothing.
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
            columns = max(columns, _most_columns(lora, self.shape))
            own += [part for part in parts if part is not None]
        places = power_of_two(most)
        scales = 4 * len(KINDS) * self.shape.num_layers
        a_column = _column_values(self.shape) * self.dtype.itemsize + scales
        own_bytes = self.own.bytes_for(own, places, has_graphs=has_graphs) if own else 0
        return places * columns * a_column + own_bytes

    def tables(self, layer: int) -> list[LoraTable]:
        """Of a layer's products, by the number of their kind. At least one adapter was held."""
        return self._tables[layer]

    def hold(self, place: int, adapter: GpuAdapter) -> bool:
        """Put a packed adapter at a free place; whether the tables have moved for it. No step may
        be in flight."""
        if place in self._held:
            raise ValueError(f"place {place} is taken")
        moves = place >= self._places or adapter.columns > self._columns
        if moves:
            places = max(self._places, power_of_two(place + 1))
            self._grow(places, max(adapter.columns, self._columns))
        for tables, parts in zip(self._tables, adapter.parts, strict=True):
            for table, part in zip(tables, parts, strict=True):
                _clear(table, place)
                if part is not None:
                    a, scales, b = part
                    columns = a.shape[1]
                    table.a[place, :, :columns] = a.to(self._device)
                    table.scales[place, :columns] = scales.to(self._device)
                    table.b[place, :columns] = b.to(self._device)
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
        """Larger tables with what the old ones hold."""
        old = self._tables
        sizes = linear_sizes(self.shape)
        self._tables = []
        for layer in range(self.shape.num_layers):
            tables = []
            for kind, modules in enumerate(_modules(self.shape, layer).values()):
                weights = [f"model.layers.{layer}.{module}.weight" for module in modules]
                outputs = sum(sizes[weight][0] for weight in weights)
                table = LoraTable(
                    self._zeros(places, sizes[weights[0]][1], columns),
                    torch.zeros((places, columns), device=self._device),
                    self._zeros(places, columns, outputs),
                )
                if old:
                    before = old[layer][kind]
                    num, width = before.scales.shape
                    table.a[:num, :, :width] = before.a
                    table.scales[:num, :width] = before.scales
                    table.b[:num, :width] = before.b
                tables.append(table)
            self._tables.append(tables)
            if old:
                old[layer] = []  # so that at most one layer is there twice
        self._places, self._columns = places, columns

    def _zeros(self, *size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self._device)


def _clear(table: LoraTable, place: int) -> None:
    for part in table:
        part[place] = 0
