"""Attention on a CPU: q, k and v of a step's rows into their places, then each row's sum over keys.

A row's keys are numbered by position; scores are sums over head_dim in order, the softmax adds 16
lanes by position mod 16, values are added in position order. So a row's result has the same bits
whatever rows stand beside it and whether a key was written by a prompt row or by an accepted tree
node. Tree attention: a node's keys are its sequence's prefix and its own path (Rows.path_slots).

The cache holds numbers of one of records.KV_TYPES: float32 as it is; float16 (bits, in uint16);
int8 with a float32 scale a head and position. The small ones are widened in registers. What is
stored of a position is a function of its key and value alone:
    score  = (0; for d in order: fma(q[d], k[d], score)) * scale of the key
    result = for keys in order: fma(p[key] * scale of the value, v[key], result)
without the scales where there are none.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from drafters.jit import borrowing, compiled, entry_run_by
from server.model.cpu.kernels.integer_rows import factor_of
from server.model.cpu.kernels.ir import (
    F32,
    I8,
    I32,
    I64,
    Loop,
    call,
    choose,
    const,
    floats,
    fma,
    function,
    i32,
    i64,
    keep_order,
    like,
    load,
    prefetch,
    put,
    splat,
    store,
    to_half,
    widened,
    word,
)  # fmt: skip
from server.model.cpu.kernels.team import barrier, run, take
from server.model.cpu.kernels.vectors import (
    exp_shifted,
    fetch,
    float_at,
    int32_at,
    max_of,
    rms_norm,
    set_float,
    soft_cap,
)  # fmt: skip
from server.model.cpu.records import (
    KV_TYPES,
    LANES,
    WIDE_HEADS,
    WIDE_REGISTERS,
    AttentionAddresses,
    AttentionLayer,
    Float32x2,
    Rows,
    Scratch,
    Shape,
    Tile,
    Work,
    tile_rows,
)  # fmt: skip

_FLOAT32, _FLOAT16, _INT8 = range(3)  # records.KV_TYPES
_KINDS = (_FLOAT32, _FLOAT16, _INT8)
_NEVER = np.float32(-np.inf)
_LANE_BITS = LANES.bit_length() - 1

_tile_rows = compiled(tile_rows)

_MOST_SUMS = 24 if WIDE_REGISTERS else 6
"""Vectors of sums of one kernel: enough that none waits for the one before it, and as many as
registers hold beside what is added to them."""

CHUNK = 4
"""Blocks whose keys, or values, all heads of a tile go through before the next ones: until then
they stay in a core's L1 cache. Those of the next chunk are asked of memory meanwhile: a core's own
prefetcher asks for little of what lies in blocks, and without this a step of eight rows behind 600
keys took a third longer."""


class Plane(NamedTuple):
    """The keys or the values of one KV head, in addresses.

    numbers: of keys [width = head_dim, 16] or values [16, width] of block 0. scales: of float32
    [16], used with int8. stride: bytes from one block's to the next one's. kind: the place in
    records.KV_TYPES.
    """

    numbers: int
    scales: int
    stride: int
    width: int
    kind: int


# --- vector kernels: addresses are int64, strides are in numbers ----------------------------------


def _size(kind: int) -> int:
    """Bytes of a number."""
    return 4 >> kind


def _block_offset(b: Any, table: Any, i: Any, shift: Any, stride: Any) -> Any:
    """Bytes from block 0 to the block whose int32 number, to be shifted right, is the i-th at an
    address."""
    entry = b.load(b.gep(b.inttoptr(table, I32.as_pointer()), [i]))
    return b.mul(b.ashr(b.sext(entry, I64), shift), stride)


def _widened(b: Any, kind: int, address: Any) -> Any:
    return widened(b, tuple(KV_TYPES)[kind], address)


def _by_kind(
    b: Any, plane: Any, case: Any, cases: Mapping[int, tuple[str, Callable[..., None]]],
    args: list[Any],
) -> None:  # fmt: skip
    """Call the function of a case, an int64, for a Plane's kind: compiled once a case and kind, as
    (kind, builder, arguments: the Plane's numbers, scales, stride and width, then args)."""
    *given, kind = (b.extract_value(plane, i) for i in range(5))
    given += args

    def emit(name: str, define: Callable[..., None], of: int) -> None:
        fn = function(b.module, f"tailor_{name}_{of}", len(given), partial(define, of))
        b.call(fn, given)

    told = {
        3 * number + of: partial(emit, name, define, of)
        for number, (name, define) in cases.items()
        for of in _KINDS
    }
    choose(b, b.add(b.mul(case, i64(3)), kind), told)


def _together(heads: int) -> int:
    """Blocks of keys, or vectors of columns, that a kernel of so many heads computes together."""
    return 4 if heads * 4 <= _MOST_SUMS else 2 if heads * 2 <= _MOST_SUMS else 1


_SIZES = {(g, num) for g in (1, 2, 3, 4, WIDE_HEADS) for num in (1, _together(g))}
"""Heads, and blocks or vectors of columns, of the kernels."""


def _one_by_one(b: Any, i: int, num_sums: int) -> None:
    """Where sums take all narrow registers, load the i-th vector when those before it are used up:
    else the compiler keeps a sum in memory, for which each product then waits."""
    if i > 0 and num_sums == _MOST_SUMS and not WIDE_REGISTERS:
        keep_order(b)


def _define_scores(num_heads: int, num_blocks: int, kind: int, b: Any, args: Any) -> None:
    """s[g, 16 i : 16 i + 16] = sum_d q[g, d] * keys[block i, d, 0:16], d in order, i < num_blocks.

    table: address of the blocks' int32 numbers, which are to be shifted right. ahead: as table, of
    blocks that are asked of memory meanwhile.
    """
    numbers, scales, stride, d, q, ldq, table, shift, ahead, s, lds = args
    own, later = (
        [_block_offset(b, of, i64(i), shift, stride) for i in range(num_blocks)]
        for of in (table, ahead)
    )
    qf, sf = floats(b, q), floats(b, s)
    heads = [b.gep(qf, [b.mul(ldq, i64(g))]) for g in range(num_heads)]
    loop = Loop(b, d, [const(0.0)] * (num_heads * num_blocks))
    here = b.add(numbers, b.mul(loop.index, i64(LANES * _size(kind))))
    for offset in later:
        prefetch(b, b.add(here, offset))
    new = list(loop.carried)
    for i, offset in enumerate(own):
        _one_by_one(b, i, num_heads * num_blocks)
        key = _widened(b, kind, b.add(here, offset))
        for g, head in enumerate(heads):
            query = splat(b, b.load(b.gep(head, [loop.index])))
            new[g * num_blocks + i] = fma(b, query, key, new[g * num_blocks + i])
    acc = loop.close(new)
    for i in range(num_blocks):
        scale = None
        if kind == _INT8:
            scale = load(b, floats(b, b.add(scales, own[i])), i64(0))
        for g in range(num_heads):
            value = acc[g * num_blocks + i]
            value = value if scale is None else b.fmul(value, scale)
            store(b, value, sf, b.add(b.mul(lds, i64(g)), i64(i * LANES)))


@word(None, int, int, int, int, Plane, int, int, int, int, int)
def _scores(
    b: Any, heads: Any, blocks: Any, q: Any, ldq: Any, plane: Any, table: Any, shift: Any,
    ahead: Any, s: Any, lds: Any,
) -> None:  # fmt: skip
    """_define_scores of one of _SIZES."""
    cases = {
        16 * num + g: (f"scores_{g}_{num}", partial(_define_scores, g, num)) for g, num in _SIZES
    }
    case = b.add(b.mul(blocks, i64(16)), heads)
    _by_kind(b, plane, case, cases, [q, ldq, table, shift, ahead, s, lds])


def _add_slot(
    b: Any, kind: int, at: Any, scale_at: Any, weights: list[Any], sums: list[Any]
) -> list[Any]:
    """The sums, of each head in turn, after one more slot: its values at an address, each vector of
    them times the head's weight, which is at an address, as their scale is."""
    size, vectors = _size(kind), len(sums) // len(weights)
    scale = None
    if kind == _INT8:
        scale = b.load(floats(b, scale_at))
    new = list(sums)
    for c in range(vectors):
        _one_by_one(b, c, len(sums))
        value = _widened(b, kind, b.add(at, i64(c * LANES * size)))
        for g, address in enumerate(weights):
            weight = b.load(address)
            wide = splat(b, weight if scale is None else b.fmul(weight, scale))
            new[g * vectors + c] = fma(b, wide, value, new[g * vectors + c])
    return new


def _define_weighted(num_heads: int, vectors: int, kind: int, b: Any, args: Any) -> None:
    """acc[g, :] += sum over slots of p[g, slot] * values[slot, :], slots in order: `num` slots from
    `lane` on of each of num_blocks blocks. Columns are a multiple of 16 * vectors.

    table, shift, ahead: as _define_scores has them.
    """
    (
        numbers, scales, stride, width, p, ldp, table, shift, num_blocks, ahead, lane, num, acc, lda
    ) = args  # fmt: skip
    size = _size(kind)
    row_bytes = b.mul(width, i64(size))
    numbers = b.add(numbers, b.mul(lane, row_bytes))
    scales = b.add(scales, b.mul(lane, i64(4)))
    columns = Loop(b, width, [], step=vectors * LANES)
    pf, af = floats(b, p), floats(b, acc)
    where = [
        b.add(b.add(b.mul(lda, i64(g)), columns.index), i64(c * LANES))
        for g in range(num_heads)
        for c in range(vectors)
    ]
    outer = Loop(b, num_blocks, [load(b, af, place) for place in where])
    own, later = (_block_offset(b, of, outer.index, shift, stride) for of in (table, ahead))
    values = b.add(numbers, b.mul(columns.index, i64(size)))
    first = b.mul(outer.index, i64(LANES))
    inner = Loop(b, num, outer.carried)
    here = b.add(values, b.mul(inner.index, row_bytes))
    for line in range(0, vectors * LANES * size, 64):
        prefetch(b, b.add(b.add(here, later), i64(line)))
    key = b.add(first, inner.index)
    weights = [b.gep(pf, [b.add(b.mul(ldp, i64(g)), key)]) for g in range(num_heads)]
    scale_at = b.add(b.add(scales, own), b.mul(inner.index, i64(4)))
    new = _add_slot(b, kind, b.add(here, own), scale_at, weights, inner.carried)
    for place, result in zip(where, outer.close(inner.close(new)), strict=True):
        store(b, result, af, place)
    columns.close([])


@word(None, int, int, int, int, Plane, int, int, int, int, int, int, int, int)
def _weighted(
    b: Any, heads: Any, vectors: Any, p: Any, ldp: Any, plane: Any, table: Any, shift: Any,
    num_blocks: Any, ahead: Any, lane: Any, num: Any, acc: Any, lda: Any,
) -> None:  # fmt: skip
    """_define_weighted of one of _SIZES."""
    cases = {16 * v + g: (f"weighted_{g}_{v}", partial(_define_weighted, g, v)) for g, v in _SIZES}
    case = b.add(b.mul(vectors, i64(16)), heads)
    given = [p, ldp, table, shift, num_blocks, ahead, lane, num, acc, lda]
    _by_kind(b, plane, case, cases, given)


_MOST_HALF = 65504.0


def _stored(b: Any, kind: int, x: Any, factor: Any) -> Any:
    """A float32, or a vector of them, as a plane keeps it: itself; the bits of the nearest float16,
    at most 65504; or round_to_even(x * factor), 0 where factor is."""
    number = x.type
    wide = isinstance(number, ir.VectorType)
    if kind == _FLOAT32:
        return x
    if kind == _FLOAT16:
        for sign, most in (("<", -_MOST_HALF), (">", _MOST_HALF)):
            x = b.select(b.fcmp_ordered(sign, x, const(most, number)), const(most, number), x)
        return to_half(b, x)
    scaled = b.fmul(x, splat(b, factor) if wide else factor)
    unknown = b.fcmp_ordered("==", factor, ir.Constant(F32, 0.0))
    scaled = b.select(unknown, const(0.0, number), scaled)
    name = f"llvm.rint.v{LANES}f32" if wide else "llvm.rint.f32"
    rounded = call(b, name, number, [scaled])
    return b.trunc(b.fptosi(rounded, like(number, I32)), like(number, I8))


@word(None, int, int, np.float32, np.float32)
def _put(b: Any, kind: Any, to: Any, x: Any, factor: Any) -> None:
    """What a Plane of a kind keeps of x, to an address."""

    def emit(of: int) -> None:
        put(b, _stored(b, of, x, factor), to, 0, _size(of))

    choose(b, kind, {of: partial(emit, of) for of in _KINDS})


@word(None, int, int, int, int, int, np.float32)
def _put_vectors(b: Any, kind: Any, to: Any, apart: Any, x: Any, num: Any, factor: Any) -> None:
    """As _put for 16 * num floats at address x: numbers `apart`, 1 or LANES, from each other."""

    def emit(of: int, apart: int) -> None:
        size = _size(of)
        loop = Loop(b, num, [])
        at = b.mul(loop.index, i64(LANES))
        value = _stored(b, of, load(b, floats(b, x), at), factor)
        here = b.add(to, b.mul(at, i64(apart * size)))
        parts = [value]
        if apart > 1:
            parts = [b.extract_element(value, i32(i)) for i in range(LANES)]
        for i, part in enumerate(parts):
            put(b, part, here, i * apart * size, size)
        loop.close([])

    cases = {3 * far + of: partial(emit, of, far) for of in _KINDS for far in (1, LANES)}
    choose(b, b.add(b.mul(apart, i64(3)), kind), cases)


@word(None, int, int, int, int, int)
def _rotate_vectors(b: Any, x: Any, cos: Any, sin: Any, half: Any, num: Any) -> None:
    """(a, b) = (a cos - b sin, b cos + a sin) in place for a the first 16 * num floats at address
    x, b as many at x + half floats."""
    xf, cf, sf = floats(b, x), floats(b, cos), floats(b, sin)
    loop = Loop(b, num, [])
    at = b.mul(loop.index, i64(LANES))
    low, high = load(b, xf, at), load(b, xf, b.add(at, half))
    c, s = load(b, cf, at), load(b, sf, at)
    store(b, b.fsub(b.fmul(low, c), b.fmul(high, s)), xf, at)
    store(b, b.fadd(b.fmul(high, c), b.fmul(low, s)), xf, b.add(at, half))
    loop.close([])


# --- what is kept of a row ------------------------------------------------------------------------


@compiled
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


@compiled
def _factor(to, x, num):
    """What a head's numbers are multiplied by before rounding; their scale goes to an address."""
    top = np.float32(0.0)
    for i in range(num):
        size = abs(float_at(x, i))
        if size > top or size != size:  # NaN stays
            top = size
    scale, factor = factor_of(top)
    set_float(to, 0, scale)
    return factor


@compiled
def _store(plane, slot, step, apart, x, num):
    """`num` floats at address x into their slot of a Plane: its lanes begin `step` numbers, and a
    lane's numbers are `apart` numbers, from each other."""
    block, lane = slot // LANES, slot % LANES
    size, kind = 4 >> plane.kind, plane.kind
    to = plane.numbers + block * plane.stride + lane * step * size
    factor = np.float32(1.0)
    if kind == _INT8:
        factor = _factor(plane.scales + block * plane.stride + lane * 4, x, num)
    whole = num // LANES
    if whole > 0:
        _put_vectors(kind, to, apart, x, whole, factor)
    for i in range(whole * LANES, num):
        _put(kind, to + i * apart * size, float_at(x, i), factor)


# --- kernels over heads ---------------------------------------------------------------------------


@compiled
def put_scaled(x, scale, out, num):
    """out[i] = x[i] * scale for `num` floats at addresses; a scale of 1 copies them."""
    for i in range(num):
        set_float(out, i, float_at(x, i) * scale)


@compiled
def clear_heads(acc, lda, num_heads, width):
    """acc[g, :width] = 0; acc: address, head stride lda."""
    for g in range(num_heads):
        for i in range(width):
            set_float(acc, g * lda + i, np.float32(0.0))


@compiled
def _ask(plane, table, num_blocks):
    """Ask memory for the first chunk of so many blocks: table has their int32 numbers."""
    size = plane.width * LANES * 4 >> plane.kind
    for b in range(min(CHUNK, num_blocks)):
        fetch(plane.numbers + int32_at(table, b) * plane.stride, size)


_most_together = compiled(_together)


@compiled
def _next_heads(left):
    """Heads of the next kernel, of so many that are left."""
    return WIDE_HEADS if left >= WIDE_HEADS else min(4, left)


@compiled
def block_scores(q, ldq, num_heads, keys, table, shift, num_blocks, s, lds):
    """Scores of all query heads of one KV head against blocks of 16 keys one after the other.

    q, s: addresses, head strides ldq and lds. keys: Plane. table: address of the blocks' int32
    numbers, which are to be shifted right.
    """
    b = 0
    while b < num_blocks:
        num = CHUNK if num_blocks - b >= CHUNK else 1
        ahead = table + min(b + CHUNK, num_blocks - num) * 4
        g = 0
        while g < num_heads:
            heads = _next_heads(num_heads - g)
            most = min(num, _most_together(heads))
            for i in range(0, num, most):
                _scores(
                    heads, most, q + g * ldq * 4, ldq, keys, table + (b + i) * 4, shift,
                    ahead + i * 4, s + (g * lds + (b + i) * LANES) * 4, lds,
                )  # fmt: skip
            g += heads
        b += num


@compiled
def add_weighted(
    p, ldp, num_heads, values, table, shift, num_blocks, ahead, lane, num, acc, lda
):  # fmt: skip
    """acc[g, :] += p[g, i] @ values of `num` slots from `lane` on of each of some blocks, in order.

    p, acc: addresses, head strides ldp and lda. values: Plane, its width a multiple of 16. table,
    shift: as block_scores has them; ahead: as table, of as many blocks whose values are asked of
    memory meanwhile.
    """
    g = 0
    while g < num_heads:
        heads = _next_heads(num_heads - g)
        vectors = _most_together(heads)
        if values.width % (vectors * LANES) != 0:
            vectors = 1
        _weighted(
            heads, vectors, p + g * ldp * 4, ldp, values, table, shift, num_blocks, ahead, lane,
            num, acc + g * lda * 4, lda,
        )  # fmt: skip
        g += heads


@compiled
def add_blocks(p, ldp, num_heads, values, table, num_blocks, acc, lda):
    """As add_weighted, for all slots of blocks one after the other."""
    b = 0
    while b < num_blocks:
        num = min(CHUNK, num_blocks - b)
        ahead = table + min(b + CHUNK, num_blocks - num) * 4
        add_weighted(
            p + b * LANES * 4, ldp, num_heads, values, table + b * 4, 0, num, ahead, 0, LANES, acc,
            lda,
        )  # fmt: skip
        b += num


# --- rows -----------------------------------------------------------------------------------------


@borrowing
def _place_row(row, position, slot, layer, shape):
    """One row of qkv, at address `row`: norms and rope on q and k in place, K and V to a slot."""
    d = shape.head_dim
    num_heads, num_kv_heads = shape.num_heads, layer.kv.shape[1]
    normed = layer.q_norm.shape[0]
    q_norm, k_norm = layer.q_norm.ctypes.data, layer.k_norm.ctypes.data
    if normed > d:
        keys = row + num_heads * d * 4
        rms_norm(row, q_norm, row, normed, shape.eps)
        rms_norm(keys, k_norm, keys, num_kv_heads * d, shape.eps)
    half = layer.cos.shape[1]
    cos = layer.cos.ctypes.data + position * half * 4
    sin = layer.sin.ctypes.data + position * half * 4
    for h in range(num_heads + num_kv_heads):
        head = row + h * d * 4
        norm = q_norm if h < num_heads else k_norm
        if normed == d and not shape.norm_after_rope:
            rms_norm(head, norm, head, d, shape.eps)
        rotate(head, cos, sin, half)
        if normed == d and shape.norm_after_rope:
            rms_norm(head, norm, head, d, shape.eps)
    if layer.query_scales.shape[0] > 0:
        scale = layer.query_scales[position]
        for i in range(num_heads * d):
            set_float(row, i, float_at(row, i) * scale)
    for h in range(num_kv_heads):
        key = row + (num_heads + h) * d * 4
        keys, values = _planes(layer, d, h)
        _store(keys, slot, 1, LANES, key, d)
        _store(values, slot, values.width, 1, key + num_kv_heads * d * 4, d)


@borrowing
def _planes(layer, head_dim, h):
    """Keys and values of KV head h."""
    kind, head_bytes = layer.kind, layer.kv.shape[2]
    width, lane_bytes = (head_dim + LANES - 1) // LANES * LANES, LANES * 4 >> kind
    keys, stride = layer.kv.ctypes.data + h * head_bytes, layer.kv.shape[1] * head_bytes
    values = keys + head_dim * lane_bytes
    scales = values + width * lane_bytes
    return (
        Plane(keys, scales, stride, head_dim, kind),
        Plane(values, scales + LANES * 4, stride, width, kind),
    )


@borrowing
def place(rows, qkv, layer, shape, work):
    """Write the K and V of all rows; qkv [R, outputs] becomes normed and rotated in place.

    Bias, norms and rope on q and k, then K and V into their slots. A thread takes rows that follow
    each other: keys of neighbouring slots share cache lines.
    """
    share = (rows.num + work.threads - 1) // work.threads
    first = work.thread * share
    for r in range(first, min(rows.num, first + share)):
        for i in range(layer.bias.shape[0]):
            qkv[r, i] += layer.bias[i]
        row = qkv.ctypes.data + r * qkv.shape[1] * 4
        _place_row(row, rows.positions[r], np.int64(rows.slots[r]), layer, shape)
    barrier(work)


@borrowing
def _finish_scores(tile, i, room, shape):
    """Softmax numerators of row i of a tile into its scores, 1 / their sum into acc[:, width]; the
    scores of its prefix are there."""
    at = tile.at
    d, group, width = shape.head_dim, tile.group, tile.values.width
    r, own = tile.first + i, i * group
    prefix_len, num_path = int32_at(at.prefix_len, r), int32_at(at.path_len, r)
    path = at.path_slots + int32_at(at.path_start, r) * 4
    base = tile.start // LANES * LANES
    num_keys = prefix_len + num_path
    padded = (num_keys - base + LANES - 1) // LANES * LANES
    s = at.scores + own * room * 4
    block = at.acc + (own * at.acc_stride + width) * 4
    last = -1
    for j in range(max(0, base - prefix_len), num_path):  # a window may begin on the path
        slot = int32_at(path, j)
        if slot // LANES != last:
            last = slot // LANES
            query = at.queries + own * d * 4
            entry = path + j * 4
            block_scores(query, d, group, tile.keys, entry, _LANE_BITS, 1, block, at.acc_stride)
        for g in range(group):
            score = float_at(block, g * at.acc_stride + slot % LANES)
            set_float(s, g * room + prefix_len + j - base, score)
    scale = shape.scale
    if shape.cap > 0:
        for g in range(group):
            soft_cap(s + g * room * 4, padded // LANES, scale, shape.cap)
        scale = np.float32(1.0)
    for g in range(group):
        row = s + g * room * 4
        for j in range(tile.start - base):
            set_float(row, j, _NEVER)
        for j in range(num_keys - base, padded):
            set_float(row, j, _NEVER)
        top = max_of(row, padded // LANES) * scale
        total = exp_shifted(row, padded // LANES, scale, top)
        set_float(at.acc, (own + g) * at.acc_stride + width, np.float32(1.0) / total)


@borrowing
def _add_prefix(tile, own, num_heads, low, high, room):
    """acc[own : own + num_heads] += the values of positions low .. high - 1, in order."""
    at = tile.at
    base = tile.start // LANES * LANES
    s = at.scores + own * room * 4
    to = at.acc + own * at.acc_stride * 4
    while low < high:
        b = low // LANES
        num = min(high, (b + 1) * LANES) - low
        whole = (high - low) // LANES
        if low % LANES == 0 and whole > 0:
            add_blocks(
                s + (low - base) * 4, room, num_heads, tile.values, tile.table + b * 4, whole, to,
                at.acc_stride,
            )  # fmt: skip
            low += whole * LANES
            continue
        entry = tile.table + b * 4
        add_weighted(
            s + (low - base) * 4, room, num_heads, tile.values, entry, 0, 1, entry, low % LANES,
            num, to, at.acc_stride,
        )  # fmt: skip
        low += num


@borrowing
def _add_path(tile, i, room):
    """The values of row i's path, in order; slots that follow each other in a block at once."""
    at = tile.at
    r, own = tile.first + i, i * tile.group
    prefix_len, num_path = int32_at(at.prefix_len, r), int32_at(at.path_len, r)
    path = at.path_slots + int32_at(at.path_start, r) * 4
    base = tile.start // LANES * LANES
    s = at.scores + (own * room + prefix_len - base) * 4
    to = at.acc + own * at.acc_stride * 4
    j = max(0, tile.start - prefix_len)
    while j < num_path:
        slot = int32_at(path, j)
        num = 1
        while j + num < num_path and (slot + num) % LANES > 0:
            if int32_at(path, j + num) != slot + num:
                break
            num += 1
        entry = path + j * 4
        add_weighted(
            s + j * 4, room, tile.group, tile.values, entry, _LANE_BITS, 1, entry,
            slot % LANES, num, to, at.acc_stride,
        )  # fmt: skip
        j += num


@borrowing
def _attend_tile(tile, shape):
    """Some rows of one sequence, one KV head, its query heads."""
    at = tile.at
    d, group, width, room = shape.head_dim, tile.group, tile.values.width, at.room
    heads = tile.num * group
    for i in range(tile.num):
        q = at.qkv + ((tile.first + i) * at.qkv_stride + tile.column) * 4
        put_scaled(q, np.float32(1.0), at.queries + i * group * d * 4, group * d)
    low, end = tile.start // LANES, (tile.longest + LANES - 1) // LANES
    if end > low:
        table = tile.table + low * 4
        _ask(tile.keys, table, end - low)
        block_scores(at.queries, d, heads, tile.keys, table, 0, end - low, at.scores, room)
        _ask(tile.values, table, end - low)
    for i in range(tile.num):
        _finish_scores(tile, i, room, shape)
    clear_heads(at.acc, at.acc_stride, heads, width)
    _add_prefix(tile, 0, heads, tile.start, tile.shortest, room)
    low = max(tile.start, tile.shortest)
    for i in range(tile.num):
        r = tile.first + i
        _add_prefix(tile, i * group, group, low, int32_at(at.prefix_len, r), room)
        _add_path(tile, i, room)
        out = at.out + (r * at.out_stride + tile.column) * 4
        for g in range(group):
            acc = at.acc + (i * group + g) * at.acc_stride * 4
            put_scaled(acc, float_at(acc, width), out + g * d * 4, d)


@borrowing
def _attend_rows(first, last, h, at, layer, shape, group):
    """Rows first .. last - 1 and KV head h: in one tile where they are of one sequence and see it
    from its beginning, else one after the other."""
    sequence, window = int32_at(at.seq_ids, first), layer.window
    alike = window == 0
    for r in range(first + 1, last):
        alike = alike and int32_at(at.seq_ids, r) == sequence
    num = last - first if alike else 1
    keys, values = _planes(layer, shape.head_dim, h)
    for r in range(first, last, num):
        start = 0
        if window > 0:
            start = max(0, int32_at(at.positions, r) - window + 1)
        shortest = longest = int32_at(at.prefix_len, r)
        for i in range(r + 1, r + num):
            shortest = min(shortest, int32_at(at.prefix_len, i))
            longest = max(longest, int32_at(at.prefix_len, i))
        table = at.tables + int32_at(at.seq_ids, r) * at.table_stride * 4
        tile = Tile(
            at, r, num, group, h * group * shape.head_dim, start, shortest, longest, table, keys,
            values,
        )  # fmt: skip
        _attend_tile(tile, shape)


@borrowing
def _addresses(rows, qkv, scratch, out, thread):
    """Where a thread finds what it works on."""
    return AttentionAddresses(
        rows.positions.ctypes.data, rows.seq_ids.ctypes.data, rows.prefix_len.ctypes.data,
        rows.path_start.ctypes.data, rows.path_len.ctypes.data, rows.path_slots.ctypes.data,
        rows.tables.ctypes.data, rows.tables.shape[1], qkv.ctypes.data, qkv.shape[1],
        out.ctypes.data, out.shape[1], scratch.queries[thread].ctypes.data,
        scratch.scores[thread].ctypes.data, scratch.scores.shape[2],
        scratch.acc[thread].ctypes.data, scratch.acc.shape[2],
    )  # fmt: skip


@borrowing
def attend(rows, qkv, layer, shape, scratch, out, work):
    """out[r] = attention of row r over its keys, all heads; K and V of all rows are in place.

    Items are (KV head, some rows that follow each other): keys and values come from memory once
    for an item's rows.
    """
    at = _addresses(rows, qkv, scratch, out, work.thread)
    num_kv_heads = layer.kv.shape[1]
    group = shape.num_heads // num_kv_heads
    size = min(_tile_rows(group), max(1, rows.num * num_kv_heads // (4 * work.threads)))
    tiles = (rows.num + size - 1) // size
    item = take(work)
    while item < tiles * num_kv_heads:
        # Late rows have the most keys: hand them out first, and all of one head, whose keys and
        # values of a prompt a core's L2 can hold, before those of the next.
        last = rows.num - item % tiles * size
        first = max(0, last - size)
        _attend_rows(first, last, item // tiles, at, layer, shape, group)
        item = take(work)
    barrier(work)


@entry_run_by(run)
@borrowing
def attend_layer(
    thread: int, rows: Rows, qkv: Float32x2, layer: AttentionLayer, shape: Shape, scratch: Scratch,
    out: Float32x2, work: Work,
) -> None:  # fmt: skip
    """A layer's attention alone: `place` and `attend`."""
    work = Work(work.sync, work.pairs, work.threads, thread)
    place(rows, qkv, layer, shape, work)
    attend(rows, qkv, layer, shape, scratch, out, work)
