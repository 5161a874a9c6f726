"""Attention's vector kernels: a step's queries against blocks of keys and values in the KV cache.

The cache holds numbers in one of three types, and a kernel's loads follow from its array's: float32
as it is; float16 (bits, in uint16); int8 with a float32 scale a head and position. Both small types
are widened in registers. What is stored of a position is a function of its key and value alone, and
keys are added in order, so that a row's result has the same bits whatever rows stand beside it:
    score  = (0; for d in order: fma(q[d], k[d], score)) * scale of the key
    result = for keys in order: fma(p[key] * scale of the value, v[key], result)
without the scales where there are none.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from server.model.cpu.integers.quantise import factor_of
from server.model.cpu.kernels import inline
from server.model.cpu.records import Float32, Numbers
from server.model.cpu.vector_ir import (
    F32,
    I16,
    I64,
    LANES,
    VEC,
    VECI,
    Loop,
    const,
    floats,
    fma,
    i64,
    intrinsic,
    load,
    splat,
    store,
)

__all__ = ["KV_TYPES", "Plane", "add_weighted", "block_scores", "store_key", "store_value"]

KV_TYPES: dict[str, type[Any]] = {"float32": np.float32, "float16": np.uint16, "int8": np.int8}
"""Type of the cache's numbers by the name of `engine.kv_cache_dtype`."""

_I8 = ir.IntType(8)
_HALF = ir.HalfType()
_MOST_HALF = 65504.0


def _address(context: Any, b: Any, kind: Any, array: Any) -> Any:
    """Where an array's numbers begin, as int64."""
    return b.ptrtoint(context.make_array(kind)(context, b, array).data, I64)


def _extent(context: Any, b: Any, kind: Any, array: Any, axis: int) -> Any:
    """An array's length along an axis, as int64."""
    return b.extract_value(context.make_array(kind)(context, b, array).shape, axis)


def _size(kind: Any) -> int:
    """Bytes of a number of an array type."""
    return int(kind.dtype.bitwidth) // 8


def _widened(b: Any, kind: Any, address: Any) -> Any:
    """16 numbers of an array type at an address, as float32."""
    if kind.dtype == types.float32:
        return load(b, floats(b, address), i64(0))
    narrow = ir.VectorType(_HALF if kind.dtype == types.uint16 else _I8, LANES)
    raw = b.load(b.inttoptr(address, narrow.as_pointer()))
    raw.align = _size(kind)
    if kind.dtype == types.uint16:
        return b.fpext(raw, VEC)
    return b.sitofp(b.sext(raw, VECI), VEC)


class Plane(NamedTuple):
    """The keys or the values of one KV head. numbers: keys [blocks, head_dim, 16] or values
    [blocks, 16, width] of a type of KV_TYPES. scales: float32 [blocks, 1, 16 or 0]."""

    numbers: Numbers
    scales: Float32


def _make_scores(num_heads: int) -> Any:
    """s[g, 0:16] = sum_d q[g, d] * keys[block, d, 0:16], d in order: one block of 16 keys.

    (q address, q head stride, Plane of keys, block, s address, s head stride).
    """

    @intrinsic
    def scores(typingctx: Any, q: Any, ldq: Any, plane: Any, block: Any, s: Any, lds: Any) -> Any:
        sig = types.void(types.intp, types.intp, plane, types.intp, types.intp, types.intp)
        keys, scales = plane.types

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            q, ldq, plane, block, s, lds = args
            array = b.extract_value(plane, 0)
            d = _extent(context, b, keys, array, 1)
            step = LANES * _size(keys)
            at = b.add(_address(context, b, keys, array), b.mul(b.mul(block, d), i64(step)))
            qf, sf = floats(b, q), floats(b, s)
            heads = [b.gep(qf, [b.mul(ldq, i64(g))]) for g in range(num_heads)]
            loop = Loop(b, d, [const(0.0)] * num_heads)
            key = _widened(b, keys, b.add(at, b.mul(loop.index, i64(step))))
            new = [
                fma(b, splat(b, b.load(b.gep(heads[g], [loop.index]))), key, loop.carried[g])
                for g in range(num_heads)
            ]
            acc = loop.close(new)
            if keys.dtype == types.int8:
                own = floats(b, _address(context, b, scales, b.extract_value(plane, 1)))
                scale = load(b, own, b.mul(block, i64(LANES)))
                acc = [b.fmul(value, scale) for value in acc]
            for g in range(num_heads):
                store(b, acc[g], sf, b.mul(lds, i64(g)))
            return context.get_dummy_value()

        return sig, codegen

    return scores


