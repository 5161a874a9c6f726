"""The coupling sampler on a device: many draws at once, the reference sampler's integers.

`plan_draws` makes flat arrays of what a Batch asks of its draws, lists of any length, which go to
the device in one copy; `draw` runs them on float32 logits with torch operations that never sync.
Draws that only take the argmax of raw logits go a fast way that reads the logits once; the others
are processed in float64 in the fixed order (bias, excluded ids, penalties, temperature, top-k,
top-p, min-p) and drawn by Gumbel-max with the shared counter hash. Rows with top-k or top-p are
sorted, and no others.

Against the reference: every comparison, order and tie rule is the same; exp and log of the device
may differ from numpy's in the last bit of a float64, and CUDA's running sum associates differently,
so a draw could differ only where two candidates are within 1e-15 of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from server.engine.batch import Batch, Int32, places_of
from server.model.draws import adjustments, noise_key
from server.model.gpu.transfers import Array
from server.types import DRAW_NUMBERS

# Ids of draws without an answer.
NAN_LOGITS = -1
NOTHING_LEFT = -2

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """Host side of one slab of draws: arrays to copy to the device, and what work there is.

    arrays (n = draws of the slab, m = processed draws among them; rows are indices into the slab's
    logits):
      plain_rows, plain_at: int32: logits row and index in the slab of the argmax-only draws.
      rows, at: int32 [m]: the same for processed draws.
      bias_row, bias_id int32, bias float64; mask_rows int32, masks int32 [., words]: of
      allowed_words; penalty_row, penalty_id int32, repetition, subtract float64; `*_row` index
      processed draws.
      numbers: float64 [m, k], SamplingParams.numbers. noise: int64 [m, 3]: the words of noise_key,
      and 1 where noise is added. ordered int32: processed draws with top-k or top-p.
      logprob_rows, logprob_at int32: draws whose logprobs are wanted. named_columns: int32
      [logprobs, most], the columns of logprob_token_ids, -1 where a slice lacks one, and behind the
      last; likely_rows: int32: rows whose likeliest ids are wanted. Both where some are.
    Every `*_id` is a column of the logits.
    num_draws: n. plain_is_all: draw i is the argmax of logits row i, for every i.
    num_top: most top logprobs of any draw, -1 when no draw wants logprobs.
    noisy: whether a draw is not greedy.
    """

    arrays: Mapping[str, Array]
    num_draws: int
    plain_is_all: bool
    num_top: int
    noisy: bool


def plan_draws(
    batch: Batch,
    draw_ids: Array,
    logits_rows: Array,
    width: int,
    column_ids: Int32 | None = None,
) -> DrawPlan:
    """Plan the draws `draw_ids` of a Batch; draw i of the slab reads row logits_rows[i].

    width: columns of the logits. column_ids: their vocabulary ids, ascending; None where a column
    is one.
    """
    lists: dict[str, list[Any]] = {name: [] for name in _DTYPES}
    num_top, noisy = -1, False
    named: list[tuple[int, ...]] = []  # ids whose logprobs are wanted

    def entries(row: str, **values: Array) -> None:
        """Numbers of the processed draw that comes next."""
        for name, array in values.items():
            lists[name].append(array)
        lists[row].append(np.full(array.shape[0], len(lists["at"])))

    for at, (draw, row) in enumerate(zip(draw_ids.tolist(), logits_rows.tolist(), strict=True)):
        params = batch.params[batch.draw_params[draw]]
        s = params.sampling
        if s.num_logprobs is not None and not batch.is_kept(draw):
            lists["logprob_rows"].append(row)
            lists["logprob_at"].append(at)
            named.append(s.logprob_token_ids)
            num_top = max(num_top, s.num_logprobs)
        path = batch.path_tokens(draw) if s.min_tokens or s.has_penalties else []
        if params.takes_argmax(int(batch.draw_mask[draw]), len(path)):
            lists["plain_rows"].append(row)
            lists["plain_at"].append(at)
            continue

        constraints, (ids, out, prompt) = adjustments(batch, draw, path, width, column_ids)
        entries("bias_row", bias_id=constraints.bias_ids, bias=constraints.biases)
        if constraints.words.shape[0]:
            lists["mask_rows"].append(len(lists["at"]))
            lists["masks"].append(constraints.words.view(np.int32))
        if s.has_penalties:
            entries(
                "penalty_row", penalty_id=ids,
                repetition=np.where((out > 0) | (prompt > 0), s.repetition_penalty, 1.0),
                subtract=s.frequency_penalty * out + s.presence_penalty * (out > 0),
            )  # fmt: skip
        key, is_noisy = (0, 0), s.temperature > 0.0
        if is_noisy:
            noisy = True
            key = noise_key(s.seed, params.choice_id, int(batch.draw_positions[draw]))
            if s.top_p < 1.0 or 0 < s.top_k < width:
                lists["ordered"].append(len(lists["at"]))
        lists["noise"].append((*key, is_noisy))
        lists["numbers"].append(s.numbers)
        lists["at"].append(at)
        lists["rows"].append(row)
    arrays = {
        name: np.array(np.concatenate(values) if name in _RUNS and values else values, kind)
        for (name, kind), values in zip(_DTYPES.items(), lists.values(), strict=True)
        if lists["at"] or name in _OF_ALL
    }
    columns = np.full((len(named), max(map(len, named), default=0)), -1, np.int32)
    for line, token_ids in zip(columns, named, strict=True):
        own = line[: len(token_ids)]
        if column_ids is None:
            own[:] = token_ids
        else:
            places, found = places_of(column_ids, np.asarray(token_ids))
            own[found] = places
    if columns.shape[1]:
        arrays["named_columns"] = columns
    if batch.num_likely:
        arrays["likely_rows"] = logits_rows.astype(np.int32)
    num_draws = int(draw_ids.shape[0])
    is_all = not lists["at"] and bool((logits_rows == np.arange(num_draws)).all())
    return DrawPlan(arrays, num_draws, is_all, num_top, noisy)


_DTYPES: dict[str, type[np.generic]] = {
    "plain_rows": np.int32, "plain_at": np.int32, "logprob_rows": np.int32, "logprob_at": np.int32,
    "at": np.int32, "rows": np.int32,
    "bias_row": np.int32, "bias_id": np.int32, "bias": np.float64,
    "mask_rows": np.int32, "masks": np.int32,
    "penalty_row": np.int32, "penalty_id": np.int32,
    "repetition": np.float64, "subtract": np.float64,
    "numbers": np.float64, "noise": np.int64, "ordered": np.int32,
}  # fmt: skip
"""Arrays of a DrawPlan; without processed draws there are the first four."""
_OF_ALL = tuple(_DTYPES)[:4]
_RUNS = {"bias_row", "bias_id", "bias", "penalty_row", "penalty_id", "repetition", "subtract"}


def noise_hash(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The hash of ids under a draw's key, in int64 arithmetic, as torch has no uint32 product:
    fmix32(fmix32(id ^ key0) + key1) of uint32, MurmurHash3's finaliser.

    token_ids int64 [V]; keys int64 [n, 2], each word in [0, 2^32). Returns int64 [n, V]
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
    logits: torch.Tensor, words: torch.Tensor, is_noisy: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest value float64 [n], its lowest column int32 [n]) of logits float64 [n, V] + noise.

    words: int64 [n, 2], of noise_key. is_noisy: bool [n, 1]. ids: int64 [V], the columns'
    vocabulary ids.
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


class Logprobs(NamedTuple):
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
        # Keys, distinct within a row, that sorted descending are in the order of (value descending,
        # id ascending). + 0.0: minus zero equals zero.
        bits = (logits + 0.0).view(torch.int32)
        keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
        top = torch.topk(keys | (_MASK32 - every), num_top, dim=1).values
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

    raw: float32 [m, V], one row a draw. arrays: plan.arrays on raw's device. ids: int32 [V], the
    columns' vocabulary ids where they are not 0, 1, ...
    """
    x = raw.double()
    host = plan.arrays
    minus_infinity = float("-inf")
    if host["bias"].shape[0]:
        row, token = arrays["bias_row"].long(), arrays["bias_id"].long()
        x[row, token] = x[row, token] + arrays["bias"]
    if host["mask_rows"].shape[0]:
        rows = arrays["mask_rows"].long()
        bits = torch.arange(x.shape[1], device=x.device) if ids is None else ids.long()
        words = arrays["masks"].index_select(1, bits >> 5)
        drop = ((words >> (bits & 31).int()) & 1) == 0
        x[rows] = x[rows].masked_fill(drop, minus_infinity)
    if host["penalty_row"].shape[0]:
        row, token = arrays["penalty_row"].long(), arrays["penalty_id"].long()
        value, repetition = x[row, token], arrays["repetition"]
        value = torch.where(value > 0, value / repetition, value * repetition)
        x[row, token] = value - arrays["subtract"]
    if plan.noisy:
        temperature = numbers_of(arrays)["temperature"]
        x /= torch.where(temperature > 0.0, temperature, 1.0)[:, None]
    return x


