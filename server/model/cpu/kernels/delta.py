"""The gated delta rule on a CPU (Qwen3.5), row by row in one order of operations.

Yang et al. 2024, arXiv 2412.06464, section 3, per value head with state S [dk, dv]:

    S = exp(g) S;  S += k ((v - S^T k) beta)^T;  out = S^T q

A prompt row, a decode row, a replayed position and a draft node run the same function on the inputs
that were kept in their slots, so that they give the same bits. Where each sequence begins is
states.py's. Items of work are (sequence, head).
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np

from drafters.jit import compiled, entry_run_by
from server.model.cpu.kernels.team import barrier, run, take
from server.model.cpu.kernels.vectors import gate
from server.model.cpu.records import (
    LANES,
    DeltaLayer,
    Float32x2,
    Float32x4,
    Float32x5,
    Rows,
    StatePlan,
    Work,
)  # fmt: skip


@compiled
def _place_of(rows, row, seq, position):
    """(block, lane) of a position: of a row's own past, or with row -1 of its sequence's."""
    if row >= 0 and position >= rows.prefix_len[row]:
        slot = rows.path_slots[rows.path_start[row] + position - rows.prefix_len[row]]
        return np.int64(slot // LANES), np.int64(slot % LANES)
    return np.int64(rows.tables[seq, position // LANES]), np.int64(position % LANES)


@compiled
def tap_sums(rows, row, seq, position, taps, inputs, first, out):
    """out = the sums over taps of channels [first, first + out.shape[0]) of the inputs up to a
    position, the oldest first; positions before 0 are zero."""
    n = out.shape[0]
    num_taps = taps.shape[0]
    for i in range(n):
        out[i] = np.float32(0.0)
    for j in range(num_taps):
        at = position - (num_taps - 1 - j)
        if at < 0:
            continue
        block, lane = _place_of(rows, row, seq, at)
        kept, weights = inputs[block, lane, first : first + n], taps[j, first : first + n]
        for i in range(n):
            out[i] += weights[i] * kept[i]


@compiled
def _filtered(rows, row, seq, position, layer, first, out, ones):
    """out = SiLU(tap_sums), a multiple of 16 channels, by the kernel whose bits are the same in
    every lane."""
    tap_sums(rows, row, seq, position, layer.taps, layer.inputs, first, out)
    gate(out.ctypes.data, ones.ctypes.data, out.ctypes.data, out.shape[0] // LANES, False)


@compiled
def _unit(x, scale):
    """x = x / sqrt(sum of squares + 1e-6) * scale."""
    total = np.float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1.0) / np.sqrt(total + np.float32(1e-6)) * scale
    for i in range(x.shape[0]):
        x[i] *= factor


@compiled
def _advance(where, head, layer, old, new, buffers):
    """The state after a position, `new`, from the one before, `old`; they may be the same.

    where: (rows, row, seq, position) of _place_of."""
    rows, row, seq, position = where
    k, v, memory = buffers[1, : layer.dk], buffers[2, : layer.dv], buffers[3, : layer.dv]
    heads = layer.rate.shape[0]
    key_head = head // (heads // layer.key_heads)
    keys = layer.key_heads * layer.dk
    _filtered(rows, row, seq, position, layer, keys + key_head * layer.dk, k, buffers[4])
    _filtered(rows, row, seq, position, layer, 2 * keys + head * layer.dv, v, buffers[4])
    _unit(k, np.float32(1.0))
    block, lane = _place_of(rows, row, seq, position)
    kept = layer.inputs[block, lane]
    channels = layer.taps.shape[1]
    beta = np.float32(1.0) / (np.float32(1.0) + np.exp(-kept[channels + head]))
    x = kept[channels + heads + head] + layer.shift[head]
    soft = x
    if x <= np.float32(20.0):
        soft = np.log1p(np.exp(x))
    decay = np.exp(-layer.rate[head] * soft)
    for j in range(layer.dv):
        memory[j] = np.float32(0.0)
    for i in range(layer.dk):
        for j in range(layer.dv):
            new[i, j] = old[i, j] * decay
            memory[j] += new[i, j] * k[i]
    for j in range(layer.dv):
        memory[j] = (v[j] - memory[j]) * beta
    for i in range(layer.dk):
        for j in range(layer.dv):
            new[i, j] += k[i] * memory[j]


@compiled
def _read(where, head, layer, state, out, buffers):
    """out = state^T q of a row."""
    rows, row, seq, position = where
    q = buffers[0, : layer.dk]
    key_head = head // (layer.rate.shape[0] // layer.key_heads)
    _filtered(rows, row, seq, position, layer, key_head * layer.dk, q, buffers[4])
    _unit(q, np.float32(1.0) / np.sqrt(np.float32(layer.dk)))
    for j in range(layer.dv):
        out[j] = np.float32(0.0)
    for i in range(layer.dk):
        for j in range(layer.dv):
            out[j] += state[i, j] * q[i]


@compiled
def _copy(source, target):
    """One state to another place."""
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            target[i, j] = source[i, j]


@compiled
def _sequence(line, head, step, states, which, stack, out, buffers):
    """All rows of one sequence, one head. step: (rows, plan, layer). states[., which]: of the
    layer."""
    rows, plan, layer = step
    source, destination, after = plan.seqs[line, 0], plan.seqs[line, 1], plan.seqs[line, 2]
    first, before, edge = plan.seqs[line, 3], plan.seqs[line, 4], plan.seqs[line, 5]
    edge_row, begin, end = plan.seqs[line, 6], plan.seqs[line, 7], plan.seqs[line, 8]
    seq = np.int64(rows.seq_ids[plan.order[begin]])
    state = stack[0]
    if source >= 0:
        _copy(states[source, which, head], state)
    else:
        for i in range(state.shape[0]):
            for j in range(state.shape[1]):
                state[i, j] = np.float32(0.0)
    for position in range(after, first):
        _advance((rows, np.int64(-1), seq, position), head, layer, state, state, buffers)
    if before >= 0:
        _copy(state, states[before, which, head])
    kept = destination < 0
    for n in range(begin, end):
        row, depth = plan.order[n], plan.depths[n]
        at = np.int64(rows.positions[row])
        if depth > 0 and not kept:
            _copy(state, states[destination, which, head])
            kept = True
        old = stack[depth - 1] if depth > 0 else state
        new = stack[depth]
        where = (rows, row, seq, at)
        _advance(where, head, layer, old, new, buffers)
        place = out[row, head * layer.dv : (head + 1) * layer.dv]
        _read(where, head, layer, new, place, buffers)
        if row == edge_row:
            _copy(state, states[edge, which, head])
    if not kept:
        _copy(state, states[destination, which, head])


@entry_run_by(run)
@compiled
def delta_rule(
    thread: int, rows: Rows, plan: StatePlan, layer: DeltaLayer, mixed: Float32x2,
    states: Float32x5, which: int, stacks: Float32x4, out: Float32x2, work: Work,
) -> None:  # fmt: skip
    """out[r] = the layer's reading of row r, all heads; inputs and states are kept.

    mixed: float32 [R, channels + 2 heads]. states: float32 [states, layers, heads, dk, dv], which:
    the layer's place there. stacks: float32 [threads, deepest path + 1, dk, dv]. out: float32
    [R, heads dv].
    """
    work = Work(work.sync, work.pairs, work.threads, thread)
    for r in range(thread, rows.num, work.threads):
        for i in range(mixed.shape[1]):
            layer.inputs[rows.slots[r] // LANES, rows.slots[r] % LANES, i] = mixed[r, i]
    barrier(work)
    heads = layer.rate.shape[0]
    buffers = np.ones((5, max(layer.dk, layer.dv)), np.float32)
    item = take(work)
    while item < plan.seqs.shape[0] * heads:
        _sequence(
            item // heads, item % heads, (rows, plan, layer), states, which, stacks[thread], out,
            buffers,
        )  # fmt: skip
        item = take(work)