_scores1, _scores2, _scores3, _scores4 = (_make_scores(g) for g in (1, 2, 3, 4))


def _make_weighted(num_heads: int, vectors: int) -> Any:
    """acc[g, :] += sum over slots of p[g, slot] * values[slot, :], slots in order, 16 * vectors
    columns.

    (p address, p head stride, Plane of values, first number: slot * width + column, slots, acc
    address, acc head stride).
    """

    @intrinsic
    def weighted(
        typingctx: Any, p: Any, ldp: Any, plane: Any, first: Any, num: Any, acc: Any, lda: Any
    ) -> Any:
        i = types.intp
        sig = types.void(i, i, plane, i, i, i, i)
        values, scales = plane.types

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            p, ldp, plane, first, num, acc, lda = args
            pf, af = floats(b, p), floats(b, acc)
            size = _size(values)
            array = b.extract_value(plane, 0)
            width = _extent(context, b, values, array, 2)
            at = b.add(_address(context, b, values, array), b.mul(first, i64(size)))
            own = None
            if values.dtype == types.int8:
                own = floats(b, _address(context, b, scales, b.extract_value(plane, 1)))
                own = b.gep(own, [b.sdiv(first, width)])
            where = [
                b.add(b.mul(lda, i64(g)), i64(c * LANES))
                for g in range(num_heads)
                for c in range(vectors)
            ]
            loop = Loop(b, num, [load(b, af, place) for place in where])
            row = b.add(at, b.mul(b.mul(loop.index, width), i64(size)))
            value = [_widened(b, values, b.add(row, i64(c * LANES * size))) for c in range(vectors)]
            new = []
            for g in range(num_heads):
                weight = b.load(b.gep(pf, [b.add(b.mul(ldp, i64(g)), loop.index)]))
                if own is not None:
                    weight = b.fmul(weight, b.load(b.gep(own, [loop.index])))
                wide = splat(b, weight)
                new += [
                    fma(b, wide, value[c], loop.carried[g * vectors + c]) for c in range(vectors)
                ]
            for place, result in zip(where, loop.close(new), strict=True):
                store(b, result, af, place)
            return context.get_dummy_value()

        return sig, codegen

    return weighted


_weighted1x1, _weighted1x4 = _make_weighted(1, 1), _make_weighted(1, 4)
_weighted2x1, _weighted2x4 = _make_weighted(2, 1), _make_weighted(2, 4)
_weighted3x1, _weighted3x4 = _make_weighted(3, 1), _make_weighted(3, 4)
_weighted4x1, _weighted4x4 = _make_weighted(4, 1), _make_weighted(4, 4)


@intrinsic
def _as_stored(typingctx: Any, cache: Any, x: Any, factor: Any) -> Any:
    """x as a number of the cache's type: itself; the bits of the nearest float16, at most 65504; or
    round_to_even(x * factor), 0 where factor is."""
    sig = cache.dtype(cache, types.float32, types.float32)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _, x, factor = args
        if cache.dtype == types.float32:
            return x
        if cache.dtype == types.uint16:
            for sign, most in (("<", -_MOST_HALF), (">", _MOST_HALF)):
                end = ir.Constant(F32, most)
                x = b.select(b.fcmp_ordered(sign, x, end), end, x)
            return b.bitcast(b.fptrunc(x, _HALF), I16)
        zero = ir.Constant(F32, 0.0)
        scaled = b.select(b.fcmp_ordered("==", factor, zero), zero, b.fmul(x, factor))
        name = "llvm.rint.f32"
        fn = b.module.globals.get(name)
        if fn is None:
            fn = ir.Function(b.module, ir.FunctionType(F32, [F32]), name)
        return b.trunc(b.fptosi(b.call(fn, [scaled]), ir.IntType(32)), _I8)

    return sig, codegen


