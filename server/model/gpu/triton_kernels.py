"""Triton kernels of the CUDA path: paged attention and its reduction; grouped products of
adapters and own head rows; the gated delta rule.

Every kernel reads its work from device memory that the runner fills with one copy a step, has a
grid known on the host and syncs nothing, so a step can be captured in a CUDA graph.
All sums are float32 in an order that depends on the row alone, never on its neighbours in the
batch: keys are walked in blocks aligned to absolute positions, splits begin at multiples of
split_size, masked keys add exactly 0, and a row's partial results are combined in their order.
There are no atomics.

Split keys: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023); online
softmax: Milakov and Gimelshein (arXiv 1805.02867).

Sizes of tiles follow from those of registers and shared memory, not from measuring.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from server.model.gpu.adapters import SPAN_FIELDS, SPAN_ROWS
from server.model.gpu.attention import (
    SMALL_M,
    TILE_FIELDS,
    WORD,
    StepTensors,
    TileShape,
)
from server.model.gpu.recurrent import DeltaItems, DeltaMemory
from server.model.interface import Call
from server.model.states import DeltaNet

# Said aloud because Triton is changing its default.
FUSE = {"enable_fp_fusion": True}
SPLITS_AT_ONCE = 32  # whose partial results registers hold: all 512 of 131,072 keys are spilled
_FIELDS = tl.constexpr(TILE_FIELDS)
_WORD = tl.constexpr(WORD)
_SPAN_FIELDS = tl.constexpr(SPAN_FIELDS)
_SPAN_ROWS = tl.constexpr(SPAN_ROWS)


@triton.jit
def _scores(q, k, scaling, cap, HAS_CAP: tl.constexpr):
    """q @ k * scaling, and cap * tanh(score / cap) of it: exp may become infinite or 0, where tanh
    is 1 or -1."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if HAS_CAP:
        score = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * score / cap)))
    return score


