"""The forward pass on a CPU, fused: one numba call runs every layer for all rows of a step.

What: embedding rows in, final hidden states out, for the families of shape.py. Weights are panels
(cpu_kernels.py), K and V live in a paged cache. What not: weights loading and Batches
(cpu_runner.py), the LM head's draws (cpu_sampler.py).

Every row's result is a function of that row and of the keys it attends to, bit for bit, whatever
rows stand beside it, however the rows before it were cut into steps, and whether a key was
written by a prompt row or by an accepted tree node:
  - products sum over k in order (cpu_kernels.py);
  - a row's keys are numbered by position; scores are sums over head_dim in order, the softmax
    adds 16 lanes by position mod 16, values are added in position order.

Cache layout: keys float32 [layers, kv_heads, blocks, head_dim, 16], so that one vector holds the
same dimension of 16 keys; values float32 [layers, kv_heads, blocks, 16, value_width] with
value_width = head_dim rounded up to 16.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import njit, prange

from server.model.cpu.kernels import (
    HALVES,
    LANES,
    MAX_ROWS,
    PANEL,
    add_weighted,
    block_scores,
    exp_shifted,
    fetch_add,
    gelu_gate,
    half_panel_product,
    max_of,
    panel_product,
    rms_norm,
    silu_gate,
)

# Long argument lists are kept in groups that belong together.
# fmt: off

_serial = njit(nogil=True, cache=True, error_model="numpy")
_parallel = njit(nogil=True, cache=True, error_model="numpy", parallel=True)

# Columns of the weight address table, one line a layer.
QKV, OUT, GATE_UP, DOWN = 0, 1, 2, 3
# Rows of the norm table, one plane a layer.
NORM_IN, NORM_MLP, NORM_POST_ATTENTION, NORM_POST_MLP = 0, 1, 2, 3

# Under this many rows the work between products is too small to share between threads.
_SERIAL_ROWS = 4

# Most rows of one work item: their inputs stay in a core's L2.
ROW_SPAN = 16 * MAX_ROWS


@_serial
def _even_span(num_rows, num_spans):
    """Rows of a span: all spans alike, in whole kernels. Items go panel by panel, so that a panel
    is read from memory once and then from the cache for the other spans."""
    span = (num_rows + num_spans - 1) // num_spans
    if num_spans > 1:
        span = (span + MAX_ROWS - 1) // MAX_ROWS * MAX_ROWS
    return span


@_serial
def _product_share(x, ldx, num_rows, panels, num_panels, k, out, ldo, bf16, counter, threads):
    """One thread's share of out = x @ W: (panel, span of rows) items from a shared counter.

    Panels that are left over when each thread has had as many are split by columns.
    """
    item_bytes = 2 if bf16 else 4
    size = k * PANEL * item_bytes
    num_spans = (num_rows + ROW_SPAN - 1) // ROW_SPAN
    span = _even_span(num_rows, num_spans)
    num_whole = num_panels
    if num_spans == 1:
        num_whole -= num_panels % threads
    num_items = (num_whole + (num_panels - num_whole) * HALVES) * num_spans
    item = fetch_add(counter)
    while item < num_items:
        if item < num_whole * num_spans:
            p = item // num_spans
            first = item % num_spans * span
            panel_product(
                x + first * ldx * 4, ldx, min(span, num_rows - first), panels + p * size, k,
                out + (first * ldo + p * PANEL) * 4, ldo, bf16,
            )
        else:
            part = item - num_whole
            column = (num_whole + part // HALVES) * PANEL + part % HALVES * (PANEL // HALVES)
            p = column // PANEL
            half_panel_product(
                x, ldx, num_rows, panels + p * size + column % PANEL * item_bytes, k,
                out + column * 4, ldo, bf16,
            )
        item = fetch_add(counter)


@_parallel
def _product_parallel(x, ldx, num_rows, panels, num_panels, k, out, ldo, bf16, counter, threads):
    for _ in prange(threads):
        _product_share(x, ldx, num_rows, panels, num_panels, k, out, ldo, bf16, counter, threads)


@_serial
def product(x, num_rows, panels, num_panels, out, bf16, counter, threads):
    """out[m, :] = W @ x[m, :] for m < num_rows; x [*, k], out [*, num_panels * PANEL]."""
    counter[0] = 0
    k = x.shape[1]
    if threads == 1:
        _product_share(
            x.ctypes.data, k, num_rows, panels, num_panels, k, out.ctypes.data, out.shape[1],
            bf16, counter.ctypes.data, 1,
        )
    else:
        _product_parallel(
            x.ctypes.data, k, num_rows, panels, num_panels, k, out.ctypes.data, out.shape[1],
            bf16, counter.ctypes.data, threads,
        )


@_serial
def _gated_share(x, num_rows, panels, num_pairs, out, bf16, gelu, scratch, counter):
    """One thread's share of out = act(x @ gate) * (x @ up); gate and up panels alternate."""
    k = x.shape[1]
    size = k * PANEL * (2 if bf16 else 4)
    ldo = out.shape[1]
    num_spans = (num_rows + ROW_SPAN - 1) // ROW_SPAN
    span = _even_span(num_rows, num_spans)
    num_items = num_pairs * num_spans
    item = fetch_add(counter)
    while item < num_items:
        p = item // num_spans
        first = item % num_spans * span
        num = min(span, num_rows - first)
        rows = x.ctypes.data + first * k * 4
        at = panels + 2 * p * size
        panel_product(rows, k, num, at, k, scratch, 2 * PANEL, bf16)
        panel_product(rows, k, num, at + size, k, scratch + PANEL * 4, 2 * PANEL, bf16)
        for m in range(num):
            target = out.ctypes.data + ((first + m) * ldo + p * PANEL) * 4
            gate = scratch + m * 2 * PANEL * 4
            if gelu:
                gelu_gate(gate, gate + PANEL * 4, target, PANEL // LANES)
            else:
                silu_gate(gate, gate + PANEL * 4, target, PANEL // LANES)
        item = fetch_add(counter)


@_parallel
def _gated_parallel(x, num_rows, panels, num_pairs, out, bf16, gelu, scratch, counter, threads):
    for t in prange(threads):
        _gated_share(
            x, num_rows, panels, num_pairs, out, bf16, gelu, scratch[t].ctypes.data, counter
        )


@_serial
def gated_product(x, num_rows, panels, num_pairs, out, bf16, gelu, scratch, counter, threads):
    """out = act(gate) * up, [*, num_pairs * PANEL].

    scratch: float32 [threads, at least 2 * ROW_SPAN * PANEL].
    """
    counter[0] = 0
    if threads == 1:
        _gated_share(
            x, num_rows, panels, num_pairs, out, bf16, gelu, scratch[0].ctypes.data,
            counter.ctypes.data,
        )
    else:
        _gated_parallel(
            x, num_rows, panels, num_pairs, out, bf16, gelu, scratch, counter.ctypes.data, threads
        )


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
def _place_rows(first, step, num_rows, qkv, bias, positions, slots, keys, values, num_heads,
                head_dim, q_norm, k_norm, has_qk_norm, eps, cos, sin):
    """Bias, head norms and rope on q and k in place, then K and V into their slots."""
    num_kv_heads = keys.shape[0]
    d = head_dim
    for r in range(first, num_rows, step):
        row = qkv[r]
        if bias.shape[0] > 0:
            for i in range(bias.shape[0]):
                row[i] += bias[i]
        c = cos[positions[r]]
        s = sin[positions[r]]
        for h in range(num_heads + num_kv_heads):
            head = row[h * d : (h + 1) * d]
            if has_qk_norm:
                rms_norm(head, q_norm if h < num_heads else k_norm, head, d, eps)
            _rotate(head, c, s)
        block = slots[r] // LANES
        lane = slots[r] % LANES
        for h in range(num_kv_heads):
            key = row[(num_heads + h) * d : (num_heads + h + 1) * d]
            value = row[(num_heads + num_kv_heads + h) * d : (num_heads + num_kv_heads + h + 1) * d]
            k_block = keys[h, block]
            v_row = values[h, block, lane]
            for i in range(d):
                k_block[i, lane] = key[i]
                v_row[i] = value[i]


@_parallel
def _place_parallel(num_rows, qkv, bias, positions, slots, keys, values, num_heads, head_dim,
                    q_norm, k_norm, has_qk_norm, eps, cos, sin, threads):
    for t in prange(threads):
        _place_rows(t, threads, num_rows, qkv, bias, positions, slots, keys, values, num_heads,
                    head_dim, q_norm, k_norm, has_qk_norm, eps, cos, sin)


@_serial
def _attend_row(q, ldq, group, d, scale, window, position, prefix_len, path, table, keys, values,
                scores, acc, out, ldo):
    """One row, one KV head, its `group` query heads. keys [blocks, d, 16], values [blocks, 16, w].

    scores: float32 [group, room]; acc: float32 [group, w + 16]. The last 16 columns of acc are
    the scores of one block of path keys.
    """
    width = values.shape[2]
    room = scores.shape[1]
    num_path = path.shape[0]
    num_keys = prefix_len + num_path
    start = 0
    if window > 0 and position - window + 1 > 0:
        start = position - window + 1
    first_block = start // LANES
    base = first_block * LANES
    end_block = (prefix_len + LANES - 1) // LANES
    padded = (num_keys - base + LANES - 1) // LANES * LANES
    s = scores.ctypes.data
    for b in range(first_block, end_block):
        block_scores(
            q, ldq, group, keys[table[b]].ctypes.data, d, s + (b * LANES - base) * 4, room
        )
    last = -1
    for j in range(num_path):
        slot = path[j]
        if slot // LANES != last:
            last = slot // LANES
            block_scores(
                q, ldq, group, keys[last].ctypes.data, d, acc.ctypes.data + width * 4, acc.shape[1]
            )
        for g in range(group):
            scores[g, prefix_len + j - base] = acc[g, width + slot % LANES]
    for g in range(group):
        for i in range(base, start):
            scores[g, i - base] = -np.inf
        for i in range(num_keys - base, padded):
            scores[g, i] = -np.inf
        row = s + g * room * 4
        top = max_of(row, padded // LANES) * scale
        total = exp_shifted(row, padded // LANES, scale, top)
        acc[g, width] = np.float32(1.0) / total
        for i in range(width):
            acc[g, i] = np.float32(0.0)
    for b in range(first_block, end_block):
        low = max(start, b * LANES)
        high = min(prefix_len, (b + 1) * LANES)
        if high > low:
            add_weighted(
                s + (low - base) * 4, room, group,
                values[table[b], low - b * LANES].ctypes.data, width, high - low, width,
                acc.ctypes.data, acc.shape[1],
            )
    for j in range(num_path):
        if prefix_len + j >= start:
            add_weighted(
                s + (prefix_len + j - base) * 4, room, group,
                values[path[j] // LANES, path[j] % LANES].ctypes.data, width, 1, width,
                acc.ctypes.data, acc.shape[1],
            )
    for g in range(group):
        for i in range(d):
            out[g * ldo + i] = acc[g, i] * acc[g, width]


@_serial
def _attend_share(num_rows, qkv, num_heads, d, scale, window, positions, seq_ids, prefix_len,
                  path_start, path_len, path_slots, tables, keys, values, scores, acc, out,
                  counter):
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    item = fetch_add(counter)
    while item < num_rows * num_kv_heads:
        # Late rows have the most keys: hand them out first.
        r = num_rows - 1 - item // num_kv_heads
        h = item % num_kv_heads
        begin = path_start[r]
        _attend_row(
            qkv[r].ctypes.data + h * group * d * 4, d, group, d, scale, window, positions[r],
            prefix_len[r], path_slots[begin : begin + path_len[r]], tables[seq_ids[r]], keys[h],
            values[h], scores, acc, out[r, h * group * d :], d,
        )
        item = fetch_add(counter)


@_parallel
def _attend_parallel(num_rows, qkv, num_heads, d, scale, window, positions, seq_ids, prefix_len,
                     path_start, path_len, path_slots, tables, keys, values, scores, acc, out,
                     counter, threads):
    for t in prange(threads):
        _attend_share(num_rows, qkv, num_heads, d, scale, window, positions, seq_ids, prefix_len,
                      path_start, path_len, path_slots, tables, keys, values, scores[t], acc[t],
                      out, counter)


@_serial
def _norm_rows(first, step, num_rows, x, weight, out, eps):
    n = weight.shape[0]
    for r in range(first, num_rows, step):
        rms_norm(x[r], weight, out[r], n, eps)


@_parallel
def _norm_parallel(num_rows, x, weight, out, eps, threads):
    for t in prange(threads):
        _norm_rows(t, threads, num_rows, x, weight, out, eps)


@_serial
def norm_rows(num_rows, x, weight, out, eps, threads):
    """out[r] = RMSNorm(x[r]) * weight for r < num_rows."""
    if threads == 1 or num_rows <= 4 * _SERIAL_ROWS:
        _norm_rows(0, 1, num_rows, x, weight, out, eps)
    else:
        _norm_parallel(num_rows, x, weight, out, eps, threads)


@_serial
def _residual_rows(first, step, num_rows, x, y, bias, post_norm, sandwich, norm, out, eps):
    n = norm.shape[0]
    for r in range(first, num_rows, step):
        if sandwich:
            rms_norm(y[r], post_norm, y[r], n, eps)
        if bias.shape[0] > 0:
            for i in range(n):
                x[r, i] += y[r, i] + bias[i]
        else:
            for i in range(n):
                x[r, i] += y[r, i]
        rms_norm(x[r], norm, out[r], n, eps)


@_parallel
def _residual_parallel(num_rows, x, y, bias, post_norm, sandwich, norm, out, eps, threads):
    for t in prange(threads):
        _residual_rows(t, threads, num_rows, x, y, bias, post_norm, sandwich, norm, out, eps)


@_serial
def residual(num_rows, x, y, bias, post_norm, sandwich, norm, out, eps, threads):
    """x[r] += y[r] (+ bias), then out[r] = RMSNorm(x[r]) * norm, for r < num_rows.

    sandwich: y[r] goes through RMSNorm * post_norm first, in place. One pass over a row, while it
    is in the cache.
    """
    if threads == 1 or num_rows <= 4 * _SERIAL_ROWS:
        _residual_rows(0, 1, num_rows, x, y, bias, post_norm, sandwich, norm, out, eps)
    else:
        _residual_parallel(num_rows, x, y, bias, post_norm, sandwich, norm, out, eps, threads)


@_serial
def forward(num_rows, x, positions, slots, seq_ids, prefix_len, path_start, path_len, path_slots,
            tables, weights, bf16, panels, norms, qk_norms, qkv_bias, out_bias, final_norm, cos,
            sin, rope_ids, windows, keys, values, num_heads, head_dim, scale, eps, has_qk_norm,
            sandwich, gelu, normed, qkv, attended, projected, inner, scratch, scores, acc, hidden,
            counter, threads):
    """All layers for `num_rows` rows; x [rows, hidden_size] is the residual stream, in and out.

    weights: int64 [layers, 4] addresses of panels (QKV, OUT, GATE_UP, DOWN). panels: int64 [4]
    how many. hidden: out, the final-normed states. The other arrays are scratch.
    """
    caddr = counter.ctypes.data
    num_layers = weights.shape[0]
    num_kv_heads = keys.shape[1]
    norm_rows(num_rows, x, norms[0, NORM_IN], normed, eps, threads)
    for layer in range(num_layers):
        product(normed, num_rows, weights[layer, QKV], panels[QKV], qkv, bf16, counter, threads)
        c = cos[rope_ids[layer]]
        s = sin[rope_ids[layer]]
        if threads == 1 or num_rows <= _SERIAL_ROWS:
            _place_rows(0, 1, num_rows, qkv, qkv_bias[layer], positions, slots, keys[layer],
                        values[layer], num_heads, head_dim, qk_norms[layer, 0],
                        qk_norms[layer, 1], has_qk_norm, eps, c, s)
        else:
            _place_parallel(num_rows, qkv, qkv_bias[layer], positions, slots, keys[layer],
                            values[layer], num_heads, head_dim, qk_norms[layer, 0],
                            qk_norms[layer, 1], has_qk_norm, eps, c, s, threads)
        counter[0] = 0
        if threads == 1 or num_rows * num_kv_heads == 1:
            _attend_share(num_rows, qkv, num_heads, head_dim, scale, windows[layer], positions,
                          seq_ids, prefix_len, path_start, path_len, path_slots, tables,
                          keys[layer], values[layer], scores[0], acc[0], attended, caddr)
        else:
            _attend_parallel(num_rows, qkv, num_heads, head_dim, scale, windows[layer], positions,
                             seq_ids, prefix_len, path_start, path_len, path_slots, tables,
                             keys[layer], values[layer], scores, acc, attended, caddr, threads)
        product(attended, num_rows, weights[layer, OUT], panels[OUT], projected, bf16, counter,
                threads)
        residual(num_rows, x, projected, out_bias[layer], norms[layer, NORM_POST_ATTENTION],
                 sandwich, norms[layer, NORM_MLP], normed, eps, threads)
        gated_product(normed, num_rows, weights[layer, GATE_UP], panels[GATE_UP] // 2, inner,
                      bf16, gelu, scratch, counter, threads)
        product(inner, num_rows, weights[layer, DOWN], panels[DOWN], projected, bf16, counter,
                threads)
        # The next layer's input norm, or the model's last.
        last = layer + 1 == num_layers
        residual(num_rows, x, projected, out_bias[layer, :0], norms[layer, NORM_POST_MLP],
                 sandwich, final_norm if last else norms[layer + 1, NORM_IN],
                 hidden if last else normed, eps, threads)


@_serial
def move_slots(src, dst, keys, values, key_buffer, value_buffer):
    """KV of slots src[i] to dst[i], all layers: gathered first, so that overlaps are safe."""
    layers, heads, _, d, _ = keys.shape
    width = values.shape[4]
    for layer in range(layers):
        for h in range(heads):
            k = keys[layer, h]
            v = values[layer, h]
            for i in range(src.shape[0]):
                b = src[i] // LANES
                lane = src[i] % LANES
                for j in range(d):
                    key_buffer[i, j] = k[b, j, lane]
                for j in range(width):
                    value_buffer[i, j] = v[b, lane, j]
            for i in range(src.shape[0]):
                b = dst[i] // LANES
                lane = dst[i] % LANES
                for j in range(d):
                    k[b, j, lane] = key_buffer[i, j]
                for j in range(width):
                    v[b, lane, j] = value_buffer[i, j]


@_serial
def copy_blocks(src, dst, keys, values):
    """KV of whole blocks src[i] to dst[i], all layers."""
    for layer in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            for i in range(src.shape[0]):
                keys[layer, h, dst[i]] = keys[layer, h, src[i]]
                values[layer, h, dst[i]] = values[layer, h, src[i]]
