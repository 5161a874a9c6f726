"""The coupling sampler on a device: many draws at once, the reference sampler's integers.

`draw` runs a DrawPlan (head_plan.py) on float32 logits with torch operations that never sync. Draws
that only take the argmax of raw logits go a fast way that reads the logits once; the others are
processed in float64 in the fixed order (bias, allowed ids and grammar, min_tokens, penalties,
temperature, top-k, top-p, min-p) and drawn by Gumbel-max with the shared counter hash. Rows with
top-k or top-p are sorted, and no others.

Against the reference: every comparison, order and tie rule is the same; exp and log of the device
may differ from numpy's in the last bit of a float64, and CUDA's running sum associates differently,
so a draw could differ only where two candidates are within 1e-15 of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from server.model.gpu.head_plan import DrawPlan

# Ids of draws without an answer.
NAN_LOGITS = -1
NOTHING_LEFT = -2

_MASK32 = 0xFFFFFFFF


def noise_hash(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """reference_sampler.noise_hash in int64 arithmetic, as torch has no uint32 product.

    token_ids int64 [V] or [n, V]; keys int64 [n, 2], each word in [0, 2^32). Returns int64 [n, V]
    in [0, 2^32). A product of two 32-bit words may wrap around 2^63; its low 32 bits are right.
    """
    return _fmix32((_fmix32(token_ids ^ keys[:, :1]) + keys[:, 1:2]) & _MASK32)


def _fmix32(h: torch.Tensor) -> torch.Tensor:
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK32
    return h ^ (h >> 16)


def noise_words(noise: torch.Tensor) -> torch.Tensor:
    """int64 [n, 2]: the words of reference_sampler.noise_key of int64 [n, 3] (DrawPlan.arrays), in
    arithmetic that wraps around as that of uint64 does."""
    z = (noise[:, 0] ^ (noise[:, 1] * _signed(0xDABA0B6EB09322E3))) + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return torch.stack([_shifted(z, 32), z & _MASK32], dim=1)


def _signed(bits: int) -> int:
    return bits - (1 << 64 if bits >> 63 else 0)


def _shifted(z: torch.Tensor, num: int) -> torch.Tensor:
    return (z >> num) & ((1 << (64 - num)) - 1)


def gumbel_max(
    logits: torch.Tensor, words: torch.Tensor, is_noisy: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest value float64 [n], its lowest column int32 [n]) of logits float64 [n, V] + noise.

    words: of noise_words. is_noisy: bool [n, 1]. ids: int64 [V] or [n, V], the columns' vocabulary
    ids.
    """
    u = (noise_hash(ids, words).double() + 0.5) / 4294967296.0
    noisy = logits + torch.where(is_noisy, -torch.log(-torch.log(u)), 0.0)
    value, which = noisy.max(dim=1)
    return value, which.int()


def keep_nucleus(x: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """x float64 [m, V] with -inf where top-k, then top-p leaves an id out: by (value descending, id
    ascending), with a running sum in that order. top_k: int64 [m], top_p: float64 [m]."""
    values, order = torch.sort(x, dim=1, descending=True, stable=True)
    num_left = torch.minimum(top_k, torch.isfinite(values).sum(dim=1))
    rank = torch.arange(x.shape[1], device=x.device)[None, :]
    share = torch.exp(values - values[:, :1]).masked_fill_(rank >= num_left[:, None], 0.0)
    running = torch.cumsum(share, dim=1)
    goal = top_p * running.gather(1, (num_left.clamp(min=1) - 1)[:, None]).squeeze(1)
    # The smallest prefix whose share reaches top_p, the id that crosses it included.
    below = ((running < goal[:, None]) & (rank < num_left[:, None])).sum(dim=1) + 1
    kept = torch.where(top_p < 1.0, torch.minimum(num_left, below), num_left)
    leaves = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, rank >= kept[:, None])
    return x.masked_fill(leaves, float("-inf"))


def _order_key(x: torch.Tensor) -> torch.Tensor:
    """int64 keys that sort float32 x [n, V] by (value descending, id ascending) when sorted
    descending; all distinct within a row."""
    bits = (x + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)
    return (ordered << 32) | (_MASK32 - ids)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """For n (row, id) pairs: logprob float32 [n], rank int32 [n], top_ids int32 [n, k] and
    top_logprobs float32 [n, k] by (logprob descending, id ascending)."""

    logprob: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> Logprobs:
    """log-softmax in float32 of raw logits float32 [n, V] at ids int32 [n], with the num_top most
    likely ids of each row."""
    normaliser = torch.logsumexp(logits, dim=1)
    chosen = ids.long().clamp(min=0)[:, None]
    value = logits.gather(1, chosen)
    every = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > value) | ((logits == value) & (every[None, :] < chosen))
    rank = before.sum(dim=1, dtype=torch.int32) + 1
    num_top = min(num_top, logits.shape[1])
    if num_top > 0:
        top = torch.topk(_order_key(logits), num_top, dim=1).values
        top_ids = _MASK32 - (top & _MASK32)
        top_logprobs = logits.gather(1, top_ids) - normaliser[:, None]
    else:
        top_ids = chosen[:, :0]
        top_logprobs = value[:, :0]
    return Logprobs(value.squeeze(1) - normaliser, rank, top_ids.int(), top_logprobs)


