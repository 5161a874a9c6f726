"""Adapters in the forward pass: y += scale * (x @ A) @ B for the rows that have one.

One record (StepAdapters) and three functions that forward.py calls after each product. The base
product is the same as without adapters, so a row without one gets the same bits. A row with
one gets, for every weight kind and every number of rows and threads,

    t = 0;  for k in 0 .. K-1:     t = fma(x[k], A[k], t)       t = t * scale
    d = 0;  for j in 0 .. rank-1:  d = fma(t[j], B[j], d)       y = y + d

in float32 and in that order: lanes are outputs, as in kernels.py. A and B are kept as the adapter's
file has them (FORMS) and widened where they are read, which is exact: the memory that a step reads
is what many adapters cost. adapters.py packs adapters and holds them in memory.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from server.model.cpu.kernels import VECTORS_PER_PANEL, borrows, gelu_gate, silu_gate
from server.model.cpu.linear import linear
from server.model.cpu.records import Float32, Int64
from server.model.cpu.team import barrier
from server.model.cpu.vector_ir import (
    F32,
    I16,
    LANES,
    Loop,
    floats,
    i64,
    intrinsic,
    load,
    load_bf16,
    load_f16,
    store,
)
from server.model.cpu.vector_ir import product as emit_product

KINDS = ("qkv", "out", "gate_up", "down", "conv_in", "conv_out")
"""The products of a layer, by the names of records.Layers."""
QKV, OUT, GATE_UP, DOWN, CONV_IN, CONV_OUT = range(len(KINDS))

FORMS = ("float32", "bfloat16", "float16")
"""What an adapter's matrices are kept in; a form's place is its number."""

ROWS = 4
"""Most rows of one span: one thread's item."""

_WIDE = max(2, VECTORS_PER_PANEL)  # vectors of a wide kernel: 4 rows of them fill the registers
_TILE = _WIDE * LANES

# These make arrays; their callers (kernels.borrows) do not.
_COUNTED: dict[str, Any] = {"_nrt": True}
_serial = njit(nogil=True, cache=True, error_model="numpy", **_COUNTED)


def in_blocks(matrix: Float32) -> Float32:
    """[rank, outputs in whole vectors] as a step reads it, flat: block after block of _TILE outputs
    (the last one of what is left), each [rank, outputs]. Rows of the whole matrix lie too close for
    a processor to fetch several of them ahead."""
    blocks = [matrix[:, at : at + _TILE].reshape(-1) for at in range(0, matrix.shape[1], _TILE)]
    return np.concatenate(blocks)


class StepAdapters(NamedTuple):
    """The adapters of a step's rows. P: places, L: layers.

    spans: int64 [n, 3]: first row, rows (1 .. ROWS), place; empty in a step without adapters.
    inputs: int64 [P, L, kinds, 5]: address of A ([K, columns]), address of its scales (float32
    [columns]), columns (whole vectors; 0: the product has no adapter), K, number of the form of A
    and B. parts: int64 [P, L, kinds, 3, 5]: first column of x @ A, rank, address of B (as
    `in_blocks` gives it), first output, outputs (0: no part).
    alternate, up: gate and up outputs lie in runs of `alternate`, one of each in turn, or one after
    the other where it is 0; the first of up is `up`. inner: outputs of each. wide: float32 [rows,
    outputs of gate and up], a buffer; [0, 0] while no adapter is in memory.
    """

    spans: Int64
    inputs: Int64
    parts: Int64
    alternate: int
    up: int
    inner: int
    wide: Float32


def _make_product(num_rows: int, vectors: int) -> Any:
    """c[m, 0:width] = sum_k x[m, k] * w[k, 0:width], m < num_rows, width = 16 * vectors.

    (addresses of x, w and c; strides of their rows in elements; K >= 1; form of w).
    """

    @intrinsic
    def product(typingctx: Any, x: Any, w: Any, c: Any, strides: Any, k: Any, form: Any) -> Any:
        three = types.UniTuple(types.intp, 3)
        sig = types.void(types.intp, types.intp, types.intp, three, types.intp, types.intp)

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            x, w, c, strides, k, form = args
            ldx, ldw, ldc = (b.extract_value(strides, i) for i in range(3))

            def sums(element: Any, read: Any) -> None:
                wp = b.inttoptr(w, element.as_pointer())

                def weights(index: Any) -> list[Any]:
                    base = b.mul(index, ldw)
                    return [read(b, wp, b.add(base, i64(v * LANES))) for v in range(vectors)]

                emit_product(b, (num_rows, vectors), (x, ldx, k), weights, (c, ldc))

            forms = ((F32, load), (I16, load_bf16), (I16, load_f16))
            for number, (element, read) in enumerate(forms):
                with b.if_then(b.icmp_signed("==", form, i64(number))):
                    sums(element, read)
            return context.get_dummy_value()

        return sig, codegen

    return product


