"""Activations as integers: int8 with one scale a block of 32, or one a row.

What: quantise_rows, one function of a row (whatever rows stand beside it), in vectors. A row with
one scale is spread first (spread.py). The operations, all float32 and each rounded once:
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

from server.model.cpu.integers.emit import F32, I8, I32, Loop, at, call, i64, splat
from server.model.cpu.integers.spread import FLOATS, INTS, larger, largest, spread_blocks
from server.model.cpu.kernels import inline, set_float
from server.model.cpu.vector_ir import LANES, intrinsic

__all__ = ["Activations", "activations", "factor_of", "quantise_rows"]

_BLOCK = 32
_LEAST = np.float32(1e-30)
_LEVELS = np.float32(127.0)

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


def _rounded(b: Any, x: Any, factor: Any, known: Any, out: Any) -> list[Any]:
    """out[i] = int8(round(x[i] * factor)) for 32 floats at address x, zeros unless `known`; the
    numbers as vectors of int32."""
    factors = splat(b, factor, FLOATS)
    numbers = []
    for part in range(_BLOCK // LANES):
        scaled = b.fmul(at(b, x, 4 * LANES * part, FLOATS, 4), factors)
        scaled = b.select(known, scaled, ir.Constant(FLOATS, [0.0] * LANES))
        whole = b.fptosi(call(b, f"llvm.rint.v{LANES}f32", FLOATS, [scaled]), INTS)
        where = b.inttoptr(b.add(out, i64(part * LANES)), _BYTES.as_pointer())
        b.store(b.trunc(whole, _BYTES), where).align = 1
        numbers.append(whole)
    return numbers


def _sum(b: Any, numbers: Any) -> Any:
    return call(b, f"llvm.vector.reduce.add.v{LANES}i32", I32, [numbers])


def _put_figure(b: Any, figure: Any, scale: Any, first: Any, whole: Any) -> None:
    """Write one figure at an address."""
    of_sum = b.fmul(scale, b.sitofp(whole, F32))
    for i, value in enumerate((scale, first, whole, of_sum)):
        where = b.inttoptr(b.add(figure, i64(4 * i)), value.type.as_pointer())
        b.store(value, where).align = 4


@intrinsic
def _write_figure(typingctx: Any, figure: Any, scale: Any, whole: Any) -> Any:
    """The figure of a row with one scale."""
    sig = types.void(types.intp, types.float32, types.int32)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _put_figure(b, args[0], args[1], ir.Constant(I32, 0), args[2])
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def _round_row(typingctx: Any, x: Any, blocks: Any, factor: Any, out: Any) -> Any:
    """out[i] = int8(round(x[i] * factor)) for 32 * blocks floats at address x, zeros for a factor
    of 0; their sum."""
    sig = types.int32(types.intp, types.intp, types.float32, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, blocks, factor, out = args
        known = b.fcmp_ordered("!=", factor, ir.Constant(F32, 0.0))
        loop = Loop(b, blocks, [ir.Constant(INTS, [0] * LANES)])
        block = b.mul(loop.index, i64(_BLOCK))
        total = loop.carried[0]
        from_, to = b.add(x, b.mul(block, i64(4))), b.add(out, block)
        for numbers in _rounded(b, from_, factor, known, to):
            total = b.add(total, numbers)
        (total,) = loop.close([total])
        return _sum(b, total)

    return sig, codegen


@intrinsic
def _round_blocks(typingctx: Any, x: Any, blocks: Any, out: Any, figures: Any) -> Any:
    """32 * blocks floats at address x, each block with a scale of its own: numbers at address out,
    figures at address figures."""
    sig = types.void(*([types.intp] * 4))

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, blocks, out, figures = args
        loop = Loop(b, blocks, [])
        block = b.mul(loop.index, i64(_BLOCK))
        from_ = b.add(x, b.mul(block, i64(4)))
        best = ir.Constant(INTS, [0] * LANES)
        for part in range(_BLOCK // LANES):
            best = larger(b, best, at(b, from_, 4 * LANES * part, FLOATS, 4))
        top = largest(b, best)
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
        return context.get_dummy_value()

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
def _quantise_row(x, num_inputs, factors, pad, q, figures):
    """One row with one scale, its figure in the first place. Addresses, as in kernels.rms_norm."""
    blocks = num_inputs // _BLOCK
    room = pad + 4 * _BLOCK
    top, whole = np.float32(0.0), blocks
    if blocks > 0:
        top = spread_blocks(x, factors, blocks, room)
    if num_inputs > blocks * _BLOCK:
        done = 4 * _BLOCK * blocks
        other = spread_blocks(pad, factors + done, 1, room + done)
        if top == top and not (other <= top):  # one that is NaN stays
            top = other
        whole += 1
    scale, factor = factor_of(top)
    _write_figure(figures, scale, _round_row(room, whole, factor, q))


@inline
def quantise_rows(first, step, num_rows, x, num_inputs, factors, rows, pad):
    """Rows first, first + step, ... of x as integers.

    x: float32 [rows, >= num_inputs], C order. rows: Activations. factors: 0: a scale a block; else
    one a row, in its first figure, and the address of the product's factors (spread.py), for whole
    blocks. pad: address of 32 floats, for the last inputs where they are no whole block; with
    factors, of a spread row's more.
    """
    blocks = num_inputs // _BLOCK
    tail = num_inputs - _BLOCK * blocks
    for i in range(_BLOCK if tail > 0 else 0):
        set_float(pad, i, np.float32(0.0))
    for r in range(first, num_rows, step):
        row = x.ctypes.data + r * x.shape[1] * 4
        q = rows.q.ctypes.data + r * rows.q.shape[1]
        figures = rows.figures.ctypes.data + r * rows.figures.shape[1] * 16
        for i in range(tail):
            set_float(pad, i, x[r, _BLOCK * blocks + i])
        if factors != 0:
            _quantise_row(row, num_inputs, factors, pad, q, figures)
            continue
        if blocks > 0:
            _round_blocks(row, blocks, q, figures)
        if tail > 0:
            _round_blocks(pad, 1, q + blocks * _BLOCK, figures + blocks * 16)