def numbers_of(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """float64 [m] of each of DRAW_NUMBERS."""
    return dict(zip(DRAW_NUMBERS, arrays["numbers"].unbind(dim=1), strict=True))


def _cut(x: torch.Tensor, plan: DrawPlan, arrays: Mapping[str, torch.Tensor]) -> None:
    """Put -inf into x where top-k, top-p or min-p leaves an id out."""
    numbers, host = numbers_of(arrays), plan.arrays["numbers"]
    if plan.arrays["ordered"].shape[0]:
        rows, top_k = arrays["ordered"], numbers["top_k"].long()
        limit = torch.where(top_k > 0, top_k, x.shape[1]).index_select(0, rows)
        share = numbers["top_p"].index_select(0, rows)
        x.index_copy_(0, rows.long(), keep_nucleus(x.index_select(0, rows), limit, share))
    if host[:, DRAW_NUMBERS.index("min_p")].any():
        floor = x.amax(dim=1) + numbers["min_p"].log()
        x.masked_fill_(x < floor[:, None], float("-inf"))


def draw(
    logits: torch.Tensor,
    plan: DrawPlan,
    arrays: Mapping[str, torch.Tensor],
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Drawn columns int32 [n]; NAN_LOGITS or NOTHING_LEFT where there is no answer.

    logits: float32 [rows, V], left unchanged. arrays: plan.arrays on the logits' device. ids: None
    where a column is a vocabulary id, else the columns' ids, int32 [V].
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
        x = adjusted(raw, plan, arrays, ids)
        if plan.noisy:
            _cut(x, plan, arrays)
            noise = arrays["noise"]
            own = torch.arange(x.shape[1], device=x.device) if ids is None else ids.long()
            value, which = gumbel_max(x, noise[:, :2], noise[:, 2:] != 0, own)
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
