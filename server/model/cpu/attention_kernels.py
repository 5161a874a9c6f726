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
from server.model.cpu.kernels import float_at, has_avx512, inline, set_float
from server.model.cpu.vector_ir import (
    F32,
    I16,
    I32,
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

__all__ = [
    "KV_TYPES",
    "Plane",
    "add_weighted",
    "block_scores",
    "rotate",
    "store_key",
    "store_value",
]

KV_TYPES: dict[str, type[Any]] = {"float32": np.float32, "float16": np.uint16, "int8": np.int8}
"""Type of the cache's numbers by the name of `engine.kv_cache_dtype`."""

_I8 = ir.IntType(8)
_HALF = ir.HalfType()
_MOST_HALF = 65504.0


def _size(kind: Any) -> int:
    """Bytes of a number type."""
    return int(kind.bitwidth) // 8


def _widened(b: Any, kind: Any, address: Any) -> Any:
    """16 numbers of a type at an address, as float32."""
    if kind == types.float32:
        return load(b, floats(b, address), i64(0))
    narrow = ir.VectorType(_HALF if kind == types.uint16 else _I8, LANES)
    raw = b.load(b.inttoptr(address, narrow.as_pointer()))
    raw.align = _size(kind)
    if kind == types.uint16:
        return b.fpext(raw, VEC)
    return b.sitofp(b.sext(raw, VECI), VEC)


class Plane(NamedTuple):
    """The keys or the values of one KV head, in addresses.

    numbers: of keys [blocks, width = head_dim, 16] or values [blocks, 16, width]. scales: of
    float32 [blocks, 1, 16], used with int8. zero: 0 of the numbers' type, one of KV_TYPES.
    """

    numbers: int
    scales: int
    width: int
    zero: Any


SCORE_BLOCKS = 4 if has_avx512() else 1
"""Blocks of keys of the largest kernel: with 3 or 4 heads, enough sums that none waits for the one
before it, and no more than registers."""


def _make_scores(num_heads: int, num_blocks: int) -> Any:
    """s[g, 16 i : 16 i + 16] = sum_d q[g, d] * keys[block i, d, 0:16], d in order, i < num_blocks.

    (q address, q head stride, Plane of keys, table, s address, s head stride). table: the address
    of the blocks' int32 numbers; for one block, its number.
    """

    @intrinsic
    def scores(typingctx: Any, q: Any, ldq: Any, plane: Any, table: Any, s: Any, lds: Any) -> Any:
        i = types.intp
        sig = types.void(i, i, plane, i, i, i)
        kind = plane.types[3]

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            q, ldq, plane, table, s, lds = args
            numbers, scales, d = (b.extract_value(plane, i) for i in range(3))
            step = LANES * _size(kind)
            blocks = [table]
            if num_blocks > 1:
                entries = b.inttoptr(table, I32.as_pointer())
                blocks = [b.sext(b.load(b.gep(entries, [i64(i)])), I64) for i in range(num_blocks)]
            starts = [b.add(numbers, b.mul(b.mul(block, d), i64(step))) for block in blocks]
            qf, sf = floats(b, q), floats(b, s)
            heads = [b.gep(qf, [b.mul(ldq, i64(g))]) for g in range(num_heads)]
            loop = Loop(b, d, [const(0.0)] * (num_heads * num_blocks))
            here = b.mul(loop.index, i64(step))
            key = [_widened(b, kind, b.add(start, here)) for start in starts]
            new = []
            for g in range(num_heads):
                query = splat(b, b.load(b.gep(heads[g], [loop.index])))
                old = loop.carried[g * num_blocks : (g + 1) * num_blocks]
                new += [fma(b, query, key[i], old[i]) for i in range(num_blocks)]
            acc = loop.close(new)
            for i in range(num_blocks):
                scale = None
                if kind == types.int8:
                    scale = load(b, floats(b, scales), b.mul(blocks[i], i64(LANES)))
                for g in range(num_heads):
                    value = acc[g * num_blocks + i]
                    value = value if scale is None else b.fmul(value, scale)
                    store(b, value, sf, b.add(b.mul(lds, i64(g)), i64(i * LANES)))
            return context.get_dummy_value()

        return sig, codegen

    return scores


_scores1, _scores2, _scores3, _scores4 = (_make_scores(g, 1) for g in (1, 2, 3, 4))
_many1, _many2, _many3, _many4 = (_make_scores(g, SCORE_BLOCKS) for g in (1, 2, 3, 4))


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
        kind = plane.types[3]

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            p, ldp, plane, first, num, acc, lda = args
            pf, af = floats(b, p), floats(b, acc)
            size = _size(kind)
            numbers, scales, width = (b.extract_value(plane, i) for i in range(3))
            at = b.add(numbers, b.mul(first, i64(size)))
            own = None
            if kind == types.int8:
                own = b.gep(floats(b, scales), [b.sdiv(first, width)])
            where = [
                b.add(b.mul(lda, i64(g)), i64(c * LANES))
                for g in range(num_heads)
                for c in range(vectors)
            ]
            loop = Loop(b, num, [load(b, af, place) for place in where])
            row = b.add(at, b.mul(b.mul(loop.index, width), i64(size)))
            value = [_widened(b, kind, b.add(row, i64(c * LANES * size))) for c in range(vectors)]
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
def int32_at(typingctx: Any, address: Any, index: Any) -> Any:
    """The int32 number `index` of those at an address."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        entry = b.gep(b.inttoptr(args[0], I32.as_pointer()), [args[1]])
        return b.sext(b.load(entry), I64)

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def _put(typingctx: Any, plane: Any, index: Any, x: Any, factor: Any) -> Any:
    """Number `index` of a Plane = x: itself; the bits of the nearest float16, at most 65504; or
    round_to_even(x * factor), 0 where factor is."""
    sig = types.void(plane, types.intp, types.float32, types.float32)
    kind = plane.types[3]

    def stored(b: Any, x: Any, factor: Any) -> Any:
        if kind == types.float32:
            return x
        if kind == types.uint16:
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
        return b.trunc(b.fptosi(b.call(fn, [scaled]), I32), _I8)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        plane, index, x, factor = args
        value = stored(b, x, factor)
        at = b.add(b.extract_value(plane, 0), b.mul(index, i64(_size(kind))))
        b.store(value, b.inttoptr(at, value.type.as_pointer()))
        return context.get_dummy_value()

    return sig, codegen


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


# --- numba functions ------------------------------------------------------------------------


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
def one_score(q, ldq, num_heads, keys, block, s, lds):
    """Scores of all query heads of one KV head against one block of 16 keys.

    q, s: addresses, head strides ldq and lds. keys: Plane.
    """
    g = 0
    while num_heads - g >= 4:
        _scores4(q + g * ldq * 4, ldq, keys, block, s + g * lds * 4, lds)
        g += 4
    q, s = q + g * ldq * 4, s + g * lds * 4
    if num_heads - g == 3:
        _scores3(q, ldq, keys, block, s, lds)
    elif num_heads - g == 2:
        _scores2(q, ldq, keys, block, s, lds)
    elif num_heads - g == 1:
        _scores1(q, ldq, keys, block, s, lds)


@inline
def _many_scores(q, ldq, num_heads, keys, table, s, lds):
    """As one_score, for SCORE_BLOCKS blocks, whose int32 numbers are at address table."""
    g = 0
    while num_heads - g >= 4:
        _many4(q + g * ldq * 4, ldq, keys, table, s + g * lds * 4, lds)
        g += 4
    q, s = q + g * ldq * 4, s + g * lds * 4
    if num_heads - g == 3:
        _many3(q, ldq, keys, table, s, lds)
    elif num_heads - g == 2:
        _many2(q, ldq, keys, table, s, lds)
    elif num_heads - g == 1:
        _many1(q, ldq, keys, table, s, lds)


@inline
def block_scores(q, ldq, num_heads, keys, table, num_blocks, s, lds):
    """As one_score, for blocks one after the other: their int32 numbers are at address table."""
    b = 0
    if SCORE_BLOCKS > 1:
        while num_blocks - b >= SCORE_BLOCKS:
            _many_scores(q, ldq, num_heads, keys, table + b * 4, s + b * LANES * 4, lds)
            b += SCORE_BLOCKS
    while num_blocks > b:
        one_score(q, ldq, num_heads, keys, int32_at(table, b), s + b * LANES * 4, lds)
        b += 1


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
    width = values.width
    first = slot * width
    c = 0
    while width - c >= 4 * LANES:
        _weighted_columns(p, ldp, num_heads, values, first + c, num, acc + c * 4, lda, True)
        c += 4 * LANES
    while width - c >= LANES:
        _weighted_columns(p, ldp, num_heads, values, first + c, num, acc + c * 4, lda, False)
        c += LANES


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
    for i in range(num):
        _put(keys, first + i * LANES, float_at(x, i), factor)


@inline
def store_value(values, scaled, slot, x, num):
    """`num` floats at address x into their slot of a Plane of values; scaled: it has scales."""
    factor = _factor(values, slot, x, num) if scaled else np.float32(1.0)
    for i in range(num):
        _put(values, slot * values.width + i, float_at(x, i), factor)
