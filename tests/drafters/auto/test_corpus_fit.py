"""Two trees of one step are followed by the tokens that come, and steps decide on a corpus."""

from __future__ import annotations

import pytest

from drafters.auto.corpus_fit import CorpusFit, Rivals
from drafters.tree import DraftTree
from tests.fakes.fake_drafters import tree_of

LONG = tree_of([1, 2, 3, 4], [-1, 0, 1, -1], [0.9, 0.8, 0.7, 0.1])
WIDE = tree_of([1, 4, 5], [-1, -1, 1], [0.5, 0.4, 0.3])


def test_both_trees_are_followed_to_where_they_end() -> None:
    rivals = Rivals((LONG, WIDE), 4)
    assert [rivals.follow([token]) for token in (1, 2, 3, 9)] == [True, True, True, False]
    assert rivals.accepted == [3, 1]
    rivals = Rivals((LONG, WIDE), 4)
    assert [rivals.follow([token]) for token in (4, 5, 6)] == [True, True, False]
    assert rivals.accepted == [1, 2]


def test_only_as_many_nodes_count_as_the_step_had() -> None:
    rivals = Rivals((LONG, WIDE), 2)
    assert [rivals.follow([token]) for token in (1, 2, 3)] == [True, True, False]
    assert rivals.accepted == [2, 1]
    assert not Rivals((LONG, DraftTree.empty()), 0).follow([1])


@pytest.mark.parametrize(("with_it", "without_it", "helps"), [(2, 1, True), (1, 2, False)])
def test_steps_decide_over_chances(with_it: int, without_it: int, helps: bool) -> None:
    fit = CorpusFit()
    for _ in range(200):  # better chances where steps are fewer, and the other way round
        fit.compare(0.5 if without_it > with_it else 0.2, 0.3)
    assert fit.helps is not helps
    for _ in range(100):
        fit.compare_steps(with_it, without_it)
    assert fit.helps is helps


def test_few_steps_and_small_differences_say_nothing() -> None:
    fit = CorpusFit()
    for _ in range(23):
        fit.compare_steps(0, 3)
    assert fit.helps, "too few"
    fit.compare_steps(0, 3)
    assert not fit.helps
    fit = CorpusFit()
    for step in range(100):
        fit.compare_steps(2, 2 + (step == 0))
    assert fit.helps, "one token in a hundred steps is chance"
