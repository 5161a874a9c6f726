"""Entropies: TASC's measures of known distributions, its Table 1, and what predicts run time."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from vocab_store.entropy import direction, kendall_tau, measure, ngrams, word_bigrams, words


def test_entropies_of_known_distributions() -> None:
    uniform = measure(ngrams([[0, 1, 2, 3]] * 5, 1).values(), vocab_size=16)
    assert uniform.h1 == pytest.approx(math.log(4))
    assert uniform.h2 == pytest.approx(math.log(4))
    assert uniform.normalised_h1 == pytest.approx(0.5)
    assert (uniform.num, uniform.k80) == (20, 4)
    skewed = measure([8, 1, 1])
    assert skewed.h2 == pytest.approx(-math.log(0.64 + 0.01 + 0.01))
    assert skewed.k80 == 1
    assert skewed.h2 < skewed.h1
    assert measure([]).k80 == 0
    alone = measure([5])
    assert f"{alone.h1:.2f} {alone.h2:.2f} {alone.k80}" == "0.00 0.00 1"
    assert ngrams([[1, 2, 3], [1, 2]], 2) == Counter({(1, 2): 2, (2, 3): 1})


def test_words_are_lower_cased_with_punctuation_and_chinese_characters_alone() -> None:
    text = "Don't say: \u4f60\u597d, Z\u00fcrich_2!"
    assert words(text) == "don ' t say : \u4f60 \u597d , z\u00fcrich_2 !".split()


def test_table_1_leaves_out_what_all_inputs_share() -> None:
    """Inputs differ in every word between a template's two ends; outputs are always alike."""
    inputs = [f"Tag the text: w{i} v{i} u{i}. Tags:" for i in range(40)]
    table = word_bigrams(inputs, ["place: river, size: large"] * 40)
    assert table.outputs.h1 == pytest.approx(math.log(6))
    assert table.outputs.k80 == 5
    assert table.inputs.num == 80  # w v, v u
    assert table.delta_h == pytest.approx(math.log(80) - math.log(6))
    assert table.ratio == pytest.approx(64 / 5)
    same = word_bigrams(["a b c"] * 3, ["a b c"] * 3)
    assert same.inputs.num == 0 and same.ratio == 0
    assert word_bigrams(["a b c"], ["a b"]).inputs.num == 2  # of one text, nothing is shared
    nothing = word_bigrams([], [])
    assert (nothing.delta_h, nothing.ratio) == (0, 0)
    # What three begin and end with, not two of them; and no word is of both ends.
    assert word_bigrams(["s t u v e f", "s m n o p f", "s t q r e f"], []).inputs.num == 9
    assert word_bigrams(["a a", "a a a a"], []).inputs.num == 1


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_tau_is_what_its_definition_says(pairs: list[tuple[int, int]]) -> None:
    def sign(a: int, b: int) -> int:
        return (a > b) - (a < b)

    both = list(combinations(pairs, 2))
    over = sum(sign(a[0], b[0]) * sign(a[1], b[1]) for a, b in both)
    xs, ys = (sum(a[i] != b[i] for a, b in both) for i in (0, 1))
    want = None if not xs * ys else over / math.sqrt(xs * ys)
    assert kendall_tau(pairs) == (None if want is None else pytest.approx(want))


def test_direction_counts_the_steps_where_x_rises() -> None:
    assert direction([(1, 9), (2, 5), (3, 6), (2, 1), (4, 0)]) == pytest.approx(2 / 3)
    assert direction([(1, 9), (2, 5), (3, 5), (3, 1)]) == 0.5  # equal is neither rising nor falling
    assert direction([(2, 1), (1, 5)]) is None
