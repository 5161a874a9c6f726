"""Rows of inputs as integers: int8 with one scale a block of 32, or one a row.

What: quantise_rows, one function of a row (whatever rows stand beside it), in vectors. A row with
one scale is spread first (integers/weights.py says why). The operations, all float32 and each
rounded once:
    top = max |x|;  scale = top / 127;  q = round_to_even(x * (127 / top))
A top below 1e-30 gives zeros. A top that is not finite gives zeros with a scale of NaN, so that
every output of the row is NaN and the draw that needs it fails alone.

What a kernel reads beside the int8 numbers is a figure of 16 bytes a block: float32 scale, int32
sum of the block's first 16 numbers, int32 sum of all, float32 scale * sum. With one scale a row
there is one figure a row, over all inputs.

Spread: y = x * factors;  for s in 1, 2, 4, 8, 16: y[i], y[i + s] = y[i] + y[i + s], y[i] - y[i + s]
for every i of a block without bit s; all float32, each operation rounded once.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from drafters.jit import compiled, entry
from server.model.cpu.integers.forms import BLOCK
from server.model.cpu.kernels.ir import (
    F32,
    I8,
    I32,
    VEC,
    VECI,
    Loop,
    at,
    call,
    const,
    fma,
    i32,
    i64,
    put,
    splat,
    word,
)  # fmt: skip
from server.model.cpu.kernels.vectors import set_float
from server.model.cpu.records import LANES, WIDE_REGISTERS, Float32, Float32x2

_LEAST = np.float32(1e-30)
_LEVELS = np.float32(127.0)

_BYTES = ir.VectorType(I8, LANES)


def _larger(b: Any, best: Any, value: Any) -> Any:
    """The larger of `best` and the bits of |value|, by lane: without their sign, floats compare as
    their bits do, and NaN is above infinity, whatever the order."""
    bits = b.and_(b.bitcast(value, VECI), const(0x7FFFFFFF, VECI))
    return call(b, f"llvm.umax.v{LANES}i32", VECI, [bits, best])


def _largest(b: Any, bits: Any) -> Any:
    """The largest lane of what `_larger` gives, a float."""
    return b.bitcast(call(b, f"llvm.vector.reduce.umax.v{LANES}i32", I32, [bits]), F32)


def _mixed(b: Any, value: Any, stride: int) -> Any:
    """Sums and differences of lanes that are `stride` apart."""
    swapped = ir.Constant(VECI, [i ^ stride for i in range(LANES)])
    other = b.shuffle_vector(value, ir.Constant(VEC, ir.Undefined), swapped)
    if WIDE_REGISTERS:  # the same numbers: a product with 1 or -1 rounds nothing
        ones = ir.Constant(VEC, [-1.0 if i & stride else 1.0 for i in range(LANES)])
        return fma(b, value, ones, other)
    signs = ir.Constant(VECI, [-(1 << 31) if i & stride else 0 for i in range(LANES)])
    return b.fadd(other, b.bitcast(b.xor(b.bitcast(value, VECI), signs), VEC))


@word(np.float32, int, int, int, int)
def spread_blocks(b: Any, x: Any, factors: Any, blocks: Any, out: Any) -> Any:
    """BLOCK * blocks floats at address x, spread, to address out; their largest magnitude, NaN
    where there is one. factors: address of as many floats."""
    loop = Loop(b, blocks, [const(0, VECI)])
    here = b.mul(loop.index, i64(4 * BLOCK))
    parts = []
    for offset in range(0, 4 * BLOCK, 4 * LANES):
        value = at(b, b.add(x, here), offset, VEC, 4)
        value = b.fmul(value, at(b, b.add(factors, here), offset, VEC, 4))
        for stride in (1, 2, 4, 8):
            value = _mixed(b, value, stride)
        parts.append(value)
    best = loop.carried[0]
    for part, value in enumerate((b.fadd(*parts), b.fsub(*parts))):
        where = b.add(b.add(out, here), i64(4 * LANES * part))
        put(b, value, where, 0, 4)
        best = _larger(b, best, value)
    (best,) = loop.close([best])
    return _largest(b, best)


def _rounded(b: Any, x: Any, factor: Any, known: Any, out: Any) -> list[Any]:
    """out[i] = int8(round(x[i] * factor)) for 32 floats at address x, zeros unless `known`; the
    numbers as vectors of int32."""
    factors = splat(b, factor, VEC)
    numbers = []
    for part in range(BLOCK // LANES):
        scaled = b.fmul(at(b, x, 4 * LANES * part, VEC, 4), factors)
        scaled = b.select(known, scaled, const(0.0))
        whole = b.fptosi(call(b, f"llvm.rint.v{LANES}f32", VEC, [scaled]), VECI)
        put(b, b.trunc(whole, _BYTES), out, part * LANES, 1)
        numbers.append(whole)
    return numbers


def _sum(b: Any, numbers: Any) -> Any:
    return call(b, f"llvm.vector.reduce.add.v{LANES}i32", I32, [numbers])


def _put_figure(b: Any, figure: Any, scale: Any, first: Any, whole: Any) -> None:
    """Write one figure at an address."""
    of_sum = b.fmul(scale, b.sitofp(whole, F32))
    for i, value in enumerate((scale, first, whole, of_sum)):
        put(b, value, figure, 4 * i, 4)


@word(None, int, np.float32, np.int32)
def _write_figure(b: Any, figure: Any, scale: Any, whole: Any) -> Any:
    """The figure of a row with one scale."""
    _put_figure(b, figure, scale, i32(0), whole)


@word(np.int32, int, int, np.float32, int)
def _round_row(b: Any, x: Any, blocks: Any, factor: Any, out: Any) -> Any:
    """out[i] = int8(round(x[i] * factor)) for 32 * blocks floats at address x, zeros for a factor
    of 0; their sum."""
    known = b.fcmp_ordered("!=", factor, ir.Constant(F32, 0.0))
    loop = Loop(b, blocks, [const(0, VECI)])
    block = b.mul(loop.index, i64(BLOCK))
    total = loop.carried[0]
    from_, to = b.add(x, b.mul(block, i64(4))), b.add(out, block)
    for numbers in _rounded(b, from_, factor, known, to):
        total = b.add(total, numbers)
    (total,) = loop.close([total])
    return _sum(b, total)


@word(None, int, int, int, int)
def _round_blocks(b: Any, x: Any, blocks: Any, out: Any, figures: Any) -> Any:
    """32 * blocks floats at address x, each block with a scale of its own: numbers at address out,
    figures at address figures."""
    loop = Loop(b, blocks, [])
    block = b.mul(loop.index, i64(BLOCK))
    from_ = b.add(x, b.mul(block, i64(4)))
    best = const(0, VECI)
    for part in range(BLOCK // LANES):
        best = _larger(b, best, at(b, from_, 4 * LANES * part, VEC, 4))
    top = _largest(b, best)
    finite = b.fcmp_ordered("<", top, ir.Constant(F32, float("inf")))
    known = b.and_(finite, b.fcmp_ordered(">=", top, ir.Constant(F32, float(_LEAST))))
    zero, levels = ir.Constant(F32, 0.0), ir.Constant(F32, float(_LEVELS))
    scale = b.select(known, b.fdiv(top, levels), zero)
    scale = b.select(finite, scale, ir.Constant(F32, float("nan")))
    factor = b.select(known, b.fdiv(levels, top), zero)
    parts = _rounded(b, from_, factor, known, b.add(out, block))
    sums = [_sum(b, part) for part in parts]
    whole = b.add(sums[0], sums[1])
    _put_figure(b, b.add(figures, b.mul(loop.index, i64(16))), scale, sums[0], whole)
    loop.close([])


@compiled
def factor_of(top):
    """(scale, 127 / top) of a block with this largest magnitude."""
    if not (top < np.float32(np.inf)):
        return np.float32(np.nan), np.float32(0.0)
    if top < _LEAST:
        return np.float32(0.0), np.float32(0.0)
    return top / _LEVELS, _LEVELS / top


@compiled
def _quantise_row(x, num_inputs, factors, pad, q, figures):
    """One row with one scale, its figure in the first place. Addresses, as in vectors.rms_norm."""
    blocks = num_inputs // BLOCK
    room = pad + 4 * BLOCK
    top, whole = np.float32(0.0), blocks
    if blocks > 0:
        top = spread_blocks(x, factors, blocks, room)
    if num_inputs > blocks * BLOCK:
        done = 4 * BLOCK * blocks
        other = spread_blocks(pad, factors + done, 1, room + done)
        if top == top and not (other <= top):  # one that is NaN stays
            top = other
        whole += 1
    scale, factor = factor_of(top)
    _write_figure(figures, scale, _round_row(room, whole, factor, q))


@compiled
def quantise_rows(first, step, num_rows, x, num_inputs, factors, rows, pad):
    """Rows first, first + step, ... of x as integers.

    x: float32 [rows, >= num_inputs], C order. rows: Activations. factors: 0: a scale a block; else
    one a row, in its first figure, and the address of the product's factors (integers/weights.py),
    for whole blocks. pad: address of 32 floats, for the last inputs where they are no whole block;
    with factors, of a spread row's more.
    """
    blocks = num_inputs // BLOCK
    tail = num_inputs - BLOCK * blocks
    for i in range(BLOCK if tail > 0 else 0):
        set_float(pad, i, np.float32(0.0))
    for r in range(first, num_rows, step):
        row = x.ctypes.data + r * x.shape[1] * 4
        q = rows.q.ctypes.data + r * rows.q.shape[1]
        figures = rows.figures.ctypes.data + r * rows.figures.shape[1] * 16
        for i in range(tail):
            set_float(pad, i, x[r, BLOCK * blocks + i])
        if factors != 0:
            _quantise_row(row, num_inputs, factors, pad, q, figures)
            continue
        if blocks > 0:
            _round_blocks(row, blocks, q, figures)
        if tail > 0:
            _round_blocks(pad, 1, q + blocks * BLOCK, figures + blocks * 16)


@entry
@compiled
def spread_rows(x: Float32x2, factors: Float32, out: Float32x2) -> None:
    """Rows of whole blocks spread into out, of the same shape."""
    for r in range(x.shape[0]):
        row, to = r * x.shape[1] * 4, r * out.shape[1] * 4
        blocks = x.shape[1] // BLOCK
        spread_blocks(x.ctypes.data + row, factors.ctypes.data, blocks, out.ctypes.data + to)