# --- numba functions ------------------------------------------------------------------------


@inline
def block_scores(q, ldq, num_heads, keys, block, s, lds):
    """Scores of all query heads of one KV head against one block of 16 keys.

    q, s: addresses, head strides ldq and lds. keys: Plane.
    """
    g = 0
    while num_heads - g >= 4:
        _scores4(q + g * ldq * 4, ldq, keys, block, s + g * lds * 4, lds)
        g += 4
    if num_heads - g == 3:
        _scores3(q + g * ldq * 4, ldq, keys, block, s + g * lds * 4, lds)
    elif num_heads - g == 2:
        _scores2(q + g * ldq * 4, ldq, keys, block, s + g * lds * 4, lds)
    elif num_heads - g == 1:
        _scores1(q + g * ldq * 4, ldq, keys, block, s + g * lds * 4, lds)


@inline
def _weighted_columns(p, ldp, num_heads, values, first, num, acc, lda, wide):
    g = 0
    while num_heads - g >= 4:
        if wide:
            _weighted4x4(p + g * ldp * 4, ldp, values, first, num, acc + g * lda * 4, lda)
        else:
            _weighted4x1(p + g * ldp * 4, ldp, values, first, num, acc + g * lda * 4, lda)
        g += 4
    left = num_heads - g
    p, acc = p + g * ldp * 4, acc + g * lda * 4
    if left == 3:
        if wide:
            _weighted3x4(p, ldp, values, first, num, acc, lda)
        else:
            _weighted3x1(p, ldp, values, first, num, acc, lda)
    elif left == 2:
        if wide:
            _weighted2x4(p, ldp, values, first, num, acc, lda)
        else:
            _weighted2x1(p, ldp, values, first, num, acc, lda)
    elif left == 1:
        if wide:
            _weighted1x4(p, ldp, values, first, num, acc, lda)
        else:
            _weighted1x1(p, ldp, values, first, num, acc, lda)


@inline
def add_weighted(p, ldp, num_heads, values, slot, num, acc, lda):
    """acc[g, :] += p[g, i] @ values of `num` slots of a block from `slot` on, in order.

    p, acc: addresses, head strides ldp and lda. values: Plane, its width a multiple of 16.
    """
    width = values.numbers.shape[2]
    first = slot * width
    c = 0
    while width - c >= 4 * LANES:
        _weighted_columns(p, ldp, num_heads, values, first + c, num, acc + c * 4, lda, True)
        c += 4 * LANES
    while width - c >= LANES:
        _weighted_columns(p, ldp, num_heads, values, first + c, num, acc + c * 4, lda, False)
        c += LANES


@inline
def _factor(x, scales, slot):
    """What a head's numbers are multiplied by before rounding; their scale goes to its place."""
    if scales.shape[2] == 0:
        return np.float32(1.0)
    top = np.float32(0.0)
    for i in range(x.shape[0]):
        size = abs(x[i])
        if size > top or size != size:  # NaN stays
            top = size
    scale, factor = factor_of(top)
    scales[slot // LANES, 0, slot % LANES] = scale
    return factor


@inline
def store_key(keys, slot, x):
    """x float32 [head_dim] into its slot of a Plane of keys."""
    factor = _factor(x, keys.scales, slot)
    lane = slot % LANES
    block = keys.numbers[slot // LANES]
    for i in range(x.shape[0]):
        block[i, lane] = _as_stored(keys.numbers, x[i], factor)


@inline
def store_value(values, slot, x):
    """x float32 [head_dim] into its slot of a Plane of values."""
    factor = _factor(x, values.scales, slot)
    row = values.numbers[slot // LANES, slot % LANES]
    for i in range(x.shape[0]):
        row[i] = _as_stored(values.numbers, x[i], factor)
