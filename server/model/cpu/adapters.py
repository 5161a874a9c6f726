"""Adapters in memory beside one base model on a CPU: packed, held at places, and put into steps.

`pack_adapter` reads a PEFT folder (any thread). AdapterBank holds packed adapters at the places
that the engine gives them, notes which rows of a step have one (StepAdapters), and puts an
adapter's own rows of the embedding and of the head in, for its requests alone. The engine's
AdapterShelf decides which adapters are in memory; kernels/lora.py computes the sums.

An adapter's matrices stay as its file has them (records.FLOAT_TYPES), whatever kind the base's
weights are; its own rows are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from server.engine.batch import Batch, Int64
from server.model.adapter import (
    NO_SPANS,
    LoraAdapter,
    TokenRows,
    adapter_spans,
    linear_sizes,
    num_ids_with,
    opened_adapter,
    own_embeddings,
    token_rows,
)
from server.model.cpu.head import FullLogits, padded
from server.model.cpu.kernels import product
from server.model.cpu.linear import float_linear, grown, packed
from server.model.cpu.records import (
    ADAPTER_ROWS,
    ADAPTER_WIDE,
    FLOAT_TYPES,
    INTEGERS,
    KINDS,
    LANES,
    PANEL,
    Float32,
    Layers,
    Linear,
    StepAdapters,
    Work,
)
from server.model.cpu.tensors import ModelTensors
from server.model.shape import ModelShape

_MAX_PARTS = 3


@dataclass(frozen=True, slots=True)
class CpuAdapter:
    """One adapter, packed. inputs, parts: a place of StepAdapters. arrays: what their
    addresses point into. embedding, head: its own rows, or None: float32 [n, hidden_size], and
    float32 panels [ceil(n / PANEL), hidden_size, PANEL]. vocab_size: ids that a request with it may
    have. num_bytes: memory of all of it."""

    inputs: Int64
    parts: Int64
    arrays: tuple[npt.NDArray[Any], ...]
    embedding: TokenRows | None
    head: TokenRows | None
    vocab_size: int

    @property
    def num_bytes(self) -> int:
        own = [part.rows for part in (self.embedding, self.head) if part is not None]
        return sum(array.nbytes for array in (self.inputs, self.parts, *self.arrays, *own))


class _Outputs:
    """An adapter's B matrices under the names of the weights that they change: what ModelTensors
    cuts into q, k and v, and puts into the forward pass's order of rows."""

    def __init__(self, lora: LoraAdapter, sizes: dict[str, tuple[int, int]]) -> None:
        self._lora = lora
        self._sizes = sizes
        self._known = lora.names()

    def names(self) -> list[str]:
        """No names: packers read matrices only."""
        return []

    def get(self, name: str) -> Any:
        """[out, rank]; rank 0 where the adapter changes nothing."""
        import torch

        if name in self._known:
            return self._lora.pair(name)[1]
        return torch.zeros((self._sizes[name][0], 0))


def pack_adapter(folder: Path, shape: ModelShape, num_base: int, layers: Layers) -> CpuAdapter:
    """Read and pack a PEFT adapter for a base model. Called from any thread.

    num_base: rows of the base's embedding table. layers: of the base, for their layout.
    Raises ModelError for one that does not fit, UnsupportedModelError for what is not computed.
    """
    lora = opened_adapter(folder, shape, num_base)
    up = gate_up_layout(layers, shape)[1]
    packer = _Packer(lora, shape, up)
    embedding, head = (
        None if own is None else TokenRows(own.ids, np.ascontiguousarray(own.rows.float().numpy()))
        for own in token_rows(lora, shape)
    )
    if head is not None:
        head = TokenRows(head.ids, packed(head.rows))
    return CpuAdapter(
        packer.inputs, packer.parts, tuple(packer.arrays), embedding, head,
        num_ids_with(lora, shape.vocab_size),
    )  # fmt: skip


