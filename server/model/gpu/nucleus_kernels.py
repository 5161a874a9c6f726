"""The Triton kernel that finds where rows of logits are cut which a selection does not show.

One program a row, and a row that needs nothing ends at once: so the host need not know which rows
do. The threshold is found by halving the range of the values: a pass over the row for each bit in
which its ends differ.

tests/model/gpu/test_attention.py compares it with a sort in Triton's interpreter and compiles it
for GPUs; it was not run on one.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.model.gpu.nucleus import Cut
from server.model.gpu.triton_kernels import FUSE

_BLOCK = 4096
_WARPS = 16


@triton.jit
def _key(x):
    """int64 in the order of float64; minus zero equals zero."""
    bits = (x + 0.0).to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _value(key):
    """The float64 of a _key."""
    return (key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)


@triton.jit
def _above(x, shares, num_ids, key, BLOCK: tl.constexpr):
    """(number, mass) of a row's ids whose key is larger. x, shares: float64 pointers of the row."""
    count = tl.zeros((BLOCK,), tl.int64)
    mass = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_ids, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_ids
        is_above = inside & (_key(tl.load(x + at, mask=inside, other=0.0)) > key)
        count += is_above.to(tl.int64)
        mass += tl.load(shares + at, mask=is_above, other=0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _find_cut(
    x, shares, rows, num_left, top_p, threshold, kept, num_ids,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): threshold and kept of the row, as nucleus.Cut has them, where `rows` is not 0.

    The lowest key that fewer than `goal` lie above is a value of the row: where top-k ends, and
    then, above it, where top-p does.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(rows + row) != 0:
        x += row * num_ids
        shares += row * num_ids
        lowest = tl.full((BLOCK,), float("inf"), tl.float64)
        highest = tl.full((BLOCK,), float("-inf"), tl.float64)
        for start in range(0, num_ids, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < num_ids, other=float("-inf"))
            lowest = tl.minimum(lowest, tl.where(value > float("-inf"), value, float("inf")))
            highest = tl.maximum(highest, value)
        low = _key(tl.min(lowest, axis=0))
        high = _key(tl.max(highest, axis=0))
        left = tl.load(num_left + row)
        end = high
        while low < end:
            middle = (low & end) + ((low ^ end) >> 1)
            count, _mass = _above(x, shares, num_ids, middle, BLOCK)
            if count < left:
                end = middle
            else:
                low = middle + 1
        keeps = left
        share = tl.load(top_p + row)
        if share < 1.0:
            count, mass = _above(x, shares, num_ids, end, BLOCK)
            value = _value(end)
            top = _value(high)
            goal = share * (mass + (left - count).to(tl.float64) * tl.exp(value - top))
            low = end
            end = high
            while low < end:
                middle = (low & end) + ((low ^ end) >> 1)
                _count, mass = _above(x, shares, num_ids, middle, BLOCK)
                if mass < goal:
                    end = middle
                else:
                    low = middle + 1
            count, mass = _above(x, shares, num_ids, end, BLOCK)
            value = _value(end)
            # Of the equal values at the threshold, as many as reach the goal, the last included.
            equal = tl.ceil((goal - mass) / tl.exp(value - top)).to(tl.int64)
            keeps = tl.minimum(left, count + tl.maximum(equal, 1))
        value = _value(end)
        tl.store(threshold + row, value)
        tl.store(kept + row, keeps)


def find_cut(x: torch.Tensor, shares: torch.Tensor, rows: torch.Tensor, cut: Cut) -> None:
    """nucleus.Beyond; x and shares contiguous. Syncs nothing."""
    _find_cut[(x.shape[0],)](
        x, shares, rows.int(), cut.num_left, cut.top_p, cut.threshold, cut.kept, x.shape[1],
        BLOCK=_BLOCK, num_warps=_WARPS, **FUSE,
    )  # fmt: skip
