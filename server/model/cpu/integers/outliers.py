"""Which layers' inputs have outliers that one scale a row is too coarse for: measured, not assumed.

`int8` gives a row of inputs one scale, its largest magnitude / 127. A dimension that is a hundred
times the others (Dettmers et al. 2022, arXiv 2208.07339, section 3) leaves the others two or three
levels. So the first layers of the model run on a short text, with all products in blocks, and of
each product two answers are compared with that of floats: with one scale a row and an output, and
in blocks. Where the first is LIMIT off or more, and blocks are better, the layer is in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from server.model.cpu.integers.forms import BLOCK, BY_NAME
from server.model.cpu.integers.weights import dequantised, quantised
from server.model.cpu.records import Float32, Float64, Scratch
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

_WIDTHS = (0, BLOCK)  # inputs of one scale: of the form int8, all of a row
_CHUNK = 4096  # outputs at a time: as float64, in three forms, they are large


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
    squares = x.astype(np.float64) ** 2
    sums = [[math.fsum(row)] for row in squares.tolist()]  # in any order the same
    scale = 1.0 / np.sqrt(np.array(sums) / x.shape[1] + shape.norm_eps)
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
    blocks. x: float32 [rows, K], K at most 65,536; parts: the matrix, [outputs, K].

    The same bits on every CPU: a layer at the limit must not be in blocks on one machine and not
    on another. So numbers are put on a grid, 20 bits of a row's and 17 of an output's largest:
    then every sum of products is a whole number below 2**53, exact in any order.
    """
    top = np.frexp(np.abs(x).max(axis=1, keepdims=True))[1]
    inputs = [_on_grid(values, top, 20) for values in (x, *(_rounded(x, w) for w in _WIDTHS))]
    found: list[tuple[Float64, ...]] = []
    for part in parts:
        for first in range(0, part.tensor.shape[0], _CHUNK):
            weight = part.tensor[first : first + _CHUNK].float().numpy()
            found.append(tuple(_outputs(inputs, weight)))
    want, *given = (np.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
    scale = 20 - np.frexp(np.abs(want).max(axis=1, keepdims=True))[1]
    size = np.sqrt(_squares(want, scale))

    def error(got: Float64) -> float:
        rows = np.sqrt(_squares(got - want, scale)) / np.maximum(size, 1.0)
        return math.fsum(rows.tolist()) / len(rows)

    one, blocks = given
    return error(one), error(blocks)


def _on_grid(values: Float32, top: npt.NDArray[Any], bits: int) -> Float64:
    """Whole numbers: multiples of 2 ** (top - bits), for each row its own."""
    whole: Float64 = np.rint(np.ldexp(values.astype(np.float64), bits - top))
    return whole


def _outputs(inputs: Sequence[Float64], weight: Float32) -> Iterator[Float64]:
    """[rows, outputs] of each of (x, x of one scale a row, x of blocks) and the weight as it is
    then; for each row in a unit of its own, the same for all three."""
    top = np.frexp(np.abs(weight).max(axis=1, keepdims=True))[1]
    matrices = [weight]
    for form in ("int8", "q8_0"):
        matrices.append(dequantised(quantised(BY_NAME[form], weight))[:, : weight.shape[1]])
    for x, matrix in zip(inputs, matrices, strict=True):
        yield np.ldexp(x @ _on_grid(matrix, top, 17).T, top.T)


def _squares(values: Float64, scale: npt.NDArray[Any]) -> Float64:
    """The sum of squares of each row, of values rounded to whole numbers after * 2 ** scale."""
    whole = np.rint(np.ldexp(values, scale)).astype(np.int64)
    sums: Float64 = (whole * whole).sum(axis=1).astype(np.float64)
    return sums


def _rounded(x: Float32, width: int) -> Float32:
    """x as its integers give it back, one scale for `width` inputs, 0: all (quantise.py)."""
    num, inputs = x.shape
    width = width or inputs
    padded: npt.NDArray[Any] = np.pad(x, ((0, 0), (0, -inputs % width)))
    blocks = padded.reshape(num, -1, width)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127.0)
    levels = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
    back: Float32 = (np.rint(levels) * scale).reshape(num, -1)[:, :inputs]
    return back
