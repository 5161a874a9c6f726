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
    store_key,
    store_value,
)
from server.model.cpu.kernels import exp_shifted, max_of, rms_norm
from server.model.cpu.records import RowKeys
from server.model.cpu.soft_cap import soft_cap
from server.model.cpu.team import barrier, take
from server.model.cpu.vector_ir import LANES

_serial = njit(nogil=True, cache=True, error_model="numpy")


@_serial
def _rotate(x, cos, sin):
    """Rotary embedding in place: halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    half = cos.shape[0]
    for i in range(half):
        a = x[i]
        b = x[half + i]
        x[i] = a * cos[i] - b * sin[i]
        x[half + i] = b * cos[i] + a * sin[i]


@_serial
def place(rows, qkv, layer, shape, work):
    """Write the K and V of all rows; qkv [R, outputs] becomes normed and rotated in place.

    Bias, norms and rope on q and k, then K and V into their slots; each thread its own rows.
    """
    num_kv_heads = layer.keys.shape[0]
    num_heads = shape.num_heads
    d = shape.head_dim
    normed = layer.q_norm.shape[0]
    norms_heads = normed == d
    for r in range(work.thread, rows.num, work.threads):
        row = qkv[r]
        if layer.bias.shape[0] > 0:
            for i in range(layer.bias.shape[0]):
                row[i] += layer.bias[i]
        if normed > d:
            keys = row[num_heads * d : (num_heads + num_kv_heads) * d]
            rms_norm(row[:normed], layer.q_norm, row[:normed], normed, shape.eps)
            rms_norm(keys, layer.k_norm, keys, keys.shape[0], shape.eps)
        c = layer.cos[rows.positions[r]]
        s = layer.sin[rows.positions[r]]
        for h in range(num_heads + num_kv_heads):
            head = row[h * d : (h + 1) * d]
            norm = layer.q_norm if h < num_heads else layer.k_norm
            if norms_heads and not shape.norm_after_rope:
                rms_norm(head, norm, head, d, shape.eps)
            _rotate(head, c, s)
            if norms_heads and shape.norm_after_rope:
                rms_norm(head, norm, head, d, shape.eps)
        if layer.query_scales.shape[0] > 0:
            for i in range(num_heads * d):
                row[i] *= layer.query_scales[rows.positions[r]]
        for h in range(num_kv_heads):
            key = row[(num_heads + h) * d : (num_heads + h + 1) * d]
            value = row[(num_heads + num_kv_heads + h) * d : (num_heads + num_kv_heads + h + 1) * d]
            store_key(Plane(layer.keys[h], layer.key_scales[h]), rows.slots[r], key)
            store_value(Plane(layer.values[h], layer.value_scales[h]), rows.slots[r], value)
    barrier(work)


@_serial
def _score_row(q, group, keys, shape, scores, acc):
    """Softmax numerators of one row's keys into scores, 1 / their sum into acc[:, width]."""
    d = shape.head_dim
    width = keys.values.numbers.shape[2]
    room = scores.shape[1]
    prefix_len = keys.prefix_len
    num_path = keys.path.shape[0]
    num_keys = prefix_len + num_path
    base = keys.start // LANES * LANES
    end_block = (prefix_len + LANES - 1) // LANES
    padded = (num_keys - base + LANES - 1) // LANES * LANES
    s = scores.ctypes.data
    for b in range(base // LANES, end_block):
        block_scores(q, d, group, keys.keys, keys.table[b], s + (b * LANES - base) * 4, room)
    last = -1
    for j in range(num_path):
        slot = keys.path[j]
        if slot // LANES != last:
            last = slot // LANES
            block_scores(
                q, d, group, keys.keys, last, acc.ctypes.data + width * 4,
                acc.shape[1],
            )  # fmt: skip
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
def _attend_row(q, group, keys, shape, scores, acc, out):
    """One row, one KV head, its `group` query heads, at address q one after the other.

    scores: float32 [group, room]; acc: float32 [group, w + 16]. The last 16 columns of acc are
    the scores of one block of path keys. out: float32 [group * head_dim].
    """
    d = shape.head_dim
    width = keys.values.numbers.shape[2]
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
                keys.table[b] * LANES + low - b * LANES, high - low, acc.ctypes.data, acc.shape[1],
            )  # fmt: skip
    for j in range(keys.path.shape[0]):
        if prefix_len + j >= start:
            add_weighted(
                s + (prefix_len + j - base) * 4, room, group, keys.values, keys.path[j], 1,
                acc.ctypes.data, acc.shape[1],
            )  # fmt: skip
    for g in range(group):
        for i in range(d):
            out[g * d + i] = acc[g, i] * acc[g, width]


@_serial
def attend(rows, qkv, layer, shape, scratch, out, work):
    """out[r] = attention of row r over its keys, all heads; K and V of all rows are in place.

    Items are (row, KV head).
    """
    scores, acc = scratch.scores[work.thread], scratch.acc[work.thread]
    num_kv_heads = layer.keys.shape[0]
    group = shape.num_heads // num_kv_heads
    d = shape.head_dim
    item = take(work)
    while item < rows.num * num_kv_heads:
        # Late rows have the most keys: hand them out first.
        r = rows.num - 1 - item // num_kv_heads
        h = item % num_kv_heads
        begin = rows.path_start[r]
        start = 0
        if layer.window > 0 and rows.positions[r] - layer.window + 1 > 0:
            start = rows.positions[r] - layer.window + 1
        keys = RowKeys(
            start, np.int64(rows.prefix_len[r]), rows.path_slots[begin : begin + rows.path_len[r]],
            rows.tables[rows.seq_ids[r]], Plane(layer.keys[h], layer.key_scales[h]),
            Plane(layer.values[h], layer.value_scales[h]),
        )  # fmt: skip
        _attend_row(
            qkv[r].ctypes.data + h * group * d * 4, group, keys, shape, scores, acc,
            out[r, h * group * d :],
        )  # fmt: skip
        item = take(work)
    barrier(work)
