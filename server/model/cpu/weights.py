"""PackedWeights: a model's weights in the kernels' layout.

It reads named tensors one at a time and packs them into panels (linear.py), in one piece. dtype is
float32, or bfloat16 for the *stored* weights: activations, sums and logits are float32 either way.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from server.model.cpu.head import HeadInFile, PackedHead, float_head
from server.model.cpu.integers.forms import Form
from server.model.cpu.kernels import embed_rows
from server.model.cpu.linear import aligned, float_linears, pack_panels, packed
from server.model.cpu.records import (
    BFLOATS,
    BLOCKS,
    FLOATS,
    HALVES,
    NO_TABLE,
    PANEL,
    READY,
    Float32,
    Int64,
    Layers,
    Table,
    UInt8,
)
from server.model.cpu.tensors import ModelTensors, Weights, as_stored, numbers_of, widened
from server.model.shape import ModelShape

Panels = npt.NDArray[Any]
"""float32, or uint16 with bfloat16 bits: [panels, K, PANEL]."""


def _num_panels(num_outputs: int) -> int:
    return -(-num_outputs // PANEL)


class _Size(NamedTuple):
    """A matrix: panels, and the width of its input."""

    num_panels: int
    width: int


def _sizes(s: ModelShape) -> dict[str, _Size]:
    """The matrices that a layer may have."""
    hidden, attended = s.hidden_size, s.num_heads * s.head_dim
    pairs = _num_panels(s.intermediate_size)
    return {
        "qkv": _Size(_num_panels((s.num_heads + 2 * s.num_kv_heads) * s.head_dim), hidden),
        "out": _Size(_num_panels(hidden), attended),
        "conv_in": _Size(_num_panels(3 * hidden), hidden),
        "conv_out": _Size(_num_panels(hidden), hidden),
        "gate_up": _Size(2 * pairs, hidden),
        "down": _Size(_num_panels(hidden), pairs * PANEL),
    }


def float_table(tensor: Any) -> Table:
    """The table that a torch tensor [num_rows, H] is; NO_TABLE for one that no kernel reads."""
    kind = {"torch.float32": FLOATS, "torch.bfloat16": BFLOATS, "torch.float16": HALVES}
    known = kind.get(str(tensor.dtype))
    if known is None or tensor.stride(1) != 1:
        return NO_TABLE
    row_bytes = tensor.stride(0) * tensor.element_size()
    return Table(tensor.data_ptr(), row_bytes, int(tensor.shape[0]), known, np.float32(1.0))


def block_table(form: Form, rows: UInt8) -> Table:
    """The table that rows of a GGUF are, uint8 [num_rows, bytes of a row, side by side]."""
    address, scale = rows.ctypes.data, np.float32(1.0)
    return Table(address, rows.strides[0], rows.shape[0], BLOCKS, scale, form.number)


class RunnerWeights:
    """What CpuRunner needs of a model's weights, whatever their kind. Read-only after construction.

    layers: the records of the forward pass. inner_size: width of what goes into the last product
    of an MLP. packed_head: the LM head, for products and for slices. num_bytes: of all panels, and
    norms. embedding: the embedding table, as tensors.Weights gives it, which stays in its file.
    table: the same as it lies in memory; NO_TABLE where only `embed` reads it.
    """

    layers: Layers
    inner_size: int
    packed_head: PackedHead
    num_bytes: int

    def __init__(self, embedding: Any, table: Table) -> None:
        self.embedding, self.table = embedding, table
        self._numbers = numbers_of(embedding)

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding table."""
        return int(self.embedding.shape[0])

    def embed(self, token_ids: Int64) -> Float32:
        """float32 [n, hidden_size]: rows of the embedding table.

        Without torch: its threads would go on spinning beside the team's for milliseconds.
        """
        if self.table.kind == READY:
            return widened(self._numbers[token_ids])
        num = token_ids.shape[0]
        rows = np.empty((num, self.layers.norms.shape[2]), np.float32)
        embed_rows(0, num, token_ids.astype(np.int32), self.table, rows, 1)
        return rows


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
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"the CPU runner stores weights as float32 or bfloat16, not {dtype}")
        self.bf16 = dtype == "bfloat16"
        self._shape = s = shape
        self._tensors = ModelTensors(shape, weights)
        embedding = self._tensors.embedding().tensor
        super().__init__(embedding, float_table(embedding))
        self._sizes = _sizes(s)
        self.inner_size = self._sizes["down"].width
        items = sum(
            size.num_panels * size.width
            for i in range(s.num_layers)
            for size in self._of(i).values()
        )
        head_panels = 0 if head_in_file else _num_panels(s.vocab_size)
        # One piece, on a cache line's boundary: vectors that straddle lines cost a tenth of the
        # bandwidth.
        items, dtype_ = items + head_panels * s.hidden_size, np.uint16 if self.bf16 else np.float32
        self._left = aligned(items * PANEL * np.dtype(dtype_).itemsize).view(dtype_)
        self.num_bytes = self._left.nbytes
        self._addresses = {kind: np.zeros(s.num_layers, np.int64) for kind in self._sizes}
        for layer in range(s.num_layers):
            views = {}
            for kind, size in self._of(layer).items():
                views[kind] = self._take(size)
                self._addresses[kind][layer] = views[kind].ctypes.data
            for kind, parts in self._tensors.matrices(layer).items():
                stored = [as_stored(part.tensor, self.bf16) for part in parts]
                if kind == "gate_up":
                    for half, part in enumerate(stored):
                        pack_panels(part, views[kind][half::2])
                elif kind == "down":
                    wide = np.zeros((s.hidden_size, self.inner_size), stored[0].dtype)
                    wide[:, : s.intermediate_size] = stored[0]
                    pack_panels(wide, views[kind])
                else:
                    pack_panels(np.concatenate(stored), views[kind])
        matrices: dict[str, Any] = {
            kind: float_linears(self._addresses[kind], size.num_panels, size.width, self.bf16)
            for kind, size in self._sizes.items()
        }
        self.layers = Layers(**matrices, **self._tensors.vectors()._asdict())
        table = self._tensors.head().tensor
        if head_in_file:
            self.packed_head = HeadInFile(s.vocab_size, partial(self._some_rows, table))
        else:
            head = self._take(_Size(head_panels, s.hidden_size))
            for first in range(0, head_panels, 256):
                rows = table[first * PANEL : min((first + 256) * PANEL, s.vocab_size)]
                pack_panels(as_stored(rows, self.bf16), head, first_panel=first)
            self.packed_head = float_head(head)
        self.num_bytes += self.layers.norms.nbytes

    def _take(self, size: _Size) -> Panels:
        """The next panels of the piece, zeros."""
        num = size.num_panels * size.width * PANEL
        taken, self._left = self._left[:num], self._left[num:]
        return taken.reshape(size.num_panels, size.width, PANEL)

    def _some_rows(self, table: Any, token_ids: Int64) -> PackedHead:
        """A head of some rows of the model's."""
        return float_head(packed(as_stored(table[token_ids], self.bf16)))

    def _of(self, layer: int) -> dict[str, _Size]:
        """The matrices that a layer has."""
        absent = ("qkv", "out") if self._shape.convolutions[layer] else ("conv_in", "conv_out")
        return {kind: size for kind, size in self._sizes.items() if kind not in absent}
