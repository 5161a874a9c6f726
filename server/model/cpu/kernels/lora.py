"""Adapters in the forward pass: y += scale * (x @ A) @ B for the rows that have one.

One record (StepAdapters) and three functions that step.py calls after each product. The base
product is the same as without adapters, so a row without one gets the same bits. A row with
one gets, for every weight kind and every number of rows and threads,

    t = 0;  for k in 0 .. K-1:     t = fma(x[k], A[k], t)       t = t * scale
    d = 0;  for j in 0 .. rank-1:  d = fma(t[j], B[j], d)       y = y + d

in float32 and in that order: lanes are outputs, as in linear.py. A and B are kept as the adapter's
file has them (FLOAT_TYPES) and widened where they are read, which is exact: the memory that a step
reads is what many adapters cost. adapters.py packs adapters and holds them in memory.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np

from drafters.jit import allocating, borrowing
from server.model.cpu.kernels.linear import linear
from server.model.cpu.kernels.team import barrier
from server.model.cpu.kernels.vectors import (
    Product,
    columns_product,
    float_at,
    gate,
    scaled_product,
    set_float,
)
from server.model.cpu.records import ADAPTER_ROWS as ROWS
from server.model.cpu.records import ADAPTER_WIDE as _WIDE
from server.model.cpu.records import FLOAT32, GATE_UP, LANES, WIDE_REGISTERS

_TILE = _WIDE * LANES


@allocating
def _multiply(num, x, ldx, w, ldw, k, c, ldc, form, vectors):
    """vectors.Product of `num` rows, 16 * vectors columns: _WIDE vectors of them at a time, then
    one."""
    v = 0
    while v < vectors:
        some, most = 1, 4
        if vectors - v >= _WIDE:
            some = _WIDE
            if not WIDE_REGISTERS:
                most = 2  # whose sums narrow registers hold
        at = w + v * LANES * (4 if form == FLOAT32 else 2)
        own = Product(x, ldx, at, ldw, k, c + v * LANES * 4, ldc, at, 0, form)
        columns_product(own, num, some, most)
        v += some


@allocating
def _add_part(t, num, row, part, form, alternate, tile, out):
    """out[row + m, part's outputs] += t[m, part's columns] @ B for m < num."""
    first, rank, b, at, outputs = part
    size = 4 if form == FLOAT32 else 2
    vectors = (outputs + LANES - 1) // LANES
    for v in range(0, vectors, _WIDE):
        some = min(_WIDE, vectors - v)
        _multiply(
            num, t.ctypes.data + first * 4, t.shape[1], b + v * rank * LANES * size, some * LANES,
            rank, tile.ctypes.data, _TILE, form, some,
        )  # fmt: skip
        for i in range(some):
            o = (v + i) * LANES
            column = at + o
            if alternate > 0:
                column = at + o // alternate * 2 * alternate + o % alternate
            for m in range(num):
                y = out.ctypes.data + ((row + m) * out.shape[1] + column) * 4
                for lane in range(min(LANES, outputs - o)):
                    set_float(y, lane, float_at(y, lane) + tile[m, i * LANES + lane])


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
            num, x.ctypes.data + row * x.shape[1] * 4, x.shape[1], a, columns, k, t.ctypes.data,
            columns, form, columns // LANES,
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
            gate(row + column * 4, row + (column + adapters.up) * 4, target + o * 4, 1, gelu)
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
