"""Trees stay as they are: beside recorded ones, and beside the plain-Python growth."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drafters.auto.drafter import AutoDrafter
from drafters.auto.trust import Trust
from drafters.corpus import build_corpus
from tests.drafters.auto.golden_scenes import SCENES, trees
from tests.drafters.auto.reference_tree import grow
from tests.drafters.trees import opened, paths
from tests.fakes.fake_drafters import check_tree
from tests.profiles import examples

GOLDEN = json.loads(Path(__file__).with_name("golden_trees.json").read_text())


@pytest.mark.parametrize("scene", SCENES)
def test_trees_are_the_recorded_ones(scene: str) -> None:
    grown = list(trees(scene))
    assert len(grown) == len(GOLDEN[scene])
    for tree, recorded in zip(grown, GOLDEN[scene], strict=True):
        assert {k: v for k, v in tree.items() if k != "survival"} == {
            k: v for k, v in recorded.items() if k != "survival"
        }
        assert tree["survival"] == pytest.approx(recorded["survival"], abs=2e-4)


_TRUST = Trust()
_words = st.lists(st.sampled_from([[1, 2, 3], [2, 3, 4, 5], [1, 5], [6], [2, 2]]), max_size=7)
_texts = _words.map(lambda words: [token for word in words for token in word])


@settings(max_examples=examples(300), deadline=None)
@example(  # two levels leave 0.004
    prompt=[1, 2, 3] * 4, output=[2, 2], documents=[[*[1, 2, 3] * 4, 0]], budget=4, max_depth=4
)
@example(  # the tenth place is between two at the bound
    prompt=[1, 5],
    output=[1, 2, 3],
    documents=[[0], [2, 3, 4, 5, 1, 5, 0], [1, 5, 1, 5, 6, 1, 2, 3, *[1, 5] * 3, 0]],
    budget=10,
    max_depth=2,
)
@given(
    prompt=_texts.filter(bool),
    output=_texts,
    documents=st.lists(_texts.map(lambda text: [*text, 0]), max_size=3),
    budget=st.integers(1, 24),
    max_depth=st.integers(1, 6),
)
def test_trees_are_those_of_plain_counting(
    prompt: list[int],
    output: list[int],
    documents: list[list[int]],
    budget: int,
    max_depth: int,
) -> None:
    corpus = None
    if documents:
        corpus = build_corpus([([], document) for document in documents], fingerprint="")
    drafter = AutoDrafter(corpus=corpus, trust=_TRUST, eos_token_ids=(0,), learn=False)
    session = opened(drafter, prompt, output)
    tree = session.propose(budget, max_depth)
    check_tree(tree)
    expected = grow(prompt, output, documents, _TRUST, (budget, max_depth, 0.003), (0,))
    # Nodes that are equally likely may stand for each other, and those at the bound may be missed.
    at_bound = sum(chance < 1.05 * 0.003 for chance in expected.values())
    assert abs(len(tree) - len(expected)) <= (len(tree) != budget) * max(1, at_bound)
    num, clear = min(len(tree), len(expected)), len(expected) - at_bound
    ours, theirs = np.sort(tree.survival)[::-1][:num], np.sort(list(expected.values()))[::-1][:num]
    assert ours[:clear].tolist() == pytest.approx(theirs[:clear].tolist(), rel=1e-3)
    assert ours[clear:].tolist() == pytest.approx(theirs[clear:].tolist(), rel=0.051)
    for path, survival in zip(paths(tree), tree.survival, strict=True):
        if path in expected:
            assert survival == pytest.approx(expected[path], rel=1e-3)
