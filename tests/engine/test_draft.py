"""The trees of a step: checked, pruned and told back to the sessions that proposed them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import make_drafter
from drafters.auto.drafter import AutoDrafter
from drafters.base import Drafter
from drafters.corpus import build_corpus
from drafters.tree import DraftTree
from server.engine.batch import Float32
from server.engine.engine import Engine
from server.engine.trees import Trees, checked
from server.types import SpeculationParams
from tests.engine.requests import engine_over, finish, request_of
from tests.fakes.fake_drafters import chain, check_tree, tree_of
from tests.fakes.fake_runner import FakeModel
from tests.profiles import examples

VOCAB = 50


@st.composite
def trees(draw: st.DrawFn) -> DraftTree | None:
    """One that can be verified; its nodes' cells are their numbers."""
    num = draw(st.integers(0, 12))
    if num == 0:
        return draw(st.sampled_from((None, DraftTree.empty())))
    parents = [draw(st.integers(-1, i - 1)) for i in range(num)]
    survival: list[float] = []
    for parent in parents:
        above = survival[parent] if parent >= 0 else 1.0
        survival.append(above * draw(st.sampled_from((1.0, 0.5, 0.25))))
    sources = [draw(st.integers(0, 2)) for _ in range(num)]
    return tree_of(range(num), parents, survival, sources, range(num))


def _checked(*each: DraftTree | None) -> Trees:
    found, errors = checked(each, np.full((len(each), 2), VOCAB))
    assert not errors
    return found


def _same(tree: DraftTree, other: DraftTree) -> None:
    for name in ("token_ids", "parents", "survival", "source", "cell"):
        assert getattr(tree, name).tolist() == getattr(other, name).tolist(), name


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(trees(), min_size=1, max_size=4), st.data())
def test_all_trees_are_pruned_as_each_would_be(
    each: list[DraftTree | None], data: st.DataObject
) -> None:
    """A part of them, too, whose other nodes may not stay."""
    most = np.array([data.draw(st.integers(0, 13)) for _ in each])
    pruned = _checked(*each)
    pruned.prune(most)
    for i, tree in enumerate(each):
        _same(pruned.proposed(i, [])[0], (tree or DraftTree.empty()).prune(int(most[i])))
    whole = _checked(*each)
    stays = np.array([data.draw(st.booleans()) for _ in range(whole.nodes.shape[1])], np.int32)
    left = _checked(*each)
    left.prune(most, stays.copy())
    for i in range(len(each)):
        first, end = whole.start[i : i + 2].tolist()
        lasts: list[int] = []
        for node in range(end - first):
            parent = int(whole.nodes[1, first + node])
            if stays[first + node] and (parent < 0 or parent in lasts):
                lasts.append(node)
        likeliest = sorted(lasts, key=lambda node: (-whole.survival[first + node], node))
        tree, _ = left.proposed(i, [])
        check_tree(tree)
        assert tree.cell.tolist() == sorted(likeliest[: most[i]])
        assert tree.depths().tolist() == left.nodes[2, left.start[i] : left.start[i + 1]].tolist()


GOOD = chain([1, 2, 3])


def _tree(token_ids: list[int], parents: list[int], num_chances: int) -> DraftTree:
    ids, above = np.array(token_ids, np.int32), np.array(parents, np.int32)
    return DraftTree(ids, above, np.ones(num_chances, np.float32))


@pytest.mark.parametrize(
    ("tree", "fault"),
    [
        (chain([1, VOCAB]), "node 1 holds id 50, outside the vocabulary"),
        (chain([-1]), "node 0 holds id -1"),
        (DraftTree(np.array([2**40]), np.array([-1]), np.ones(1, np.float32)), "outside the voc"),
        (_tree([1, 2], [-1, 1], 2), "parent 1"),
        (_tree([1], [-2], 1), "parent -2"),
        (chain([1], [float("nan")]), "node 0 survives with chance nan"),
        (_tree([1, 1], [-1, -1], 2), "sibling"),
        (chain([1] * 5), "node 4 is 5 deep, past 4"),
        (_tree([1], [-1], 2), "differ in length"),
        (chain([1], [1.0]).token_ids, "has no attribute"),
    ],
)
def test_a_tree_that_cannot_be_verified_is_left_out_alone(tree: Any, fault: str) -> None:
    found, errors = checked([GOOD, tree, None, GOOD], np.full((4, 2), (VOCAB, 4)))
    ((item, error),) = errors
    assert item == 1 and fault in str(error)
    assert np.diff(found.start).tolist() == [3, 0, 0, 3]
    for i in (0, 3):
        assert found.proposed(i, [])[0].token_ids.tolist() == [1, 2, 3]


class Circle(FakeModel):
    """Its likeliest id is the one after the last, around a circle of 7."""

    def logits(self, row_hash: int, recent: SequenceOf[int] = ()) -> Float32:
        """See FakeModel."""
        return (np.arange(VOCAB) == recent[-1] % 7 + 1).astype(np.float32)


def _engine(drafter: Drafter) -> Engine:
    model = Circle(VOCAB, context=1)
    return engine_over(model, {"d": drafter}, eos_token_ids=(0,), max_num_seqs=4)[0]


def test_a_published_drafter_learns_from_the_nodes_that_were_verified() -> None:
    """Of ten that it proposes two are verified; its calibration hears of exactly these."""
    drafter = make_drafter("prompt")
    engine = _engine(drafter)
    engine.gain.choose = lambda seats, start, *_: np.minimum(  # type: ignore[method-assign]
        np.diff(start).astype(np.int64), 2
    )
    prompt, drafts = [i % 7 + 1 for i in range(20)], SpeculationParams("d", 10)
    known: Any = drafter
    before = known.calibration.counts()["offers"].sum(axis=1)
    told = finish(engine, request_of("r", prompt, max_tokens=31, speculation=drafts))["r"]
    drafted = sum(delta.counts.num_drafted for delta in told)
    accepted = sum(delta.counts.num_accepted for delta in told)
    offered, came = known.calibration.counts()["offers"].sum(axis=1) - before
    assert drafted == accepted > 10
    assert (offered, came) == (pytest.approx(drafted), pytest.approx(accepted))


def test_auto_hears_how_many_nodes_of_its_two_trees_were_verified() -> None:
    """One is grown with the corpus and one without, until it is known which to follow."""
    corpus = build_corpus([([], [i % 7 + 1 for i in range(30)])] * 4, fingerprint="")
    drafter = AutoDrafter(corpus=corpus)
    engine = _engine(drafter)
    drafts = SpeculationParams("d", 4)
    told = finish(engine, request_of("r", (9, 8), max_tokens=31, speculation=drafts))["r"]
    num_drafts = sum(delta.counts.num_drafts for delta in told)
    assert num_drafts > 3
    assert num_drafts - 2 <= drafter.trust.fit.num_steps <= num_drafts
