"""Matrix products of a step: out = W @ x for all rows, work shared between threads.

A weight kind is one record (here FloatLinear: float32 or bfloat16 in panels) and two functions that
forward.py calls for every kind, with all threads of the team (team.py):

    linear(x, num_rows, weights, layer, out, work)
    gated_linear(x, num_rows, weights, layer, out, gelu, work)

Row r of x is complete, or it is this thread's own (r % threads == thread) and complete; `out` is
complete for all threads when they return.

numba picks the implementation by the record's type, so another kind (integers) is a module with a
NamedTuple of its own and an `@overload` of both functions, imported before forward.py is called;
forward.py does not change. A kind must give each row the same bits whatever the other rows are and
however many threads there are. `product` is `linear` on one matrix, for callers in Python.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.extending import overload

from server.model.cpu.integers.forms import PANEL as INTEGER_PANEL
from server.model.cpu.jobs import make_job
from server.model.cpu.kernels import (
    HALVES,
    MAX_ROWS,
    PANEL,
    PanelTask,
    borrows,
    gelu_gate,
    half_panel_product,
    panel_product,
    silu_gate,
)
from server.model.cpu.records import Int64, Work
from server.model.cpu.soft_cap import soft_cap
from server.model.cpu.team import Team, barrier, begin_items, run, take, take_near
from server.model.cpu.vector_ir import LANES

_serial = njit(nogil=True, cache=True, error_model="numpy")

# Most rows of one work item: their inputs stay in a core's L2.
ROW_SPAN = 16 * MAX_ROWS


class FloatLinear(NamedTuple):
    """float32 or bfloat16 weights in panels [num_panels, k, PANEL], one matrix a layer.

    addresses: int64 [layers], of the panels, which the caller keeps alive. bf16: uint16 with
    bfloat16 bits, else float32.
    """

    addresses: Int64
    num_panels: int
    bf16: bool


def float_linear(panels: npt.NDArray[Any]) -> FloatLinear:
    """The record of one matrix: panels [num_panels, k, PANEL], float32 or uint16 (bfloat16)."""
    address = np.array([panels.ctypes.data], np.int64)
    return FloatLinear(address, int(panels.shape[0]), panels.dtype == np.uint16)


def new_work(threads: int, team: Team | None = None, inputs: int = 0) -> Work:
    """What products with so many threads share; team: of that size, made here when None. inputs:
    the most that a product of integers has."""
    # Of the widest panels of any weight kind: floats' are narrower than integers' without AVX-512.
    # A row that integers are made of lies there too, behind a block.
    room = max(2 * ROW_SPAN * max(PANEL, INTEGER_PANEL), inputs + 64)
    pairs = np.zeros((threads, -(-room // 16) * 16), np.float32)
    return Work((team or Team(threads)).sync, pairs, threads, 0)


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


@borrows
def _even_span(num_rows, num_spans):
    """Rows of a span: all spans alike, in whole kernels. Items go panel by panel, so that a panel
    is read from memory once and then from the cache for the other spans."""
    span = (num_rows + num_spans - 1) // num_spans
    if num_spans > 1:
        span = (span + MAX_ROWS - 1) // MAX_ROWS * MAX_ROWS
    return span


@borrows
def _product_share(task, work):
    """One thread's share of out = x @ W: (panel, span of rows) items.

    Panels that are left over when each thread has had as many are split by columns.
    """
    x, num_rows, k, panels, num_panels, bf16, out, ldo = task
    item_bytes = 2 if bf16 else 4
    size = k * PANEL * item_bytes
    num_spans = (num_rows + ROW_SPAN - 1) // ROW_SPAN
    span = _even_span(num_rows, num_spans)
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


@borrows
def _gated_share(task, gelu, work):
    """One thread's share of out = act(x @ gate) * (x @ up); gate and up panels alternate."""
    pairs = work.pairs[work.thread].ctypes.data
    x, num_rows, k, panels, num_panels, bf16, out, ldo = task
    size = k * PANEL * (2 if bf16 else 4)
    num_spans = (num_rows + ROW_SPAN - 1) // ROW_SPAN
    span = _even_span(num_rows, num_spans)
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
        for m in range(num):
            target = out + ((first + m) * ldo + p * PANEL) * 4
            left = pairs + m * 2 * PANEL * 4
            if gelu:
                gelu_gate(left, left + PANEL * 4, target, PANEL // LANES)
            else:
                silu_gate(left, left + PANEL * 4, target, PANEL // LANES)
        item = then


def linear(x, num_rows, weights, layer, out, work):
    """out[m, :] = W @ x[m, :] for m < num_rows; x [*, k], out [*, outputs in whole panels].

    weights: a weight kind's record; layer: which of its matrices. Compiled code only.
    """
    raise NotImplementedError


def gated_linear(x, num_rows, weights, layer, out, gelu, work):
    """out[m, :] = act(gate) * up, where W @ x[m, :] has gate and up in alternating panels.

    out [*, half of the outputs]. Compiled code only.
    """
    raise NotImplementedError


def is_kind(weights: Any, kind: type) -> bool:
    """Whether a numba type is that of a record class: for an overload to pick itself."""
    return getattr(weights, "instance_class", None) is kind


@overload(linear)
def _float_linear(x, num_rows, weights, layer, out, work):
    if not is_kind(weights, FloatLinear):
        return None

    def multiply(x, num_rows, weights, layer, out, work):
        begin_items(work)
        barrier(work)
        task = _Task(
            x.ctypes.data, num_rows, x.shape[1], weights.addresses[layer], weights.num_panels,
            weights.bf16, out.ctypes.data, out.shape[1],
        )  # fmt: skip
        _product_share(task, work)
        barrier(work)

    return multiply


@overload(gated_linear)
def _float_gated_linear(x, num_rows, weights, layer, out, gelu, work):
    if not is_kind(weights, FloatLinear):
        return None

    def multiply(x, num_rows, weights, layer, out, gelu, work):
        begin_items(work)
        barrier(work)
        task = _Task(
            x.ctypes.data, num_rows, x.shape[1], weights.addresses[layer], weights.num_panels,
            weights.bf16, out.ctypes.data, out.shape[1],
        )  # fmt: skip
        _gated_share(task, gelu, work)
        barrier(work)

    return multiply


@borrows
def _logits_share(thread, x, num_rows, weights, out, cap, work):
    work = Work(work.sync, work.pairs, work.threads, thread)
    linear(x, num_rows, weights, 0, out, work)
    if cap > 0.0:
        for m in range(thread, num_rows, work.threads):
            soft_cap(out[m].ctypes.data, out.shape[1] // LANES, np.float32(1.0), np.float32(cap))


_logits_job = make_job(_logits_share)


@_serial
def product(x, num_rows, weights, out, work, cap=0.0):
    """`linear` on the record's first matrix, by the whole team; cap: of logits.

    With a cap above 0, out[m] = cap * tanh((W @ x[m]) / cap); out [*, a multiple of 16].
    """
    run(_logits_job((x, num_rows, weights, out, cap, work)), work)
