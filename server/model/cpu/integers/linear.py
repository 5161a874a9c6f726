"""IntegerLinear: the weight kind whose products are sums of integers (server/model/cpu/linear.py).

What: the record that forward.py is given, and its `linear` and `gated_linear`. Inputs come as
float32, are quantised once a product, by a rule that sees one row at a time (quantise.py), and
multiplied (product.py). Nobody else sees them spread. Import this module before forward.py runs on
such weights.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba.extending import overload

from server.model.cpu.integers.amx import tile_rows
from server.model.cpu.integers.forms import BLOCK, PANEL
from server.model.cpu.integers.kernels import JOB_ITEMS, call_kernel
from server.model.cpu.integers.product import (
    FEW_ROWS,
    IntegerMatrix,
    begin_job,
    even_span,
    next_item,
    num_panels,
    own_first,
    product_share,
    set_rows,
)
from server.model.cpu.integers.quantise import Activations, quantise_rows
from server.model.cpu.kernels import borrows, fetch, gelu_gate, silu_gate
from server.model.cpu.linear import gated_linear, is_kind, linear
from server.model.cpu.records import Float32, Int64
from server.model.cpu.team import barrier, barrier_reading, begin_items, own_words
from server.model.cpu.vector_ir import LANES

_FIRST_BYTES = 8192  # that a thread asks for before it makes inputs


class IntegerLinear(NamedTuple):
    """Matrices of one kind, one a layer, in panels that the caller keeps alive.

    parts: int64 [layers, parts, 6], IntegerMatrix.parts of each layer. inputs, outputs: as there.
    per_row: bool [layers], as there. rows: the buffer of quantised inputs, for the most rows that a
    product may have. factors: float32 [layers, inputs], what inputs of a layer that is per_row are
    spread with; [layers, 0] when none is. tile_rows: rows from which on AMX tiles multiply
    (amx.tile_rows).
    """

    parts: Int64
    inputs: int
    outputs: int
    per_row: npt.NDArray[np.bool_]
    rows: Activations
    factors: Float32
    tile_rows: int


def integer_linear(
    matrices: Sequence[IntegerMatrix], rows: Activations, factors: Float32
) -> IntegerLinear:
    """The record of matrices of the same sizes, one a layer."""
    first = matrices[0]
    parts = np.stack([m.parts for m in matrices])
    per_row = np.array([m.per_row for m in matrices])
    if per_row.any() and factors.shape != (len(matrices), first.inputs):
        raise ValueError(f"factors are {factors.shape}, not {(len(matrices), first.inputs)}")
    return IntegerLinear(parts, first.inputs, first.outputs, per_row, rows, factors, tile_rows())


@borrows
def _gated_share(weights, layer, num_rows, out, gelu, work):
    """One thread's share of out = act(gate) * up: the panel of the same outputs of both parts."""
    parts = weights.parts
    span, spans = even_span(num_rows)
    q, figures = weights.rows.q.ctypes.data, weights.rows.figures.ctypes.data
    words = own_words(work)
    job = work.sync[words : words + JOB_ITEMS]
    begin_job(job, weights, out)
    job[8] = 8 * PANEL
    pairs = work.pairs.ctypes.data + work.thread * work.pairs.shape[1] * 4
    total = num_panels(parts, layer, 0) * spans
    alike = num_rows > FEW_ROWS and parts[layer, 0, 2] == parts[layer, 1, 2]
    item, end = next_item(work, 0, 0, total, spans)
    while item < end:
        following, following_end = next_item(work, item, end, total, spans)
        p = item // spans
        first = item % spans * span
        num = min(span, num_rows - first)
        set_rows(job, q, figures, first, num)
        for half in range(2):
            size = parts[layer, half, 2]
            job[9] = 0
            if half == 0 and alike:
                job[9] = parts[layer, 1, 0] + p * size
            elif alike and following < following_end:
                job[9] = parts[layer, 0, 0] + following // spans * size
            job[5] = parts[layer, half, 0] + p * size
            job[6] = parts[layer, half, 3]
            job[7] = pairs + half * PANEL * 4
            call_kernel(parts[layer, half, 1], job.ctypes.data)
        for m in range(num):
            target = out.ctypes.data + ((first + m) * out.shape[1] + p * PANEL) * 4
            left = pairs + m * 8 * PANEL
            if gelu:
                gelu_gate(left, left + PANEL * 4, target, PANEL // LANES)
            else:
                silu_gate(left, left + PANEL * 4, target, PANEL // LANES)
        item, end = following, following_end


@borrows
def _prepare(x, num_rows, weights, layer, num_parts, work):
    """The inputs of all rows as integers, while this thread's first panels (product.own_first) are
    on their way."""
    if num_rows > weights.rows.q.shape[0]:
        raise ValueError("more rows than the buffer of quantised inputs has")
    factors = 0
    if weights.per_row[layer]:
        if work.pairs.shape[1] < weights.inputs + BLOCK:
            raise ValueError("a thread has no room for a row of spread inputs")
        factors = weights.factors.ctypes.data + layer * weights.inputs * 4
    begin_items(work)
    ahead, end = own_first(weights, layer, num_parts, work)
    early = min(ahead + _FIRST_BYTES, end)
    if early > ahead:
        fetch(ahead, early - ahead)
    width = min(weights.inputs, x.shape[1])
    pad = work.pairs.ctypes.data + work.thread * work.pairs.shape[1] * 4
    quantise_rows(work.thread, work.threads, num_rows, x, width, factors, weights.rows, pad)
    barrier_reading(work, early, end)


@overload(linear)
def _integer_linear(x, num_rows, weights, layer, out, work):
    if not is_kind(weights, IntegerLinear):
        return None

    def multiply(x, num_rows, weights, layer, out, work):
        _prepare(x, num_rows, weights, layer, weights.parts.shape[1], work)
        product_share(weights, layer, num_rows, out, work)
        barrier(work)

    return multiply


@overload(gated_linear)
def _integer_gated_linear(x, num_rows, weights, layer, out, gelu, work):
    if not is_kind(weights, IntegerLinear):
        return None

    def multiply(x, num_rows, weights, layer, out, gelu, work):
        _prepare(x, num_rows, weights, layer, 1, work)
        _gated_share(weights, layer, num_rows, out, gelu, work)
        barrier(work)

    return multiply
