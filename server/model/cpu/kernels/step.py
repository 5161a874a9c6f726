"""A step in one call of compiled code: the rows' embeddings, all layers, the LM head, greedy draws.

One share of the team does all of it, so the host is not asked between the parts of a step: what
Python does between two of them takes longer than the arithmetic of a small part, because a step's
weights have pushed its code and data out of the caches.

The forward pass is that of the families of shape.py. Weights are records.Linear of any kind; K and
V lie in a paged cache. Every row's result is a function of that row and of the keys it attends to,
bit for bit, whatever rows stand beside it, however the rows before it were cut into steps, and
whether a key was written by a prompt row or by an accepted tree node:
  - products sum over k in order (vectors.py), of integers exactly;
  - attention sums over a row's keys in position order (attention.py).
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np

from drafters.jit import borrowing, compiled, entry, entry_run_by
from server.model.cpu.kernels.attention import attend, place
from server.model.cpu.kernels.blocks import block_row
from server.model.cpu.kernels.delta import tap_sums
from server.model.cpu.kernels.linear import gated_linear, linear
from server.model.cpu.kernels.lora import add_lora, gated_linear_lora
from server.model.cpu.kernels.sampling import is_finite_row, likeliest_allowed, likeliest_of
from server.model.cpu.kernels.screen import allowed_linear, screened_linear
from server.model.cpu.kernels.team import barrier, now, run
from server.model.cpu.kernels.vectors import (
    bfloat_at,
    float_at,
    half_at,
    rms_norm,
    soft_cap,
)  # fmt: skip
from server.model.cpu.records import (
    BFLOAT16,
    CONV_IN,
    CONV_OUT,
    DOWN,
    FAILED,
    FLOAT32,
    INTEGERS,
    LANES,
    OUT,
    QKV,
    AttentionLayer,
    Cache,
    Ends,
    Float32x2,
    Head,
    Int32,
    Int64x2,
    Layers,
    Positions,
    Rows,
    Scratch,
    Shape,
    StepAdapters,
    Table,
    Wanted,
    Work,
)  # fmt: skip

# Rows of the norm table, one plane a layer; WeightNames.norms has them in this order.
NORM_IN, NORM_POST_ATTENTION, NORM_MLP, NORM_POST_MLP = 0, 1, 2, 3

_NEAR = 4.0
"""Likely ids, which drafts are made of, are not a Screen's where they are so little less likely
than the likeliest: with its logits alone drafts take a thirtieth more steps."""


@borrowing
def _row(x, r):
    """Address of row r of a float32 array in C order."""
    return x.ctypes.data + r * x.shape[1] * 4


@borrowing
def _norm_row(x, r, is_normed, weight, out, eps):
    """out[r] = RMSNorm(x[r]) * weight, or x[r] as it is."""
    if is_normed:
        rms_norm(_row(x, r), weight.ctypes.data, _row(out, r), weight.shape[0], eps)
    else:
        for i in range(weight.shape[0]):
            out[r, i] = x[r, i]


@borrowing
def residual(num_rows, x, y, bias, post, has_following, following, out, shape, work):
    """x[r] += (y[r] + bias) * scale, then out[r] = RMSNorm(x[r]) * following, or x[r] without
    has_following, for this thread's rows r < num_rows.

    bias: float32 [H] or [0]. post: the norm that y[r] goes through first, in place, where the model
    has norms after its blocks. One pass over a row, while it is in the cache.
    """
    n = following.shape[0]
    for r in range(work.thread, num_rows, work.threads):
        if shape.norms_after:
            rms_norm(_row(y, r), post.ctypes.data, _row(y, r), n, shape.eps)
        if bias.shape[0] > 0:
            for i in range(n):
                x[r, i] += (y[r, i] + bias[i]) * shape.residual_scale
        else:
            for i in range(n):
                x[r, i] += y[r, i] * shape.residual_scale
        _norm_row(x, r, has_following, following, out, shape.eps)


@compiled
def convolve(rows, projected, taps, inputs, out, work):
    """out[r] = C * (taps * (B * x)) for the rows of a step; the layer's inputs are kept.

    A short convolution (LFM2) is a gated filter over the last few positions of a row's path. A
    layer projects a row to B, C and x. Its input B * x is kept per KV slot, like one more K, so
    that a row reads its own ancestors' through its sequence's block table and its draft path,
    whatever else is in the batch. Nothing recurs: a rejected draft leaves nothing to roll back, a
    cached block holds what the next position needs, and each row has the same bits in a prompt
    chunk, a decode step and a tree.

    projected: float32 [R, at least 3 H]: B, C, x. taps: float32 [taps, H], the oldest first.
    inputs: float32 [blocks, 16, H]. out: float32 [R, H].
    """
    n = inputs.shape[2]
    for r in range(work.thread, rows.num, work.threads):
        row, kept = projected[r], inputs[rows.slots[r] // LANES, rows.slots[r] % LANES]
        for i in range(n):
            kept[i] = row[i] * row[2 * n + i]
    barrier(work)
    for r in range(work.thread, rows.num, work.threads):
        row, result = projected[r], out[r, :n]
        last = np.int64(rows.prefix_len[r] + rows.path_len[r] - 1)
        tap_sums(rows, r, np.int64(rows.seq_ids[r]), last, taps, inputs, 0, result)
        for i in range(n):
            result[i] *= row[n + i]


@borrowing
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


@borrowing
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


@borrowing
def _put_rows(ends, scratch, work):
    """hidden[r] = normed[i] of wanted row i, which is row r of the step."""
    barrier(work)
    for i in range(work.thread, ends.table.shape[1], work.threads):
        for j in range(scratch.hidden.shape[1]):
            scratch.hidden[ends.table[0, i], j] = scratch.normed[i, j]


@borrowing
def _forward_share(thread, rows, ends, layers, memory, shape, adapters, work):
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
    norm_in = layers.norms[0, NORM_IN]
    for r in range(thread, num, work.threads):
        _norm_row(x, r, shape.norms_before, norm_in, normed, shape.eps)
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
                positions.sin[table], positions.query_scales, positions.windows[i], cache.kind,
                cache.kv[which],
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
        residual(
            num, x, y, layers.out_bias[i], norms[NORM_POST_ATTENTION], shape.norms_before,
            norms[NORM_MLP], normed, shape, work,
        )  # fmt: skip
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
        residual(
            num, x, y, layers.out_bias[i, :0], norms[NORM_POST_MLP], shape.norms_before or last,
            following, scratch.hidden if last and not picks else normed, shape, work,
        )  # fmt: skip
    if picks:
        _put_rows(ends, scratch, work)


@entry
@borrowing
def embed_rows(
    thread: int, num: int, token_ids: Int32, table: Table, x: Float32x2, threads: int
) -> None:
    """x[r] = the embedding of this thread's rows r < num."""
    for r in range(thread, num, threads):
        token = token_ids[r]
        if token >= table.num_rows:
            token = 0
        row = table.address + token * table.row_bytes
        if table.kind == FLOAT32:
            for j in range(x.shape[1]):
                x[r, j] = float_at(row, j) * table.scale
        elif table.kind == INTEGERS:
            block_row(row, table.form, table.scale, x[r])
        elif table.kind == BFLOAT16:
            for j in range(x.shape[1]):
                x[r, j] = bfloat_at(row, j) * table.scale
        else:
            for j in range(x.shape[1]):
                x[r, j] = half_at(row, j) * table.scale


