"""Nearest: the corpus' examples whose prompts are most like this one.

Two prompts of a task that share rare tokens tend to get outputs that share them too, so the
outputs of the nearest examples are a small corpus of this request's own. Likeness is the sum of
squared inverse document frequencies of the shared tokens and pairs of neighbouring tokens, over
the root of the example's own sum (a cosine without term frequency). Template text occurs in every
prompt, so it weighs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from drafters.arrays import Float32, Float32x2, Int32, Int64
from drafters.jit import compiled, entry
from drafters.sorted_keys import find_row

MAX_SHARE = 0.25  # terms of more than this share of the prompts are template
TEMPLATE_SHARE = 0.5  # pairs of at least this share of the prompts are template
MAX_TERM_DOCUMENTS = 2000  # and so are terms of more documents than this


@compiled
def _pair(a: int, b: int) -> int:
    """Key of two neighbouring tokens, above all keys of single tokens."""
    pair = (np.uint64(a) << np.uint64(32)) ^ np.uint64(b)
    return int(np.int64((pair * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(2)) | (1 << 61))


@entry
@compiled
def _terms(ids: Int32, out: Int64) -> int:
    """Keys of the tokens and of the pairs of neighbours; returns their number (2 size - 1)."""
    num = 0
    for i in range(ids.shape[0]):
        out[num] = np.int64(ids[i])
        num += 1
        if i > 0:
            out[num] = _pair(ids[i - 1], ids[i])
            num += 1
    return num


@entry
@compiled
def _score(
    terms: Int64,
    keys: Int64,
    starts: Int64,
    postings: Int32,
    weights: Float32,
    scores: Float32,
) -> None:
    previous = np.int64(-1)
    for i in range(terms.shape[0]):
        term = terms[i]
        if term == previous:
            continue
        previous = term
        row = find_row(keys, 0, keys.shape[0], term)
        if row < 0:
            continue
        weight = weights[row]
        for j in range(starts[row], starts[row + 1]):
            scores[postings[j]] += weight


@entry
@compiled
def _mark_template(ids: Int32, template: Int64, weight: float, out: Float32x2) -> None:
    for i in range(1, ids.shape[0]):
        key = _pair(ids[i - 1], ids[i])
        if find_row(template, 0, template.shape[0], key) >= 0:
            out[0, i - 1] = weight


class Nearest(NamedTuple):
    """An inverted index. keys: int64 [terms] ascending; starts: int64 [terms + 1] into postings:
    int32, example numbers; weights: float32 [terms] squared idf; norms: float32 [examples];
    template: int64, ascending keys of the pairs that most prompts hold."""

    keys: Int64
    starts: Int64
    postings: Int32
    weights: Float32
    norms: Float32
    template: Int64

    def find(self, prompt_ids: Sequence[int] | Int32, num: int) -> tuple[Int64, Float32]:
        """(examples, likeness), the most similar first, of equal ones the first; fewer than `num`
        when fewer share any term."""
        ids = np.asarray(prompt_ids, np.int32)
        terms = np.empty(2 * ids.shape[0], np.int64)
        terms = np.sort(terms[: _terms(ids, terms)])
        scores = np.zeros(self.norms.shape[0], np.float32)
        _score(terms, self.keys, self.starts, self.postings, self.weights, scores)
        scores /= self.norms
        num = min(num, scores.shape[0])
        if num <= 0:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        least = np.partition(scores, -num)[-num]
        best = np.flatnonzero((scores >= least) & (scores > 0))
        best = best[np.argsort(-scores[best], kind="stable")][:num]
        return best, scores[best]

    def template_weights(self, prompt_ids: Int32, weight: float) -> Float32:
        """float32 [1, prompt]: `weight` where a pair that most prompts share begins, else 1.

        Text that every prompt of the task holds (the instruction) is seldom what is copied.
        """
        out = np.ones((1, prompt_ids.shape[0]), np.float32)
        _mark_template(prompt_ids, self.template, weight, out)
        return out


def build_nearest(prompts: Sequence[Sequence[int] | Int32]) -> Nearest:
    """Index the prompts of a corpus' examples, in their order."""
    parts: list[Int64] = []
    for prompt in prompts:
        ids = np.asarray(prompt, np.int32)
        terms = np.empty(2 * ids.shape[0], np.int64)
        parts.append(np.unique(terms[: _terms(ids, terms)]))
    num = len(parts)
    terms = np.concatenate(parts) if parts else np.empty(0, np.int64)
    documents = np.repeat(
        np.arange(num, dtype=np.int32), np.asarray([p.shape[0] for p in parts], np.int64)
    )
    order = np.argsort(terms, kind="stable")
    keys, counts = np.unique(terms[order], return_counts=True)
    limit = min(MAX_TERM_DOCUMENTS, max(1.0, MAX_SHARE * num))
    idf = np.log((num + 1.0) / counts)
    # Common terms are dropped; the other terms of an example make its norm.
    keep = counts <= limit
    weights = (idf * idf).astype(np.float32)
    postings = documents[order]
    norms = np.zeros(num, np.float64)
    np.add.at(norms, postings, np.repeat(np.where(keep, weights, 0.0), counts))
    kept = np.repeat(keep, counts)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[keep])])
    return Nearest(
        keys[keep].astype(np.int64),
        starts.astype(np.int64),
        postings[kept],
        weights[keep],
        np.sqrt(norms + 1.0).astype(np.float32),
        keys[(counts >= TEMPLATE_SHARE * num) & (keys >= 1 << 61)] if num > 1 else keys[:0],
    )
