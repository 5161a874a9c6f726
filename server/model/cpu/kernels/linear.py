"""Matrix products of a step: out = W @ x for all rows, work shared between threads.

    linear(x, num_rows, weights, layer, out, work)
    gated_linear(x, num_rows, weights, layer, out, gelu, work)

are called with all threads of the team (team.py). weights: records.Linear, of any kind. Row r of x
is complete, or it is this thread's own (r % threads == thread) and complete; `out` is complete for
all threads when they return. Each row has the same bits whatever the other rows are and however
many threads there are. `product` is `linear` on one matrix, for callers in Python.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np

from drafters.jit import borrowing, entry_run_by
from server.model.cpu.kernels.integer_linear import (
    even_span,
    integer_gated_linear,
    integer_linear,
    integer_outputs,
)
from server.model.cpu.kernels.team import barrier, begin_items, run, take, take_near
from server.model.cpu.kernels.vectors import (
    HALF,
    Product,
    columns_product,
    gate_rows,
    panel_product,
    soft_cap,
)  # fmt: skip
from server.model.cpu.records import (
    FLOAT32,
    INTEGERS,
    LANES,
    MAX_ROWS,
    PANEL,
    Float32x2,
    Linear,
    Work,
)


@borrowing
def _product_share(x, num_rows, weights, layer, out, work):
    """One thread's share of out = x @ W: (panel, span of rows) items.

    Panels that are left over when each thread has had as many are split by columns.
    """
    x_at, k, to, ldo = x.ctypes.data, x.shape[1], out.ctypes.data, out.shape[1]
    panels, num_panels = weights.parts[layer, 0, 0], weights.outputs // PANEL
    item_bytes = 4 if weights.kind == FLOAT32 else 2
    size = k * PANEL * item_bytes
    span, num_spans = even_span(num_rows, MAX_ROWS)
    num_whole = num_panels
    if num_spans == 1:
        num_whole -= num_panels % work.threads
    num_items = num_whole * num_spans
    item = take_near(work, num_items)
    while item >= 0:
        then = take_near(work, num_items)
        p = item // num_spans
        first = item % num_spans * span
        following = panels + then // num_spans * size if then >= 0 else 0
        own = Product(
            x_at + first * k * 4, k, panels + p * size, PANEL, k,
            to + (first * ldo + p * PANEL) * 4, ldo, following, 0, weights.kind,
        )  # fmt: skip
        panel_product(own, min(span, num_rows - first))
        item = then
    part = take(work)
    halves = PANEL // (HALF * LANES)
    while part < (num_panels - num_whole) * halves:
        column = num_whole * PANEL + part * HALF * LANES
        p = column // PANEL
        own = Product(
            x_at, k, panels + p * size + column % PANEL * item_bytes, PANEL, k, to + column * 4,
            ldo, 0, 0, weights.kind,
        )  # fmt: skip
        columns_product(own, num_rows, HALF, 4)
        part = take(work)


@borrowing
def _gated_share(x, num_rows, weights, layer, out, gelu, work):
    """One thread's share of out = act(x @ gate) * (x @ up); gate and up panels alternate."""
    pairs, kind = work.pairs[work.thread].ctypes.data, weights.kind
    k, ldo = x.shape[1], out.shape[1]
    panels, num_panels = weights.parts[layer, 0, 0], weights.outputs // PANEL
    size = k * PANEL * (4 if kind == FLOAT32 else 2)
    span, num_spans = even_span(num_rows, MAX_ROWS)
    num_items = num_panels // 2 * num_spans
    item = take_near(work, num_items)
    while item >= 0:
        then = take_near(work, num_items)
        p = item // num_spans
        first = item % num_spans * span
        num = min(span, num_rows - first)
        rows = x.ctypes.data + first * k * 4
        at = panels + 2 * p * size
        following = panels + then // num_spans * 2 * size if then >= 0 else 0
        gate = Product(rows, k, at, PANEL, k, pairs, 2 * PANEL, at + size, 0, kind)
        panel_product(gate, num)
        up = Product(rows, k, at + size, PANEL, k, pairs + PANEL * 4, 2 * PANEL, following, 0, kind)
        panel_product(up, num)
        target = out.ctypes.data + (first * ldo + p * PANEL) * 4
        gate_rows(pairs, PANEL, num, target, ldo, gelu)
        item = then


@borrowing
def linear(x, num_rows, weights, layer, out, work):
    """out[m, :] = W @ x[m, :] for m < num_rows; x [*, k], out [*, outputs in whole panels].

    weights: Linear; layer: which of its matrices.
    """
    if weights.kind == INTEGERS:
        integer_linear(x, num_rows, weights, layer, out, work)
    else:
        begin_items(work)
        barrier(work)
        _product_share(x, num_rows, weights, layer, out, work)
        barrier(work)


@borrowing
def outputs_of(x, row, first, weights, out, work):
    """out[row, first : first + LANES] as `linear` has them, of a matrix in one part; first: a
    multiple of LANES."""
    if weights.kind == INTEGERS:
        integer_outputs(row, first, weights, out, work)
        return
    k, item_bytes = x.shape[1], 4 if weights.kind == FLOAT32 else 2
    at = (first // PANEL * k * PANEL + first % PANEL) * item_bytes + weights.parts[0, 0, 0]
    to = out.ctypes.data + (row * out.shape[1] + first) * 4
    own = Product(x.ctypes.data + row * k * 4, k, at, PANEL, k, to, 0, 0, 0, weights.kind)
    columns_product(own, 1, 1, 1)


@borrowing
def gated_linear(x, num_rows, weights, layer, out, gelu, work):
    """out[m, :] = act(gate) * up, where W @ x[m, :] has gate and up: of floats in alternating
    panels, of integers in two parts. out [*, half of the outputs]."""
    if weights.kind == INTEGERS:
        integer_gated_linear(x, num_rows, weights, layer, out, gelu, work)
    else:
        begin_items(work)
        barrier(work)
        _gated_share(x, num_rows, weights, layer, out, gelu, work)
        barrier(work)


@entry_run_by(run)
@borrowing
def product(
    thread: int, x: Float32x2, num_rows: int, weights: Linear, out: Float32x2, cap: float,
    work: Work,
) -> None:  # fmt: skip
    """`linear` on the record's first matrix, by the whole team; cap: of logits.

    With a cap above 0, out[m] = cap * tanh((W @ x[m]) / cap); out [*, a multiple of 16].
    """
    work = Work(work.sync, work.pairs, work.threads, thread)
    linear(x, num_rows, weights, 0, out, work)
    if cap > 0.0:
        for m in range(thread, num_rows, work.threads):
            soft_cap(out[m].ctypes.data, out.shape[1] // LANES, np.float32(1.0), np.float32(cap))