class _Packer:
    """One adapter's matrices in lora.py's layout."""

    def __init__(self, lora: LoraAdapter, shape: ModelShape, up: int) -> None:
        self.inputs = np.zeros((shape.num_layers, len(KINDS), 5), np.int64)
        self.parts = np.zeros((shape.num_layers, len(KINDS), _MAX_PARTS, 5), np.int64)
        self.arrays: list[npt.NDArray[Any]] = []
        self._form = FLOAT_TYPES.index(lora.form)
        self._lora = lora
        self._known = lora.names()
        tensors = ModelTensors(shape, _Outputs(lora, linear_sizes(shape)))
        for layer in range(shape.num_layers):
            for kind, rows in tensors.matrices(layer).items():
                at = 0
                found = []
                for i, part in enumerate(rows):
                    b = np.ascontiguousarray(part.tensor.float().numpy().T)  # [rank, outputs]
                    found.append((part.name, up * i if kind == "gate_up" else at, b))
                    at += b.shape[1]
                self._pack(layer, KINDS.index(kind), found)

    def _pack(self, layer: int, kind: int, parts: list[tuple[str, int, Float32]]) -> None:
        """parts: (weight's name, first output, B). Parts of one weight share its A."""
        names = [name for name in dict.fromkeys(p[0] for p in parts) if name in self._known]
        if not names:
            return
        first: dict[str, int] = {}
        blocks, scales = [], []
        num = 0
        for name in names:
            a = self._lora.pair(name)[0].numpy()  # [rank, K]
            first[name] = num
            num += a.shape[0]
            blocks.append(a.T)
            scales += [self._lora.scale(name)] * a.shape[0]
        columns = padded(num)
        together = np.zeros((blocks[0].shape[0], columns), np.float32)
        together[:, :num] = np.concatenate(blocks, axis=1)
        factors = np.zeros(columns, np.float32)
        factors[:num] = scales
        self.inputs[layer, kind] = (
            self._keep(self._narrow(together)), self._keep(factors), columns, together.shape[0],
            self._form,
        )  # fmt: skip
        for i, (name, at, b) in enumerate(p for p in parts if p[0] in first):
            wide = np.zeros((b.shape[0], padded(b.shape[1])), np.float32)
            wide[:, : b.shape[1]] = b
            self.parts[layer, kind, i] = (
                first[name], b.shape[0], self._keep(self._narrow(in_blocks(wide))), at, b.shape[1],
            )  # fmt: skip

    def _narrow(self, matrix: Float32) -> npt.NDArray[Any]:
        """The matrix in the file's own form; nothing is rounded, as its numbers came from there."""
        match FLOAT_TYPES[self._form]:
            case "bfloat16":
                return np.ascontiguousarray((matrix.view(np.uint32) >> 16).astype(np.uint16))
            case "float16":
                return matrix.astype(np.float16).view(np.uint16)
        return matrix

    def _keep(self, array: npt.NDArray[Any]) -> int:
        self.arrays.append(array)
        return array.ctypes.data


def in_blocks(matrix: Float32) -> Float32:
    """[rank, outputs in whole vectors] as a step reads it, flat: block after block of ADAPTER_WIDE
    vectors of outputs (the last one of what is left), each [rank, outputs]. Rows of the whole
    matrix lie too close for a processor to fetch several of them ahead."""
    tile = ADAPTER_WIDE * LANES
    blocks = [matrix[:, at : at + tile].reshape(-1) for at in range(0, matrix.shape[1], tile)]
    return np.concatenate(blocks)


def gate_up_layout(layers: Layers, shape: ModelShape) -> tuple[int, int]:
    """(alternate, up) of StepAdapters for a kind of weights."""
    gate_up: Linear | None = layers.gate_up  # none of a body that is not ours
    if gate_up is not None and gate_up.kind != INTEGERS:
        return PANEL, PANEL
    return 0, shape.intermediate_size