_wide1, _wide2, _wide4 = (_make_product(m, _WIDE) for m in (1, 2, 4))
_one1, _one2, _one4 = (_make_product(m, 1) for m in (1, 2, 4))


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


@_serial
def _columns(task, v, wide):
    """Vector v of the columns, or _WIDE of them from it on: the same bits each way."""
    x, ldx, num, w, ldw, k, c, ldc, form = task
    strides = (ldx, ldw, ldc)
    w += v * LANES * (4 if form == 0 else 2)
    c += v * LANES * 4
    m = 0
    while num - m >= 4:
        if wide:
            _wide4(x + m * ldx * 4, w, c + m * ldc * 4, strides, k, form)
        else:
            _one4(x + m * ldx * 4, w, c + m * ldc * 4, strides, k, form)
        m += 4
    if num - m >= 2:
        if wide:
            _wide2(x + m * ldx * 4, w, c + m * ldc * 4, strides, k, form)
        else:
            _one2(x + m * ldx * 4, w, c + m * ldc * 4, strides, k, form)
        m += 2
    if num - m >= 1:
        if wide:
            _wide1(x + m * ldx * 4, w, c + m * ldc * 4, strides, k, form)
        else:
            _one1(x + m * ldx * 4, w, c + m * ldc * 4, strides, k, form)


@_serial
def _multiply(task, vectors):
    """Over so many vectors of columns."""
    v = 0
    while vectors - v >= _WIDE:
        _columns(task, v, True)
        v += _WIDE
    while v < vectors:
        _columns(task, v, False)
        v += 1


@intrinsic
def _add_vector(typingctx: Any, d: Any, y: Any) -> Any:
    """y += d for 16 floats at addresses d and y."""
    sig = types.void(types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        d, y = (floats(b, address) for address in args)
        zero = i64(0)
        store(b, b.fadd(load(b, y, zero), load(b, d, zero)), y, zero)
        return context.get_dummy_value()

    return sig, codegen


@_serial
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


@_serial
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
        _scale(t, scales)
        for p in range(adapters.parts.shape[3]):
            part = adapters.parts[place, layer, kind, p]
            if part[4] > 0:
                _add_part(t, num, row, part, form, alternate, tile, out)


@borrows
def add_lora(x, adapters, layer, kind, out, work):
    """out[r] += scale * (x[r] @ A) @ B for the rows of every span; x [*, at least K].

    By all threads; x and out are complete before, and out is after.
    """
    if adapters.spans.shape[0] > 0:
        _add_share(x, adapters, layer, kind, out, work.thread, work.threads)
        barrier(work)


@intrinsic
def _scale_rows(typingctx: Any, t: Any, scales: Any, num: Any) -> Any:
    """t[i] *= scales[i] for 16 * num floats at addresses t and scales."""
    sig = types.void(types.intp, types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        t, scales, num = args
        tf, sf = floats(b, t), floats(b, scales)
        loop = Loop(b, num, [])
        at = b.mul(loop.index, i64(LANES))
        store(b, b.fmul(load(b, tf, at), load(b, sf, at)), tf, at)
        loop.close([])
        return context.get_dummy_value()

    return sig, codegen


@_serial
def _scale(t, scales):
    for m in range(t.shape[0]):
        _scale_rows(t[m].ctypes.data, scales, t.shape[1] // LANES)


@_serial
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


@borrows
def gated_linear_lora(x, num_rows, weights, layer, adapters, out, gelu, work):
    """linear.gated_linear with the adapters' share of gate and up.

    The same bits for a row without an adapter: gate and up are the same sums, which here go
    through a buffer.
    """
    linear(x, num_rows, weights, layer, adapters.wide, work)
    add_lora(x, adapters, layer, GATE_UP, adapters.wide, work)
    _gate_rows(work.thread, work.threads, num_rows, adapters, out, gelu)
    barrier(work)
