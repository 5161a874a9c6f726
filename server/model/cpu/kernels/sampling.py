"""Draws on a CPU: the semantics of tests/fakes/reference_sampler.py at the speed of a step.

It is fast without changing a draw: plain greedy rows stay in float32; noise is computed only for
ids that can still win; a nucleus is sorted only as deep as it reaches. And rows of a head for
slices: copied from panel to panel, and their logits gathered.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls
# mypy: disable-error-code="untyped-decorator,no-any-return"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drafters.jit import compiled, entry
from server.model.cpu.kernels.vectors import (
    exp_sum,
    exp_sum64,
    max_of,
    rough_exp_sum,
    sum_of_squares,
)
from server.model.cpu.records import (
    FAILED,
    LANES,
    Constraints,
    Counts,
    Float32,
    Float32x2,
    Float64,
    Int32,
    Int32x2,
    Int64,
    Int64x2,
    UInt8x2,
    UInt32,
    UInt32x2,
)  # fmt: skip

_CHUNK = 256


class DrawSettings(NamedTuple):
    """SamplingParams.numbers of a request, by the names of server.types.DRAW_NUMBERS."""

    temperature: float
    top_p: float
    top_k: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float


@entry
@compiled
def is_finite_row(x: Float32) -> bool:
    """Whether a hidden state (float32 [n]) has no NaN and no infinity."""
    n = x.shape[0]
    whole = n // LANES
    total = np.float32(0.0)
    if whole > 0:
        total = sum_of_squares(x.ctypes.data, whole)
    for i in range(whole * LANES, n):
        total += x[i] * x[i]
    return np.isfinite(total)


@entry
@compiled
def argmax(x: Float32) -> int:
    """Lowest index of the largest of float32 [n], n a multiple of 16."""
    n = x.shape[0]
    best = np.float32(-np.inf)
    where = 0
    for start in range(0, n, _CHUNK):
        size = min(_CHUNK, n - start)
        top = max_of(x[start:].ctypes.data, size // LANES)
        if top > best:
            best = top
            where = start
    for i in range(where, min(where + _CHUNK, n)):
        if x[i] == best:
            return i
    return FAILED


@entry
@compiled
def masked_argmax(x: Float32, mask: UInt32, vocab_size: int) -> int:
    """Lowest index of the largest of float32 x[:vocab_size] whose bit of `mask` (uint32 words) is
    set; FAILED when there is none above -inf. A grammar's masks are mostly empty or full words."""
    best = np.float32(-np.inf)
    where = FAILED
    for w in range(mask.shape[0]):
        word = mask[w]
        start = 32 * w
        if word == np.uint32(0) or start >= vocab_size:
            continue
        end = min(start + 32, vocab_size)
        if word == np.uint32(0xFFFFFFFF):
            top = best
            for i in range(start, end):
                top = max(top, x[i])
            if top <= best:
                continue
        for i in range(start, end):
            if (word >> np.uint32(i - start)) & np.uint32(1) != np.uint32(0) and x[i] > best:
                best = x[i]
                where = i
    return where


@compiled
def likeliest_allowed(x, words, i, vocab_size):
    """The likeliest id of a row of logits that row i of Wanted.words allows, or FAILED."""
    return masked_argmax(x, words[i], vocab_size) if words.shape[0] > 0 else argmax(x)


@entry
@compiled
def greedy(
    rows: Int64, words: UInt32x2, vocab_size: int, logits: Float32x2, hidden: Float32x2, out: Int32
) -> None:
    """out[i] = the likeliest id of logits[rows[i]] that it may give, or FAILED where there is none
    or the hidden row is not finite. words: of Wanted, for ids below vocab_size."""
    for i in range(rows.shape[0]):
        r = rows[i]
        is_finite = is_finite_row(hidden[r])
        out[i] = likeliest_allowed(logits[r], words, i, vocab_size) if is_finite else FAILED