@borrowing
def _head_share(hidden, head, wanted, work):
    """This thread's part of the logits, and of what is drawn from them."""
    num = wanted.rows.shape[0]
    for i in range(work.thread, num, work.threads):
        for j in range(hidden.shape[1]):
            head.states[i, j] = hidden[wanted.rows[i], j]
    if wanted.greedy.shape[0] == 0 or not allowed_linear(num, head, wanted.words, work):
        if wanted.greedy.shape[0] > 0 and head.screen.order.shape[0] > 0:
            near = _NEAR if wanted.chances.shape[0] > 0 else 0.0
            screened_linear(num, head, wanted.words, near, work)
        else:
            linear(head.states, num, head.weights, 0, head.logits, work)
    for i in range(work.thread, num, work.threads):
        logits = head.logits[i]
        if head.cap > 0.0:
            soft_cap(
                logits.ctypes.data, logits.shape[0] // LANES, np.float32(1.0), np.float32(head.cap)
            )
        for j in range(head.vocab_size, logits.shape[0]):
            logits[j] = -np.inf
        if wanted.greedy.shape[0] > 0:
            finite = is_finite_row(head.states[i])
            token = likeliest_allowed(logits, wanted.words, i, head.vocab_size)
            wanted.greedy[i] = token if finite else FAILED
            if wanted.chances.shape[0] > 0:
                ids, chances = wanted.likely_ids[i], wanted.chances[i]
                likeliest_of(finite, logits, ids, chances, work.pairs[work.thread])


@entry_run_by(run)
@borrowing
def step(
    thread: int, table: Table, layers: Layers, memory: tuple[Positions, Cache, Scratch],
    shape: Shape, adapters: StepAdapters, head: Head, embeds: bool, token_ids: Int32, rows: Rows,
    ends: Ends, spans: Int64x2, wanted: Wanted, work: Work,
) -> None:  # fmt: skip
    """A whole step: Scratch.hidden of the rows that Ends has, logits of the wanted ones, and what
    is drawn of them.

    The first six stay the same from step to step. embeds: whether rows have their embeddings from
    the table; else they are in Scratch.x. spans: of the rows that have an adapter, StepAdapters'.
    """
    scratch = memory[2]
    own = Work(work.sync, work.pairs, work.threads, thread)
    if thread == 0:
        wanted.clock[0] = wanted.clock[1] = 0
    if embeds:  # by the thread that norms the row first
        embed_rows(thread, rows.num, token_ids, table, scratch.x, work.threads)
    of_rows = StepAdapters(
        spans, adapters.inputs, adapters.parts, adapters.alternate, adapters.up, adapters.inner,
        adapters.wide,
    )  # fmt: skip
    _forward_share(thread, rows, ends, layers, memory, shape, of_rows, work)
    if wanted.rows.shape[0] > 0:
        barrier(own)
        if thread == 0:
            wanted.clock[0] = now()
        _head_share(scratch.hidden, head, wanted, own)
        if thread == 0:
            wanted.clock[1] = now()
