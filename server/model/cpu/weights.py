"""PackedWeights: a model's weights in the kernels' layout.

It reads named tensors one at a time and packs them into panels (linear.py), in one piece. dtype is
float32, or bfloat16 for the *stored* weights: activations, sums and logits are float32 either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from server.model.cpu.head import HeadInFile, PackedHead, Panels, float_head
from server.model.cpu.integers.forms import Form
from server.model.cpu.linear import Arena, float_linears, pack_panels, packed
from server.model.cpu.records import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INTEGERS,
    KINDS,
    PANEL,
    Int64,
    Layers,
    Table,
    UInt8,
)
from server.model.cpu.tensors import ModelTensors, Weights, as_stored
from server.model.shape import ModelShape


def float_table(tensor: Any) -> tuple[Any, Table]:
    """(the tensor that it lies in, the table) of a torch tensor [num_rows, H]: the same one, or its
    float32 where no kernel reads its numbers."""
    kinds = {"torch.float32": FLOAT32, "torch.bfloat16": BFLOAT16, "torch.float16": FLOAT16}
    if str(tensor.dtype) not in kinds or tensor.stride(1) != 1:
        tensor = tensor.float().contiguous()
    row_bytes, kind = tensor.stride(0) * tensor.element_size(), kinds[str(tensor.dtype)]
    table = Table(tensor.data_ptr(), row_bytes, int(tensor.shape[0]), kind, np.float32(1.0))
    return tensor, table


def block_table(form: Form, rows: UInt8) -> Table:
    """The table that rows of a GGUF are, uint8 [num_rows, bytes of a row, side by side]."""
    address, scale = rows.ctypes.data, np.float32(1.0)
    return Table(address, rows.strides[0], rows.shape[0], INTEGERS, scale, form.number)


@dataclass(eq=False)
class RunnerWeights:
    """What CpuRunner needs of a model's weights, whatever their kind. Read-only after construction.

    layers: the records of the forward pass. inner_size: width of what goes into the last product
    of an MLP. packed_head: the LM head, for products and for slices. num_bytes: of all panels, and
    norms. embedding: the embedding table, as tensors.Weights gives it, which stays in its file.
    table: the same as it lies in memory; NO_TABLE where the runner's own body embeds.
    """

    layers: Layers
    inner_size: int
    packed_head: PackedHead
    num_bytes: int
    embedding: Any
    table: Table

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding table."""
        return int(self.embedding.shape[0])


class PackedWeights(RunnerWeights):
    """All weights of a model in the kernels' layout. Peak memory while packing is the panels and
    one tensor. The LM head is a second copy of a tied embedding table; head_in_file: its rows are
    packed when they are asked for."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        *,
        dtype: str = "float32",
        head_in_file: bool = False,
    ) -> None:
        self._bf16 = dtype == "bfloat16"
        self._arena = Arena()
        self._kept: list[Panels] = []  # the addresses of records are theirs
        tensors = ModelTensors(shape, weights)
        self.embedding, self.table = float_table(tensors.embedding().tensor)
        self.inner_size = -(-shape.intermediate_size // PANEL) * PANEL
        addresses = {kind: np.zeros(shape.num_layers, np.int64) for kind in KINDS}
        sizes: dict[str, tuple[int, int]] = {}
        for layer in range(shape.num_layers):
            for kind, parts in tensors.matrices(layer).items():
                stored = [as_stored(part.tensor, self._bf16) for part in parts]
                if kind == "gate_up":  # their panels alternate
                    panels = self._take(2 * self.inner_size, stored[0].shape[1])
                    for half, part in enumerate(stored):
                        pack_panels(part, panels[half::2])
                else:
                    rows = np.concatenate(stored)
                    if kind == "down":
                        wide = self.inner_size - shape.intermediate_size
                        rows = np.pad(rows, ((0, 0), (0, wide)))
                    panels = self._take(*rows.shape)
                    pack_panels(rows, panels)
                addresses[kind][layer] = panels.ctypes.data
                sizes[kind] = panels.shape[:2]
        matrices = {
            kind: float_linears(addresses[kind], *sizes.get(kind, (0, 0)), self._bf16)
            for kind in KINDS
        }
        self.layers = tensors.layers(matrices)
        table, num_rows = tensors.head().tensor, shape.vocab_size
        if head_in_file:
            self.packed_head = HeadInFile(num_rows, partial(self._some_rows, table))
        else:
            head = self._take(num_rows, shape.hidden_size)
            for first in range(0, head.shape[0], 256):
                some = table[first * PANEL : min((first + 256) * PANEL, num_rows)]
                pack_panels(as_stored(some, self._bf16), head[first:])
            self.packed_head = float_head(head)
        self.num_bytes = sum(part.nbytes for part in (*self._kept, self.layers.norms))

    def _take(self, num_outputs: int, width: int) -> Panels:
        """Zeroed panels for that many outputs, [panels, width, PANEL], which live with the arena's
        memory."""
        dtype, num = np.dtype(np.uint16 if self._bf16 else np.float32), -(-num_outputs // PANEL)
        panels = self._arena.take(num * width * PANEL * dtype.itemsize).view(dtype)
        self._kept.append(panels)
        return panels.reshape(num, width, PANEL)

    def _some_rows(self, table: Any, token_ids: Int64) -> PackedHead:
        """A head of some rows of the model's."""
        return float_head(packed(as_stored(table[token_ids], self._bf16)))
