"""IntegerLinear: the weight kind whose products are sums of integers (server/model/cpu/linear.py).

What: the record that forward.py is given, and its `linear` and `gated_linear`. Inputs come as
float32, are quantised once a product, by a rule that sees one row at a time (quantise.py), and
multiplied (product.py). Import this module before forward.py runs on such weights.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numba.extending import overload

from server.model.cpu.integers.forms import PANEL
from server.model.cpu.integers.kernels import JOB_ITEMS, call_kernel
from server.model.cpu.integers.product import (
    ROW_SPAN,
    IntegerMatrix,
    num_panels,
    product_share,
    set_job,
)
from server.model.cpu.integers.quantise import Activations, quantise_rows
from server.model.cpu.kernels import gelu_gate, silu_gate
from server.model.cpu.linear import gated_linear, is_kind, linear
from server.model.cpu.records import Int64
from server.model.cpu.team import barrier, take
from server.model.cpu.vector_ir import LANES

__all__ = ["IntegerLinear", "integer_linear"]

_serial = njit(nogil=True, cache=True, error_model="numpy")


class IntegerLinear(NamedTuple):
    """Matrices of one kind, one a layer, in panels that the caller keeps alive.

    parts: int64 [layers, parts, 6], IntegerMatrix.parts of each layer. inputs, outputs, per_row: as
    there. rows: the buffer of quantised inputs, for the most rows that a product may have.
    """

    parts: Int64
    inputs: int
    outputs: int
    per_row: bool
    rows: Activations


def integer_linear(matrices: Sequence[IntegerMatrix], rows: Activations) -> IntegerLinear:
    """The record of matrices of the same sizes, one a layer."""
    first = matrices[0]
    parts = np.stack([m.parts for m in matrices])
    return IntegerLinear(parts, first.inputs, first.outputs, first.per_row, rows)


@_serial
def _gated_share(rows, num_rows, matrix, out, gelu, work):
    """One thread's share of out = act(gate) * up: the panel of the same outputs of both parts."""
    gate, up = matrix.parts[0], matrix.parts[1]
    spans = (num_rows + ROW_SPAN - 1) // ROW_SPAN
    span = (num_rows + spans - 1) // spans
    total = num_panels(gate) * spans
    job = np.empty(JOB_ITEMS, np.int64)
    pairs = work.pairs[work.thread].ctypes.data
    item = take(work)
    while item < total:
        following = take(work)
        p = item // spans
        first = item % spans * span
        num = min(span, num_rows - first)
        set_job(job, rows, first, num, pairs, 8 * PANEL)
        for half in range(2):
            line = gate if half == 0 else up
            then = up if half == 0 else gate
            place = p if half == 0 else following // spans
            job[9] = 0
            if then[2] == line[2] and (half == 0 or following < total):
                job[9] = then[0] + place * then[2]
            job[5] = line[0] + p * line[2]
            job[6] = line[3]
            job[7] = pairs + half * PANEL * 4
            call_kernel(line[1], job.ctypes.data)
        for m in range(num):
            target = out.ctypes.data + ((first + m) * out.shape[1] + p * PANEL) * 4
            left = pairs + m * 8 * PANEL
            if gelu:
                gelu_gate(left, left + PANEL * 4, target, PANEL // LANES)
            else:
                silu_gate(left, left + PANEL * 4, target, PANEL // LANES)
        item = following


@_serial
def _prepared(x, num_rows, weights, layer, work):
    """The layer's matrix, once the inputs of all rows are integers."""
    if num_rows > weights.rows.q.shape[0]:
        raise ValueError("more rows than the buffer of quantised inputs has")
    width = min(weights.inputs, x.shape[1])
    quantise_rows(work.thread, work.threads, num_rows, x, width, weights.per_row, weights.rows)
    barrier(work)
    return IntegerMatrix(weights.parts[layer], weights.inputs, weights.outputs, weights.per_row)


@overload(linear)
def _integer_linear(x, num_rows, weights, layer, out, work):
    if not is_kind(weights, IntegerLinear):
        return None

    def multiply(x, num_rows, weights, layer, out, work):
        matrix = _prepared(x, num_rows, weights, layer, work)
        product_share(weights.rows, num_rows, matrix, out, work)
        barrier(work)

    return multiply


@overload(gated_linear)
def _integer_gated_linear(x, num_rows, weights, layer, out, gelu, work):
    if not is_kind(weights, IntegerLinear):
        return None

    def multiply(x, num_rows, weights, layer, out, gelu, work):
        matrix = _prepared(x, num_rows, weights, layer, work)
        _gated_share(weights.rows, num_rows, matrix, out, gelu, work)
        barrier(work)

    return multiply
