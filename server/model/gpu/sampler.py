"""The coupling sampler on a device: many draws at once, the reference sampler's integers.

A DrawPlan is made on the host from a Batch (numpy only); `Sampler.draw` runs it on float32 logits
with torch operations that never sync. Draws that only take the argmax of raw logits go a fast way
that reads the logits once; the others are processed in float64 in the fixed order (bias, allowed
ids and grammar, min_tokens, penalties, temperature, top-k, top-p, min-p) and drawn by Gumbel-max
with the shared counter hash.

Against the reference: every comparison, order and tie rule is the same; exp and log of the device
may differ from numpy's in the last bit of a float64, and CUDA's running sum associates differently,
so a draw could differ only where two candidates are within 1e-15 of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from server.engine.batch import Batch, DrawParams
from server.engine.reference_sampler import noise_key, penalty_counts

# Ids of draws without an answer.
NAN_LOGITS = -1
NOTHING_LEFT = -2

Array = npt.NDArray[Any]

_TOPK_LIMIT = 1024  # above it a full sort of the row is as fast as a selection
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """Host side of one slab of draws: arrays to copy to the device, and what work there is.

    arrays (n = draws of the slab, m = processed draws among them; rows are indices into the slab's
    logits):
      plain_rows, plain_at: int32: logits row and index in the slab of the argmax-only draws.
      rows, at: int32 [m]: the same for processed draws.
      bias_row, bias_id int32, bias float64; allow_rows int32 (processed rows restricted to ids),
      allow_row, allow_id int32; mask_rows int32, masks int32 [., words]; ban_row, ban_id int32;
      penalty_row, penalty_id int32, repetition, subtract float64; `*_row` index processed draws.
      temperature float64 [m] (1 for greedy); top_k int64 [m] (the logits' width when off); top_p
      float64 [m]; log_min_p float64 [m] (-inf when off); keys int32 [m, 3]: the noise key's words,
      and 1 where noise is added.
      logprob_rows, logprob_at int32: draws whose logprobs are wanted.
    Every `*_id` is a column of the logits: a vocabulary id, or an id's place in the draw's slice.
    num_draws: n. plain_is_all: draw i is the argmax of logits row i, for every i.
    num_top: most top logprobs of any draw, -1 when no draw wants logprobs.
    order_limit: 0 = no row needs an order; else the most ids a row may keep by top-k, or V.
    """

    arrays: Mapping[str, Array]
    num_draws: int
    plain_is_all: bool
    num_top: int
    order_limit: int
    noisy: bool


def path_tokens(batch: Batch, draw_id: int) -> list[int]:
    """Drafted tokens between the root and this draw's row, root's child first."""
    tokens: list[int] = []
    parent = int(batch.draw_parent[draw_id])
    while parent >= 0:
        tokens.append(int(batch.token_ids[batch.draw_rows[draw_id]]))
        draw_id, parent = parent, int(batch.draw_parent[parent])
    tokens.reverse()
    return tokens


def _path_len(batch: Batch, draw_id: int) -> int:
    num = 0
    while batch.draw_parent[draw_id] >= 0:
        num += 1
        draw_id = int(batch.draw_parent[draw_id])
    return num


def _is_plain(params: DrawParams, num_on_path: int, mask_id: int) -> bool:
    s = params.sampling
    return (
        s.temperature == 0.0
        and mask_id < 0
        and not s.logit_bias
        and s.allowed_token_ids is None
        and not s.has_penalties
        and params.num_generated + num_on_path >= s.min_tokens
    )


def is_kept(batch: Batch, draw_id: int) -> bool:
    """Whether a draw's hidden state waits for `verify`: such a draw gives no logprobs."""
    return batch.draw_keep is not None and bool(batch.draw_keep[draw_id] >= 0)


def has_choice(batch: Batch, draw_id: int, ids: Array) -> bool:
    """Whether a draw's constraints leave any of these ids (ascending, of a slice).

    Where they leave none the full head draws. The host can tell, because nothing but ids decides.
    """
    params = batch.params[batch.draw_params[draw_id]]
    s = params.sampling
    excluded = [t for t, b in s.logit_bias if b <= -100.0]
    banned: Array = np.empty(0, np.int32)
    if params.num_generated + _path_len(batch, draw_id) < s.min_tokens:
        banned = params.banned_until
    mask_id = int(batch.draw_mask[draw_id])
    is_free = mask_id < 0 and s.allowed_token_ids is None
    if is_free and len(excluded) + banned.shape[0] < ids.shape[0]:
        return True
    left = np.ones(ids.shape[0], bool)
    for gone in (excluded, banned):
        left[columns_of(ids, np.asarray(gone, np.int64))[0]] = False
    if mask_id >= 0:
        left &= (batch.masks[mask_id][ids >> 5] >> (ids & 31).astype(np.uint32)) & 1 != 0
    if s.allowed_token_ids is not None:
        allowed = np.zeros(ids.shape[0], bool)
        allowed[columns_of(ids, np.asarray(s.allowed_token_ids, np.int64))[0]] = True
        left &= allowed
    return bool(left.any())


def columns_of(ids: Array, wanted: Array) -> tuple[Array, Array]:
    """(places in `ids`, ascending, of the wanted ids that are there; which ones those are)."""
    at = np.searchsorted(ids, wanted)
    found = at < ids.shape[0]
    found[found] = ids[at[found]] == wanted[found]
    return at[found], found


def plan_draws(
    batch: Batch,
    draw_ids: Array,
    logits_rows: Array,
    width: int,
    slice_ids: Sequence[Array] | None = None,
) -> DrawPlan:
    """Plan the draws `draw_ids` of a Batch; draw i of the slab reads row logits_rows[i].

    width: columns of the logits. slice_ids: None where a column is a vocabulary id, else for each
    draw the ids of its first columns, ascending; the others are -inf.
    """
    plain_rows: list[int] = []
    plain_at: list[int] = []
    processed: list[tuple[int, int, int, int]] = []  # (index in slab, logits row, draw, on path)
    logprob_rows: list[int] = []
    logprob_at: list[int] = []
    num_top = -1
    for at, (draw_id, row) in enumerate(zip(draw_ids.tolist(), logits_rows.tolist(), strict=True)):
        params = batch.params[batch.draw_params[draw_id]]
        wanted = params.sampling.num_logprobs
        if wanted is not None and not is_kept(batch, draw_id):
            logprob_rows.append(row)
            logprob_at.append(at)
            num_top = max(num_top, wanted)
        on_path = _path_len(batch, draw_id) if params.sampling.min_tokens else 0
        if _is_plain(params, on_path, int(batch.draw_mask[draw_id])):
            plain_rows.append(row)
            plain_at.append(at)
        else:
            processed.append((at, row, draw_id, on_path))
    arrays: dict[str, Array] = {
        "plain_rows": np.asarray(plain_rows, np.int32),
        "plain_at": np.asarray(plain_at, np.int32),
        "logprob_rows": np.asarray(logprob_rows, np.int32),
        "logprob_at": np.asarray(logprob_at, np.int32),
    }
    order_limit, noisy = 0, False
    if processed:
        order_limit, noisy = _plan_processed(batch, processed, width, slice_ids, arrays)
    num_draws = int(draw_ids.shape[0])
    return DrawPlan(
        arrays,
        num_draws,
        not processed and plain_rows == list(range(num_draws)),
        num_top,
        order_limit,
        noisy,
    )


def _plan_processed(
    batch: Batch,
    processed: list[tuple[int, int, int, int]],
    width: int,
    slice_ids: Sequence[Array] | None,
    arrays: dict[str, Array],
) -> tuple[int, bool]:
    """Fill `arrays` for the processed draws; (order_limit, whether any draw has noise)."""
    bias: list[tuple[int, int, float]] = []
    allow_rows: list[int] = []
    allow: list[tuple[Array, Array]] = []
    mask_rows: list[int] = []
    mask_ids: list[int] = []
    bans: list[tuple[Array, Array]] = []
    penalties: list[tuple[Array, Array, Array, Array]] = []
    count = len(processed)
    temperature = np.ones(count, np.float64)
    top_k = np.full(count, width, np.int64)
    top_p = np.ones(count, np.float64)
    log_min_p = np.full(count, -np.inf)
    keys = np.zeros((count, 3), np.uint32)
    order_limit = 0
    for i, (at, _, draw_id, on_path) in enumerate(processed):
        params = batch.params[batch.draw_params[draw_id]]
        s = params.sampling
        own = None if slice_ids is None else slice_ids[at]
        for t, b in s.logit_bias:
            [column] = [t] if own is None else columns_of(own, np.asarray([t]))[0].tolist() or [-1]
            if column >= 0:
                bias.append((i, column, -np.inf if b <= -100.0 else b))
        if s.allowed_token_ids is not None:
            ids = np.asarray(s.allowed_token_ids, np.int32)
            if own is not None:
                ids = columns_of(own, ids)[0]
            allow_rows.append(i)
            allow.append((np.full(ids.shape[0], i, np.int32), ids))
        if batch.draw_mask[draw_id] >= 0:
            mask_rows.append(i)
            mask_ids.append(int(batch.draw_mask[draw_id]))
        if params.num_generated + on_path < s.min_tokens:
            banned: Array = params.banned_until
            if own is not None:
                banned = columns_of(own, banned)[0]
            bans.append((np.full(banned.shape[0], i, np.int32), banned))
        if s.has_penalties:
            ids64, out, prompt = penalty_counts(params, path_tokens(batch, draw_id))
            if own is not None:
                ids64, found = columns_of(own, ids64)
                out, prompt = out[found], prompt[found]
            seen = (out > 0) | (prompt > 0)
            penalties.append(
                (
                    np.full(ids64.shape[0], i, np.int32),
                    ids64.astype(np.int32),
                    np.where(seen, s.repetition_penalty, 1.0),
                    s.frequency_penalty * out + s.presence_penalty * (out > 0),
                )
            )
        if s.temperature == 0.0:
            continue
        temperature[i] = s.temperature
        key = noise_key(s.seed, params.choice_id, int(batch.draw_positions[draw_id]))
        keys[i] = (*key, 1)
        if 0 < s.top_k < width:
            top_k[i] = s.top_k
        top_p[i] = s.top_p
        if s.top_p < 1.0 or top_k[i] < width:
            order_limit = max(order_limit, int(top_k[i]))
        if s.min_p > 0.0:
            log_min_p[i] = np.log(s.min_p)

    def columns(parts: list[tuple[Array, ...]], dtypes: tuple[Any, ...]) -> list[Array]:
        if not parts:
            return [np.empty(0, d) for d in dtypes]
        return [
            np.concatenate(c).astype(d)
            for c, d in zip(zip(*parts, strict=True), dtypes, strict=True)
        ]

    arrays["at"] = np.asarray([p[0] for p in processed], np.int32)
    arrays["rows"] = np.asarray([p[1] for p in processed], np.int32)
    arrays["bias_row"] = np.asarray([b[0] for b in bias], np.int32)
    arrays["bias_id"] = np.asarray([b[1] for b in bias], np.int32)
    arrays["bias"] = np.asarray([b[2] for b in bias], np.float64)
    arrays["allow_rows"] = np.asarray(allow_rows, np.int32)
    arrays["allow_row"], arrays["allow_id"] = columns(list(allow), (np.int32, np.int32))
    arrays["mask_rows"] = np.asarray(mask_rows, np.int32)
    arrays["masks"] = batch.masks[mask_ids].view(np.int32)
    arrays["ban_row"], arrays["ban_id"] = columns(list(bans), (np.int32, np.int32))
    (
        arrays["penalty_row"],
        arrays["penalty_id"],
        arrays["repetition"],
        arrays["subtract"],
    ) = columns(list(penalties), (np.int32, np.int32, np.float64, np.float64))
    arrays["temperature"] = temperature
    arrays["top_k"] = top_k
    arrays["top_p"] = top_p
    arrays["log_min_p"] = log_min_p
    arrays["keys"] = keys.view(np.int32)
    return order_limit, bool(keys[:, 2].any())


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


def gumbel_max(
    logits: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest value float64 [n], its lowest column int32 [n]) of logits float64 [n, V] + noise.

    keys: int32 [n, 3]: the noise key's words, and 1 where noise is added. ids: int32 [n, V], the
    columns' vocabulary ids where they are not 0, 1, ... The Triton kernel of the same name computes
    the same for those.
    """
    words = keys[:, :2].long() & _MASK32
    if ids is None:
        ids = torch.arange(logits.shape[1], dtype=torch.int64, device=logits.device)
    ids = ids.long()
    u = (noise_hash(ids, words).double() + 0.5) / 4294967296.0
    noise = -torch.log(-torch.log(u))
    noisy = logits + torch.where(keys[:, 2:] != 0, noise, 0.0)
    value, which = noisy.max(dim=1)
    return value, which.int()


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


def process_logits(
    raw: torch.Tensor,
    plan: DrawPlan,
    arrays: Mapping[str, torch.Tensor],
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Processed logits float64 [m, V] of the plan's processed draws; -inf where not drawable.

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
    if not plan.noisy:
        return x
    x /= arrays["temperature"][:, None]
    if plan.order_limit:
        x = _cut_nucleus(x, plan, arrays)
    if np.isfinite(host["log_min_p"]).any():
        floor = x.amax(dim=1) + arrays["log_min_p"]
        x.masked_fill_(x < floor[:, None], minus_infinity)
    return x


def _cut_nucleus(
    x: torch.Tensor, plan: DrawPlan, arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """top-k, then top-p, of x float64 [m, V].

    How many ids stay depends on the sorted *values* alone, and which of several equal values stay
    on their ids: so values are sorted, and the ids at the threshold are counted in id order.
    """
    vocab_size = x.shape[1]
    if plan.order_limit <= _TOPK_LIMIT and _only_by_top_k(plan, vocab_size):
        values = torch.topk(x, plan.order_limit, dim=1).values
    else:
        values = torch.sort(x, dim=1, descending=True).values
    width = values.shape[1]
    finite = torch.isfinite(x).sum(dim=1)
    num_keep = torch.minimum(arrays["top_k"], finite)
    rank = torch.arange(width, device=x.device)
    share = torch.exp(values - values[:, :1])
    share = torch.where(rank[None, :] < num_keep[:, None], share, 0.0)
    running = torch.cumsum(share, dim=1)
    last = (num_keep.clamp(min=1, max=width) - 1)[:, None]
    goal = arrays["top_p"][:, None] * running.gather(1, last)
    # The smallest prefix whose share reaches top_p, the id that crosses it included.
    below = ((running < goal) & (rank[None, :] < num_keep[:, None])).sum(dim=1) + 1
    num_keep = torch.where(arrays["top_p"] < 1.0, torch.minimum(num_keep, below), num_keep)
    # A row that keeps all its ids has its threshold at the lowest finite value, or beyond `width`.
    threshold = values.gather(1, (num_keep.clamp(min=1, max=width) - 1)[:, None])
    above = x > threshold
    room = num_keep - above.sum(dim=1)
    equal = x == threshold
    kept = above | (equal & (torch.cumsum(equal, dim=1) <= room[:, None]))
    return x.masked_fill(~kept & (num_keep <= width)[:, None], float("-inf"))


def _only_by_top_k(plan: DrawPlan, vocab_size: int) -> bool:
    """True when every processed draw that needs an order is bounded by top-k."""
    top_k, top_p = plan.arrays["top_k"], plan.arrays["top_p"]
    return bool(((top_k < vocab_size) | (top_p >= 1.0)).all())


class Sampler:
    """Runs DrawPlans. use_triton: draw by the Triton kernel (CUDA) instead of torch."""

    def __init__(self, *, use_triton: bool = False) -> None:
        self._gumbel_max: Callable[
            [torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
        ] = gumbel_max
        if use_triton:
            from server.model.gpu import triton_kernels

            self._gumbel_max = triton_kernels.gumbel_max

    def draw(
        self,
        logits: torch.Tensor,
        plan: DrawPlan,
        arrays: Mapping[str, torch.Tensor],
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Drawn columns int32 [n]; NAN_LOGITS or NOTHING_LEFT where there is no answer.

        logits: float32 [rows, V], left unchanged. arrays: plan.arrays on the logits' device. ids:
        None where a column is a vocabulary id, else the columns' ids, int32 [rows, V].
        """
        if plan.plain_is_all:
            return _answer(*logits[: plan.num_draws].max(dim=1))
        drawn = torch.empty(plan.num_draws, dtype=torch.int32, device=logits.device)
        num_plain = plan.arrays["plain_rows"].shape[0]
        if num_plain:
            answer = _answer(*logits.index_select(0, arrays["plain_rows"]).max(dim=1))
            drawn.index_copy_(0, arrays["plain_at"].long(), answer)
        if plan.num_draws > num_plain:
            raw = logits.index_select(0, arrays["rows"])
            own = None if ids is None else ids.index_select(0, arrays["rows"])
            x = process_logits(raw, plan, arrays, own)
            if not plan.noisy:
                value, which = x.max(dim=1)
            elif own is None:
                value, which = self._gumbel_max(x, arrays["keys"])
            else:
                value, which = gumbel_max(x, arrays["keys"], own)
            value = torch.where(raw.isnan().any(dim=1), float("nan"), value)
            drawn.index_copy_(0, arrays["at"].long(), _answer(value, which))
        return drawn


def _answer(value: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """int32 ids, or why there is none, by the best value: max passes a NaN on."""
    reason = torch.where(torch.isnan(value), NAN_LOGITS, NOTHING_LEFT)
    return torch.where(torch.isfinite(value), which, reason).int()
