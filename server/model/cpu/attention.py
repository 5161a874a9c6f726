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
from numba import njit

from server.model.cpu.attention_kernels import (
    Plane,
    add_weighted,
    block_scores,
    int32_at,
    one_score,
    rotate,
    store_key,
    store_value,
)
from server.model.cpu.kernels import exp_shifted, float_at, max_of, rms_norm, set_float
from server.model.cpu.records import RowKeys
from server.model.cpu.soft_cap import soft_cap
from server.model.cpu.team import barrier, take
from server.model.cpu.vector_ir import LANES

_serial = njit(nogil=True, cache=True, error_model="numpy")


@_serial
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


@_serial
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


@_serial
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


@_serial
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


@_serial
def _score_row(q, group, keys, shape, scores, acc):
    """Softmax numerators of one row's keys into scores, 1 / their sum into acc[:, width]."""
    d = shape.head_dim
    width = keys.values.width
    room = scores.shape[1]
    prefix_len = keys.prefix_len
    num_keys = prefix_len + keys.num_path
    first = keys.start // LANES
    base = first * LANES
    end_block = (prefix_len + LANES - 1) // LANES
    padded = (num_keys - base + LANES - 1) // LANES * LANES
    s = scores.ctypes.data
    if end_block > first:
        block_scores(q, d, group, keys.keys, keys.table + first * 4, end_block - first, s, room)
    last = -1
    for j in range(keys.num_path):
        slot = int32_at(keys.path, j)
        if slot // LANES != last:
            last = slot // LANES
            one_score(q, d, group, keys.keys, last, acc.ctypes.data + width * 4, acc.shape[1])
        for g in range(group):
            scores[g, prefix_len + j - base] = acc[g, width + slot % LANES]
    scale = shape.scale
    if shape.cap > 0:
        for g in range(group):
            soft_cap(s + g * room * 4, padded // LANES, scale, shape.cap)
        scale = np.float32(1.0)
    for g in range(group):
        for i in range(base, keys.start):
            scores[g, i - base] = -np.inf
        for i in range(num_keys - base, padded):
            scores[g, i] = -np.inf
        row = s + g * room * 4
        top = max_of(row, padded // LANES) * scale
        total = exp_shifted(row, padded // LANES, scale, top)
        acc[g, width] = np.float32(1.0) / total


@_serial
def _add_path(group, keys, scores, acc):
    """The values of a row's path, in order; slots that follow each other in a block at once."""
    base = keys.start // LANES * LANES
    room = scores.shape[1]
    j = max(0, keys.start - keys.prefix_len)
    while j < keys.num_path:
        slot = int32_at(keys.path, j)
        num = 1
        while j + num < keys.num_path and (slot + num) % LANES > 0:
            if int32_at(keys.path, j + num) != slot + num:
                break
            num += 1
        add_weighted(
            scores.ctypes.data + (keys.prefix_len + j - base) * 4, room, group, keys.values, slot,
            num, acc.ctypes.data, acc.shape[1],
        )  # fmt: skip
        j += num


@_serial
def _attend_row(q, group, keys, shape, scores, acc, out):
    """One row, one KV head, its `group` query heads, at address q one after the other.

    scores: float32 [group, room]; acc: float32 [group, w + 16]. The last 16 columns of acc are
    the scores of one block of path keys. out: address of float32 [group * head_dim].
    """
    d = shape.head_dim
    width = keys.values.width
    room = scores.shape[1]
    start, prefix_len = keys.start, keys.prefix_len
    base = start // LANES * LANES
    s = scores.ctypes.data
    _score_row(q, group, keys, shape, scores, acc)
    for g in range(group):
        for i in range(width):
            acc[g, i] = np.float32(0.0)
    for b in range(base // LANES, (prefix_len + LANES - 1) // LANES):
        low = max(start, b * LANES)
        high = min(prefix_len, (b + 1) * LANES)
        if high > low:
            add_weighted(
                s + (low - base) * 4, room, group, keys.values,
                int32_at(keys.table, b) * LANES + low - b * LANES, high - low, acc.ctypes.data,
                acc.shape[1],
            )  # fmt: skip
    _add_path(group, keys, scores, acc)
    for g in range(group):
        for i in range(d):
            set_float(out, g * d + i, acc[g, i] * acc[g, width])


@_serial
def attend(rows, qkv, layer, shape, scratch, out, work):
    """out[r] = attention of row r over its keys, all heads; K and V of all rows are in place.

    Items are (KV head, row).
    """
    scores, acc = scratch.scores[work.thread], scratch.acc[work.thread]
    planes = _all_planes(layer)
    num_kv_heads = layer.keys.shape[0]
    group = shape.num_heads // num_kv_heads
    d = shape.head_dim
    paths, tables = rows.path_slots.ctypes.data, rows.tables.ctypes.data
    item = take(work)
    while item < rows.num * num_kv_heads:
        # Late rows have the most keys: hand them out first, and all of one head, whose keys and
        # values of a prompt a core's L2 can hold, before those of the next.
        r = rows.num - 1 - item % rows.num
        h = item // rows.num
        start = 0
        if layer.window > 0 and rows.positions[r] - layer.window + 1 > 0:
            start = rows.positions[r] - layer.window + 1
        key_plane, value_plane = _planes(planes, h)
        keys = RowKeys(
            start, np.int64(rows.prefix_len[r]), paths + rows.path_start[r] * 4,
            np.int64(rows.path_len[r]), tables + rows.seq_ids[r] * rows.tables.shape[1] * 4,
            key_plane, value_plane,
        )  # fmt: skip
        column = h * group * d
        _attend_row(
            qkv.ctypes.data + (r * qkv.shape[1] + column) * 4, group, keys, shape, scores, acc,
            out.ctypes.data + (r * out.shape[1] + column) * 4,
        )  # fmt: skip
        item = take(work)
    barrier(work)
