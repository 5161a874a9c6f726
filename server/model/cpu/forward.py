"""The forward pass on a CPU, fused: a part of a job of the team (step.py) runs every layer for all
rows of a step.

It takes embedding rows and gives final hidden states, for the families of shape.py. Weights are
records of any kind (linear.py); K and V lie in a paged cache. Elsewhere: loading weights
(weights.py), Batches (runner.py), the LM head (head.py), draws (sampler.py).

Every row's result is a function of that row and of the keys it attends to, bit for bit, whatever
rows stand beside it, however the rows before it were cut into steps, and whether a key was
written by a prompt row or by an accepted tree node:
  - products sum over k in order (kernels.py);
  - attention sums over a row's keys in position order (attention.py).
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import njit

from server.model.cpu.attention import attend, place
from server.model.cpu.convolution import convolve
from server.model.cpu.kernels import borrows, rms_norm
from server.model.cpu.linear import gated_linear, linear
from server.model.cpu.lora import (
    CONV_IN,
    CONV_OUT,
    DOWN,
    OUT,
    QKV,
    add_lora,
    gated_linear_lora,
)
from server.model.cpu.records import AttentionLayer, Residual, Rows, Work
from server.model.cpu.team import barrier
from server.model.cpu.vector_ir import LANES

_serial = njit(nogil=True, cache=True, error_model="numpy")

# Rows of the norm table, one plane a layer; WeightNames.norms has them in this order.
NORM_IN, NORM_POST_ATTENTION, NORM_MLP, NORM_POST_MLP = 0, 1, 2, 3


@borrows
def _row(x, r):
    """Address of row r of a float32 array in C order."""
    return x.ctypes.data + r * x.shape[1] * 4


@borrows
def _norm_rows(num_rows, x, weight, out, eps, work):
    """out[r] = RMSNorm(x[r]) * weight for this thread's rows r < num_rows."""
    n = weight.shape[0]
    for r in range(work.thread, num_rows, work.threads):
        rms_norm(_row(x, r), weight.ctypes.data, _row(out, r), n, eps)


@borrows
def residual(num_rows, x, y, norms, out, work):
    """x[r] += (y[r] + bias) * scale, then out[r] = RMSNorm(x[r]) * following, for this thread's
    rows r < num_rows.

    has_post: y[r] goes through RMSNorm * post first, in place. Without has_following, out[r] =
    x[r]. One pass over a row, while it is in the cache.
    """
    n = norms.following.shape[0]
    for r in range(work.thread, num_rows, work.threads):
        if norms.has_post:
            rms_norm(_row(y, r), norms.post.ctypes.data, _row(y, r), n, norms.eps)
        if norms.bias.shape[0] > 0:
            for i in range(n):
                x[r, i] += (y[r, i] + norms.bias[i]) * norms.scale
        else:
            for i in range(n):
                x[r, i] += y[r, i] * norms.scale
        if norms.has_following:
            rms_norm(_row(x, r), norms.following.ctypes.data, _row(out, r), n, norms.eps)
        else:
            for i in range(n):
                out[r, i] = x[r, i]


@borrows
def _convolve_share(i, rows, layers, cache, scratch, adapters, work):
    """What layer i, a short convolution, adds to the residual stream, into scratch.projected."""
    which, num = layers.conv_ids[i], rows.num
    linear(scratch.normed, num, layers.conv_in, i, scratch.conv_projected, work)
    add_lora(scratch.normed, adapters, i, CONV_IN, scratch.conv_projected, work)
    convolve(
        rows, scratch.conv_projected, layers.taps[which], cache.inputs[which], scratch.convolved,
        work,
    )  # fmt: skip
    linear(scratch.convolved, num, layers.conv_out, i, scratch.projected, work)
    add_lora(scratch.convolved, adapters, i, CONV_OUT, scratch.projected, work)


@borrows
def _pick_rows(ends, rows, scratch, work):
    """The wanted ones of the rows. attended[i] = the queries and hidden[i] = the residual stream of
    wanted row i: nobody needs what lies in either before a last layer's attention."""
    width, of = scratch.attended.shape[1], ends.table
    for i in range(work.thread, of.shape[1], work.threads):
        r = of[0, i]
        for j in range(width):
            scratch.attended[i, j] = scratch.qkv[r, j]
        for j in range(scratch.x.shape[1]):
            scratch.hidden[i, j] = scratch.x[r, j]
    barrier(work)
    return Rows(of.shape[1], of[1], of[2], of[3], of[4], of[5], of[6], rows.path_slots, rows.tables)


@borrows
def _put_rows(ends, scratch, work):
    """hidden[r] = normed[i] of wanted row i, which is row r of the step."""
    barrier(work)
    for i in range(work.thread, ends.table.shape[1], work.threads):
        for j in range(scratch.hidden.shape[1]):
            scratch.hidden[ends.table[0, i], j] = scratch.normed[i, j]


