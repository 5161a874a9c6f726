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

from server.model.cpu.kernels import float_at, has_avx512, inline, set_float
from server.model.cpu.vector_ir import (
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
    "HALF",
    "I8",
    "KV_TYPES",
    "WIDE_HEADS",
    "Plane",
    "add_blocks",
    "add_weighted",
    "block_scores",
    "clear_heads",
    "put_scaled",
    "size_of",
]

KV_TYPES: dict[str, type[Any]] = {"float32": np.float32, "float16": np.uint16, "int8": np.int8}
"""Type of the cache's numbers by the name of `engine.kv_cache_dtype`."""

I8 = ir.IntType(8)
HALF = ir.HalfType()


def size_of(kind: Any) -> int:
    """Bytes of a number type."""
    return int(kind.bitwidth) // 8


def _widened(b: Any, kind: Any, address: Any) -> Any:
    """16 numbers of a type at an address, as float32."""
    if kind == types.float32:
        return load(b, floats(b, address), i64(0))
    narrow = ir.VectorType(HALF if kind == types.uint16 else I8, LANES)
    raw = b.load(b.inttoptr(address, narrow.as_pointer()))
    raw.align = size_of(kind)
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
            step = LANES * size_of(kind)
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


WIDE_HEADS, _WIDE_VECTORS = (12, 2) if has_avx512() else (0, 0)
"""Heads of several rows of one sequence that are computed together, by vectors of keys or columns:
each key and value is widened once for all of them. 0: there are no registers for it."""

_scores1, _scores2, _scores3, _scores4 = (_make_scores(g, 1) for g in (1, 2, 3, 4))
_many1, _many2, _many3, _many4 = (_make_scores(g, SCORE_BLOCKS) for g in (1, 2, 3, 4))
_wide_scores = _make_scores(WIDE_HEADS or 1, _WIDE_VECTORS or 1)


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
            size = size_of(kind)
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


def _make_weighted_blocks(num_heads: int, vectors: int) -> Any:
    """As _make_weighted, for all slots of whole blocks, one after the other, and all columns: a
    multiple of 16 * vectors.

    (p address, p head stride, Plane of values, address of the blocks' int32 numbers, blocks, acc
    address, acc head stride).
    """

    @intrinsic
    def weighted(
        typingctx: Any, p: Any, ldp: Any, plane: Any, table: Any, num: Any, acc: Any, lda: Any
    ) -> Any:
        i = types.intp
        sig = types.void(i, i, plane, i, i, i, i)
        kind = plane.types[3]

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            p, ldp, plane, table, num, acc, lda = args
            size = size_of(kind)
            numbers, scales, width = (b.extract_value(plane, i) for i in range(3))
            columns = Loop(b, width, [], step=vectors * LANES)
            column = columns.index
            pf, af = floats(b, p), floats(b, acc)
            weights = [b.gep(pf, [b.mul(ldp, i64(g))]) for g in range(num_heads)]
            where = [
                b.add(b.add(b.mul(lda, i64(g)), column), i64(c * LANES))
                for g in range(num_heads)
                for c in range(vectors)
            ]
            outer = Loop(b, num, [load(b, af, place) for place in where])
            entry = b.gep(b.inttoptr(table, I32.as_pointer()), [outer.index])
            slot = b.mul(b.sext(b.load(entry), I64), i64(LANES))
            first = b.mul(outer.index, i64(LANES))
            inner = Loop(b, i64(LANES), outer.carried)
            row = b.add(b.mul(b.add(slot, inner.index), width), column)
            at = b.add(numbers, b.mul(row, i64(size)))
            value = [_widened(b, kind, b.add(at, i64(c * LANES * size))) for c in range(vectors)]
            scale = None
            if kind == types.int8:
                scale = b.load(b.gep(floats(b, scales), [b.add(slot, inner.index)]))
            key = b.add(first, inner.index)
            new = []
            for g in range(num_heads):
                weight = b.load(b.gep(weights[g], [key]))
                wide = splat(b, weight if scale is None else b.fmul(weight, scale))
                new += [
                    fma(b, wide, value[c], inner.carried[g * vectors + c]) for c in range(vectors)
                ]
            sums = outer.close(inner.close(new))
            for place, result in zip(where, sums, strict=True):
                store(b, result, af, place)
            columns.close([])
            return context.get_dummy_value()

        return sig, codegen

    return weighted


