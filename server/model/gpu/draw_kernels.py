"""Triton kernels that draw from rows of logits: what a request changes, top-k, top-p, min-p, noise.

Everything that differs from draw to draw is read from device memory, a row each, and a row that
does not need a step ends it at once. So shapes and launches depend on the number of rows alone, and
a CUDA graph can hold them (graph_draws.py). What a row draws depends on that row alone, never on
how many there are: the sampler outside graphs runs the same kernels, and both give the same ids.

The order is engine/reference_sampler.py's; noise is made here, from the position. Only the
selection of the largest values is torch's (nucleus.py says what it is for).

tests/model/gpu/test_draw_kernels.py compares them with the reference in Triton's interpreter and
compiles them for GPUs; they were not run on one.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from server.model.gpu import nucleus, nucleus_kernels
from server.model.gpu.nucleus import Cut
from server.model.gpu.triton_kernels import FUSE

_PART = 8192
_BLOCK = 1024
_WARPS = 8  # with 4, sm_100 keeps 8 bytes a thread in memory
_ENTRIES = 1024
_EXACT = {"enable_fp_fusion": False}
"""A product and the difference behind it round one after the other, as the reference's do."""


class Given(NamedTuple):
    """Of n draws: top_k int64 [n] (the number of ids when off), top_p and log_min_p float64 [n],
    noise int64 [n, 3] (DrawPlan.arrays)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    noise: torch.Tensor


class Changes(NamedTuple):
    """What requests change in n rows of logits. temperature: float64 [n]. mask_of: int32 [n], a row
    of masks or -1. masks: int32 [g, words], bit set = id allowed. entries: float64 [e, 4]: row *
    ids + id, what is added to its logit, what a positive sum is divided by (a negative one is
    multiplied), and what is subtracted then; an id of a row stands once. num_entries: int32 [1]:
    those behind are not read."""

    temperature: torch.Tensor
    mask_of: torch.Tensor
    masks: torch.Tensor
    entries: torch.Tensor
    num_entries: torch.Tensor


@triton.jit
def _prepare(
    logits, logits_stride, temperature, mask_of, masks, num_words, x, is_nan, num_ids, num_parts,
    PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part): float64 logits over the temperature, -inf where a mask has no bit; and
    whether one of them is NaN."""
    row, part = tl.program_id(0), tl.program_id(1)
    scale = tl.load(temperature + row)
    mask = tl.load(mask_of + row)
    logits += row.to(tl.int64) * logits_stride
    masks += tl.maximum(mask, 0).to(tl.int64) * num_words
    num_masked = tl.where(mask >= 0, num_ids, 0)
    found = tl.zeros([BLOCK], tl.int32)
    for offset in range(0, PART, BLOCK):
        ids = part * PART + offset + tl.arange(0, BLOCK)
        inside = ids < num_ids
        raw = tl.load(logits + ids, mask=inside, other=0.0)
        found |= (raw != raw).to(tl.int32)
        word = tl.load(masks + (ids >> 5), mask=ids < num_masked, other=-1)
        value = tl.where(((word >> (ids & 31)) & 1) != 0, raw.to(tl.float64) / scale, float("-inf"))
        tl.store(x + row.to(tl.int64) * num_ids + ids, value, mask=inside)
    tl.store(is_nan + row * num_parts + part, tl.max(found, axis=0))


@triton.jit
def _change(
    logits, logits_stride, temperature, entries, num_entries, x, num_ids, BLOCK: tl.constexpr
):
    """Program (block of entries): biases and penalties of the ids that a mask leaves."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(num_entries)
    where = tl.load(entries + at * 4, mask=inside, other=0.0).to(tl.int64)
    row = where // num_ids
    before = tl.load(x + where, mask=inside, other=float("-inf"))
    value = tl.load(logits + row * logits_stride + where % num_ids, mask=inside, other=0.0)
    value = value.to(tl.float64) + tl.load(entries + at * 4 + 1, mask=inside, other=0.0)
    factor = tl.load(entries + at * 4 + 2, mask=inside, other=1.0)
    value = tl.where(value > 0, value / factor, value * factor)
    value = value - tl.load(entries + at * 4 + 3, mask=inside, other=0.0)
    value = value / tl.load(temperature + row, mask=inside, other=1.0)
    tl.store(x + where, tl.where(before > float("-inf"), value, before), mask=inside)


@triton.jit
def _measure(x, part_top, part_num, num_ids, num_parts, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, part): the largest value of PART ids, and how many are finite."""
    row, part = tl.program_id(0), tl.program_id(1)
    x += row.to(tl.int64) * num_ids
    top = tl.full([BLOCK], float("-inf"), tl.float64)
    num = tl.zeros([BLOCK], tl.int32)
    for offset in range(0, PART, BLOCK):
        ids = part * PART + offset + tl.arange(0, BLOCK)
        value = tl.load(x + ids, mask=ids < num_ids, other=float("-inf"))
        top = tl.maximum(top, value)
        num += ((value > float("-inf")) & (value < float("inf"))).to(tl.int32)
    tl.store(part_top + row * num_parts + part, tl.max(top, axis=0))
    tl.store(part_num + row * num_parts + part, tl.sum(num, axis=0))