class AdapterBank:
    """The adapters in memory of one runner. Used from one thread at a time, between steps.

    max_rows: most rows of a step. record: what a step needs of the adapters in memory, without
    spans; another one when that changes.
    """

    def __init__(self, shape: ModelShape, layers: Layers, max_rows: int, work: Work) -> None:
        self.max_vocab_size = shape.vocab_size
        self._shape = shape
        self._max_rows = max_rows
        self._work = work
        self._held: dict[int, CpuAdapter] = {}
        alternate, up = gate_up_layout(layers, shape)
        places = (1, shape.num_layers, len(KINDS))
        self.record = StepAdapters(
            NO_SPANS,
            np.zeros((*places, 5), np.int64),
            np.zeros((*places, _MAX_PARTS, 5), np.int64),
            alternate,
            up,
            shape.intermediate_size,
            np.zeros((0, 0), np.float32),
        )

    def vocab_size(self, place: int) -> int:
        """Ids that a request with the adapter at a place may have; -1: without one."""
        return self._shape.vocab_size if place < 0 else self._held[place].vocab_size

    def hold(self, place: int, adapter: CpuAdapter) -> None:
        """Put a packed adapter at a free place. No step may be in flight."""
        if place in self._held:
            raise ValueError(f"place {place} is taken")
        step = self.record
        if place >= step.inputs.shape[0]:
            room = max(place + 1, 2 * step.inputs.shape[0])
            step = step._replace(inputs=grown(step.inputs, room), parts=grown(step.parts, room))
        if not step.wide.size:
            inner = self._shape.intermediate_size
            width = max(2 * -(-inner // PANEL) * PANEL, 2 * inner + LANES)
            step = step._replace(wide=np.zeros((self._max_rows, padded(width)), np.float32))
        step.inputs[place], step.parts[place] = adapter.inputs, adapter.parts
        self.record = step
        self._held[place] = adapter
        self.max_vocab_size = max(self.max_vocab_size, adapter.vocab_size)

    def drop(self, place: int) -> None:
        """Forget what is at a place; an empty one is fine. No step may be in flight."""
        if self._held.pop(place, None) is not None:
            self.record.inputs[place] = 0
            self.record.parts[place] = 0

    def spans(self, batch: Batch) -> Int64:
        """Which of a step's rows have which adapter: StepAdapters.spans."""
        return adapter_spans(batch, ADAPTER_ROWS)

    def brings_embeddings(self, batch: Batch) -> bool:
        """Whether an adapter of the batch has rows of the embedding of its own."""
        return any(adapter.embedding is not None for adapter in self._of(batch))

    def head_ids(self, batch: Batch) -> list[Int64]:
        """Of adapters of the batch that have rows of the head of their own, the ids of these."""
        return [own.head.ids for own in self._of(batch) if own.head is not None]

    def _of(self, batch: Batch) -> list[CpuAdapter]:
        """Those of a batch's sequences that have one."""
        places = () if batch.seq_adapters is None else batch.seq_adapters.tolist()
        return [self._held[p] for p in places if p >= 0]

    def embed(self, batch: Batch, x: Float32) -> None:
        """Put adapters' own rows of the embedding over x[r], that of row r's id."""
        scale = np.float32(self._shape.embedding_scale)
        for own, rows, at in own_embeddings(batch, self._held):
            x[rows] = own.rows[at] * scale

    def put_head(self, batch: Batch, full: FullLogits) -> None:
        """Put the logits of adapters' own head rows into those of their rows' full heads."""
        if batch.seq_adapters is None or not full.places:
            return
        rows = np.fromiter(full.places.keys(), np.int64)
        where = np.fromiter(full.places.values(), np.int64)
        of_row = batch.seq_adapters[batch.seq_ids[rows]]
        for place in np.unique(of_row):
            own = None if place < 0 else self._held[int(place)].head
            if own is None:
                continue
            mine = where[of_row == place]
            logits = np.zeros((mine.shape[0], own.rows.shape[0] * PANEL), np.float32)
            states = full.states[mine]
            cap = self._shape.logit_cap
            record = float_linear(own.rows)
            product(states, mine.shape[0], record, logits, cap, self._work)
            full.logits[np.ix_(mine, own.ids)] = logits[:, : own.ids.shape[0]]
