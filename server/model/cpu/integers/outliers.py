"""How inputs are spread, and which layers' inputs one scale a row is too coarse for even so:
measured, not assumed.

`int8` gives a row of inputs one scale, its largest magnitude / 127. A dimension that is a hundred
times the others (Dettmers et al. 2022, arXiv 2208.07339, section 3) leaves the others two or three
levels, so inputs are spread first (weights.py). The layers of the model run on a short text, with
all products in blocks, which says how large each input of a product is, and with it its factor. Of
each product two answers are compared with that of floats: with one scale a row and an output, and
in blocks. Where the first is LIMIT off or more, and blocks are better, the layer is in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from server.model.cpu.integers.forms import BLOCK, BY_NAME, CHANNEL
from server.model.cpu.integers.weights import (
    Measured,
    dequantised,
    quantised,
    spread,
    spread_weights,
)
from server.model.cpu.records import Float32, Float64, Scratch
from server.model.cpu.tensors import ModelTensors, Rows, Weights, numbers_of, widened
from server.model.cpu.threads import torch_on_one_thread
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

_SAMPLE = 4096  # outputs of a matrix that are looked at, at most; of 512, errors differ by 73 %
_RARE = 16  # times smaller than the median
_CHUNK = 256  # outputs at a time: in three forms, they stay in a core's cache


def measured(
    shape: ModelShape,
    weights: Weights,
    norms: Float32,
    run: Callable[[int], Scratch],
    num_rows: int,
    *,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Measured:
    """Of every product what its inputs are spread with, or that it is to be in blocks.

    norms: Layers.norms. run: called in order: with 0 it fills x of num_rows rows with the
    embedding, with n it runs the n-th layer on x; it gives the buffers as they are then. threads:
    that measure. progress: (layers done, all).
    """
    tensors = ModelTensors(shape, weights)
    in_blocks: dict[str, list[int]] = {}
    factors: dict[str, Float32] = {}

    def choose(layer: int, inputs: dict[str, Float32], matrices: dict[str, list[Rows]]) -> None:
        kinds = list(matrices)
        found = pool.map(_measure, [inputs[kind] for kind in kinds], matrices.values())
        for kind, (own, one, blocks) in zip(kinds, found, strict=True):
            if one >= LIMIT and one > blocks:
                in_blocks.setdefault(kind, []).append(layer)
            else:
                factors[kind if kind == "head" else f"{layer}.{kind}"] = own

    # Threads that share one product wait for each other by spinning: on a busy machine a product of
    # a few milliseconds took hundreds (numpy's library, whose threads nobody can limit here).
    with torch_on_one_thread(), ThreadPoolExecutor(threads) as pool:
        following = np.array(run(0).x[:num_rows])
        for layer in range(shape.num_layers):
            first = _normed(shape, following, norms[layer, 0])
            scratch = run(layer + 1)
            inputs = dict(_inputs(shape, scratch, first, num_rows))
            choose(layer, inputs, tensors.matrices(layer))
            following = np.array(scratch.x[:num_rows])
            if progress is not None:
                progress(layer + 1, shape.num_layers)
        table = tensors.head()
        head = Rows(table.name, table.tensor[: shape.vocab_size])
        choose(0, {"head": scratch.hidden[:num_rows]}, {"head": [head]})
    return Measured(in_blocks, factors)


def _measure(x: Float32, parts: Sequence[Rows]) -> tuple[Float32, float, float]:
    """Factors of one product, and its errors with them."""
    # Of some outputs, evenly: as good for a mean, and a head has very many.
    steps = [-(-part.tensor.shape[0] // _SAMPLE) for part in parts]
    some = [part._replace(tensor=part.tensor[::n]) for part, n in zip(parts, steps, strict=True)]
    own = factors_of(x, some)
    return own, *errors(x, some, own)


def _chunks(part: Rows) -> Iterator[Float32]:
    """All rows, float32 [at most _CHUNK, K] at a time."""
    for first in range(0, part.tensor.shape[0], _CHUNK):
        yield widened(numbers_of(part.tensor[first : first + _CHUNK]))


def factors_of(x: Float32, parts: Sequence[Rows]) -> Float32:
    """float32 [K in whole blocks]: what inputs are multiplied by before they become integers, so
    that an input and its weights are alike in size: sqrt(size of the weights / size of the input).

    x: float32 [rows, K]. Once inputs are spread, the error of a row grows with sqrt(sum of
    (x f)**2), that of the weights with sqrt(sum of (w / f)**2), and what a row's and the weights'
    errors make of the outputs with the product of both: these f make it least (Cauchy, Schwarz).
    Rows weigh alike, whatever their sizes. The same bits on every CPU: see `errors`.
    """
    rows = _on_grid(x, np.frexp(np.abs(x).max(axis=1, keepdims=True))[1], 20)
    norms = np.sqrt(_sums(rows, axis=1))[:, None]
    sizes = np.sqrt(_sums(np.rint(rows / np.maximum(norms, 1.0) * 2.0**20), axis=0))
    tops = [max(chunk.max(), -chunk.min()) for part in parts for chunk in _chunks(part)]
    top = np.frexp(max(tops))[1]
    grids = (_on_grid(chunk, top, 20) for part in parts for chunk in _chunks(part))
    of_weights = np.sqrt(sum(_sums(whole, axis=0) for whole in grids))
    # An input that was hardly seen, or weights that hardly count, say nothing certain.
    quotient = [np.maximum(v, max(float(np.median(v)) / _RARE, 1.0)) for v in (of_weights, sizes)]
    factors = np.ones(-(-x.shape[1] // BLOCK) * BLOCK, np.float32)
    factors[: x.shape[1]] = np.sqrt(quotient[0] / quotient[1])
    return factors


def _sums(whole: Float64, axis: int) -> Float64:
    """Sums of squares of at most 8,192 whole numbers up to 2**20, exact."""
    sums: Float64 = np.einsum("ij,ij->j" if axis == 0 else "ij,ij->i", whole, whole)
    return sums


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


def errors(x: Float32, parts: Sequence[Rows], factors: Float32) -> tuple[float, float]:
    """Relative errors of the outputs, mean over rows: with one scale a row and an output, in
    blocks. x: float32 [rows, K], K at most 65,536; parts: the matrix, [outputs, K]; factors: what
    inputs are spread with, in the first.

    The same bits on every CPU: a layer at the limit must not be in blocks on one machine and not
    on another. So numbers are put on a grid, 20 bits of a row's and 17 of an output's largest:
    then every sum of products is a whole number below 2**53, exact in any order.
    """
    inputs = [x, rounded(spread(x, factors), 0), rounded(x, BLOCK)]
    rows = [(v, np.frexp(np.abs(v).max(axis=1, keepdims=True))[1]) for v in inputs]
    grids = [(_on_grid(values, top, 20), top) for values, top in rows]
    found: list[tuple[Float64, ...]] = []
    for part in parts:
        found += [tuple(_outputs(grids, chunk, factors)) for chunk in _chunks(part)]
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
    whole: Float64 = values * np.ldexp(1.0, bits - top)
    return np.rint(whole, out=whole)


def _outputs(
    inputs: Sequence[tuple[Float64, npt.NDArray[Any]]], weight: Float32, factors: Float32
) -> Iterator[Float64]:
    """[rows, outputs] of each of (x, x spread and of one scale a row, x of blocks), as grids with
    their tops, and the weight as it is then."""
    width = weight.shape[1]
    one = dequantised(quantised(CHANNEL, spread_weights(weight, factors)))
    blocks = dequantised(quantised(BY_NAME["q8_0"], weight))[:, :width]
    for (x, top), matrix in zip(inputs, (weight, one, blocks), strict=True):
        own = np.frexp(np.abs(matrix).max(axis=1, keepdims=True))[1]
        yield np.ldexp(_exact(x, _on_grid(matrix, own, 17)), (top - 20) + (own.T - 17))


def _exact(x: Float64, matrix: Float64) -> Float64:
    """x @ matrix.T of whole numbers whose sums float64 holds: in any order, by any library."""
    import torch

    product: Float64 = (torch.from_numpy(x) @ torch.from_numpy(matrix).T).numpy()
    return product


def _squares(values: Float64, scale: npt.NDArray[Any]) -> Float64:
    """The sum of squares of each row, of values rounded to whole numbers after * 2 ** scale."""
    whole = np.rint(np.ldexp(values, scale)).astype(np.int64)
    sums: Float64 = (whole * whole).sum(axis=1).astype(np.float64)
    return sums


def rounded(x: Float32, width: int) -> Float32:
    """x as its integers (kernels/integer_rows.py) give it back, one scale for `width` inputs, 0:
    all."""
    num, inputs = x.shape
    width = width or inputs
    padded: npt.NDArray[Any] = np.pad(x, ((0, 0), (0, -inputs % width)))
    blocks = padded.reshape(num, -1, width)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127.0)
    levels = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
    back: Float32 = (np.rint(levels) * scale).reshape(num, -1)[:, :inputs]
    return back
