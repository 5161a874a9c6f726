"""`mix`: TASC-spec, a corpus n-gram drafter mixed with the request's own (arXiv 2602.24174).

p_corp(x | c) comes from the M_n tables of the task's outputs: the longest context of up to
n_max - 1 tokens that the tables hold, or the most frequent token when none matches. p_prompt is
the same over prompt and output of the request, with p_min = 1 (the paper's 5 would empty it).
p_mixed = lambda p_corp + (1 - lambda) p_prompt; the draft is one chain of its likeliest tokens.
The paper prints p_min = 5 and lambda = 0.75; n_max = 5 and the horizon of 10 tokens are ours.
Without a corpus only p_prompt is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from drafters.arrays import Float64, Int32, Int32x2, Int64, Int64x2
from drafters.auto.text_index import find_slot
from drafters.calibration import Calibration
from drafters.catalog import MixOptions
from drafters.corpus import Corpus
from drafters.jit import compiled, entry
from drafters.options import check_options
from drafters.published.ngram_tables import NGramTables, context_hash, count_ngrams
from drafters.session import TextSession
from drafters.sorted_keys import find_row
from drafters.tree import DraftTree

MAX_CANDIDATES = 512


class OwnText(NamedTuple):
    """A TextIndex's arrays and size."""

    text: Int32x2
    table: Int64x2
    size: int


@compiled
def commonest(own: OwnText) -> tuple[int, int]:
    """The text's most frequent token (ties: the first to get there), and how often it occurs."""
    times = np.empty(own.size, np.int32)
    best = most = 0
    for i in range(own.size):
        before = own.text[1, i]
        times[i] = 1 if before < 0 else times[before] + 1
        if times[i] > most:
            best, most = own.text[0, i], times[i]
    return best, most


@compiled
def count_seen(
    own: OwnText, context: Int32, end: int, n_max: int, tokens: Int32, counts: Int64
) -> tuple[int, int, int]:
    """p_prompt: what followed the longest match of context[:end] in the request's own text.

    tokens, counts: [MAX_CANDIDATES], filled. Returns (match length, candidates, occurrences).
    """
    longest = num = total = 0
    limit = min(end, n_max - 1)
    position = -1
    if limit > 0:
        position = own.table[1, find_slot(own.table, int(context[end - 1]))]
    while position >= 0:
        if position + 1 < own.size:
            length = 1
            most = min(limit, position + 1)
            while length < most and own.text[0, position - length] == context[end - 1 - length]:
                length += 1
            if length > longest:
                longest, num, total = length, 0, 0
            if length == longest:
                token = own.text[0, position + 1]
                total += 1
                i = 0
                while i < num and tokens[i] != token:
                    i += 1
                if i == num and i < MAX_CANDIDATES:
                    tokens[i], counts[i] = token, 0
                    num += 1
                if i < MAX_CANDIDATES:
                    counts[i] += 1
        position = own.text[1, position]
    return longest, num, total


@compiled
def find_longest(rows: NGramTables, context: Int32, end: int, n_max: int) -> tuple[int, int]:
    """p_corp: (row of the longest end of context[:end] that the tables hold, its length), or -1."""
    for n in range(min(rows.first_row.shape[0] - 1, n_max, end + 1), 0, -1):
        key = context_hash(context, end, n - 1)
        row = find_row(rows.keys, rows.first_row[n - 1], rows.first_row[n], key)
        if row >= 0:
            return row, n - 1
    return -1, 0


@compiled
def likeliest(
    rows: NGramTables, row: int, weight: float, tokens: Int32, own: Float64
) -> tuple[int, float, int]:
    """(token, p_mixed, source) of the highest p_mixed; ties go to the lowest id.

    row, weight: of the corpus; no row is -1. tokens, own: the prompt's candidates and what each
    adds to p_mixed.
    """
    best, best_token, best_source = -1.0, -1, 0
    if row >= 0:
        # What a candidate of the prompt adds at most.
        left = 0.0
        for i in range(own.shape[0]):
            left = max(left, own[i])
        first, last = rows.starts[row], rows.starts[row + 1]
        total = 0
        for entry in range(first, last):
            total += rows.counts[entry]
        for entry in range(first, last):
            share = weight * rows.counts[entry] / total
            if share + left < best:
                break
            added = 0.0
            for i in range(tokens.shape[0]):
                if tokens[i] == rows.tokens[entry]:
                    added = own[i]
            value = share + added
            if value > best or (value == best and rows.tokens[entry] < best_token):
                best, best_token = value, rows.tokens[entry]
                best_source = 0 if share >= added else 1
    for i in range(tokens.shape[0]):
        if own[i] > best or (own[i] == best and tokens[i] < best_token):
            best, best_token, best_source = own[i], tokens[i], 1
    return best_token, best, best_source


