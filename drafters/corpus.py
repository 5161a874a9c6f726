"""Corpus: a task's example outputs and their indexes, in one memory-mapped file.

It holds the M_n tables (for `mix`), a suffix automaton over the outputs and an index of the prompts
(for `auto`), and the outputs themselves. Outputs are token ids as the model would emit them after
their prompt (leading space and merges included) and end with the EOS id, so that a drafter can
propose both the first token of an answer and its end.

    corpus = build_corpus(examples, fingerprint=..., p_min=5)
    corpus.save("task.corpus"); Corpus.load("task.corpus", fingerprint=...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters.array_file import ArrayFileError
from drafters.arrays import Float64, Int32, Int64
from drafters.auto.automaton import Automaton, build_automaton
from drafters.auto.nearest import Nearest, build_nearest
from drafters.auto.trust import is_evidence
from drafters.corpus_file import FORMAT, NUMBERS, read_corpus
from drafters.published.ngram_tables import NGramTables, count_ngrams

Progress = Callable[[str, float], None]

_PARTS = ("tables", "automaton", "nearest")
MAX_INDEXED_TOKENS = 8_000_000
MAX_MERGED_TOKENS = 250_000
"""A corpus of at most so many tokens is indexed together with what is laid over it. A larger one
keeps its own index: the layer's outputs are then used only as retrieved examples."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A task's corpus. Immutable; shared by all sessions, and by all processes that map it.

    fingerprint: of the tokenizer. token_ids: int32 [tokens], the outputs in a row;
    document_starts: int64 [documents + 1], the last entry is the number of tokens.
    evidence, outcomes: arrays of drafters.auto.trust.Trust, from a held-out part of the examples;
    without columns when none was held out.
    """

    fingerprint: str
    token_ids: Int32
    document_starts: Int64
    tables: NGramTables
    automaton: Automaton
    nearest: Nearest
    evidence: Float64
    outcomes: Float64

    @property
    def num_documents(self) -> int:
        return int(self.document_starts.shape[0]) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    def output(self, document: int) -> Int32:
        """int32 ids of one output."""
        start, end = self.document_starts[document], self.document_starts[document + 1]
        return self.token_ids[start:end]

    def count_grams(self, n: int) -> tuple[Int32, Int64]:
        """(int32 [grams, n] distinct n-grams inside documents, int64 [grams] counts), commonest
        first. Unpruned, so that measures are those of the outputs and not of the tables."""
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")
        ids, starts = self.token_ids, self.document_starts
        document = np.searchsorted(starts, np.arange(self.num_tokens), side="right")
        num = max(0, self.num_tokens - n + 1)
        inside = np.flatnonzero(document[:num] == document[n - 1 : n - 1 + num])
        if inside.shape[0] == 0:
            return np.empty((0, n), np.int32), np.empty(0, np.int64)
        all_grams = ids[inside[:, None] + np.arange(n)]
        grams, counts = np.unique(all_grams, axis=0, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return grams[order], counts[order]

    def end_ids(self) -> tuple[int, ...]:
        """The id that ends most outputs, when it stands nowhere else: the EOS id; else nothing."""
        last = self.document_starts[1:] - 1
        last = last[last >= self.document_starts[:-1]]
        if last.shape[0] == 0:
            return ()
        ids, counts = np.unique(self.token_ids[last], return_counts=True)
        best = int(np.argmax(counts))
        inside = int((self.token_ids == ids[best]).sum()) - int(counts[best])
        if 2 * counts[best] <= last.shape[0] or inside:
            return ()
        return (int(ids[best]),)

    def save(self, path: Path | str) -> None:
        """Write atomically; see drafters.array_file for the layout."""
        arrays: dict[str, npt.NDArray[Any]] = {
            "token_ids": self.token_ids,
            "document_starts": self.document_starts,
            "trust.evidence": self.evidence,
            "trust.outcomes": self.outcomes,
        }
        for prefix in _PARTS:
            values = getattr(self, prefix)._asdict()
            arrays |= {f"{prefix}.{n}": v for n, v in values.items() if isinstance(v, np.ndarray)}
        meta = {name: getattr(self.tables, name) for name in NUMBERS}
        FORMAT.write(path, arrays, fingerprint=self.fingerprint, meta=meta)

    @classmethod
    def load(cls, path: Path | str, *, fingerprint: str | None) -> Corpus:
        """Map what save() wrote, once it is checked. None is any tokenizer (only for looking at a
        file). Raises as read_corpus does."""
        meta, arrays, _ = read_corpus(path, fingerprint=fingerprint)

        def part(prefix: str) -> dict[str, Any]:
            start = len(prefix) + 1
            return {n[start:]: a for n, a in arrays.items() if n.startswith(prefix + ".")}

        if not is_evidence(arrays["trust.evidence"], arrays["trust.outcomes"]):
            raise ArrayFileError(f"{path} is damaged: its evidence is of other cells")
        return cls(
            str(meta["fingerprint"]),
            arrays["token_ids"],
            arrays["document_starts"],
            NGramTables(*(meta[name] for name in NUMBERS), **part("tables")),
            Automaton(**part("automaton")),
            Nearest(**part("nearest")),
            arrays["trust.evidence"],
            arrays["trust.outcomes"],
        )


def build_corpus(
    examples: Iterable[tuple[Sequence[int] | Int32, Sequence[int] | Int32]],
    *,
    fingerprint: str,
    n_max: int = 5,
    p_min: int = 5,
    base: Corpus | None = None,
    max_merged_tokens: int = MAX_MERGED_TOKENS,
    progress: Progress | None = None,
) -> Corpus:
    """A corpus from (prompt ids, output ids) pairs; an empty prompt means an unknown one.

    fingerprint: names the tokenizer that made the ids. n_max, p_min: of the M_n tables.
    The automaton and the prompt index cover the last MAX_INDEXED_TOKENS output tokens (whole
    documents); the tables count all. base: the corpus is a layer, to draft from beside this
    one: its outputs and prompts are the examples' alone, but automaton and tables cover `base` too
    (with its n_max and p_min), or are its own if it has more than `max_merged_tokens` tokens.
    progress: called with (what, share done). Takes about 5 us a token.
    drafters.auto.held_out builds one that `auto` starts from with this task's own trust.
    Raises ValueError for parameters out of range or negative ids.
    """
    tell: Progress = progress or (lambda *_: None)
    prompts: list[Int32] = []
    outputs: list[Int32] = []
    for prompt, output in examples:
        prompts.append(np.asarray(prompt, np.int32))
        outputs.append(np.asarray(output, np.int32))
        if len(outputs) % 10_000 == 0:
            tell("reading", 0.0)
    ids, starts = joined(outputs), starts_of(outputs)
    del outputs
    first = first_indexed(starts)
    if base is not None and base.num_tokens > max_merged_tokens:
        tables, automaton = base.tables, base.automaton
    else:
        all_ids, all_starts = ids, starts
        if base is not None:
            all_ids = np.concatenate([base.token_ids, ids])
            all_starts = np.concatenate([base.document_starts[:-1], starts + base.num_tokens])
            n_max, p_min = base.tables.n_max, base.tables.p_min
        tables = count_ngrams(all_ids, all_starts[:-1], n_max=n_max, p_min=p_min, progress=tell)
        tell("indexing", 0.0)
        # Both indexes number documents from 0 for the first indexed one.
        indexed = all_starts[first_indexed(all_starts) :]
        automaton = build_automaton(all_ids[indexed[0] :], indexed[:-1] - indexed[0])
    tell("indexing", 0.7)
    nearest = build_nearest(prompts[first:] if any(p.shape[0] for p in prompts) else [])
    tell("indexing", 1.0)
    evidence, outcomes = np.empty((2, 0), np.float64), np.empty((3, 0), np.float64)
    return Corpus(fingerprint, ids, starts, tables, automaton, nearest, evidence, outcomes)


def first_indexed(starts: Int64) -> int:
    """The first of the last documents that have at most MAX_INDEXED_TOKENS. starts: of documents,
    and their end."""
    first = int(np.searchsorted(starts, starts[-1] - MAX_INDEXED_TOKENS, side="left"))
    return min(first, len(starts) - 1)


def joined(parts: list[Int32]) -> Int32:
    """int32: all parts in a row."""
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def starts_of(parts: Sequence[Int32]) -> Int64:
    """int64 [parts + 1]: where each begins in `joined`, and its length."""
    starts = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([part.shape[0] for part in parts], out=starts[1:])
    return starts
