"""The file of a corpus: its kind and version, what its arrays must be, and how to read its size.

The API process checks corpora before an engine drafts from them, so this module imports nothing
that compiles. drafters.corpus makes a Corpus of what `read_corpus` gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from drafters.array_file import Array, ArrayFile, ArrayFileError, ArrayFormat, Column, blocks

NUMBERS = ("n_max", "p_min", "num_tokens", "num_documents")
"""What the file says beside its arrays: of the n-gram tables, and of the corpus."""

START = -2
"""Stands before the first token of an output in an index of outputs. Never proposed."""
MAX_TOP = 8  # commonest next tokens that an automaton's state has beside its edges
MAX_N = 16  # of n-gram tables

FORMAT = ArrayFormat(
    "task corpus",
    2,  # occurrences beside edges and tops
    {
        "token_ids": Column("int32", ("tokens",), low=0),
        "document_starts": Column("int64", ("documents+1",), cuts="tokens"),
        "tables.first_row": Column("int64", ("orders+1",), cuts="rows"),
        "tables.keys": Column("int64", ("rows",)),
        "tables.starts": Column("int64", ("rows+1",), cuts="entries"),
        "tables.tokens": Column("int32", ("entries",), low=0),
        "tables.counts": Column("int32", ("entries",), low=1),
        "automaton.states": Column("int32", (None, 5), low=-1),
        "automaton.edges": Column("int32", ("edges", 3), low=START),
        "automaton.tops": Column("int32", ("tops", 2), low=START),
        "nearest.keys": Column("int64", ("terms",), ascends=True),
        "nearest.starts": Column("int64", ("terms+1",), cuts="postings"),
        "nearest.postings": Column("int32", ("postings",), low=0, high="examples"),
        "nearest.weights": Column("float32", ("terms",), low=0),
        "nearest.norms": Column("float32", ("examples",), low=1),
        "nearest.template": Column("int64", ("pairs",), ascends=True),
        "trust.evidence": Column("float64", (2, None), low=0),
        "trust.outcomes": Column("float64", (3, None), low=0),
    },
)


def read_extent(path: Path | str, *, fingerprint: str) -> tuple[int, int, int]:
    """(examples, output tokens, bytes on disk) of a corpus file, which is checked as read_corpus
    does."""
    path = Path(path)
    arrays = read_corpus(path, fingerprint=fingerprint).arrays
    num_documents = arrays["document_starts"].shape[0] - 1
    return num_documents, arrays["token_ids"].shape[0], path.stat().st_size


def read_corpus(path: Path | str, *, fingerprint: str | None) -> ArrayFile:
    """Map a corpus file that may be drafted from: all of it is checked.

    fingerprint: of the tokenizer; None is any. Raises OSError, FingerprintError (another tokenizer)
    or ArrayFileError (anything else).
    """
    read = FORMAT.read(path, fingerprint=fingerprint)
    arrays = read.arrays
    problem = _wrong_numbers(read.meta, arrays) or _wrong_states(
        arrays["automaton.states"], arrays["automaton.edges"], arrays["automaton.tops"]
    )
    if problem:
        raise ArrayFileError(f"{path} is damaged: {problem}")
    read.release_pages()
    return read


def _wrong_numbers(meta: dict[str, Any], arrays: dict[str, Array]) -> str:
    numbers = [meta.get(name) for name in NUMBERS]
    orders = arrays["tables.first_row"].shape[0] - 1
    if not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers) or orders > MAX_N:
        return "its numbers are none"
    if numbers[0] != orders or not numbers[1]:
        return "its tables are not of n_max and p_min"
    documents, examples = arrays["document_starts"].shape[0] - 1, arrays["nearest.norms"].shape[0]
    return "it has more prompts than outputs" if examples > documents else ""


def _wrong_states(states: Array, edges: Array, tops_of: Array) -> str:
    """What is wrong with an automaton (drafters.auto.automaton), "" for nothing.

    Columns of a state: suffix link, length, occurrences, first edge, place in tops. Links lead to
    shorter contexts, so that who follows them comes to the root.
    """
    if not states.shape[0]:
        return "" if not edges.shape[0] else "edges of no state"
    num = states.shape[0] - 1
    if num < 1 or states[0, 0] != -1 or states[0, 1] != 0:
        return "its automaton has no root"
    if states[0, 3] != 0 or states[num, 3] != edges.shape[0]:
        return "its edges belong to no state"
    lengths = states[:num, 1]
    for rows in blocks(states[1:num]):
        links = rows[:, 0]
        if links.min() < 0 or links.max() >= num or (lengths[links] >= rows[:, 1]).any():
            return "suffix links that lead nowhere"
    for rows in blocks(states, overlap=1):
        degrees = np.diff(rows[:, 3].astype(np.int64))
        tops = rows[:-1, 4] if rows.shape[0] > 1 else rows[:0, 4]
        many = degrees > MAX_TOP
        if (degrees < 0).any() or rows[:, 1:4].min() < 0:
            return "states that cannot be"
        most = tops_of.shape[0] - MAX_TOP
        if (tops[~many] != -1).any() or (tops[many] < 0).any() or (tops[many] > most).any():
            return "states whose commonest edges are elsewhere"
    for rows in blocks(edges):
        if rows[:, 1].min() < 0 or rows[:, 1].max() >= num or rows[:, 2].min() < 0:
            return "edges that lead nowhere"
    return "occurrences that cannot be" if tops_of[:, 1].min(initial=0) < 0 else ""
