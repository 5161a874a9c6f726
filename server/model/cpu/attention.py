"""Attention on a CPU: q, k and v of a step's rows into their places, then each row's sum over keys.

A row's keys are numbered by position; scores are sums over head_dim in order, the softmax adds 16
lanes by position mod 16, values are added in position order. So a row's result has the same bits
whatever rows stand beside it and whether a key was written by a prompt row or by an accepted tree
node. Tree attention: a node's keys are its sequence's prefix and its own path (Rows.path_slots).
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np

from server.model.cpu.attention_kernels import (
    WIDE_HEADS,
    Plane,
    add_blocks,
    add_weighted,
    block_scores,
    clear_heads,
    int32_at,
    one_score,
    put_scaled,
)
from server.model.cpu.attention_places import rotate, store_key, store_value
from server.model.cpu.kernels import (
    borrows,
    exp_shifted,
    float_at,
    inline,
    max_of,
    rms_norm,
    set_float,
)
from server.model.cpu.records import AttentionAddresses, Tile
from server.model.cpu.soft_cap import soft_cap
from server.model.cpu.team import barrier, take
from server.model.cpu.vector_ir import LANES

_NEVER = np.float32(-np.inf)


@inline
def tile_rows(group):
    """Most rows whose scores and sums are computed together, with `group` query heads a KV head:
    their query heads share each load."""
    if WIDE_HEADS > 0 and WIDE_HEADS % group == 0:
        return WIDE_HEADS // group
    return 4


@borrows
def _place_row(row, position, slot, layer, planes, shape):
    """One row of qkv, at address `row`: norms and rope on q and k in place, K and V to a slot."""
    d = shape.head_dim
    num_heads, num_kv_heads = shape.num_heads, layer.keys.shape[0]
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
    scaled = layer.key_scales.shape[3] > 0
    for h in range(num_kv_heads):
        key = row + (num_heads + h) * d * 4
        keys, values = _planes(planes, h)
        store_key(keys, scaled, slot, key, d)
        store_value(values, scaled, slot, key + num_kv_heads * d * 4, d)


@borrows
def _all_planes(layer):
    """The keys and the values of a layer, those of head 0, and the bytes from head to head."""
    zero = layer.keys.dtype.type(0)
    keys = Plane(layer.keys.ctypes.data, layer.key_scales.ctypes.data, layer.keys.shape[2], zero)
    values = Plane(
        layer.values.ctypes.data, layer.value_scales.ctypes.data, layer.values.shape[3], zero
    )
    strides = (
        layer.keys.strides[0], layer.key_scales.strides[0], layer.values.strides[0],
        layer.value_scales.strides[0],
    )  # fmt: skip
    return keys, values, strides


@borrows
def _planes(planes, h):
    """Keys and values of head h."""
    keys, values, strides = planes
    return (
        Plane(keys.numbers + h * strides[0], keys.scales + h * strides[1], keys.width, keys.zero),
        Plane(
            values.numbers + h * strides[2], values.scales + h * strides[3], values.width,
            values.zero,
        ),
    )  # fmt: skip


@borrows
def place(rows, qkv, layer, shape, work):
    """Write the K and V of all rows; qkv [R, outputs] becomes normed and rotated in place.

    Bias, norms and rope on q and k, then K and V into their slots. A thread takes rows that follow
    each other: keys of neighbouring slots share cache lines.
    """
    planes = _all_planes(layer)
    share = (rows.num + work.threads - 1) // work.threads
    first = work.thread * share
    for r in range(first, min(rows.num, first + share)):
        for i in range(layer.bias.shape[0]):
            qkv[r, i] += layer.bias[i]
        row = qkv.ctypes.data + r * qkv.shape[1] * 4
        _place_row(row, rows.positions[r], np.int64(rows.slots[r]), layer, planes, shape)
    barrier(work)


@borrows
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
            one_score(at.queries + own * d * 4, d, group, tile.keys, last, block, at.acc_stride)
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


@borrows
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
        slot = int32_at(tile.table, b) * LANES + low % LANES
        add_weighted(
            s + (low - base) * 4, room, num_heads, tile.values, slot, num, to, at.acc_stride
        )
        low += num


@borrows
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
        add_weighted(s + j * 4, room, tile.group, tile.values, slot, num, to, at.acc_stride)
        j += num


@borrows
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
        block_scores(at.queries, d, heads, tile.keys, table, end - low, at.scores, room)
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


@borrows
def _attend_rows(first, last, h, at, window, planes, shape, group):
    """Rows first .. last - 1 and KV head h: in one tile where they are of one sequence and see it
    from its beginning, else one after the other."""
    sequence = int32_at(at.seq_ids, first)
    alike = window == 0
    for r in range(first + 1, last):
        alike = alike and int32_at(at.seq_ids, r) == sequence
    num = last - first if alike else 1
    keys, values = _planes(planes, h)
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


@borrows
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


@borrows
def attend(rows, qkv, layer, shape, scratch, out, work):
    """out[r] = attention of row r over its keys, all heads; K and V of all rows are in place.

    Items are (KV head, some rows that follow each other): keys and values come from memory once
    for an item's rows.
    """
    at = _addresses(rows, qkv, scratch, out, work.thread)
    planes = _all_planes(layer)
    num_kv_heads, window = layer.keys.shape[0], layer.window
    group = shape.num_heads // num_kv_heads
    size = min(tile_rows(group), max(1, rows.num * num_kv_heads // (4 * work.threads)))
    tiles = (rows.num + size - 1) // size
    item = take(work)
    while item < tiles * num_kv_heads:
        # Late rows have the most keys: hand them out first, and all of one head, whose keys and
        # values of a prompt a core's L2 can hold, before those of the next.
        last = rows.num - item % tiles * size
        first = max(0, last - size)
        _attend_rows(first, last, item // tiles, at, window, planes, shape, group)
        item = take(work)
    barrier(work)