def adjusted(
    raw: torch.Tensor,
    plan: DrawPlan,
    arrays: Mapping[str, torch.Tensor],
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits float64 [m, V] of the plan's processed draws, over the temperature; -inf where a
    request excludes an id.

    raw: float32 [m, V], one row a draw. arrays: plan.arrays on raw's device. ids: int32 [m, V], the
    columns' vocabulary ids where they are not 0, 1, ...
    """
    x = raw.double()
    host = plan.arrays
    minus_infinity = float("-inf")
    if host["bias"].shape[0]:
        row, token = arrays["bias_row"].long(), arrays["bias_id"].long()
        x[row, token] = x[row, token] + arrays["bias"]
    if host["allow_rows"].shape[0]:
        drop = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        drop.index_fill_(0, arrays["allow_rows"].long(), True)
        row, token = arrays["allow_row"].long(), arrays["allow_id"].long()
        drop.index_put_((row, token), drop.new_zeros(()))
        x.masked_fill_(drop, minus_infinity)
    if host["mask_rows"].shape[0]:
        rows = arrays["mask_rows"].long()
        if ids is None:
            bits = torch.arange(x.shape[1], device=x.device)
            words = arrays["masks"].index_select(1, bits >> 5)
        else:
            bits = ids.index_select(0, rows).long()
            words = arrays["masks"].gather(1, bits >> 5)
        drop = ((words >> (bits & 31).int()) & 1) == 0
        x[rows] = x[rows].masked_fill(drop, minus_infinity)
    if host["ban_row"].shape[0]:
        row, token = arrays["ban_row"].long(), arrays["ban_id"].long()
        x.index_put_((row, token), x.new_full((), minus_infinity))
    if host["penalty_row"].shape[0]:
        row, token = arrays["penalty_row"].long(), arrays["penalty_id"].long()
        value, repetition = x[row, token], arrays["repetition"]
        value = torch.where(value > 0, value / repetition, value * repetition)
        x[row, token] = value - arrays["subtract"]
    if plan.noisy:
        x /= arrays["temperature"][:, None]
    return x


def _cut(x: torch.Tensor, plan: DrawPlan, arrays: Mapping[str, torch.Tensor]) -> None:
    """Put -inf into x where top-k, top-p or min-p leaves an id out."""
    if plan.arrays["ordered"].shape[0]:
        rows = arrays["ordered"]
        given = (arrays[name].index_select(0, rows) for name in ("top_k", "top_p"))
        x.index_copy_(0, rows.long(), keep_nucleus(x.index_select(0, rows), *given))
    if np.isfinite(plan.arrays["log_min_p"]).any():
        floor = x.amax(dim=1) + arrays["log_min_p"]
        x.masked_fill_(x < floor[:, None], float("-inf"))


def draw(
    logits: torch.Tensor,
    plan: DrawPlan,
    arrays: Mapping[str, torch.Tensor],
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Drawn columns int32 [n]; NAN_LOGITS or NOTHING_LEFT where there is no answer.

    logits: float32 [rows, V], left unchanged. arrays: plan.arrays on the logits' device. ids: None
    where a column is a vocabulary id, else the columns' ids, int32 [rows, V].
    """
    if plan.plain_is_all:
        return argmax_ids(logits[: plan.num_draws])
    drawn = torch.empty(plan.num_draws, dtype=torch.int32, device=logits.device)
    num_plain = plan.arrays["plain_rows"].shape[0]
    if num_plain:
        answer = argmax_ids(logits.index_select(0, arrays["plain_rows"]))
        drawn.index_copy_(0, arrays["plain_at"].long(), answer)
    if plan.num_draws > num_plain:
        raw = logits.index_select(0, arrays["rows"])
        own = None if ids is None else ids.index_select(0, arrays["rows"])
        x = adjusted(raw, plan, arrays, own)
        if plan.noisy:
            _cut(x, plan, arrays)
            noise = arrays["noise"]
            if own is None:
                own = torch.arange(x.shape[1], device=x.device)
            value, which = gumbel_max(x, noise_words(noise), noise[:, 2:] != 0, own.long())
        else:
            value, which = x.max(dim=1)
        value = torch.where(raw.isnan().any(dim=1), float("nan"), value)
        drawn.index_copy_(0, arrays["at"].long(), _answer(value, which))
    return drawn


def argmax_ids(logits: torch.Tensor) -> torch.Tensor:
    """int32 [n]: the likeliest id of each row of float32 [n, V], or why there is none."""
    return _answer(*logits.max(dim=1))


def _answer(value: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """int32 ids, or why there is none, by the best value: max passes a NaN on."""
    reason = torch.where(torch.isnan(value), NAN_LOGITS, NOTHING_LEFT)
    return torch.where(torch.isfinite(value), which, reason).int()