@triton.jit
def _add_keys(score, v, highest, total, acc):
    """One block of keys of the online softmax: (highest score, sum, weighted values) so far."""
    higher = tl.maximum(highest, tl.max(score, axis=1))
    # While a row has seen no key its maximum is -inf; exp(-inf - 0) = 0 keeps it empty.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp(score - base[:, None])
    shrink = tl.exp(highest - base)
    total = total * shrink + tl.sum(p, axis=1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return higher, total, acc


@triton.jit(do_not_specialize=["num_splits", "stride_table", "num_words"])
def _attend_tiles(
    query,
    keys,
    values,
    out,
    part_out,
    part_max,
    part_sum,
    tiles,
    block_tables,
    prefix_len,
    positions,
    slots,
    ancestors,
    scaling,
    cap,
    window,
    stride_query_row,
    stride_query_head,
    stride_table,
    num_words,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (tile, KV head, split): the tile's query vectors over one split of the prefix, and
    over the rows' ancestors in their tree in split 0. Writes `out`, or with SPLIT the unnormalised
    partials."""
    tile = tiles + tl.program_id(0) * _FIELDS
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row_start = tl.load(tile)
    num_rows = tl.load(tile + 1)
    seq_id = tl.load(tile + 2)
    max_prefix = tl.load(tile + 3)
    min_position = tl.load(tile + 4)
    tree_start = tl.load(tile + 5)
    part_start = tl.load(tile + 6)
    num_tree = tl.load(tile + 7)

    begin = 0
    end = max_prefix
    if SPLIT:
        begin = split * SPLIT_SIZE
        end = tl.minimum(max_prefix, begin + SPLIT_SIZE)
    if HAS_WINDOW:
        # Down to a whole block, so that blocks stay aligned whatever the tile's rows.
        window_begin = tl.maximum(min_position - window + 1, 0) // BLOCK_N * BLOCK_N
        begin = tl.maximum(begin, window_begin)
    if SPLIT:
        if (split > 0) & (begin >= end):
            return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    nth = m // GROUP_SIZE
    active = nth < num_rows
    row = row_start + nth
    head = kv_head * GROUP_SIZE + m % GROUP_SIZE
    in_dim = d < HEAD_DIM
    load_mask = active[:, None] & in_dim[None, :]
    q = tl.load(
        query + row[:, None] * stride_query_row + head[:, None] * stride_query_head + d[None, :],
        mask=load_mask,
        other=0.0,
    )
    prefix = tl.load(prefix_len + row, mask=active, other=0)
    position = tl.load(positions + row, mask=active, other=0)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    slot_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM

    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        in_range = n < end
        block = tl.load(
            block_tables + seq_id * stride_table + n // BLOCK_SIZE, mask=in_range, other=0
        )
        slot = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        at = slot[:, None] * slot_stride + kv_head * HEAD_DIM + d[None, :]
        kv_mask = in_range[:, None] & in_dim[None, :]
        k = tl.load(keys + at, mask=kv_mask, other=0.0)
        score = _scores(q, k, scaling, cap, HAS_CAP)
        visible = in_range[None, :] & (n[None, :] < prefix[:, None])
        if HAS_WINDOW:
            visible = visible & (position[:, None] - n[None, :] < window)
        score = tl.where(visible, score, float("-inf"))
        v = tl.load(values + at, mask=kv_mask, other=0.0)
        highest, total, acc = _add_keys(score, v, highest, total, acc)

    # The tree's rows are keys like the prefix's, in blocks of a word or half of one: a bit says
    # who is an ancestor.
    tree_end = tl.where(split == 0, num_tree, 0)
    TREE_N: tl.constexpr = BLOCK_N if BLOCK_N < _WORD else _WORD
    for first in range(0, tree_end, TREE_N):
        nth_key = first + tl.arange(0, TREE_N)
        in_tree = nth_key < tree_end
        key_row = tree_start + nth_key
        slot = tl.load(slots + key_row, mask=in_tree, other=0).to(tl.int64)
        at = slot[:, None] * slot_stride + kv_head * HEAD_DIM + d[None, :]
        kv_mask = in_tree[:, None] & in_dim[None, :]
        k = tl.load(keys + at, mask=kv_mask, other=0.0)
        score = _scores(q, k, scaling, cap, HAS_CAP)
        word = tl.load(ancestors + row * num_words + first // _WORD, mask=active, other=0)
        visible = in_tree[None, :] & (((word[:, None] >> (nth_key % _WORD)[None, :]) & 1) != 0)
        if HAS_WINDOW:
            key_position = tl.load(positions + key_row, mask=in_tree, other=0)
            visible = visible & (position[:, None] - key_position[None, :] < window)
        score = tl.where(visible, score, float("-inf"))
        v = tl.load(values + at, mask=kv_mask, other=0.0)
        highest, total, acc = _add_keys(score, v, highest, total, acc)

    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
    if SPLIT:
        part = ((part_start + nth).to(tl.int64) * num_heads + head) * num_splits + split
        tl.store(part_max + part, highest, mask=active)
        tl.store(part_sum + part, total, mask=active)
        tl.store(part_out + part[:, None] * HEAD_DIM + d[None, :], acc, mask=load_mask)
    else:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        at_out = (row.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(out + at_out, result.to(out.dtype.element_ty), mask=load_mask)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_splits(
    out,
    part_out,
    part_max,
    part_sum,
    split_rows,
    prefix_len,
    positions,
    window,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Program (split row, head): one row's partials into its output, BLOCK_S splits at a time.
    A row < 0 is padding."""
    part_row = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(split_rows + part_row)
    if row < 0:
        return
    prefix = tl.load(prefix_len + row)
    position = tl.load(positions + row)
    first_part = (part_row.to(tl.int64) * NUM_HEADS + head) * num_splits
    d = tl.arange(0, BLOCK_D)
    in_dim = d < HEAD_DIM
    highest = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, tl.maximum(1, tl.cdiv(prefix, SPLIT_SIZE)), BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        written = s * SPLIT_SIZE < prefix
        if HAS_WINDOW:
            written = written & ((s + 1) * SPLIT_SIZE > position - window + 1)
        written = written | (s == 0)  # it carries the tree
        part = first_part + s
        most = tl.load(part_max + part, mask=written, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(most, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(most - base)
        shrink = tl.exp(highest - base)
        sums = tl.load(part_sum + part, mask=written, other=0.0)
        total = total * shrink + tl.sum(sums * weight, axis=0)
        values = tl.load(
            part_out + part[:, None] * HEAD_DIM + d[None, :],
            mask=written[:, None] & in_dim[None, :],
            other=0.0,
        )
        acc = acc * shrink + tl.sum(values * weight[:, None], axis=0)
        highest = higher
    result = acc / tl.where(total == 0.0, 1.0, total)
    at = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + d
    tl.store(out + at, result.to(out.dtype.element_ty), mask=in_dim)


def block_d_of(head_dim: int) -> int:
    """Lanes of a vector of head_dim numbers: a power of two that a tensor core takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile_options(head_dim: int, block_m: int, dtype: torch.dtype) -> dict[str, int]:
    """Launch options of _attend_tiles: keys per block, warps and stages.

    Chosen so that K, V and the queries of a program fit the 99 KiB of shared memory that the
    smallest supported devices have (compute capability 8.6) and its accumulators the registers.
    """
    bytes_per_key = block_d_of(head_dim) * dtype.itemsize
    block_n = 64 if bytes_per_key <= 256 else 32 if bytes_per_key <= 512 else 16
    is_wide = dtype.itemsize > 2  # products of float32 run on the plain units, out of registers
    if is_wide:
        block_n = min(block_n, 32 if block_m <= SMALL_M else 16)
    large = block_m > SMALL_M and (is_wide or block_m * block_d_of(head_dim) >= 8192)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": 8 if large else 4,
        "num_stages": 2 if block_n == 64 else 1,
    }


class Partials:
    """Memory for the partial results of split rows: written and read within one layer."""

    def __init__(self, shape: TileShape, num_heads: int, head_dim: int, device: torch.device):
        size = shape.max_partials * num_heads
        self.out = torch.empty(size * head_dim, dtype=torch.float32, device=device)
        self.highest = torch.empty(size, dtype=torch.float32, device=device)
        self.total = torch.empty(size, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """server.model.gpu.attention.Attention by the kernels above, for one step.

    short, long, num_splits, split_rows: a TilePlan's, arrays on the device. With fixed tensors and
    numbers the same instance may be captured in a CUDA graph and replayed with new contents.
    """

    step: StepTensors
    short: torch.Tensor
    long: torch.Tensor
    num_splits: int
    split_rows: torch.Tensor
    shape: TileShape
    partials: Partials
    block_size: int

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        call: Call,
    ) -> torch.Tensor:
        """See Attention. query may be strided except in its last dimension."""
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = keys.shape[1]
        out = torch.empty((num_rows, num_heads, head_dim), dtype=query.dtype, device=query.device)
        step, partials = self.step, self.partials
        assert step.ancestors is not None
        common: dict[str, Any] = {
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d_of(head_dim),
            "SPLIT_SIZE": self.shape.split_size,
            "HAS_WINDOW": call.window > 0,
            **FUSE,
        }
        for tiles, block_m, num_splits in (
            (self.short, self.shape.small_m, self.num_splits),
            (self.long, self.shape.large_m, 1),
        ):
            if not tiles.shape[0]:
                continue
            _attend_tiles[(tiles.shape[0], num_kv_heads, num_splits)](
                query,
                keys,
                values,
                out,
                partials.out,
                partials.highest,
                partials.total,
                tiles,
                step.block_tables,
                step.prefix_len,
                step.positions,
                step.slots,
                step.ancestors,
                call.scaling,
                call.cap,
                call.window,
                query.stride(0),
                query.stride(1),
                step.block_tables.stride(0),
                step.ancestors.stride(0),
                num_splits,
                NUM_KV_HEADS=num_kv_heads,
                GROUP_SIZE=num_heads // num_kv_heads,
                BLOCK_SIZE=self.block_size,
                HAS_CAP=call.cap > 0.0,
                SPLIT=num_splits > 1,
                **tile_options(head_dim, block_m, query.dtype),
                **common,
            )
        if self.num_splits > 1:
            _combine_splits[(self.split_rows.shape[0], num_heads)](
                out,
                partials.out,
                partials.highest,
                partials.total,
                self.split_rows,
                step.prefix_len,
                step.positions,
                call.window,
                self.num_splits,
                NUM_HEADS=num_heads,
                BLOCK_S=min(self.shape.max_splits, SPLITS_AT_ONCE),
                **common,
            )
        return out


GROUPED_N = 32


@triton.jit
def _grouped(
    x, spans, w, y, stride_x, stride_y, stride_place, stride_k, stride_n, num_outputs,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Program (span, part): BLOCK_N outputs of its rows, up to SPAN_ROWS of one adapter, of SIZE
    inputs. A row's result is a function of that row and its adapter: rows are lines of one tile,
    and no sum crosses them. A span without rows pads a CUDA graph's, and ends at once."""
    fields = spans + tl.program_id(0).to(tl.int64) * _SPAN_FIELDS
    first = tl.load(fields).to(tl.int64)
    num = tl.load(fields + 1)
    place = tl.load(fields + 2).to(tl.int64)
    if num == 0:
        return
    r = tl.arange(0, _SPAN_ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_output = r < num, n < num_outputs
    of_rows = x + (first + r[:, None]) * stride_x
    of_outputs = w + place * stride_place + n[None, :] * stride_n
    total = tl.zeros((_SPAN_ROWS, BLOCK_N), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        inside = start + k < SIZE
        states = tl.load(
            of_rows + start + k[None, :], mask=is_row[:, None] & inside[None, :], other=0.0
        )
        weights = tl.load(
            of_outputs + (start + k[:, None]) * stride_k,
            mask=is_output[None, :] & inside[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(states, weights.to(states.dtype), total, input_precision="ieee")
    at = y + (first + r[:, None]) * stride_y + n[None, :]
    mask = is_row[:, None] & is_output[None, :]
    if ADDS:
        total = tl.load(at, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(at, total.to(y.dtype.element_ty), mask=mask)


def block_k(dtype: torch.dtype) -> int:
    """Inputs that are multiplied at once: products of float32 fill the registers."""
    return 32 if dtype == torch.float32 else 64


def grouped_triton(
    x: torch.Tensor, spans: torch.Tensor, w: torch.Tensor, y: torch.Tensor, adds: bool
) -> None:
    """adapters.Grouped by the kernel above."""
    size, outputs = w.shape[1:]
    _grouped[(spans.shape[0], triton.cdiv(outputs, GROUPED_N))](
        x, spans, w, y, x.stride(0), y.stride(0), *w.stride(), outputs,
        SIZE=size, BLOCK_N=GROUPED_N, BLOCK_K=block_k(x.dtype), ADDS=adds, num_warps=4, **FUSE,
    )  # fmt: skip


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
    """Program (line, head, part): a sequence's items and BLOCK_V columns of one value head's state,
    which stays in registers: columns of a state do not read each other. Prompts are walked token by
    token: their order of sums is that of decoding, at the price of a slow prefill."""
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
    """recurrent.DeltaRule by the kernel above."""
    heads, dk, dv = net.state_size
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
