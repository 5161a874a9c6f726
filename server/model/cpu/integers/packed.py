"""IntegerWeights: a model's weights as integers, in panels.

What: matrices as a GGUF has them, or rounded to a form, in panels; weights.PackedWeights keeps
floats. Norms and biases stay float32. What not: files (the
Weights that it is given), products (kernels/integer_linear.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from server.errors import ModelError
from server.model.cpu.head import HeadInFile, PackedHead
from server.model.cpu.integers.amx import tile_rows
from server.model.cpu.integers.forms import (
    BLOCK,
    BY_NAME,
    PANEL,
    Form,
    count_of,
    kernel_address,
    padded_inputs,
    panels_of,
)
from server.model.cpu.integers.weights import (
    KeptWeights,
    Measured,
    Part,
    Stored,
    from_ggml,
    pack,
    pack_rows,
    quantised,
    spread_weights,
)
from server.model.cpu.linear import Arena, activations
from server.model.cpu.records import (
    INTEGERS,
    KINDS,
    Activations,
    Float32,
    Int64,
    Linear,
    UInt8,
)
from server.model.cpu.tensors import ModelTensors, Rows, Weights
from server.model.cpu.weights import RunnerWeights, block_table, float_table
from server.model.shape import ModelShape

if TYPE_CHECKING:
    from server.model.gguf_file import GgufWeights

FORM_OF = {"int8": "int8", "int8-blocks": "q8_0", "int4": "q4_1"}
"""What `weights` may be called -> the form that floats are rounded to, but for layers that are in
blocks for outliers (outliers.py measures which) and the LM head."""

HEAD_FORM_OF = {"int8": "int8", "int8-blocks": "q8_0", "int4": "q8_0"}
# Files of 4 bits keep the head in more: rounded to 4, SmolLM2's is 8 % off, to 8 bits 1 %.
_CHUNK = 128 * PANEL  # rows of the head that are taken apart at a time: it is larger then


def rounded(
    weight: Float32, form: str, measured: Measured, kind: str, layer: int = 0
) -> tuple[Stored, Float32 | None]:
    """A layer's matrix of a kind, or the "head", as a key of FORM_OF rounds it, and what its inputs
    are spread with, float32 [inputs in whole blocks]; None where they are not. Raises as
    `quantised`."""
    names, key = (HEAD_FORM_OF, kind) if kind == "head" else (FORM_OF, f"{layer}.{kind}")
    in_blocks = layer in measured.in_blocks.get(kind, ())
    own = BY_NAME["q8_0" if in_blocks else names[form]]
    factors = None
    if own.per_output:
        ones = np.ones(padded_inputs(own, weight.shape[1]), np.float32)
        factors = measured.factors.get(key, ones)
        weight = spread_weights(weight, factors)
    return quantised(own, weight), factors


def integer_linear(layers: Sequence[Sequence[Part]], rows: Activations, factors: Float32) -> Linear:
    """The record of matrices of the same sizes, one a layer, whose outputs are cut into parts, each
    in a form of its own; a layer without has none. It points into their panels.

    The parts have the same inputs, and those of a layer are all `int8` or none. factors: float32
    [layers, inputs] where one is, else [layers, 0].
    """
    some = next((parts for parts in layers if parts), [])
    inputs = some[0].inputs if some else 0
    table = np.zeros((len(layers), max(1, len(some)), 6), np.int64)
    per_row = np.zeros(len(layers), np.bool_)
    for layer, parts in enumerate(layers):
        per_row[layer] = any(part.form.per_output for part in parts)
        first = 0
        for i, part in enumerate(parts):
            table[layer, i] = (
                part.panels.ctypes.data, kernel_address(part.form), part.form.panel_bytes(inputs),
                count_of(part.form, inputs), first, part.outputs,
            )  # fmt: skip
            first += part.outputs
    outputs = sum(part.outputs for part in some)
    kinds = {part.form.per_output for parts in layers for part in parts} or {False}
    least = max(tile_rows(kind) for kind in kinds)
    return Linear(INTEGERS, table, inputs, outputs, per_row, rows, factors, least)


class IntegerWeights(RunnerWeights):
    """All weights of a model, quantised.

    form: a key of FORM_OF, floats are rounded to it; or "file": `weights` are GgufWeights, and
    nothing is rounded. max_rows: most rows of a product. measured: of `int8`. kept: the panels of
    an earlier start, which are mapped; then nothing is read of `weights` but vectors and rows of
    the embedding. head_in_file: the LM head's rows are packed when they are asked for; not with
    `kept`, whose pages are a file's already. parts: what the panels are, by layer and kind, "head"
    is the head. Peak memory while packing is the panels and one tensor.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        *,
        form: str,
        max_rows: int,
        measured: Measured | None = None,
        kept: KeptWeights | None = None,
        progress: Callable[[int, int], None] | None = None,
        head_in_file: bool = False,
    ) -> None:
        self._file = cast("GgufWeights", weights) if form == "file" else None
        self._kept = kept
        self._measured = measured or (Measured() if kept is None else kept.measured)
        self._form = form
        self._max_rows = max_rows
        self._hidden_size = shape.hidden_size
        self._arena = Arena()
        self.parts: dict[str, list[Part]] = {}  # the addresses of records are theirs
        self._buffers: dict[int, Activations] = {}
        self.inner_size = -(-shape.intermediate_size // BLOCK) * BLOCK
        tensors = ModelTensors(shape, weights)
        name, embedding = tensors.embedding()
        if self._file is None:
            self.embedding, self.table = float_table(embedding)
        else:
            form_of_rows = BY_NAME[self._file.form(name)]
            self.embedding, self.table = embedding, block_table(form_of_rows, embedding)
        layers: list[dict[str, list[Part]]] = []
        for layer in range(shape.num_layers):
            layers.append(self._layer(tensors, layer))
            self.parts |= {f"{layer}.{kind}": parts for kind, parts in layers[-1].items()}
            if progress is not None:
                progress(layer + 1, shape.num_layers + 1)
        records = {
            kind: self._record(kind, [parts.get(kind, []) for parts in layers]) for kind in KINDS
        }
        self.layers = tensors.layers(records)
        if head_in_file and kept is None:
            rows = tensors.head()
            self.packed_head = HeadInFile(shape.vocab_size, partial(self._some_rows, rows))
        else:
            self.parts["head"] = [self._head_part(tensors, shape.vocab_size)]
            self.packed_head = self._head_of(self.parts["head"][0])
            head = tensors.head()
            if self._file is not None and self._file.form(head.name) == "q8_0":
                self.packed_head.file_rows = head.tensor
        panels = sum(part.panels.nbytes for parts in self.parts.values() for part in parts)
        self.num_bytes = panels + self.layers.norms.nbytes
        if self._file is not None:
            self._file.release_pages()
        if progress is not None:
            progress(shape.num_layers + 1, shape.num_layers + 1)

    def _factors(self, name: str, num_inputs: int) -> Float32:
        """float32 [num_inputs]: what the inputs of a matrix are spread with."""
        return self._measured.factors.get(name, np.ones(num_inputs, np.float32))

    def _stored(self, rows: Rows, kind: str, layer: int = 0) -> Stored:
        """Rows of a matrix, rounded or as their file has them. Raises ModelError."""
        if self._file is not None:
            return from_ggml(self._file.form(rows.name), rows.tensor)
        weight: Float32 = rows.tensor.float().numpy()
        try:
            return rounded(weight, self._form, self._measured, kind, layer)[0]
        except ValueError as error:
            raise ModelError(f"{rows.name}: {error}") from None

    def _layer(self, tensors: ModelTensors, layer: int) -> dict[str, list[Part]]:
        """The matrices of a layer by kind, in panels."""
        if self._kept is not None:
            return self._kept.layer(layer)
        return {
            kind: [pack(self._stored(part, kind, layer), self._arena) for part in parts]
            for kind, parts in tensors.matrices(layer).items()
        }

    def _record(self, kind: str, layers: Sequence[Sequence[Part]]) -> Linear:
        """One matrix a layer; none where a layer has none of the kind."""
        inputs = max((part.inputs for parts in layers for part in parts), default=0)
        per_row = any(part.form.per_output for parts in layers for part in parts)
        names = [f"{layer}.{kind}" for layer in range(len(layers))]
        factors = [self._factors(name, inputs if per_row else 0) for name in names]
        return integer_linear(layers, self._rows(inputs), np.stack(factors))

    def _rows(self, num_inputs: int) -> Activations:
        """The buffer for inputs of that width, shared by all products with it."""
        if num_inputs not in self._buffers:
            self._buffers[num_inputs] = activations(self._max_rows, num_inputs)
        return self._buffers[num_inputs]

    def _head_of(self, part: Part) -> PackedHead:
        """The full head, or a part of it: panels [panels, bytes of a panel]."""
        form, inputs, rows = part.form, part.inputs, self._rows(part.inputs)
        factors = self._factors("head", inputs if form.per_output else 0)[None]

        def record(panels: UInt8, num_panels: int) -> Linear:
            some = Part(form, inputs, num_panels * PANEL, panels)
            return integer_linear([[some]], rows, factors)

        return PackedHead(part.panels, PANEL, self._hidden_size, _runs(form, inputs), record)

    def _some_rows(self, rows: Rows, token_ids: Int64) -> PackedHead:
        """A head of some rows of the model's."""
        own = Rows(rows.name, rows.tensor[token_ids])
        head = self._head_of(pack(self._stored(own, "head"), Arena()))
        if self._file is not None:
            self._file.release_pages()
        return head

    def _head_part(self, tensors: ModelTensors, num_rows: int) -> Part:
        """The first num_rows rows of the head; the rest pads a table and is never drawn."""
        if self._kept is not None:
            (kept,) = self._kept.parts("head")
            return kept
        table = tensors.head()
        panels = np.empty((0, 0), np.uint8)
        for first in range(0, num_rows, _CHUNK):
            last = min(first + _CHUNK, num_rows)
            part = self._stored(Rows(table.name, table.tensor[first:last]), "head")
            if first == 0:
                size = part.form.panel_bytes(part.numbers.shape[1])
                panels = self._arena.take(panels_of(num_rows) * size).reshape(-1, size)
            at = first // PANEL
            pack_rows(part, panels[at : at + panels_of(last - first)])
        return Part(part.form, part.numbers.shape[1], num_rows, panels)


# -- The LM head ----------------------------------------------------------------------------------


def _runs(form: Form, num_inputs: int) -> Int64:
    """Every run of PANEL lanes in a panel: [(first byte, bytes of a lane, lanes)]; see forms.py."""
    small = 1 if form.two_level else 2
    block = [(form.low_bytes + form.high_bytes, 4), (form.scale_bytes * (1 + form.has_min), small)]
    pieces = [(form.header_bytes, 2), *(block * form.blocks_per_super)]
    pieces *= num_inputs // (BLOCK * form.blocks_per_super)
    if form.per_output:
        pieces = [(form.panel_bytes(num_inputs), 4)]
    lanes = np.repeat([lane for _, lane in pieces], [n // (PANEL * lane) for n, lane in pieces])
    ends = np.cumsum(lanes * PANEL)
    return np.stack((ends - lanes * PANEL, lanes, np.full_like(lanes, PANEL)), axis=1)