@triton.jit
def _share(
    x, part_top, part_num, top_k, top_p, shares, part_mass, width, num_ids, num_parts,
    PARTS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part): shares exp(x - max) and their sum, of rows whose mass top-p needs."""
    row, part = tl.program_id(0), tl.program_id(1)
    parts = row * num_parts + tl.arange(0, PARTS)
    inside = tl.arange(0, PARTS) < num_parts
    finite = tl.sum(tl.load(part_num + parts, mask=inside, other=0), axis=0)
    left = tl.minimum(tl.load(top_k + row), finite.to(tl.int64))
    if (tl.load(top_p + row) < 1.0) & (left > width):
        top = tl.max(tl.load(part_top + parts, mask=inside, other=float("-inf")), axis=0)
        mass = tl.zeros([BLOCK], tl.float64)
        for offset in range(0, PART, BLOCK):
            ids = part * PART + offset + tl.arange(0, BLOCK)
            at = row.to(tl.int64) * num_ids + ids
            share = tl.exp(tl.load(x + at, mask=ids < num_ids, other=float("-inf")) - top)
            tl.store(shares + at, share, mask=ids < num_ids)
            mass += share
        tl.store(part_mass + row * num_parts + part, tl.sum(mass, axis=0))


@triton.jit
def _cut_selected(
    values, width, part_num, part_mass, top_k, top_p, num_left, threshold, kept, beyond, num_ids,
    num_parts, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row): nucleus._find: the cut as the largest `width` values show it, descending;
    beyond: 1 where they do not."""
    row = tl.program_id(0)
    parts = row * num_parts + tl.arange(0, PARTS)
    inside = tl.arange(0, PARTS) < num_parts
    finite = tl.sum(tl.load(part_num + parts, mask=inside, other=0), axis=0).to(tl.int64)
    left = tl.minimum(tl.load(top_k + row), finite)
    p = tl.load(top_p + row)
    rank = tl.arange(0, WIDTH)
    value = tl.load(values + row * width + rank, mask=rank < width, other=float("-inf"))
    has = (rank < left) & (rank < width)
    share = tl.where(has, tl.exp(value - tl.max(value, axis=0)), 0.0)
    running = tl.cumsum(share, axis=0)
    is_whole = left <= width
    end = tl.sum(tl.where(rank == tl.minimum(left, width) - 1, running, 0.0), axis=0)
    num_mass = tl.where((p < 1.0) & (left > width), num_parts, 0)
    mass = tl.load(part_mass + parts, mask=tl.arange(0, PARTS) < num_mass, other=0.0)
    goal = p * tl.where(is_whole, end, tl.sum(mass, axis=0))
    below = tl.sum(((running < goal) & has).to(tl.int64), axis=0) + 1
    keeps = tl.where(p < 1.0, tl.minimum(left, below), left)
    last = tl.minimum(tl.maximum(keeps, 1), width) - 1
    cut = tl.sum(tl.where(rank == last, value, 0.0), axis=0)
    # The order of summing could tell: as in nucleus._find.
    slack = (num_ids + 8) * 2.220446049250313e-16 * goal / p
    near = tl.sum((has & (tl.abs(running - goal) <= slack)).to(tl.int32), axis=0) > 0
    shown = (p < 1.0) & (left == finite) & (end > goal) & (near == 0)
    keeps_all = (p >= 1.0) & (left == finite)
    tl.store(num_left + row, left)
    tl.store(threshold + row, tl.where(keeps == finite, float("-inf"), cut))
    tl.store(kept + row, keeps)
    tl.store(beyond + row, tl.where(is_whole | shown | keeps_all, 0, 1))


