"""Corpora: counts checked by hand and by brute force, files that refuse what is not theirs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.array_file import ArrayFileError, ArrayFormat, Column, FingerprintError
from drafters.auto.automaton import automaton_step, build_automaton
from drafters.auto.held_out import build_calibrated
from drafters.corpus import Corpus, build_corpus
from drafters.corpus_file import FORMAT, START, read_extent
from drafters.published.ngram_tables import NGramTables, context_hash, count_ngrams
from drafters.sorted_keys import find_row
from tests.profiles import examples
from vocab_store.entropy import measure

documents = st.lists(st.lists(st.integers(0, 4), max_size=25), min_size=1, max_size=8)


def flat(docs: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0] + [len(d) for d in docs])[:-1].astype(np.int64)
    return np.asarray([t for d in docs for t in d], np.int32), starts


def grams(docs: list[list[int]], n: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(d[i : i + n]) for d in docs for i in range(len(d) - n + 1))


def num_ngrams(tables: NGramTables) -> list[int]:
    """Kept distinct n-grams for n = 1..n_max."""
    return np.diff(tables.starts[tables.first_row]).tolist()


def lookup(tables: NGramTables, *context: int) -> dict[int, int]:
    """Counts of the next token after exactly these tokens."""
    ids, n = np.asarray(context, np.int32), len(context)
    first, end = tables.first_row[n : n + 2].tolist()
    row = find_row(tables.keys, first, end, context_hash(ids, n, n))
    part = slice(*tables.starts[row : row + 2].tolist() if row >= 0 else (0, 0))
    return dict(zip(tables.tokens[part].tolist(), tables.counts[part].tolist(), strict=True))


@settings(max_examples=examples(400), deadline=None)
@given(docs=documents, p_min=st.integers(1, 4), n_max=st.integers(1, 5))
def test_tables_equal_a_brute_force_count(docs: list[list[int]], p_min: int, n_max: int) -> None:
    tables = count_ngrams(*flat(docs), n_max=n_max, p_min=p_min)
    for n in range(1, n_max + 1):
        kept = {gram: count for gram, count in grams(docs, n).items() if count >= p_min}
        contexts = {gram[:-1] for gram in grams(docs, n)}
        for context in contexts:
            expected = {gram[-1]: count for gram, count in kept.items() if gram[:-1] == context}
            found = lookup(tables, *context)
            assert found == expected
            assert list(found) == sorted(found, key=lambda token: (-found[token], token))
        assert num_ngrams(tables)[n - 1] == len(kept)


def test_table_parameters_are_checked() -> None:
    ids, starts = flat([[1, 2]])
    bad: Any = ({"n_max": 0}, {"n_max": 17}, {"p_min": 0})
    for options in bad:
        with pytest.raises(ValueError):
            count_ngrams(ids, starts, **options)
    with pytest.raises(ValueError, match="negative"):
        count_ngrams(np.asarray([-1], np.int32), starts)


@settings(max_examples=examples(400), deadline=None)
@given(docs=documents)
def test_the_automaton_counts_every_context_of_every_length(docs: list[list[int]]) -> None:
    automaton = build_automaton(*flat(docs))
    behind_start = [[START, *d] for d in docs]
    for n in range(1, 8):
        longer = grams(behind_start, n + 1)
        for context, count in grams(behind_start, n).items():
            state, length = 0, 0
            for token in context:
                state, length = automaton_step(
                    automaton.states, automaton.edges, state, length, token
                )
            assert length == n
            assert automaton.states[state, 2] == count
            first, end = automaton.states[state, 3], automaton.states[state + 1, 3]
            edges = automaton.edges[first:end]
            assert (edges[:, 2] == automaton.states[edges[:, 1], 2]).all()
            following = {int(token): int(count) for token, _, count in edges}
            assert following == {g[-1]: c for g, c in longer.items() if g[:-1] == context}


EXAMPLES = [([7, 7, n, 8], [1, 2, n, 0]) for n in range(20, 32)]


def test_a_corpus_survives_its_file(tmp_path: Path) -> None:
    corpus = build_corpus(EXAMPLES, fingerprint="tok-a", p_min=1)
    path = tmp_path / "deep" / "task.corpus"
    corpus.save(path)
    loaded = Corpus.load(path, fingerprint="tok-a")
    assert loaded.num_documents == 12 and loaded.num_tokens == 48
    assert loaded.output(3).tolist() == [1, 2, 23, 0]
    assert loaded.end_ids() == (0,)
    assert lookup(loaded.tables, 1) == {2: 12}
    for part in ("tables", "automaton", "nearest"):
        for name, old in getattr(corpus, part)._asdict().items():
            assert np.array_equal(old, getattr(getattr(loaded, part), name)), (part, name)
    assert [p.name for p in path.parent.iterdir()] == ["task.corpus"]  # no temporary is left
    with pytest.raises(FingerprintError, match="tokenizer tok-a, but the model's is tok-b"):
        Corpus.load(path, fingerprint="tok-b")
    assert Corpus.load(path, fingerprint=None).fingerprint == "tok-a"  # for looking at it


def test_the_extent_of_a_file_is_that_of_its_corpus_and_needs_no_compiler(tmp_path: Path) -> None:
    path = tmp_path / "task.corpus"
    corpus = build_corpus(EXAMPLES, fingerprint="a")
    corpus.save(path)
    held = corpus.num_documents, corpus.num_tokens
    assert read_extent(path, fingerprint="a") == (*held, path.stat().st_size)
    with pytest.raises(FingerprintError):
        read_extent(path, fingerprint="b")


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "task.corpus"
    with pytest.raises(FileNotFoundError):
        Corpus.load(path, fingerprint=None)
    path.write_bytes(b"hello")
    with pytest.raises(ArrayFileError, match="not a task corpus"):
        Corpus.load(path, fingerprint=None)
    build_corpus(EXAMPLES, fingerprint="a").save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArrayFileError, match="cut short"):
        Corpus.load(path, fingerprint=None)
    path.write_bytes(whole[:60])
    with pytest.raises(ArrayFileError, match="damaged header"):
        Corpus.load(path, fingerprint=None)
    one = {"a": np.zeros(3, np.int32)}
    replace(FORMAT, kind="other").write(path, one, fingerprint="")
    with pytest.raises(ArrayFileError, match="of the kind 'other'"):
        Corpus.load(path, fingerprint=None)
    replace(FORMAT, version=99).write(path, one, fingerprint="")
    with pytest.raises(
        ArrayFileError, match="version 99; this program reads version 2: build it again"
    ):
        Corpus.load(path, fingerprint=None)
    FORMAT.write(path, one, fingerprint="")
    with pytest.raises(ArrayFileError, match="lacks a part of a task corpus"):
        Corpus.load(path, fingerprint=None)


def test_writing_what_was_read_changes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "arrays"
    form = ArrayFormat("k", 1, {"a": Column("int32", ("a",))})
    form.write(path, {"a": np.arange(4, dtype="i4")}, fingerprint="f")

    def read() -> np.ndarray:
        return form.read(path, fingerprint="f").arrays["a"]

    read()[0] = 99  # a private page
    assert read().tolist() == [0, 1, 2, 3]


def test_the_nearest_prompts_are_those_that_share_rare_tokens() -> None:
    prompts = [[1, 2, 3, 50 + n, 80 + n % 5, 4] for n in range(30)]
    corpus = build_corpus([(p, [n, 0]) for n, p in enumerate(prompts)], fingerprint="")
    found, likeness = corpus.nearest.find([1, 2, 3, 57, 82, 4], 5)
    assert found.tolist() == [7, 2, 12, 17, 22], "the first of those that are as near"
    assert (np.diff(likeness) <= 0).all()
    weights = corpus.nearest.template_weights(np.asarray(prompts[0], np.int32), 0.1)[0]
    assert weights.tolist() == pytest.approx([0.1, 0.1, 1, 1, 1, 1])


def test_progress_is_reported() -> None:
    seen: list[tuple[str, float]] = []
    build_calibrated(
        EXAMPLES, fingerprint="", progress=lambda what, share: seen.append((what, share))
    )
    assert {what for what, _ in seen} == {"counting", "indexing", "calibrating"}
    assert all(0.0 <= share <= 1.0 for _, share in seen)


def test_empty_corpora_work() -> None:
    corpus = build_corpus([], fingerprint="")
    assert corpus.num_documents == 0 and corpus.end_ids() == ()
    corpus = build_corpus([([], [1, 2, 3])], fingerprint="", p_min=1)
    assert lookup(corpus.tables, 1) == {2: 1}


@pytest.mark.parametrize(
    ("outputs", "ends"),
    [
        ([[1, 0], [], [2, 0]], (0,)),
        ([[1, 0], [2, 9], [3, 8]], ()),  # nothing ends most of them
        ([[0, 1, 0], [2, 0]], ()),  # it stands elsewhere, too
    ],
)
def test_the_end_is_what_ends_most_outputs_alone(
    outputs: list[list[int]], ends: tuple[int, ...]
) -> None:
    corpus = build_corpus([([], output) for output in outputs], fingerprint="")
    assert corpus.end_ids() == ends


def test_a_large_corpus_is_indexed_by_its_last_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafters.corpus.MAX_INDEXED_TOKENS", 8)
    corpus = build_corpus(EXAMPLES, fingerprint="", p_min=1)
    assert corpus.nearest.norms.shape[0] == 2 and corpus.num_documents == 12
    assert lookup(corpus.tables, 1) == {2: 12}, "the tables count all"
    states = corpus.automaton.states
    assert states[0, 2] == 8 + 2, "each token, and each start"
    monkeypatch.setattr("drafters.corpus.MAX_INDEXED_TOKENS", 3)  # fewer than the last one has
    assert build_corpus(EXAMPLES, fingerprint="").automaton.num_states == 0


def test_measures_of_a_corpus_checked_by_hand() -> None:
    # Bigrams: 1 2 four times, 2 3 and 2 4 twice each: shares 1/2, 1/4, 1/4.
    outputs = [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 4]]
    corpus = build_corpus([([], o) for o in outputs], fingerprint="", p_min=5)
    grams, counts = corpus.count_grams(2)
    assert grams[0].tolist() == [1, 2] and counts.tolist() == [4, 2, 2]
    bigrams = measure(counts.tolist())
    assert bigrams.bits == pytest.approx(1.5)
    assert bigrams.k80 == 3  # two make 75 %
    assert corpus.count_grams(3)[1].tolist() == [2, 2]
    assert corpus.count_grams(4)[1].shape == (0,)
    assert build_corpus([], fingerprint="").count_grams(2)[1].shape == (0,)