@borrows
def forward_share(thread, rows, ends, layers, memory, shape, adapters, work):
    """All layers for the rows of a step, run by every thread of the team: scratch.x in,
    scratch.hidden out (records.py), of the rows that `ends` (Ends) wants. adapters: of the rows
    that have one (lora.py).

    Sums of a row belong to one thread or, in products and attention, to items; where a thread reads
    what others wrote, they have met before (team.py).

    memory: (positions, cache, scratch)."""
    positions, cache, scratch = memory
    work = Work(work.sync, work.pairs, work.threads, thread)
    num = rows.num
    x, y, normed = scratch.x, scratch.projected, scratch.normed
    num_layers = layers.norms.shape[0]
    if shape.norms_before:
        _norm_rows(num, x, layers.norms[0, NORM_IN], normed, shape.eps, work)
    else:
        for r in range(thread, num, work.threads):
            for j in range(x.shape[1]):
                normed[r, j] = x[r, j]
    picks = False
    for i in range(num_layers):
        norms = layers.norms[i]
        last = i + 1 == num_layers
        if layers.conv_ids[i] >= 0:
            _convolve_share(i, rows, layers, cache, scratch, adapters, work)
        else:
            table, which = positions.rope_ids[i], layers.kv_ids[i]
            layer = AttentionLayer(
                layers.qkv_bias[i], layers.q_norms[i], layers.k_norms[i], positions.cos[table],
                positions.sin[table], positions.query_scales, positions.windows[i],
                cache.keys[which], cache.values[which], cache.key_scales[which],
                cache.value_scales[which],
            )  # fmt: skip
            linear(normed, num, layers.qkv, i, scratch.qkv, work)
            add_lora(normed, adapters, i, QKV, scratch.qkv, work)
            place(rows, scratch.qkv, layer, shape, work)
            picks = last and ends.picks and adapters.spans.shape[0] == 0
            queries = scratch.qkv
            if picks:
                if ends.table.shape[1] == 0:
                    return
                rows = _pick_rows(ends, rows, scratch, work)
                num, queries, x = rows.num, scratch.attended, scratch.hidden
            attend(rows, queries, layer, shape, scratch, scratch.attended, work)
            linear(scratch.attended, num, layers.out, i, y, work)
            add_lora(scratch.attended, adapters, i, OUT, y, work)
        after = Residual(
            layers.out_bias[i], shape.norms_after, norms[NORM_POST_ATTENTION], shape.residual_scale,
            shape.norms_before, norms[NORM_MLP], shape.eps,
        )  # fmt: skip
        residual(num, x, y, after, normed, work)
        if adapters.spans.shape[0] > 0:
            gated_linear_lora(
                normed, num, layers.gate_up, i, adapters, scratch.inner, shape.gelu, work
            )
        else:
            gated_linear(normed, num, layers.gate_up, i, scratch.inner, shape.gelu, work)
        linear(scratch.inner, num, layers.down, i, y, work)
        add_lora(scratch.inner, adapters, i, DOWN, y, work)
        # The next layer's input norm, or the model's last.
        following = layers.final_norm if last else layers.norms[i + 1, NORM_IN]
        after = Residual(
            layers.out_bias[i, :0], shape.norms_after, norms[NORM_POST_MLP], shape.residual_scale,
            shape.norms_before or last, following, shape.eps,
        )  # fmt: skip
        residual(num, x, y, after, scratch.hidden if last and not picks else normed, work)
    if picks:
        _put_rows(ends, scratch, work)


@_serial
def _move_rows(src, dst, rows):
    """rows[slot] of slots src[i] to dst[i], rows [blocks, 16, n] of any strides: gathered first, so
    that overlaps are safe."""
    buffer = np.empty((src.shape[0], rows.shape[2]), rows.dtype)
    for i in range(src.shape[0]):
        row = rows[src[i] // LANES, src[i] % LANES]
        for j in range(rows.shape[2]):
            buffer[i, j] = row[j]
    for i in range(src.shape[0]):
        row = rows[dst[i] // LANES, dst[i] % LANES]
        for j in range(rows.shape[2]):
            row[j] = buffer[i, j]


@_serial
def move_slots(src, dst, cache):
    """KV of slots src[i] to dst[i], all layers."""
    scaled = cache.key_scales.shape[4] > 0
    for layer in range(cache.keys.shape[0]):
        for h in range(cache.keys.shape[1]):
            _move_rows(src, dst, cache.keys[layer, h].transpose(0, 2, 1))
            _move_rows(src, dst, cache.values[layer, h])
            if scaled:
                _move_rows(src, dst, cache.key_scales[layer, h].transpose(0, 2, 1))
                _move_rows(src, dst, cache.value_scales[layer, h].transpose(0, 2, 1))
    for layer in range(cache.inputs.shape[0]):
        _move_rows(src, dst, cache.inputs[layer])


@_serial
def copy_blocks(src, dst, cache):
    """KV of whole blocks src[i] to dst[i], all layers."""
    for layer in range(cache.keys.shape[0]):
        for h in range(cache.keys.shape[1]):
            for i in range(src.shape[0]):
                cache.keys[layer, h, dst[i]] = cache.keys[layer, h, src[i]]
                cache.values[layer, h, dst[i]] = cache.values[layer, h, src[i]]
                cache.key_scales[layer, h, dst[i]] = cache.key_scales[layer, h, src[i]]
                cache.value_scales[layer, h, dst[i]] = cache.value_scales[layer, h, src[i]]
    for layer in range(cache.inputs.shape[0]):
        for i in range(src.shape[0]):
            cache.inputs[layer, dst[i]] = cache.inputs[layer, src[i]]