_wide_weighted = _make_weighted_blocks(WIDE_HEADS or 1, _WIDE_VECTORS or 1)


@intrinsic
def _scaled_vectors(typingctx: Any, x: Any, scale: Any, out: Any, num: Any) -> Any:
    """out[i] = x[i] * scale for 16 * num floats at addresses."""
    sig = types.void(types.intp, types.float32, types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, scale, out, num = args
        factor = splat(b, scale)
        loop = Loop(b, num, [])
        at = b.mul(loop.index, i64(LANES))
        store(b, b.fmul(load(b, floats(b, x), at), factor), floats(b, out), at)
        loop.close([])
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def _clear_vectors(typingctx: Any, out: Any, num: Any) -> Any:
    """out[i] = 0 for 16 * num floats at an address."""
    sig = types.void(types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, num = args
        loop = Loop(b, num, [])
        store(b, const(0.0), floats(b, out), b.mul(loop.index, i64(LANES)))
        loop.close([])
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def int32_at(typingctx: Any, address: Any, index: Any) -> Any:
    """The int32 number `index` of those at an address."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        entry = b.gep(b.inttoptr(args[0], I32.as_pointer()), [args[1]])
        return b.sext(b.load(entry), I64)

    return types.intp(types.intp, types.intp), codegen


# --- numba functions ------------------------------------------------------------------------


@inline
def put_scaled(x, scale, out, num):
    """out[i] = x[i] * scale for `num` floats at addresses; a scale of 1 copies them."""
    whole = num // LANES
    if whole > 0:
        _scaled_vectors(x, scale, out, whole)
    for i in range(whole * LANES, num):
        set_float(out, i, float_at(x, i) * scale)


@inline
def clear_heads(acc, lda, num_heads, width):
    """acc[g, :width] = 0; acc: address, head stride lda; width: a multiple of 16."""
    for g in range(num_heads):
        _clear_vectors(acc + g * lda * 4, width // LANES)


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
    while WIDE_HEADS > 0 and num_heads >= WIDE_HEADS:
        b = 0
        while num_blocks - b >= _WIDE_VECTORS:
            _wide_scores(q, ldq, keys, table + b * 4, s + b * LANES * 4, lds)
            b += _WIDE_VECTORS
        while num_blocks > b:
            block = int32_at(table, b)
            one_score(q, ldq, WIDE_HEADS, keys, block, s + b * LANES * 4, lds)
            b += 1
        q, s = q + WIDE_HEADS * ldq * 4, s + WIDE_HEADS * lds * 4
        num_heads -= WIDE_HEADS
    b = num_blocks if num_heads == 0 else 0
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
def add_blocks(p, ldp, num_heads, values, table, num_blocks, acc, lda):
    """As add_weighted, for whole blocks one after the other: their int32 numbers are at address
    table."""
    width = values.width
    if WIDE_HEADS > 0 and width % (_WIDE_VECTORS * LANES) == 0:
        while num_heads >= WIDE_HEADS:
            _wide_weighted(p, ldp, values, table, num_blocks, acc, lda)
            p, acc = p + WIDE_HEADS * ldp * 4, acc + WIDE_HEADS * lda * 4
            num_heads -= WIDE_HEADS
    for b in range(num_blocks if num_heads > 0 else 0):
        slot = int32_at(table, b) * LANES
        add_weighted(p + b * LANES * 4, ldp, num_heads, values, slot, LANES, acc, lda)
