"""Enrichments: exact to expand, fewest ids, and the tokens of Algorithm 1 written plainly."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from vocab_store.enrichment import Enrichment, EnrichSettings, enrich, may_copy
from vocab_store.errors import VocabStoreError

V = 6
TEXTS = st.lists(st.lists(st.integers(0, V - 1), max_size=14).map(tuple), min_size=1, max_size=12)


def piece(token_id: int) -> bytes:
    """The string of 1 begins those of 2 and 3, as " the" begins " therapy"."""
    return (b"a.", b"b.", b"b.c", b"b.d", b"e.", b"f.")[token_id]


def naive(
    outputs: Sequence[tuple[int, ...]], settings: EnrichSettings, barriers: frozenset[int]
) -> tuple[list[tuple[int, ...]], int, int]:
    """Algorithm 1 with everything counted anew for every token; ids of the outputs in them; how
    many were rejected."""
    texts = [list(output) for output in outputs]
    found: list[tuple[int, ...]] = []
    used: set[tuple[int, ...]] = set()
    num_rejected = 0

    def flat(symbol: int) -> tuple[int, ...]:
        return (symbol,) if symbol < V else found[symbol - V]

    def string(symbol: int) -> bytes:
        return b"".join(map(piece, flat(symbol)))

    while len(found) < settings.budget:
        counts: Counter[tuple[int, ...]] = Counter()
        for text in texts:
            for n in range(2, settings.n_max + 1):
                for at in range(len(text) - n + 1):
                    gram = tuple(text[at : at + n])
                    if not barriers & set(gram):
                        counts[gram] += 1
        left = [g for g in counts if g not in used and counts[g] >= settings.min_count]
        if not left:
            break
        gram = min(left, key=lambda g: (-counts[g] * (len(g) - 1), -len(g), g))
        used.add(gram)
        symbols = [s for text in texts for s in text]
        last = string(gram[-1])
        clash = sum(string(s).startswith(last) and string(s) != last for s in symbols)
        if clash / len(symbols) >= settings.alpha:
            num_rejected += 1
            continue
        whole = tuple(i for s in gram for i in flat(s))
        if whole not in found:
            found.append(whole)
        symbol = V + found.index(whole)
        for text in texts:
            at = 0
            while at <= len(text) - len(gram):
                if tuple(text[at : at + len(gram)]) == gram:
                    text[at : at + len(gram)] = [symbol]
                at += 1
    return found, sum(map(len, texts)), num_rejected


@settings(max_examples=examples(300))
@given(
    outputs=TEXTS,
    budget=st.integers(1, 30),
    n_max=st.integers(2, 5),
    alpha=st.sampled_from([0.05, 0.3, 2.0]),
    min_count=st.integers(1, 4),
    barriers=st.sampled_from([frozenset[int](), frozenset({0})]),
)
@example([(0, 1, 0, 0, 1)], 10, 2, 2.0, 1, frozenset())  # two merges with one token between them
@example(  # an n-gram that was rejected is not tried again when it has become rarer
    [(1, 1), (4, 2, 0, 1, 1, 2, 1, 1, 1, 1, 1, 0)], 10, 3, 0.05, 1, frozenset()
)
# The last part of the first begins three of the twelve tokens of the outputs: its score is 1/4.
@example([(0, 1)] * 3 + [(0, 2)] * 2 + [(0, 3)], 4, 2, 0.25, 1, frozenset())
@example([(0, 1)] * 3 + [(0, 2)] * 2 + [(0, 3)], 4, 2, 0.26, 1, frozenset())
def test_the_tokens_are_those_of_the_plain_algorithm(
    outputs: list[tuple[int, ...]],
    budget: int,
    n_max: int,
    alpha: float,
    min_count: int,
    barriers: frozenset[int],
) -> None:
    settings = EnrichSettings(budget, n_max, alpha, min_count)
    expected, num_ids, num_rejected = naive(outputs, settings, barriers)
    if not expected:
        with pytest.raises(ValueError, match="no n-gram"):
            enrich(
                outputs, piece, tokenizer="t", base_vocab_size=V, settings=settings,
                barriers=barriers,
            )  # fmt: skip
        return
    found = enrich(
        outputs, piece, tokenizer="t", base_vocab_size=V, settings=settings, barriers=barriers
    )
    assert list(found.parts) == expected
    assert found.ids == tuple(range(V, V + len(expected)))
    assert not any(barriers & set(parts) for parts in found.parts)
    # Fewer asked: the first of them. So more are never fewer, and the found are told right.
    fewer, *_ = naive(outputs, replace(settings, budget=max(1, budget // 2)), barriers)
    assert expected[: len(fewer)] == fewer
    assert found.made["outputs"] == len(outputs)
    assert found.made["base_ids_per_output"] == sum(map(len, outputs)) / len(outputs)
    assert found.made["ids_per_output"] == num_ids / len(outputs)
    assert found.made["rejected"] == num_rejected


@settings(max_examples=examples(300))
@given(outputs=TEXTS, prompts=TEXTS, budget=st.integers(1, 30))
def test_prompts_add_the_tokens_that_the_algorithm_finds_in_them(
    outputs: list[tuple[int, ...]], prompts: list[tuple[int, ...]], budget: int
) -> None:
    settings = EnrichSettings(budget, 4, 2.0)
    expected, *_ = naive(outputs, settings, frozenset())
    if not expected:
        return
    told: list[tuple[int, int]] = []
    found = enrich(
        outputs, piece, tokenizer="t", base_vocab_size=V, settings=settings, prompts=prompts,
        progress=lambda *of: told.append(of),
    )  # fmt: skip
    assert told == [(num, budget) for num in range(1, len(expected) + 1)]
    assert found.prompts and found.first(len(expected)).parts == tuple(expected)
    assert found.first(1).made["budget"] == 1 and found.first(999).made["budget"] == len(found)
    half = max(2, math.ceil(len(prompts) / 2))
    of_prompts, *_ = naive(prompts, replace(settings, min_count=half), frozenset())
    assert list(found.parts) == list(dict.fromkeys(expected + of_prompts))
    assert found.made["of_prompts"] == len(found.parts) - len(expected)


def test_what_outputs_copy_from_their_prompts_is_part_of_no_token() -> None:
    # 0 and 1 stand in all prompts: the task's own words. 4 and 5 are what is asked.
    prompts = [(0, 1, 4)] * 20 + [(0, 1, 5)] * 20 + [(0, 1, 3)] * 20
    outputs = [(0, 1, 2, 4)] * 20 + [(0, 1, 2, 5)] * 20 + [(0, 1, 2)] * 20
    copied = may_copy(prompts)
    assert copied == [{4}] * 20 + [{5}] * 20 + [{3}] * 20
    plain = enrich(outputs, piece, tokenizer="t", base_vocab_size=V)
    assert {(0, 1, 2, 4), (0, 1, 2, 5)} <= set(plain.parts)
    found = enrich(outputs, piece, tokenizer="t", base_vocab_size=V, copied=copied)
    assert set(found.parts) == {(0, 1, 2)}
    # Where some outputs write it unasked, it is no copy.
    written = enrich(outputs, piece, tokenizer="t", base_vocab_size=V, copied=[(), *copied[1:]])
    assert set(written.parts) == {(0, 1, 2)}
    written = enrich(outputs, piece, tokenizer="t", base_vocab_size=V, copied=[(), (), *copied[2:]])
    assert set(written.parts) == {(0, 1, 2), (0, 1, 2, 4)}
    # (1, 2) is written unasked only within (0, 1, 2), and is copied where it stands alone.
    alone = [(0, 1, 2)] * 20 + [(3, 1, 2)] * 10
    copied = [frozenset[int]()] * 20 + [frozenset({1})] * 10
    found = enrich(alone, piece, tokenizer="t", base_vocab_size=V, copied=copied)
    assert set(found.parts) == {(0, 1, 2)}
    # Nineteen prompts of twenty are nearly all, eighteen are not.
    assert may_copy([(0, 1)] * 18 + [(0,), ()]) == [{1}] * 18 + [set(), set()]


@settings(max_examples=examples(300))
@given(outputs=TEXTS, least=st.integers(1, 6))
def test_every_token_stands_in_as_many_outputs_as_asked(
    outputs: list[tuple[int, ...]], least: int
) -> None:
    def found(least: int) -> Enrichment | None:
        settings = EnrichSettings(50, 4, 2.0, least=least)
        try:
            return enrich(outputs, piece, tokenizer="t", base_vocab_size=V, settings=settings)
        except ValueError:
            return None

    every, often = found(0), found(least)
    if often is None:
        return
    uses = Counter(i for output in outputs for i in often.segment(output))
    assert min(uses[i] for i in often.ids) >= max(least, EnrichSettings().min_count)
    assert every is not None and often.ids == tuple(range(V, V + len(often)))


def test_the_seldomest_are_dropped_first_and_what_is_then_written_more_often_stays() -> None:
    def found(outputs: Sequence[tuple[int, ...]], least: int) -> tuple[tuple[int, ...], ...]:
        settings = EnrichSettings(9, 2, 2.0, least=least)
        return enrich(outputs, piece, tokenizer="t", base_vocab_size=V, settings=settings).parts

    # Without (1, 2, 3), which one output is left to, four hold (1, 2).
    outputs = [(1, 2, 3, 5)] * 4 + [(1, 2, 3)] + [(1, 2)] * 3
    assert found(outputs, 4) == ((1, 2), (1, 2, 3, 5))
    assert found([(1, 2, 3)] * 2 + [(1, 2)], 1) == ((1, 2, 3),), "min_count is the least there is"


@settings(max_examples=examples(300))
@given(
    parts=st.lists(
        st.lists(st.integers(0, 3), min_size=2, max_size=5).map(tuple), max_size=8, unique=True
    ),
    text=st.lists(st.integers(0, 3), max_size=9),
)
@example([(1, 2), (0, 1)], [0, 1, 2])  # a token first, then an id of the base
@example([(0, 1), (2, 3), (0, 1, 2)], [0, 1, 2, 3])  # the longer of two tokens first
@example([(0, 1, 2), (0, 1), (2, 3)], [0, 1, 2, 3])
def test_segmenting_is_exact_and_takes_the_fewest_ids(
    parts: list[tuple[int, ...]], text: list[int]
) -> None:
    enrichment = Enrichment("t", 4, tuple(range(4, 4 + len(parts))), tuple(parts))
    short = enrichment.segment(text)
    assert enrichment.expand(short) == text
    # Every way to cut the text in pieces that exist; the fewest pieces, longest first.
    ways = []
    for cuts in product((False, True), repeat=max(0, len(text) - 1)):
        pieces, start = [], 0
        for at, is_cut in enumerate(cuts, 1):
            if is_cut:
                pieces.append(tuple(text[start:at]))
                start = at
        if text:
            pieces.append(tuple(text[start:]))
        if all(len(p) == 1 or p in parts for p in pieces):
            ways.append(pieces)
    best = min(ways, key=lambda pieces: (len(pieces), [-len(p) for p in pieces]))
    assert [len(enrichment.parts_of(i)) for i in short] == [len(p) for p in best]


def test_reserved_rows_are_given_out_first() -> None:
    outputs = [(0, 1, 2, 3)] * 3 + [(2, 3)] * 4
    found = enrich(
        outputs, piece, tokenizer="t", base_vocab_size=10, reserved_ids=(7, 9),
        settings=EnrichSettings(5, 2, 2.0),
    )  # fmt: skip
    assert found.ids[:2] == (7, 9)
    assert found.ids[2:] == tuple(range(10, 10 + len(found) - 2))
    assert found.vocab_size == 10 + len(found) - 2
    assert found.expand(found.segment([0, 1, 2, 3])) == [0, 1, 2, 3]
    few = enrich([(0, 1)] * 2, piece, tokenizer="t", base_vocab_size=10, reserved_ids=(7, 9))
    assert few.ids == (7,) and few.vocab_size == 10


def test_a_file_comes_back_and_damage_is_named(tmp_path: Path) -> None:
    file = tmp_path / "task.enrichment.json"
    enrichment = Enrichment("abc", 5, (5, 6), ((0, 1), (1, 2, 3)), {"budget": 2})
    enrichment.save(file)
    assert Enrichment.load(file, tokenizer="abc") == enrichment
    with pytest.raises(VocabStoreError, match="another tokenizer"):
        Enrichment.load(file, tokenizer="other")
    body = json.loads(file.read_text())
    for change, message in (
        ({"parts": [[0, 1], [1, 2]]}, "hash"),
        ({"parts": [[0, 1], [1, 9]]}, "no id of the base"),
        ({"parts": [[0, 1], [1, -1]]}, "part -1 is no id of the base"),
        ({"ids": [2, 5]}, "part 2 is no id of the base"),
        ({"parts": [[0, 1], [1]]}, "token 6 has 1 parts"),
        ({"ids": [-1, 5]}, "token -1 has 2 parts"),
        ({"ids": [5]}, "1 ids for 2 tokens"),
        ({"ids": [5, 5]}, "stands twice"),
        ({"parts": [[0, 1], [0, 1]]}, "stands twice"),
        ({"ids": None}, "damaged"),
        ({"ids": [5, 7]}, "without a gap"),
        ({"version": 9}, "version 9"),
        ({"kind": "x"}, "no enrichment"),
    ):
        file.write_text(json.dumps(body | change))
        with pytest.raises(VocabStoreError, match=message):
            Enrichment.load(file)
    for text in ("{", "[]"):
        file.write_text(text)
        with pytest.raises(VocabStoreError, match="no enrichment"):
            Enrichment.load(file)


def test_the_hash_is_of_the_tokens_and_their_tokenizer_alone() -> None:
    one = Enrichment("abc", 5, (5,), ((0, 1),), {"budget": 1})
    assert one.hash == Enrichment("abc", 5, (5,), ((0, 1),)).hash
    others = [
        Enrichment("abd", 5, (5,), ((0, 1),)),
        Enrichment("abc", 6, (6,), ((0, 1),)),
        Enrichment("abc", 6, (5,), ((0, 1),)),  # the same id, in a row that this base reserved
        Enrichment("abc", 5, (5,), ((1, 0),)),
    ]
    assert len({one.hash, *(other.hash for other in others)}) == 5


def test_prompts_keep_their_base_ids_unless_the_enrichment_says_otherwise(tmp_path: Path) -> None:
    plain = Enrichment("t", V, (V, V + 1), ((1, 2), (2, 3, 4)))
    as_in_the_paper = replace(plain, prompts=True)
    prompt = [0, 1, 2, 3, 4, 1, 2]
    assert plain.read(tuple(prompt)) == prompt
    short = as_in_the_paper.read(prompt)
    assert short == [0, 1, V + 1, V] and as_in_the_paper.segment(short) == short
    assert as_in_the_paper.expand(short) == prompt
    assert plain.hash != as_in_the_paper.hash == as_in_the_paper.first(2).hash
    as_in_the_paper.save(tmp_path / "e.json")
    assert Enrichment.load(tmp_path / "e.json").prompts
    plain.save(tmp_path / "e.json")
    assert not Enrichment.load(tmp_path / "e.json").prompts
