"""Short convolutions on a CPU (LFM2): a gated filter over the last few positions of a row's path.

A layer projects a row to B, C and x. Its convolution's input B * x is kept per KV slot, like one
more K, so that a row reads its own ancestors' through its sequence's block table and its draft
path, whatever else is in the batch. Nothing recurs: a rejected draft leaves nothing to roll back, a
cached block holds what the next position needs, and each row has the same bits in a prompt chunk,
a decode step and a tree.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import njit

from server.model.cpu.team import barrier
from server.model.cpu.vector_ir import LANES

_serial = njit(nogil=True, cache=True, error_model="numpy")


@_serial
def _keep_rows(first, step, rows, projected, inputs):
    """B * x of each row into its slot."""
    n = inputs.shape[2]
    for r in range(first, rows.num, step):
        row = projected[r]
        kept = inputs[rows.slots[r] // LANES, rows.slots[r] % LANES]
        for i in range(n):
            kept[i] = row[i] * row[2 * n + i]


@_serial
def _filter_rows(first, step, rows, projected, taps, inputs, out):
    """out[r] = C * sum over taps, the oldest position first; positions before 0 are zero."""
    n = inputs.shape[2]
    num_taps = taps.shape[0]
    for r in range(first, rows.num, step):
        result = out[r]
        for i in range(n):
            result[i] = np.float32(0.0)
        prefix_len = rows.prefix_len[r]
        last = prefix_len + rows.path_len[r] - 1
        for j in range(num_taps):
            position = last - (num_taps - 1 - j)
            if position < 0:
                continue
            if position < prefix_len:
                block = rows.tables[rows.seq_ids[r], position // LANES]
                lane = position % LANES
            else:
                slot = rows.path_slots[rows.path_start[r] + position - prefix_len]
                block = slot // LANES
                lane = slot % LANES
            kept = inputs[block, lane]
            weight = taps[j]
            for i in range(n):
                result[i] += weight[i] * kept[i]
        gate = projected[r]
        for i in range(n):
            result[i] *= gate[n + i]


@_serial
def convolve(rows, projected, taps, inputs, out, work):
    """out[r] = C * (taps * (B * x)) for the rows of a step; the layer's inputs are kept.

    projected: float32 [R, at least 3 H]: B, C, x. taps: float32 [taps, H], the oldest first.
    inputs: float32 [blocks, 16, H]. out: float32 [R, H].
    """
    _keep_rows(work.thread, work.threads, rows, projected, inputs)
    barrier(work)
    _filter_rows(work.thread, work.threads, rows, projected, taps, inputs, out)
