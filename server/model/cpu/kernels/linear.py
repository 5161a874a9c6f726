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

from typing import NamedTuple

import numpy as np

from drafters.jit import borrowing, entry_run_by
from server.model.cpu.kernels.integer_linear import (
    even_span,
    integer_gated_linear,
    integer_linear,
)
from server.model.cpu.kernels.team import barrier, begin_items, run, take, take_near
from server.model.cpu.kernels.vectors import (
    HALVES,
    PanelTask,
    gate_rows,
    half_panel_product,
    panel_product,
    soft_cap,
)  # fmt: skip
from server.model.cpu.records import (
    BFLOAT16,
    INTEGERS,
    LANES,
    MAX_ROWS,
    PANEL,
    Float32x2,
    Linear,
    Work,
)


class _Task(NamedTuple):
    """One product in addresses: x [num_rows, k], weights, out (row stride ldo)."""

    x: int
    num_rows: int
    k: int
    panels: int
    num_panels: int
    bf16: bool
    out: int
    ldo: int


@borrowing
def _product_share(task, work):
    """One thread's share of out = x @ W: (panel, span of rows) items.

    Panels that are left over when each thread has had as many are split by columns.
    """
    x, num_rows, k, panels, num_panels, bf16, out, ldo = task
    item_bytes = 2 if bf16 else 4
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
        own = PanelTask(
            x + first * k * 4, k, panels + p * size, k, out + (first * ldo + p * PANEL) * 4,
            ldo, following, 0,
        )  # fmt: skip
        panel_product(own, min(span, num_rows - first), bf16)
        item = then
    part = take(work)
    while part < (num_panels - num_whole) * HALVES:
        column = (num_whole + part // HALVES) * PANEL + part % HALVES * (PANEL // HALVES)
        p = column // PANEL
        own = PanelTask(
            x, k, panels + p * size + column % PANEL * item_bytes, k, out + column * 4, ldo, 0, 0
        )
        half_panel_product(own, num_rows, bf16)
        part = take(work)


@borrowing
def _gated_share(task, gelu, work):
    """One thread's share of out = act(x @ gate) * (x @ up); gate and up panels alternate."""
    pairs = work.pairs[work.thread].ctypes.data
    x, num_rows, k, panels, num_panels, bf16, out, ldo = task
    size = k * PANEL * (2 if bf16 else 4)
    span, num_spans = even_span(num_rows, MAX_ROWS)
    num_items = num_panels // 2 * num_spans
    item = take_near(work, num_items)
    while item >= 0:
        then = take_near(work, num_items)
        p = item // num_spans
        first = item % num_spans * span
        num = min(span, num_rows - first)
        rows = x + first * k * 4
        at = panels + 2 * p * size
        following = panels + then // num_spans * 2 * size if then >= 0 else 0
        gate = PanelTask(rows, k, at, k, pairs, 2 * PANEL, at + size, 0)
        panel_product(gate, num, bf16)
        up = PanelTask(rows, k, at + size, k, pairs + PANEL * 4, 2 * PANEL, following, 0)
        panel_product(up, num, bf16)
        gate_rows(pairs, PANEL, num, out + (first * ldo + p * PANEL) * 4, ldo, gelu)
        item = then


@borrowing
def _task(x, num_rows, weights, layer, out):
    """A product of floats in addresses, begun."""
    return _Task(
        x.ctypes.data, num_rows, x.shape[1], weights.parts[layer, 0, 0], weights.outputs // PANEL,
        weights.kind == BFLOAT16, out.ctypes.data, out.shape[1],
    )  # fmt: skip


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
        _product_share(_task(x, num_rows, weights, layer, out), work)
        barrier(work)


@borrowing
def gated_linear(x, num_rows, weights, layer, out, gelu, work):
    """out[m, :] = act(gate) * up, where W @ x[m, :] has gate and up: of floats in alternating
    panels, of integers in two parts. out [*, half of the outputs]."""
    if weights.kind == INTEGERS:
        integer_gated_linear(x, num_rows, weights, layer, out, gelu, work)
    else:
        begin_items(work)
        barrier(work)
        _gated_share(_task(x, num_rows, weights, layer, out), gelu, work)
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
