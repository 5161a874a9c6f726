"""The Triton kernel of the gated delta rule: DeltaRule (delta.py), two launches a layer.

A program has one sequence, one value head and BLOCK_V columns of its state, which stays in
registers while it walks the sequence's items: columns of a state do not read each other. Prompts
are walked token by token: their order of sums is that of decoding, at the price of a slow prefill.

tests/model/gpu/test_delta.py compares it with the reference in Triton's interpreter and compiles it
for sm_80 to sm_100; it was not run on a GPU.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.model.delta_net import DeltaNet
from server.model.gpu.delta import DeltaItems, DeltaMemory, state_size
from server.model.gpu.triton_kernels import FUSE

_COLUMNS = 32  # of a state, for one program


@triton.jit
def _filtered(item, kept, taps, at, inside, CHANNELS, WIDTH, NUM_TAPS: tl.constexpr):
    """SiLU of the sum over taps of the channels `at`, the oldest position first."""
    total = at.to(tl.float32) * 0.0
    for j in tl.static_range(NUM_TAPS):
        slot = tl.load(item + 3 + j).to(tl.int64) + at.to(tl.int64) * 0
        there = inside & (slot >= 0)
        value = tl.load(kept + tl.maximum(slot, 0) * WIDTH + at, mask=there, other=0.0)
        total += tl.load(taps + j * CHANNELS + at, mask=inside, other=0.0) * value.to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _delta_rows(
    items, lines, kept, taps, rate, shift, states, out, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NUM_TAPS: tl.constexpr,
):  # fmt: skip
    """Program (line, head, part): the items of a sequence, BLOCK_V columns of one head."""
    line = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(lines + 2 * line)
    end = tl.load(lines + 2 * line + 1)
    channels: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    width: tl.constexpr = channels + 2 * HEADS
    i = tl.arange(0, BLOCK_K)
    in_k = i < DK
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = j < DV
    at_q = (head // (HEADS // KEY_HEADS)) * DK + i
    at_v = 2 * KEY_HEADS * DK + head * DV + j
    at_state = head * (DK * DV) + i[:, None] * DV + j[None, :]
    inside = in_k[:, None] & in_v[None, :]
    head_rate = tl.load(rate + head)
    head_shift = tl.load(shift + head)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for n in range(first, end):
        item = items + n * (3 + NUM_TAPS)
        row = tl.load(item).to(tl.int64)
        reload = tl.load(item + 1).to(tl.int64) + at_state.to(tl.int64) * 0
        save = tl.load(item + 2).to(tl.int64)
        before = states + tl.maximum(reload, 0) * (HEADS * DK * DV) + at_state
        stored = tl.load(before, mask=inside & (reload >= 0), other=0.0)
        state = tl.where(reload == -2, state, stored)  # CONTINUES

        k = _filtered(item, kept, taps, KEY_HEADS * DK + at_q, in_k, channels, width, NUM_TAPS)
        k = tl.where(in_k, k, 0.0)
        k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
        v = _filtered(item, kept, taps, at_v, in_v, channels, width, NUM_TAPS)
        own = kept + tl.load(item + 2 + NUM_TAPS).to(tl.int64) * width + channels + head
        beta = 1.0 / (1.0 + tl.exp(-tl.load(own).to(tl.float32)))
        x = tl.load(own + HEADS).to(tl.float32) + head_shift
        e = tl.exp(tl.minimum(x, 20.0))
        # log(1 + e): of a small e its first terms, of a large x the x itself.
        soft = tl.where(x < -8.0, e - 0.5 * e * e, tl.log(1.0 + e))
        soft = tl.where(x > 20.0, x, soft)
        state = state * tl.exp(-head_rate * soft)
        change = (v - tl.sum(state * k[:, None], axis=0)) * beta
        state = state + k[:, None] * change[None, :]
        if row >= 0:
            q = _filtered(item, kept, taps, at_q, in_k, channels, width, NUM_TAPS)
            q = tl.where(in_k, q, 0.0)
            q = q / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
            read = tl.sum(state * q[:, None], axis=0)
            place = out + row * (HEADS * DV) + head * DV + j
            tl.store(place, read.to(out.dtype.element_ty), mask=in_v)
        if save >= 0:
            tl.store(states + save * (HEADS * DK * DV) + at_state, state, mask=inside)


def delta_triton(
    net: DeltaNet, mixed: torch.Tensor, step: DeltaItems, memory: DeltaMemory
) -> torch.Tensor:
    """DeltaRule by the kernel above."""
    heads, dk, dv = state_size(net)
    memory.inputs.index_copy_(0, memory.slots.long(), mixed)
    out = torch.empty((mixed.shape[0], heads * dv), dtype=mixed.dtype, device=mixed.device)
    block_v = min(_COLUMNS, triton.next_power_of_2(dv))
    _delta_rows[(step.lines.shape[0], heads, triton.cdiv(dv, block_v))](
        step.items, step.lines, memory.inputs, net.taps, net.rate, net.shift, memory.states, out,
        dk**-0.5, KEY_HEADS=net.key_heads, HEADS=heads, DK=dk, DV=dv,
        BLOCK_K=triton.next_power_of_2(dk), BLOCK_V=block_v, NUM_TAPS=net.taps.shape[0],
        num_warps=4, **FUSE,
    )  # fmt: skip
    return out
