"""Adapters in the forward pass: y += scale * (x @ A) @ B for the rows that have one.

One record (StepAdapters) and three functions that step.py calls after each product. The base
product is the same as without adapters, so a row without one gets the same bits. A row with
one gets, for every weight kind and every number of rows and threads,

    t = 0;  for k in 0 .. K-1:     t = fma(x[k], A[k], t)       t = t * scale
    d = 0;  for j in 0 .. rank-1:  d = fma(t[j], B[j], d)       y = y + d

in float32 and in that order: lanes are outputs, as in linear.py. A and B are kept as the adapter's
file has them (FORMS) and widened where they are read, which is exact: the memory that a step reads
is what many adapters cost. adapters.py packs adapters and holds them in memory.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from drafters.jit import allocating, borrowing
from server.model.cpu.kernels.ir import (
    F32,
    I16,
    I64,
    choose,
    floats,
    function,
    i64,
    load,
    load_bf16,
    load_f16,
    store,
    word,
)  # fmt: skip
from server.model.cpu.kernels.ir import product as emit_product
from server.model.cpu.kernels.linear import linear
from server.model.cpu.kernels.team import barrier
from server.model.cpu.kernels.vectors import gelu_gate, scaled_product, silu_gate
from server.model.cpu.records import ADAPTER_FORMS as FORMS
from server.model.cpu.records import ADAPTER_ROWS as ROWS
from server.model.cpu.records import ADAPTER_WIDE as _WIDE
from server.model.cpu.records import GATE_UP, LANES, WIDE_REGISTERS

_TILE = _WIDE * LANES


def _define_product(num_rows: int, vectors: int, form: int, b: Any, args: Any) -> None:
    """c[m, 0:width] = sum_k x[m, k] * w[k, 0:width], m < num_rows, width = 16 * vectors."""
    x, ldx, w, ldw, k, c, ldc = args
    element, read = ((F32, load), (I16, load_bf16), (I16, load_f16))[form]
    wp = b.inttoptr(w, element.as_pointer())

    def weights(index: Any) -> list[Any]:
        base = b.mul(index, ldw)
        return [read(b, wp, b.add(base, i64(v * LANES))) for v in range(vectors)]

    emit_product(b, (num_rows, vectors), (x, ldx, k), weights, (c, ldc))


class _Product(NamedTuple):
    """c[m, :] = x[m, :] @ w for m < num: addresses, strides of rows in elements, w's form."""

    x: int
    ldx: int
    num: int
    w: int
    ldw: int
    k: int
    c: int
    ldc: int
    form: int


def _make_product(vectors: int) -> Any:
    """A word: 1, 2 or 4 rows of a _Product from row m on, 16 * vectors columns."""

    @word(None, int, int, _Product)
    def product(b: Any, num: Any, m: Any, task: Any) -> None:
        x, ldx, _, w, ldw, k, c, ldc, form = (b.extract_value(task, i) for i in range(9))
        rows = b.mul(m, i64(4))
        given = [b.add(x, b.mul(rows, ldx)), ldx, w, ldw, k, b.add(c, b.mul(rows, ldc)), ldc]

        def emit(num_rows: int, of: int) -> None:
            name = f"tailor_lora_{num_rows}_{vectors}_{of}"
            define = partial(_define_product, num_rows, vectors, of)
            b.call(function(b, name, [I64] * 7, ir.VoidType(), define), given)

        cases = {3 * n + of: partial(emit, n, of) for n in (1, 2, 4) for of in range(len(FORMS))}
        choose(b, b.add(b.mul(num, i64(3)), form), cases)

    return product


_wide_product, _one_product = _make_product(_WIDE), _make_product(1)


@allocating
def _columns(task, v, wide):
    """Vector v of the columns, or _WIDE of them from it on: the same bits each way."""
    x, ldx, num, w, ldw, k, c, ldc, form = task
    w += v * LANES * (4 if form == 0 else 2)
    own = _Product(x, ldx, num, w, ldw, k, c + v * LANES * 4, ldc, form)
    most, m = 4, 0
    if wide and not WIDE_REGISTERS:
        most = 2  # whose sums narrow registers hold
    while m < num:
        rows = most if num - m >= most else 2 if num - m >= 2 else 1
        if wide:
            _wide_product(rows, m, own)
        else:
            _one_product(rows, m, own)
        m += rows