@compiled
def _fmix32(h):
    h ^= h >> np.uint32(16)
    h = np.uint32(h * np.uint32(0x85EBCA6B))
    h ^= h >> np.uint32(13)
    h = np.uint32(h * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@compiled
def _hash(token_id, key0, key1):
    return _fmix32(np.uint32(_fmix32(np.uint32(np.uint32(token_id) ^ key0)) + key1))


@compiled
def _gumbel(h):
    return -np.log(-np.log((np.float64(h) + 0.5) / 4294967296.0))


@compiled
def _id_at(columns, i):
    """The vocabulary id of column i of a slice; i itself where there are none (the full head)."""
    return columns[i] if columns.shape[0] > 0 else i


@compiled
def _draw_all(x, top_id, key0, key1, columns):
    """Gumbel-max over all finite x. The likeliest id sets the bar; most ids fail it by bits.

    An id that lies d >= 0 below the best score so far wins only if -log(-log u) > d, which needs
    1 - u < exp(-d) <= 2^-b with b = floor(d * log2 e): its hash must start with b one bits.
    """
    best = x[top_id] + _gumbel(_hash(_id_at(columns, top_id), key0, key1))
    best_id = top_id
    for i in range(x.shape[0]):
        d = best - x[i]
        if d > 23.0:  # the largest Gumbel of a 33-bit u is 22.9
            continue
        h = _hash(_id_at(columns, i), key0, key1)
        if d > 1.0:
            b = np.uint32(d * 1.4426950408889634)
            if b > np.uint32(31):
                b = np.uint32(31)
            if (np.uint32(~h) >> (np.uint32(32) - b)) != np.uint32(0):
                continue
        score = x[i] + _gumbel(h)
        if score > best or (score == best and i < best_id):
            best = score
            best_id = i
    return best_id


@compiled
def _ordered(x, top, num_wanted, reach):
    """Ids by (x descending, id ascending): all with x >= top - reach, reach doubled until at
    least num_wanted ids (or all finite ones) are in."""
    n = x.shape[0]
    while True:
        num = 0
        num_finite = 0
        floor = top - reach
        for i in range(n):
            if x[i] >= floor:
                num += 1
            if x[i] > -np.inf:
                num_finite += 1
        if num >= num_wanted or num == num_finite:
            break
        reach *= 2.0
    ids = np.empty(num, np.int64)
    values = np.empty(num, np.float64)
    j = 0
    for i in range(n):
        if x[i] >= floor:
            ids[j] = i
            values[j] = -x[i]
            j += 1
    order = np.argsort(values, kind="mergesort")
    return ids[order], num == num_finite


@compiled
def _restrict(x, logits, constraints, columns):
    """x = logits with bias added, and -inf where an id may not be drawn. Without columns most words
    are empty or full ones."""
    num = x.shape[0]
    for i in range(num):
        x[i] = logits[i]
    for j in range(constraints.bias_ids.shape[0]):
        x[constraints.bias_ids[j]] += constraints.biases[j]
    words = constraints.words
    if columns.shape[0] > 0:
        for i in range(num if words.shape[0] > 0 else 0):
            token = columns[i]
            if (words[token >> 5] >> np.uint32(token & 31)) & np.uint32(1) == np.uint32(0):
                x[i] = -np.inf
        return
    for w in range(words.shape[0]):
        word = words[w]
        if word != np.uint32(0xFFFFFFFF):
            for i in range(32 * w, min(32 * w + 32, num)):
                if (word >> np.uint32(i - 32 * w)) & np.uint32(1) == np.uint32(0):
                    x[i] = -np.inf


@compiled
def _penalise(x, counts, settings):
    """Repetition, frequency and presence penalties, in place."""
    for j in range(counts.ids.shape[0]):
        i = counts.ids[j]
        if counts.out[j] > 0 or counts.prompt[j] > 0:
            if x[i] > 0:
                x[i] /= settings.repetition_penalty
            else:
                x[i] *= settings.repetition_penalty
        if counts.out[j] > 0:
            x[i] -= settings.frequency_penalty * counts.out[j] + settings.presence_penalty


@compiled
def _nucleus(x, top, settings):
    """(ids in order, how many of them to keep) of top-k and top-p; sorted only as deep as the
    nucleus reaches."""
    num = x.shape[0]
    top_k, top_p = int(settings.top_k), settings.top_p
    limited = 0 < top_k < num
    total = 0.0
    if not limited:
        whole = num // 8
        if whole > 0:
            total = exp_sum64(x.ctypes.data, whole, top)
        for i in range(8 * whole, num):
            total += np.exp(x[i] - top)
    reach = 4.0
    while True:
        ids, is_all = _ordered(x, top, top_k if limited else 1, reach)
        num_left = ids.shape[0]
        if limited and num_left > top_k:
            num_left = top_k
        if top_p >= 1.0:
            break
        if limited:
            total = 0.0
            for j in range(num_left):
                total += np.exp(x[ids[j]] - top)
        running = 0.0
        found = False
        for j in range(num_left):
            running += np.exp(x[ids[j]] - top)
            if running >= top_p * total:
                num_left = j + 1
                found = True
                break
        if found or is_all or limited:
            break
        reach *= 2.0
    return ids, num_left


@entry
@compiled
def draw(
    logits: Float32, x: Float64, settings: DrawSettings, constraints: Constraints, counts: Counts,
    key: tuple[np.uint32, np.uint32], columns: Int32,
) -> int:  # fmt: skip
    """One draw with everything; see SamplingParams for the order. Returns the id.

    logits: float32, at least as many as x: float64 scratch, one for each id or column. constraints,
    counts: records.py. key: the noise key, two uint32. columns: empty, or the
    ascending ids of a slice of x.shape[0] columns: then the ids of biases and counts and the
    result are places in it, while noise and mask go by id.
    """
    num = x.shape[0]
    _restrict(x, logits, constraints, columns)
    _penalise(x, counts, settings)
    top = -np.inf
    top_id = -1
    for i in range(num):
        if x[i] > top:
            top = x[i]
            top_id = i
    if top_id < 0:
        return FAILED
    if settings.temperature == 0.0:
        return top_id
    for i in range(num):
        x[i] /= settings.temperature
    top = x[top_id]
    floor = -np.inf
    if settings.min_p > 0.0:
        floor = top + np.log(settings.min_p)
    if settings.top_p >= 1.0 and (settings.top_k <= 0 or settings.top_k >= num):
        if settings.min_p > 0.0:
            for i in range(num):
                if x[i] < floor:
                    x[i] = -np.inf
        return _draw_all(x, top_id, key[0], key[1], columns)
    ids, num_left = _nucleus(x, top, settings)
    best = -np.inf
    best_id = -1
    for j in range(num_left):
        i = ids[j]
        if x[i] < floor:
            break
        score = x[i] + _gumbel(_hash(_id_at(columns, i), key[0], key[1]))
        if score > best or (score == best and i < best_id):
            best = score
            best_id = i
    return best_id


@compiled
def _insert(value, token_id, values, ids, num):
    """Put an id behind those of no smaller value; how many of values and ids are filled now.

    values: the first `num` are filled, descending. When all are, the last falls out: then `value`
    must be larger than it.
    """
    j = min(num, values.shape[0] - 1)
    while j > 0 and values[j - 1] < value:
        values[j] = values[j - 1]
        ids[j] = ids[j - 1]
        j -= 1
    values[j] = value
    ids[j] = token_id
    return min(num + 1, values.shape[0])


@entry
@compiled
def logprob(
    logits: Float32, vocab_size: int, token_id: int, num_top: int, top_ids: Int64,
    top_logprobs: Float32,
) -> tuple[np.float32, int]:  # fmt: skip
    """(log-softmax of the raw logits at token_id in float32, its rank from 1).

    logits: float32 [n], n a multiple of 16, -inf past vocab_size. Fills the first num_top of
    top_ids / top_logprobs by (logprob descending, id ascending).
    """
    num = logits.shape[0] // LANES
    top = max_of(logits.ctypes.data, num)
    normaliser = top + np.log(exp_sum(logits.ctypes.data, num, top))
    target = logits[token_id]
    rank = 1
    for i in range(token_id):
        rank += logits[i] >= target
    for i in range(token_id + 1, vocab_size):
        rank += logits[i] > target
    filled = 0
    for i in range(vocab_size if num_top > 0 else 0):
        v = logits[i]
        if filled == num_top and v <= top_logprobs[num_top - 1]:
            continue
        filled = _insert(v, i, top_logprobs[:num_top], top_ids, filled)
    for j in range(filled):
        top_logprobs[j] -= normaliser
    return target - normaliser, rank


@compiled
def _kth_largest(x, num, best, places):
    """The k-th largest of x[:num], k <= num. best float32, places int32 [k]: overwritten."""
    k = best.shape[0]
    for j in range(k):
        best[j] = -np.inf
    for i in range(num):
        if x[i] > best[k - 1]:
            _insert(x[i], i, best, places, k)
    return best[k - 1]


@compiled
def likeliest_of(is_finite, x, ids, chances, tops):
    """ids int32, chances float32 [K] (a Likely's row) = the likeliest of logits float32 x [n], n a
    multiple of 16, pads -inf; none of a row that is not finite. Makes no arrays, as a share of a
    team must not.

    tops: float32 scratch, one for each 256 of x. Only chunks whose largest is among the K largest
    of all chunks can hold one of the K likeliest.
    """
    n = x.shape[0] if is_finite else 0
    k = ids.shape[0]
    num_chunks = 0
    top = np.float32(-np.inf)
    for start in range(0, n, _CHUNK):
        size = min(_CHUNK, n - start)
        tops[num_chunks] = max_of(x[start:].ctypes.data, size // LANES)
        top = max(top, tops[num_chunks])
        num_chunks += 1
    floor = np.float32(-np.inf)
    if num_chunks >= k:
        floor = _kth_largest(tops, num_chunks, chances, ids)
    filled = 0
    for c in range(num_chunks):
        if tops[c] < floor or tops[c] == -np.inf:
            continue
        for i in range(c * _CHUNK, min((c + 1) * _CHUNK, n)):
            v = x[i]
            if v < floor or v == -np.inf or (filled == k and v <= chances[k - 1]):
                continue
            filled = _insert(v, i, chances, ids, filled)
    total = np.float32(0.0)
    if filled > 0:
        total = rough_exp_sum(x.ctypes.data, n // LANES, top)
    for j in range(k):
        if j < filled:
            chances[j] = np.exp(chances[j] - top) / total
        else:
            ids[j] = FAILED
            chances[j] = 0.0


@entry
@compiled
def likeliest(
    draws: Int64, rows: Int64, logits: Float32x2, hidden: Float32x2, ids: Int32x2,
    chances: Float32x2,
) -> None:  # fmt: skip
    """ids[draws[i]], chances[draws[i]] = the likeliest of logits[rows[i]].

    draws, rows: int64. logits, hidden: as FullLogits has them. ids int32, chances float32 [D, K].
    """
    tops = np.empty(logits.shape[1] // _CHUNK + 1, np.float32)
    for i in range(rows.shape[0]):
        r, d = rows[i], draws[i]
        likeliest_of(is_finite_row(hidden[r]), logits[r], ids[d], chances[d], tops)


@entry
@compiled
def logprobs_at(logits: Float32, columns: Int32, out: Float32) -> None:
    """log-softmax of the raw logits (as for `logprob`) at columns int32 [k] into out float32 [k];
    -inf for column -1."""
    num = logits.shape[0] // LANES
    top = max_of(logits.ctypes.data, num)
    normaliser = top + np.log(exp_sum(logits.ctypes.data, num, top))
    for i in range(columns.shape[0]):
        out[i] = logits[columns[i]] - normaliser if columns[i] >= 0 else -np.inf


@entry
@compiled
def copy_bytes(
    source: UInt8x2, token_ids: Int64, out: UInt8x2, places: Int64, runs: Int64x2
) -> None:
    """Lane places[i] of `out` = lane token_ids[i] of `source`, both [panels, bytes of a panel].

    runs: int64 [n, 3]: where each run of a panel's lanes begins, the bytes of a lane, and lanes.
    """
    for i in range(token_ids.shape[0]):
        for run in range(runs.shape[0]):
            start, size, lanes = runs[run, 0], runs[run, 1], runs[run, 2]
            source_panel, a = token_ids[i] // lanes, token_ids[i] % lanes
            target_panel, b = places[i] // lanes, places[i] % lanes
            for j in range(size):
                out[target_panel, start + b * size + j] = source[source_panel, start + a * size + j]


@entry
@compiled
def gather_logits(
    static: Float32, pool: Float32, columns: Int32, num_static: int, out: Float32
) -> None:
    """out[i] = the logit of column i of a slice; -inf past the last, up to a whole vector."""
    num = columns.shape[0]
    for i in range(num):
        column = columns[i]
        if column < num_static:
            out[i] = static[column]
        else:
            out[i] = pool[column - num_static]
    for i in range(num, out.shape[0]):
        out[i] = -np.inf