@entry
@compiled
def draft_chain(
    n_max: int, mixing: float, own: OwnText, rows: NGramTables, out: Int32x2, shares: Float64
) -> int:
    """Draft up to shares.shape[0] tokens. out: int32 [3, num]: token, match length, source
    (0 corpus, 1 prompt); shares: float64 [num], p_mixed of each. Returns how many there are."""
    num: int = shares.shape[0]
    size = min(own.size, n_max - 1)
    context = np.empty(size + num, np.int32)
    for i in range(size):
        context[i] = own.text[0, own.size - size + i]
    tokens = np.empty(MAX_CANDIDATES, np.int32)
    counts = np.empty(MAX_CANDIDATES, np.int64)
    usual = most = 0
    for step in range(num):
        end = size + step
        longest = num_seen = total_seen = 0
        if mixing < 1.0:
            longest, num_seen, total_seen = count_seen(own, context, end, n_max, tokens, counts)
            if longest == 0:  # without a match, the text's most frequent token
                if most == 0:
                    usual, most = commonest(own)
                tokens[0], counts[0] = usual, most
                num_seen, total_seen = 1, own.size
        row, row_length = -1, 0
        if mixing > 0.0:
            row, row_length = find_longest(rows, context, end, n_max)
        if row < 0 and num_seen == 0:
            return step
        weight = 0.0 if row < 0 else mixing
        added = np.empty(num_seen, np.float64)
        for i in range(num_seen):
            added[i] = (1.0 - weight) * counts[i] / total_seen
        token, share, source = likeliest(rows, row, weight, tokens[:num_seen], added)
        out[0, step], out[1, step], out[2, step] = token, max(row_length, longest), source
        shares[step] = share
        context[end] = token
    return num


class MixDrafter:
    """Makes MixSessions.

    corpus: the task's, or None. learned: a layer over it, whose tables hold it too. n_max: longest
    n-gram. horizon: tokens drafted. mixing: the paper's lambda, the weight of the corpus: 1 is
    p_corp alone, 0 is p_prompt alone. p_min is a property of the corpus' tables.
    """

    name = "mix"
    sources = ("corpus", "prompt")

    def __init__(
        self,
        *,
        corpus: Corpus | None = None,
        learned: Corpus | None = None,
        n_max: int = MixOptions.n_max,
        horizon: int = MixOptions.horizon,
        mixing: float = MixOptions.mixing,
    ) -> None:
        check_options(MixOptions, {"n_max": n_max, "horizon": horizon, "mixing": mixing})
        newest = learned if learned is not None else corpus
        self.n_max = n_max
        self.horizon = horizon
        self.mixing = mixing
        self.calibration = Calibration(self.sources)
        self.tables = (
            newest.tables
            if newest is not None
            else count_ngrams(np.empty(0, np.int32), np.empty(0, np.int64), n_max=1, p_min=1)
        )

    def open(self, prompt_ids: Sequence[int], **_: Any) -> MixSession:
        """A session over the whole prompt; nothing else is used."""
        return MixSession(self, prompt_ids)


class MixSession(TextSession):
    """Drafts for one Sequence: one chain of at most `horizon` tokens. Its TextIndex gives the
    counts of p_prompt at every length."""

    def __init__(self, drafter: MixDrafter, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids, drafter.calibration)
        self._drafter = drafter

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        drafter = self._drafter
        num = min(budget, max_depth, drafter.horizon)
        if self._index.size == 0:
            return DraftTree.empty()
        out = np.empty((3, num), np.int32)
        shares = np.empty(num, np.float64)
        index = self._index
        own = OwnText(index.text, index.table, index.size)
        num = draft_chain(drafter.n_max, drafter.mixing, own, drafter.tables, out, shares)
        if num == 0:
            return DraftTree.empty()
        parents = np.arange(-1, num - 1, dtype=np.int32)
        return drafter.calibration.tree(
            out[0, :num], parents, out[2, :num], out[1, :num], shares[:num]
        )
