"""What a step writes of a row into the KV cache, and the rotation before it (attention.py).

What is stored of a position is a function of its key and value alone.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from server.model.cpu.attention_kernels import HALF, I8, size_of
from server.model.cpu.integers.quantise import factor_of
from server.model.cpu.kernels import float_at, inline, set_float
from server.model.cpu.vector_ir import (
    F32,
    I16,
    I32,
    LANES,
    Loop,
    floats,
    i64,
    intrinsic,
    load,
    splat,
    store,
)

__all__ = ["rotate", "store_key", "store_value"]

_MOST_HALF = 65504.0


def _stored(b: Any, kind: Any, x: Any, factor: Any) -> Any:
    """A float32, or a vector of them, as a plane keeps it: itself; the bits of the nearest float16,
    at most 65504; or round_to_even(x * factor), 0 where factor is."""
    wide = isinstance(x.type, ir.VectorType)

    def of(scalar: Any) -> Any:
        return ir.VectorType(scalar, LANES) if wide else scalar

    def same(value: float) -> Any:
        return ir.Constant(of(F32), [value] * LANES if wide else value)

    if kind == types.float32:
        return x
    if kind == types.uint16:
        for sign, most in (("<", -_MOST_HALF), (">", _MOST_HALF)):
            x = b.select(b.fcmp_ordered(sign, x, same(most)), same(most), x)
        return b.bitcast(b.fptrunc(x, of(HALF)), of(I16))
    scaled = b.fmul(x, splat(b, factor) if wide else factor)
    unknown = b.fcmp_ordered("==", factor, ir.Constant(F32, 0.0))
    scaled = b.select(unknown, same(0.0), scaled)
    name = f"llvm.rint.v{LANES}f32" if wide else "llvm.rint.f32"
    fn = b.module.globals.get(name)
    if fn is None:
        fn = ir.Function(b.module, ir.FunctionType(of(F32), [of(F32)]), name)
    return b.trunc(b.fptosi(b.call(fn, [scaled]), of(I32)), of(I8))


@intrinsic
def _put(typingctx: Any, plane: Any, index: Any, x: Any, factor: Any) -> Any:
    """Number `index` of a Plane = x, as it keeps it."""
    sig = types.void(plane, types.intp, types.float32, types.float32)
    kind = plane.types[3]

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        plane, index, x, factor = args
        value = _stored(b, kind, x, factor)
        at = b.add(b.extract_value(plane, 0), b.mul(index, i64(size_of(kind))))
        b.store(value, b.inttoptr(at, value.type.as_pointer()))
        return context.get_dummy_value()

    return sig, codegen


def _make_put_vectors(stride: int) -> Any:
    """As _put for 16 * num floats at address x: numbers `stride` apart, from `first` on."""

    @intrinsic
    def put(typingctx: Any, plane: Any, first: Any, x: Any, num: Any, factor: Any) -> Any:
        sig = types.void(plane, types.intp, types.intp, types.intp, types.float32)
        kind = plane.types[3]

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            plane, first, x, num, factor = args
            size = size_of(kind)
            start = b.add(b.extract_value(plane, 0), b.mul(first, i64(size)))
            loop = Loop(b, num, [])
            at = b.mul(loop.index, i64(LANES))
            value = _stored(b, kind, load(b, floats(b, x), at), factor)
            to = b.add(start, b.mul(at, i64(stride * size)))
            parts = [value]
            if stride > 1:
                parts = [b.extract_element(value, ir.Constant(I32, i)) for i in range(LANES)]
            for i, part in enumerate(parts):
                where = b.add(to, i64(i * stride * size))
                b.store(part, b.inttoptr(where, part.type.as_pointer())).align = size
            loop.close([])
            return context.get_dummy_value()

        return sig, codegen

    return put


_put_keys, _put_values = _make_put_vectors(LANES), _make_put_vectors(1)


@intrinsic
def _rotate_vectors(typingctx: Any, x: Any, cos: Any, sin: Any, half: Any, num: Any) -> Any:
    """(a, b) = (a cos - b sin, b cos + a sin) in place for a the first 16 * num floats at address
    x, b as many at x + half floats."""
    sig = types.void(*([types.intp] * 5))

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, cos, sin, half, num = args
        xf, cf, sf = floats(b, x), floats(b, cos), floats(b, sin)
        loop = Loop(b, num, [])
        at = b.mul(loop.index, i64(LANES))
        low, high = load(b, xf, at), load(b, xf, b.add(at, half))
        c, s = load(b, cf, at), load(b, sf, at)
        store(b, b.fsub(b.fmul(low, c), b.fmul(high, s)), xf, at)
        store(b, b.fadd(b.fmul(high, c), b.fmul(low, s)), xf, b.add(at, half))
        loop.close([])
        return context.get_dummy_value()

    return sig, codegen


@inline
def rotate(x, cos, sin, half):
    """Rotary embedding in place: halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).

    x: 2 * half floats; cos, sin: half floats; addresses.
    """
    whole = half // LANES
    if whole > 0:
        _rotate_vectors(x, cos, sin, half, whole)
    for i in range(whole * LANES, half):
        a, b = float_at(x, i), float_at(x, half + i)
        c, s = float_at(cos, i), float_at(sin, i)
        set_float(x, i, a * c - b * s)
        set_float(x, half + i, b * c + a * s)


@inline
def _factor(plane, slot, x, num):
    """What a head's numbers are multiplied by before rounding; their scale goes to its place."""
    top = np.float32(0.0)
    for i in range(num):
        size = abs(float_at(x, i))
        if size > top or size != size:  # NaN stays
            top = size
    scale, factor = factor_of(top)
    set_float(plane.scales, slot, scale)
    return factor


@inline
def store_key(keys, scaled, slot, x, num):
    """`num` floats at address x into their slot of a Plane of keys; scaled: it has scales."""
    factor = _factor(keys, slot, x, num) if scaled else np.float32(1.0)
    first = slot // LANES * num * LANES + slot % LANES
    whole = num // LANES
    if whole > 0:
        _put_keys(keys, first, x, whole, factor)
    for i in range(whole * LANES, num):
        _put(keys, first + i * LANES, float_at(x, i), factor)


@inline
def store_value(values, scaled, slot, x, num):
    """`num` floats at address x into their slot of a Plane of values; scaled: it has scales."""
    factor = _factor(values, slot, x, num) if scaled else np.float32(1.0)
    whole = num // LANES
    if whole > 0:
        _put_values(values, slot * values.width, x, whole, factor)
    for i in range(whole * LANES, num):
        _put(values, slot * values.width + i, float_at(x, i), factor)
