"""Which layers' inputs have outliers that one scale a row is too coarse for: measured, not assumed.

`int8` gives a row of inputs one scale, its largest magnitude / 127. A dimension that is a hundred
times the others (Dettmers et al. 2022, arXiv 2208.07339, section 3) leaves the others two or three
levels. So the first layers of the model run on a short text, with all products in blocks, and of
each product two answers are compared with that of floats: with one scale a row and an output, and
in blocks. Where the first is LIMIT off or more, and blocks are better, the layer is in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from server.model.cpu.integers.forms import BLOCK, BY_NAME
from server.model.cpu.integers.weights import dequantised, quantised
from server.model.cpu.records import Float32, Scratch
from server.model.cpu.tensors import ModelTensors, Rows, Weights
from server.model.shape import ModelShape

LIMIT = 0.025
"""Relative error of a product's outputs, mean over rows, from which on a layer is in blocks."""

TEXT = (
    "The harbour town of Brennick lies where the river widens before it meets the sea. For three "
    "hundred years its people lived from herring; in 1987 the last boat was sold.\n\n"
    'Utterance: wake me up at nine am on friday\nSlots: {"time": "nine am", "date": "friday"}\n\n'
    "Question: How many towns lie on the coast?\n"
    "SQL: SELECT count(*) FROM town WHERE coast = 1;\n\n"
    "def mean(values):\n    if not values:\n        return 0.0\n"
    "    return sum(values) / len(values)"
)
"""What is computed: prose, slots, SQL and code."""

NUM_TOKENS = 128
"""The text's first ids."""


def outliers(
    shape: ModelShape,
    weights: Weights,
    norms: Float32,
    run: Callable[[int], Scratch],
    num_rows: int,
    limit: float = LIMIT,
) -> dict[str, tuple[int, ...]]:
    """kind -> layers that are to be in blocks.

    norms: Layers.norms. run: run so many of the first layers on num_rows rows, and give the buffers
    as they are then; with 0, only x is filled, with the embedding.
    """
    tensors = ModelTensors(shape, weights)
    found: dict[str, list[int]] = {}
    following = np.array(run(0).x[:num_rows])
    for layer in range(shape.num_layers):
        entering = following
        scratch = run(layer + 1)
        inputs = dict(_inputs(shape, scratch, _normed(shape, entering, norms[layer, 0]), num_rows))
        for kind, parts in tensors.matrices(layer).items():
            one, blocks = errors(inputs[kind], parts)
            if one >= limit and one > blocks:
                found.setdefault(kind, []).append(layer)
        following = np.array(scratch.x[:num_rows])
    return {kind: tuple(layers) for kind, layers in found.items()}


def _normed(shape: ModelShape, x: Float32, weight: Float32) -> Float32:
    """What the first product of a layer is given."""
    if shape.norms == "after":
        return x
    scale = 1.0 / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + shape.norm_eps)
    normed: Float32 = (x * scale * weight).astype(np.float32)
    return normed


def _inputs(
    shape: ModelShape, scratch: Scratch, first: Float32, num: int
) -> Iterator[tuple[str, Float32]]:
    """The inputs of the products of the layer that was computed last."""
    yield "qkv", first
    yield "conv_in", first
    yield "out", scratch.attended[:num]
    yield "conv_out", scratch.convolved[:num]
    yield "gate_up", scratch.normed[:num]
    yield "down", scratch.inner[:num, : shape.intermediate_size]


def errors(x: Float32, parts: Sequence[Rows]) -> tuple[float, float]:
    """Relative errors of the outputs, mean over rows: with one scale a row and an output, in
    blocks. x: float32 [rows, K]; parts: the matrix, [outputs, K]."""
    weight = np.concatenate([part.tensor.float().numpy() for part in parts])
    want = x @ weight.T
    size = np.maximum(np.linalg.norm(want, axis=1), 1e-20)

    def error(form: str, width: int) -> float:
        stored = dequantised(quantised(BY_NAME[form], weight))[:, : x.shape[1]]
        got = _rounded(x, width) @ stored.T
        return float((np.linalg.norm(got - want, axis=1) / size).mean())

    return error("int8", x.shape[1]), error("q8_0", BLOCK)


def _rounded(x: Float32, width: int) -> Float32:
    """x as its integers give it back, one scale for `width` inputs (quantise.py)."""
    num, inputs = x.shape
    padded: npt.NDArray[Any] = np.pad(x, ((0, 0), (0, -inputs % width)))
    blocks = padded.reshape(num, -1, width)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127.0)
    levels = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
    back: Float32 = (np.rint(levels) * scale).reshape(num, -1)[:, :inputs]
    return back
