"""Activations as integers: int8 with one scale a block of 32, or one a row.

What: quantise_rows, one function of a row (whatever rows stand beside it), in vectors. The
operations, all float32 and each rounded once:
    top = max |x|;  scale = top / 127;  q = round_to_even(x * (127 / top))
A top below 1e-30 gives zeros. A top that is not finite gives zeros with a scale of NaN, so that
every output of the row is NaN and the draw that needs it fails alone.

What a kernel reads beside the int8 numbers is a figure of 16 bytes a block: float32 scale, int32
sum of the block's first 16 numbers, int32 sum of all, float32 scale * sum. With one scale a row
there is one figure a row, over all inputs.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from server.model.cpu.integers.emit import F32, I8, I32, I64, Loop, at, call, i64, splat
from server.model.cpu.kernels import inline
from server.model.cpu.vector_ir import LANES, intrinsic

__all__ = ["Activations", "activations", "factor_of", "quantise_rows"]

_BLOCK = 32
_LEAST = np.float32(1e-30)
_LEVELS = np.float32(127.0)

_INTS = ir.VectorType(I32, LANES)
_FLOATS = ir.VectorType(F32, LANES)
_BYTES = ir.VectorType(I8, LANES)


class Activations(NamedTuple):
    """Rows as integers: q int8 [rows, padded inputs]; figures int32 [rows, blocks, 4] and the same
    memory as float32 in scales."""

    q: npt.NDArray[np.int8]
    figures: npt.NDArray[np.int32]
    scales: npt.NDArray[np.float32]


def activations(num_rows: int, num_inputs: int) -> Activations:
    """Empty buffers for num_rows rows of num_inputs values."""
    padded = -(-num_inputs // _BLOCK) * _BLOCK
    figures = np.zeros((num_rows, padded // _BLOCK, 4), np.int32)
    return Activations(np.zeros((num_rows, padded), np.int8), figures, figures.view(np.float32))


@intrinsic
def _top_of(typingctx: Any, x: Any, blocks: Any) -> Any:
    """max |x[i]| of 32 * blocks floats at address x; NaN where there is one, whatever the order:
    without their sign, floats compare as their bits do, and NaN is above infinity."""
    sig = types.float32(types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, blocks = args
        mask = ir.Constant(_INTS, [0x7FFFFFFF] * LANES)
        loop = Loop(b, blocks, [ir.Constant(_INTS, [0] * LANES)])
        block = b.add(x, b.mul(loop.index, i64(4 * _BLOCK)))
        best = loop.carried[0]
        for part in range(_BLOCK // LANES):
            value = at(b, block, 4 * LANES * part, _FLOATS, 4)
            bits = b.and_(b.bitcast(value, _INTS), mask)
            best = call(b, f"llvm.umax.v{LANES}i32", _INTS, [bits, best])
        (best,) = loop.close([best])
        top = call(b, f"llvm.vector.reduce.umax.v{LANES}i32", I32, [best])
        return b.bitcast(top, F32)

    return sig, codegen


@intrinsic
def _round_block(typingctx: Any, x: Any, factor: Any, out: Any) -> Any:
    """out[i] = int8(round(x[i] * factor)) for 32 floats at address x; their sums: of the first 16
    in the low, of all in the high 32 bits."""
    sig = types.int64(types.intp, types.float32, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, factor, out = args
        factors = splat(b, factor, _FLOATS)
        sums = []
        for part in range(_BLOCK // LANES):
            scaled = b.fmul(at(b, x, 4 * LANES * part, _FLOATS, 4), factors)
            whole = b.fptosi(call(b, f"llvm.rint.v{LANES}f32", _FLOATS, [scaled]), _INTS)
            sums.append(call(b, f"llvm.vector.reduce.add.v{LANES}i32", I32, [whole]))
            where = b.inttoptr(b.add(out, i64(part * LANES)), _BYTES.as_pointer())
            b.store(b.trunc(whole, _BYTES), where).align = 1
        wide = [b.sext(s, I64) for s in (sums[0], b.add(sums[0], sums[1]))]
        low = b.and_(wide[0], i64(0xFFFFFFFF))
        return b.or_(low, b.shl(wide[1], i64(32)))

    return sig, codegen


@inline
def factor_of(top):
    """(scale, 127 / top) of a block with this largest magnitude."""
    if not (top < np.float32(np.inf)):
        return np.float32(np.nan), np.float32(0.0)
    if top < _LEAST:
        return np.float32(0.0), np.float32(0.0)
    return top / _LEVELS, _LEVELS / top


@inline
def _figure(scale, first, whole, figures, scales):
    """One figure: `figures` its four int32, `scales` the same bytes as float32."""
    scales[0] = scale
    figures[1] = first
    figures[2] = whole
    scales[3] = scale * np.float32(whole)


@inline
def quantise_rows(first, step, num_rows, x, num_inputs, per_row, rows):
    """Rows first, first + step, ... of x as integers.

    x: float32 [rows, >= num_inputs], C order. rows: Activations. per_row: one scale a row, in its
    first figure.
    """
    q, figures, scales = rows
    blocks = num_inputs // 32
    tail = num_inputs - 32 * blocks
    pad = np.zeros(32, np.float32)
    for r in range(first, num_rows, step):
        row = x[r].ctypes.data
        out = q[r].ctypes.data
        scale = np.float32(0.0)
        factor = np.float32(0.0)
        if tail > 0:
            pad[:tail] = x[r, 32 * blocks : num_inputs]
        if per_row:
            top = np.float32(0.0)
            if blocks > 0:
                top = _top_of(row, blocks)
            if tail > 0:
                other = _top_of(pad.ctypes.data, 1)
                if top == top and not (other <= top):  # one that is NaN stays
                    top = other
            scale, factor = factor_of(top)
        total = np.int32(0)
        for k in range(blocks + (1 if tail > 0 else 0)):
            source = row + k * 128
            if k == blocks:
                source = pad.ctypes.data
            if not per_row:
                scale, factor = factor_of(_top_of(source, 1))
            halves = np.int64(0)
            if factor == np.float32(0.0):
                q[r, 32 * k : 32 * k + 32] = 0
            else:
                halves = _round_block(source, factor, out + k * 32)
            whole = np.int32(halves >> 32)
            if per_row:
                total += whole
            else:
                _figure(scale, np.int32(halves), whole, figures[r, k], scales[r, k])
        if per_row:
            _figure(scale, np.int32(0), total, figures[r, 0], scales[r, 0])