@allocating
def _multiply(task, vectors):
    """Over so many vectors of columns."""
    v = 0
    while vectors - v >= _WIDE:
        _columns(task, v, True)
        v += _WIDE
    while v < vectors:
        _columns(task, v, False)
        v += 1


@word(None, int, int)
def _add_vector(b: Any, d: Any, y: Any) -> None:
    """y += d for 16 floats at addresses d and y."""
    d, y = floats(b, d), floats(b, y)
    zero = i64(0)
    store(b, b.fadd(load(b, y, zero), load(b, d, zero)), y, zero)


@allocating
def _add_part(t, num, row, part, form, alternate, tile, out):
    """out[row + m, part's outputs] += t[m, part's columns] @ B for m < num."""
    first, rank, b, at, outputs = part
    size = 4 if form == 0 else 2
    vectors = (outputs + LANES - 1) // LANES
    for v in range(0, vectors, _WIDE):
        some = min(_WIDE, vectors - v)
        _multiply(
            _Product(
                t.ctypes.data + first * 4, t.shape[1], num, b + v * rank * LANES * size,
                some * LANES, rank, tile.ctypes.data, _TILE, form,
            ),
            some,
        )  # fmt: skip
        for i in range(some):
            o = (v + i) * LANES
            column = at + o
            if alternate > 0:
                column = at + o // alternate * 2 * alternate + o % alternate
            for m in range(num):
                if outputs - o >= LANES:
                    y = out.ctypes.data + ((row + m) * out.shape[1] + column) * 4
                    _add_vector(tile.ctypes.data + (m * _TILE + i * LANES) * 4, y)
                else:
                    for lane in range(outputs - o):
                        out[row + m, column + lane] += tile[m, i * LANES + lane]


@allocating
def _add_share(x, adapters, layer, kind, out, first, step):
    """Every step-th span from the first-th on."""
    alternate = adapters.alternate if kind == GATE_UP else 0
    tile = np.empty((ROWS, _TILE), np.float32)
    for s in range(first, adapters.spans.shape[0], step):
        row, num, place = adapters.spans[s]
        a, scales, columns, k, form = adapters.inputs[place, layer, kind]
        if columns == 0:
            continue
        t = np.empty((num, columns), np.float32)
        _multiply(
            _Product(
                x.ctypes.data + row * x.shape[1] * 4, x.shape[1], num, a, columns, k,
                t.ctypes.data, columns, form,
            ),
            columns // LANES,
        )  # fmt: skip
        for m in range(num):
            row_of = t[m].ctypes.data
            scaled_product(row_of, np.float32(1.0), scales, row_of, columns // LANES)
        for p in range(adapters.parts.shape[3]):
            part = adapters.parts[place, layer, kind, p]
            if part[4] > 0:
                _add_part(t, num, row, part, form, alternate, tile, out)


@borrowing
def add_lora(x, adapters, layer, kind, out, work):
    """out[r] += scale * (x[r] @ A) @ B for the rows of every span; x [*, at least K].

    By all threads; x and out are complete before, and out is after.
    """
    if adapters.spans.shape[0] > 0:
        _add_share(x, adapters, layer, kind, out, work.thread, work.threads)
        barrier(work)


@allocating
def _gate_rows(first, step, num_rows, adapters, out, gelu):
    wide, alternate, inner = adapters.wide, adapters.alternate, adapters.inner
    vectors = (inner + LANES - 1) // LANES
    for r in range(first, num_rows, step):
        row, target = wide[r].ctypes.data, out[r].ctypes.data
        for v in range(vectors):
            o = v * LANES
            column = o
            if alternate > 0:
                column = o // alternate * 2 * alternate + o % alternate
            gate, up = row + column * 4, row + (column + adapters.up) * 4
            if gelu:
                gelu_gate(gate, up, target + o * 4, 1)
            else:
                silu_gate(gate, up, target + o * 4, 1)
        for i in range(inner, out.shape[1]):
            out[r, i] = 0.0


@borrowing
def gated_linear_lora(x, num_rows, weights, layer, adapters, out, gelu, work):
    """linear.gated_linear with the adapters' share of gate and up.

    The same bits for a row without an adapter: gate and up are the same sums, which here go
    through a buffer.
    """
    linear(x, num_rows, weights, layer, adapters.wide, work)
    add_lora(x, adapters, layer, GATE_UP, adapters.wide, work)
    _gate_rows(work.thread, work.threads, num_rows, adapters, out, gelu)
    barrier(work)
