"""M_n tables: the last n-1 tokens -> counts of the next one, for n = 1..n_max (TASC section 3).

Counted by sorting: an n-gram's prefix is replaced by its rank among the (n-1)-grams kept so far,
so that a key is 64 bits for every n, and an n-gram whose prefix was pruned is never sorted. Peak
memory is about 40 bytes a token of corpus.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from drafters.arrays import Int32, Int64
from drafters.corpus_file import MAX_N
from drafters.jit import compiled, entry

Progress = Callable[[str, float], None]

_Rows = tuple[Int64, Int64, Int32, Int32]


@entry
@compiled
def context_hash(ids: Int32, end: int, length: int) -> int:
    """64-bit hash of ids[end-length:end]: the key of a context in the tables."""
    h = np.uint64(0x243F6A8885A308D3) + np.uint64(length)
    for i in range(end - length, end):
        h = (h ^ np.uint64(ids[i])) * np.uint64(0x9E3779B97F4A7C15)
        h = h ^ (h >> np.uint64(29))
    h = h * np.uint64(0xBF58476D1CE4E5B9)
    return int(np.int64((h ^ (h >> np.uint64(32))) >> np.uint64(1)))


@entry
@compiled
def _hash_contexts(ids: Int32, ends: Int64, length: int, out: Int64) -> None:
    for i in range(ends.shape[0]):
        out[i] = context_hash(ids, ends[i], length)


class NGramTables(NamedTuple):
    """The tables of all n in flat arrays.

    first_row: int64 [n_max + 1]: rows of M_n are first_row[n-1]:first_row[n]. keys: int64 [rows],
    hash of the context, ascending inside a table. starts: int64 [rows + 1]: a row's entries.
    tokens: int32 [entries] next tokens and counts: int32 [entries], by count descending, then id.
    """

    n_max: int
    p_min: int
    num_tokens: int
    num_documents: int
    first_row: Int64
    keys: Int64
    starts: Int64
    tokens: Int32
    counts: Int32


def _ranks(keys: Int64, p_min: int) -> tuple[Int64, Int64, Int64]:
    """(index of each key among the kept distinct keys or -1, kept keys, their counts)."""
    order = np.argsort(keys)
    ordered = keys[order]
    fresh = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    counts = np.diff(np.append(fresh, ordered.shape[0]))
    keep = counts >= p_min
    rank = np.where(keep, np.cumsum(keep) - 1, -1)
    out = np.empty(keys.shape[0], np.int64)
    out[order] = np.repeat(rank, counts)
    return out, ordered[fresh[keep]], counts[keep]


def count_ngrams(
    token_ids: Int32,
    document_starts: Int64,
    *,
    n_max: int = 5,
    p_min: int = 5,
    progress: Progress | None = None,
) -> NGramTables:
    """Count all n-grams inside documents and keep those seen at least p_min times.

    token_ids: int32 [tokens], all documents in a row. document_starts: int64 [documents],
    ascending. progress: called with ("counting", share done). Raises ValueError for n_max outside
    1..16, p_min below 1 or ids below 0.
    """
    if not 1 <= n_max <= MAX_N:
        raise ValueError(f"n_max must be in 1..{MAX_N}, not {n_max}")
    if p_min < 1:
        raise ValueError(f"p_min must be at least 1, not {p_min}")
    ids = np.ascontiguousarray(token_ids, np.int32)
    num = ids.shape[0]
    if num and int(ids.min()) < 0:
        raise ValueError("token ids must not be negative")
    starts_here = np.zeros(num, bool)
    inside = document_starts[document_starts < num]
    starts_here[inside] = True

    # ends: positions of the last token of the n-grams still alive; rank: of their n-1 prefix.
    ends = np.arange(num, dtype=np.int64)
    prefix = np.zeros(num, np.int64)
    tables: list[_Rows] = []
    for n in range(1, n_max + 1):
        rank, kept, counts = _ranks((prefix << 32) | ids[ends], p_min)
        alive = rank >= 0
        # One occurrence of each kept n-gram gives its context's tokens, for the hash.
        example = np.empty(kept.shape[0], np.int64)
        example[rank[alive]] = ends[alive]
        tables.append(_rows_of(ids, n - 1, kept, counts, example))
        # An (n+1)-gram ends one further, inside the same document, behind a kept n-gram.
        longer = ends[alive] + 1
        inside_document = longer < num
        inside_document[inside_document] = ~starts_here[longer[inside_document]]
        prefix = rank[alive][inside_document]
        ends = longer[inside_document]
        if progress is not None:
            progress("counting", n / n_max)
    keys, sizes, tokens, entry_counts = (
        np.concatenate(column) for column in zip(*tables, strict=True)
    )
    num_rows = [0, *(table[0].shape[0] for table in tables)]
    return NGramTables(
        n_max,
        p_min,
        num,
        int(document_starts.shape[0]),
        np.cumsum(num_rows, dtype=np.int64),
        keys,
        np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        tokens,
        entry_counts,
    )


def _rows_of(ids: Int32, length: int, kept: Int64, counts: Int64, example: Int64) -> _Rows:
    """One table: (keys, entries of each row, next tokens, their counts), rows in key order.

    kept: int64, the n-grams as prefix rank and token, with counts. example: where each occurs.
    length: of a context.
    """
    owner, next_tokens = kept >> 32, (kept & 0xFFFFFFFF).astype(np.int32)
    # By context, then count descending, then id.
    order = np.lexsort((next_tokens, -counts, owner))
    owner, next_tokens, counts = owner[order], next_tokens[order], counts[order]
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    sizes = np.diff(np.append(first, owner.shape[0]))
    keys = np.empty(first.shape[0], np.int64)
    _hash_contexts(ids, example[order][first], length, keys)
    by_key = np.argsort(keys)
    # Rows move to key order, their entries with them.
    moved = np.repeat(first[by_key], sizes[by_key]) + _within(sizes[by_key])
    return keys[by_key], sizes[by_key], next_tokens[moved], counts[moved].astype(np.int32)


def _within(sizes: Int64) -> Int64:
    """0..size-1 for each size, in a row."""
    total = int(sizes.sum())
    offsets = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.arange(total, dtype=np.int64) - offsets
