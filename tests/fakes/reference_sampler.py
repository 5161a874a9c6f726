"""The coupling sampler as a reference: numpy, one row at a time, in float64.

The Runners' fast samplers are tested against it, and the FakeRunner draws with it. It draws each
token once, from the fully processed distribution, with noise that depends on (seed, choice,
absolute position, vocabulary id) alone: Gumbel-max over the kept ids.
So the drawn id never depends on the drafter, on other requests or on chunks (docs/DESIGN.md 1.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from server.engine.batch import NO_TOKEN_LEFT, DrawParams, UInt32
from server.model.draws import noise_key
from server.types import TokenLogprob

Float64 = npt.NDArray[np.float64]


def _fmix32(h: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """MurmurHash3's 32-bit finaliser: a bijection on uint32."""
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ (h >> np.uint32(13))
    h = h * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def noise_hash(token_ids: npt.NDArray[np.uint32], key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """h32 of every id under a draw's key: fmix32(fmix32(id ^ key0) + key1), uint32 wrap-around.

    A bijection of the id, so two ids of one row never share a hash. The CPU and CUDA samplers
    compute the same integers.
    """
    return _fmix32(_fmix32(token_ids ^ np.uint32(key[0])) + np.uint32(key[1]))


def gumbel(h32: npt.NDArray[np.uint32]) -> Float64:
    """Gumbel(0, 1) noise from 32 hash bits: u = (h + 1/2) / 2^32, -log(-log u), in float64."""
    u = (h32.astype(np.float64) + 0.5) / 4294967296.0
    return -np.log(-np.log(u))


def penalty_counts(
    params: DrawParams, path_tokens: list[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(ids ascending, times generated, in prompt 0/1) of a node: its sequence's and its path's."""
    out = {int(i): int(c) for i, c in zip(params.count_ids, params.count_out, strict=True)}
    prompt = {int(i): int(c) for i, c in zip(params.count_ids, params.count_prompt, strict=True)}
    for token in path_tokens:
        out[token] = out.get(token, 0) + 1
    ids = sorted(out)
    return (
        np.asarray(ids, np.int64),
        np.asarray([out[i] for i in ids], np.int64),
        np.asarray([prompt.get(i, 0) for i in ids], np.int64),
    )


def process_logits(
    logits: npt.NDArray[np.float32],
    params: DrawParams,
    path_tokens: list[int],
    mask: UInt32 | None = None,
) -> Float64:
    """The processed logits of one row: float64 [V], -inf where an id cannot be drawn.

    logits: float32 [V], raw. path_tokens: drafted tokens between the root and this row. mask:
    uint32 [ceil(V / 32)] grammar bits, or None. Order: bias, grammar and min_tokens, penalties,
    temperature, top-k, top-p, min-p. Raises FloatingPointError when a logit is NaN.
    """
    s = params.sampling
    x = logits.astype(np.float64)
    if np.isnan(x.max()):  # of any: they are larger than all numbers
        raise FloatingPointError("the model produced NaN logits")
    for token, bias in s.logit_bias:
        x[token] = -np.inf if bias <= -100.0 else x[token] + bias
    if s.allowed_token_ids is not None:
        keep = np.zeros(x.shape[0], bool)
        keep[list(s.allowed_token_ids)] = True
        x[~keep] = -np.inf
    if mask is not None:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: x.shape[0]]
        x[bits == 0] = -np.inf
    if params.num_generated + len(path_tokens) < s.min_tokens:
        x[params.banned_until] = -np.inf
    if s.has_penalties:
        ids, out, prompt = penalty_counts(params, path_tokens)
        seen = (out > 0) | (prompt > 0)
        rep = ids[seen]
        x[rep] = np.where(x[rep] > 0, x[rep] / s.repetition_penalty, x[rep] * s.repetition_penalty)
        x[ids] -= s.frequency_penalty * out + s.presence_penalty * (out > 0)
    if s.temperature == 0.0 or not np.isfinite(x.max()):
        return x
    x /= s.temperature
    needs_order = 0 < s.top_k < x.shape[0] or s.top_p < 1.0
    if needs_order:
        order = np.argsort(-x, kind="stable")  # logit descending, id ascending
        num_left = int(np.isfinite(x).sum())
        if 0 < s.top_k < num_left:
            num_left = s.top_k
        if s.top_p < 1.0:
            p = np.exp(x[order[:num_left]] - x[order[0]])
            running = np.cumsum(p)
            # The smallest prefix whose share reaches top_p, the id that crosses it included.
            num_left = min(num_left, int(np.searchsorted(running, s.top_p * running[-1])) + 1)
        x[order[num_left:]] = -np.inf
    if s.min_p > 0.0:
        x[x < x.max() + np.log(s.min_p)] = -np.inf
    return x


def draw(
    logits: npt.NDArray[np.float32],
    params: DrawParams,
    position: int,
    path_tokens: list[int],
    mask: UInt32 | None = None,
) -> int:
    """The id drawn at absolute `position` from one row of raw logits. Ties go to the lowest id.

    Raises FloatingPointError on NaN logits and ValueError when no id is left to draw.
    """
    x = process_logits(logits, params, path_tokens, mask)
    if not np.isfinite(x.max()):
        raise ValueError(NO_TOKEN_LEFT)
    if params.sampling.temperature == 0.0:
        return int(np.argmax(x))
    kept = np.flatnonzero(np.isfinite(x))
    key = noise_key(params.sampling.seed, params.choice_id, position)
    return int(kept[np.argmax(x[kept] + gumbel(noise_hash(kept.astype(np.uint32), key)))])


def token_logprob(
    logits: npt.NDArray[np.float32], token_id: int, num_top: int, named: Sequence[int] = ()
) -> TokenLogprob:
    """log-softmax of the raw logits at `token_id`, its rank and the `num_top` most likely ids, or
    those that are `named`.

    rank = 1 + the number of ids with a higher logit or an equal logit and a lower id.
    """
    return _token_logprob(logits.tobytes(), token_id, num_top, tuple(named))


@lru_cache(300)  # the one-token loop and the FakeRunner ask for the same ones
def _token_logprob(
    logits: bytes, token_id: int, num_top: int, named: tuple[int, ...]
) -> TokenLogprob:
    x = np.frombuffer(logits, np.float32).astype(np.float64)
    top = x.max()
    logprobs = x - (top + np.log(np.exp(x - top).sum()))
    ids = np.arange(x.shape[0])
    rank = 1 + int(((x > x[token_id]) | ((x == x[token_id]) & (ids < token_id))).sum())
    among = np.array(sorted(set(named)), np.int64) if named else ids
    order = among[np.argsort(-x[among], kind="stable")][: None if named else num_top]
    return TokenLogprob(
        token_id,
        float(logprobs[token_id]),
        rank,
        tuple((int(i), float(logprobs[i])) for i in order),
    )