@triton.jit
def _count(
    x, threshold, part_above, part_equal, num_ids, num_parts,
    PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part): how many of PART ids are above the threshold, and how many at it."""
    row, part = tl.program_id(0), tl.program_id(1)
    cut = tl.load(threshold + row)
    if cut > float("-inf"):
        above = tl.zeros([BLOCK], tl.int32)
        equal = tl.zeros([BLOCK], tl.int32)
        for offset in range(0, PART, BLOCK):
            ids = part * PART + offset + tl.arange(0, BLOCK)
            at = row.to(tl.int64) * num_ids + ids
            value = tl.load(x + at, mask=ids < num_ids, other=float("-inf"))
            above += (value > cut).to(tl.int32)
            equal += (value == cut).to(tl.int32)
        tl.store(part_above + row * num_parts + part, tl.sum(above, axis=0))
        tl.store(part_equal + row * num_parts + part, tl.sum(equal, axis=0))


@triton.jit
def _fmix32(h):
    """MurmurHash3's finaliser on uint32; the same integers as server.engine.reference_sampler."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _key_of(stream, position):
    """The two uint32 words of reference_sampler.noise_key. stream, position: int64."""
    z = stream.to(tl.uint64, bitcast=True)
    z = z ^ (position.to(tl.uint64, bitcast=True) * 0xDABA0B6EB09322E3)
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 32).to(tl.uint32), (z & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _draw(
    x, part_top, threshold, kept, part_above, part_equal, log_min_p, noise, best_value, best_id,
    num_ids, num_parts,
    HAS_ORDER: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the largest value + noise of those of PART ids that stay, and its lowest
    id. Without HAS_ORDER nothing is cut."""
    row, part = tl.program_id(0), tl.program_id(1)
    x += row.to(tl.int64) * num_ids
    every = tl.arange(0, PARTS)
    parts, inside_parts = row * num_parts + every, every < num_parts
    highest = tl.max(tl.load(part_top + parts, mask=inside_parts, other=float("-inf")), axis=0)
    floor = highest + tl.load(log_min_p + row)
    cut = tl.full((), 0.0, tl.float64)
    room = tl.full((), 0, tl.int64)
    if HAS_ORDER:
        cut = tl.load(threshold + row)
        num_cut = tl.where(cut > float("-inf"), num_parts, 0)
        above = tl.sum(tl.load(part_above + parts, mask=every < num_cut, other=0), axis=0)
        before = every < tl.minimum(num_cut, part)
        equal = tl.sum(tl.load(part_equal + parts, mask=before, other=0), axis=0)
        # Of the equal values at the threshold the lowest ids stay; here, so many of them.
        room = tl.load(kept + row) - above - equal
    key0, key1 = _key_of(tl.load(noise + row * 3), tl.load(noise + row * 3 + 1))
    is_noisy = tl.load(noise + row * 3 + 2) != 0
    top = tl.full([1], float("-inf"), tl.float64)
    top_id = tl.zeros([1], tl.int32)
    for offset in range(0, PART, BLOCK):
        ids = part * PART + offset + tl.arange(0, BLOCK)
        value = tl.load(x + ids, mask=ids < num_ids, other=float("-inf"))
        stays = value >= floor
        if HAS_ORDER:
            at_cut = (value == cut).to(tl.int32)
            rank = tl.cumsum(at_cut, axis=0)
            stays = stays & ((value > cut) | ((at_cut != 0) & (rank <= room)))
            room -= tl.sum(at_cut, axis=0)
        h = _fmix32(_fmix32(ids.to(tl.uint32) ^ key0) + key1)
        u = (h.to(tl.float64) + 0.5) / 4294967296.0
        value = tl.where(is_noisy, value + (-tl.log(-tl.log(u))), value)
        value = tl.where(stays, value, float("-inf"))
        block_top = tl.max(value, axis=0)
        # The lowest id among equals.
        block_id = tl.min(tl.where(value == block_top, ids, 0x7FFFFFFF), axis=0)
        better = block_top > top
        top = tl.where(better, block_top, top)
        top_id = tl.where(better, block_id, top_id)
    one = tl.arange(0, 1)
    tl.store(best_value + row * num_parts + part + one, top)
    tl.store(best_id + row * num_parts + part + one, top_id)


@triton.jit
def _answer(best_value, best_id, is_nan, drawn, num_parts, PARTS: tl.constexpr):
    """Program (row): the best part's id, or why there is none (sampler.NAN_LOGITS, NOTHING_LEFT).
    Parts ascend with ids: the lowest id of equals."""
    row = tl.program_id(0)
    parts = row * num_parts + tl.arange(0, PARTS)
    inside = tl.arange(0, PARTS) < num_parts
    value = tl.load(best_value + parts, mask=inside, other=float("-inf"))
    ids = tl.load(best_id + parts, mask=inside, other=0x7FFFFFFF)
    top = tl.max(value, axis=0)
    best = tl.min(tl.where(value == top, ids, 0x7FFFFFFF), axis=0)
    fine = (top > float("-inf")) & (top < float("inf"))
    has_nan = tl.max(tl.load(is_nan + parts, mask=inside, other=0), axis=0) != 0
    tl.store(drawn + row, tl.where(has_nan, -1, tl.where(fine, best, -2)))


def num_parts(num_ids: int) -> int:
    """Parts into which the ids of a row are divided."""
    return int(triton.cdiv(num_ids, _PART))


def changed(logits: torch.Tensor, changes: Changes) -> tuple[torch.Tensor, torch.Tensor]:
    """(processed logits float64 [n, V] up to the temperature; int32 [n, parts], 1 where a part of
    the raw logits has a NaN) of logits float32 [n, V], rows of any stride."""
    num_rows, num_ids = logits.shape
    grid = (num_rows, num_parts(num_ids))
    x = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
    is_nan = torch.empty(grid, dtype=torch.int32, device=logits.device)
    stride, scale = logits.stride(0), changes.temperature
    _prepare[grid](
        logits, stride, scale, changes.mask_of, changes.masks, changes.masks.shape[1], x, is_nan,
        num_ids, grid[1], PART=_PART, BLOCK=_BLOCK, **_EXACT,
    )  # fmt: skip
    _change[(triton.cdiv(changes.entries.shape[0], _ENTRIES),)](
        logits, stride, scale, changes.entries, changes.num_entries, x, num_ids,
        BLOCK=_ENTRIES, **_EXACT,
    )  # fmt: skip
    return x, is_nan


def drawn(x: torch.Tensor, is_nan: torch.Tensor, given: Given, *, has_order: bool) -> torch.Tensor:
    """int32 [n]: the ids that rows of x, float64 [n, V] and contiguous, draw, or why there is none.

    is_nan: as `changed` gives it. has_order: whether a row has top-k or top-p. Syncs nothing.
    """
    num_rows, num_ids = x.shape
    parts = num_parts(num_ids)
    grid = (num_rows, parts)
    sizes = {"PART": _PART, "BLOCK": _BLOCK}
    padded = {"PARTS": triton.next_power_of_2(parts)}
    part_top, best_value = x.new_empty(grid), x.new_empty(grid)
    # Each is memory of its own: Triton compiles a kernel anew for a pointer of another alignment.
    num, above, equal, best_id = (is_nan.new_empty(grid) for _ in range(4))
    _measure[grid](x, part_top, num, num_ids, parts, **sizes)
    threshold, kept = best_value, given.top_k  # not read without order
    if has_order:
        cut = _cut(x, part_top, num, given)
        threshold, kept = cut.threshold, cut.kept
        _count[grid](x, threshold, above, equal, num_ids, parts, **sizes)
    _draw[grid](
        x, part_top, threshold, kept, above, equal, given.log_min_p, given.noise, best_value,
        best_id, num_ids, parts, HAS_ORDER=has_order, num_warps=_WARPS, **padded, **sizes, **FUSE,
    )  # fmt: skip
    ids = is_nan.new_empty(num_rows)
    _answer[(num_rows,)](best_value, best_id, is_nan, ids, parts, **padded)
    return ids


def _cut(x: torch.Tensor, part_top: torch.Tensor, part_num: torch.Tensor, given: Given) -> Cut:
    """Where rows are cut; the threshold is -inf where they are not."""
    num_rows, num_ids = x.shape
    parts, width = part_num.shape[1], min(num_ids, nucleus.SELECTED)
    padded = {"PARTS": triton.next_power_of_2(parts)}
    values = torch.topk(x, width, dim=1).values
    shares, part_mass = torch.empty_like(x), torch.empty_like(part_top)
    _share[(num_rows, parts)](
        x, part_top, part_num, given.top_k, given.top_p, shares, part_mass, width, num_ids, parts,
        PART=_PART, BLOCK=_BLOCK, **padded,
    )  # fmt: skip
    num_left, kept = (given.top_k.new_empty(num_rows) for _ in range(2))
    cut = Cut(num_left, given.top_p, x.new_empty(num_rows), kept)
    beyond = part_num.new_empty(num_rows)
    _cut_selected[(num_rows,)](
        values, width, part_num, part_mass, given.top_k, given.top_p, cut.num_left, cut.threshold,
        cut.kept, beyond, num_ids, parts, WIDTH=triton.next_power_of_2(width), **padded, **FUSE,
    )  # fmt: skip
    nucleus_kernels.find_cut(x, shares, beyond, cut)
    return cut
