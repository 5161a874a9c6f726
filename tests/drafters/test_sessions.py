"""What every DraftSession holds, on random texts: the tree's invariants, its limits, its life."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import DRAFTER_NAMES, Drafter, DraftTree, SessionClosedError, make_drafter
from tests.fakes.fake_drafters import check_tree
from tests.profiles import examples

NAMES = [name for name in DRAFTER_NAMES if name != "off"]
# Few distinct ids, so that contexts recur and trees branch.
ids = st.lists(st.integers(0, 5), max_size=40)
drafters: dict[str, Drafter] = {}


def drafter(name: str) -> Drafter:
    if name not in drafters:
        drafters[name] = make_drafter(name)
    return drafters[name]


def same(a: DraftTree, b: DraftTree) -> bool:
    return (
        a.token_ids.tolist() == b.token_ids.tolist()
        and a.parents.tolist() == b.parents.tolist()
        and np.allclose(a.survival, b.survival, atol=1e-6)
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(300), deadline=None)
@given(
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    output=ids,
    budget=st.integers(0, 40),
    depth=st.integers(0, 20),
)
def test_trees_are_valid_and_within_their_limits(
    name: str, prompt: list[int], output: list[int], budget: int, depth: int
) -> None:
    session = drafter(name).open(prompt)
    session.settle()
    session.extend(output)
    tree = session.propose(budget, depth)
    check_tree(tree)
    assert len(tree) <= budget
    assert tree.source.shape[0] == len(tree)
    assert all(0 < d <= depth for d in tree.depths())
    assert ((tree.survival > 0) & (tree.survival <= 1)).all()
    assert tree.token_ids.dtype == np.int32 and tree.survival.dtype == np.float32
    for node in range(1, len(tree)):  # siblings by survival
        before = [i for i in range(node) if tree.parents[i] == tree.parents[node]]
        assert all(tree.survival[i] >= tree.survival[node] - 1e-6 for i in before)
    again = session.propose(budget, depth)
    assert same(tree, again)  # proposing changes nothing


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(300), deadline=None)
@given(
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    kept=ids,
    dropped=ids,
    more=ids,
    prediction=ids,
)
def test_rollback_equals_a_fresh_session(
    name: str, prompt: list[int], kept: list[int], dropped: list[int], more: list[int],
    prediction: list[int],
) -> None:  # fmt: skip
    """Also with a prediction, whose place is found when a session settles or later."""
    session = drafter(name).open(prompt, prediction_ids=prediction)
    session.settle()
    session.extend(kept)
    mark = session.checkpoint()
    assert mark == len(kept)
    for token in dropped:
        session.extend([token])
        session.propose(4, 4)
    session.rollback(mark)
    session.extend(more)
    fresh = drafter(name).open(prompt, prediction_ids=prediction)
    if len(more) % 2:
        fresh.settle()
    fresh.extend(kept + more)
    assert session.checkpoint() == fresh.checkpoint() == len(kept) + len(more)
    assert same(session.propose(16, 8), fresh.propose(16, 8))
    with pytest.raises(ValueError):
        session.rollback(session.checkpoint() + 1)
    with pytest.raises(ValueError):
        session.rollback(-1)


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_session_refuses_all_but_close(name: str) -> None:
    session = drafter(name).open([1, 2, 3, 1, 2])
    session.close()
    session.close()
    calls = [
        lambda: session.propose(4, 4),
        lambda: session.extend([1]),
        lambda: session.feedback(DraftTree.empty(), []),
        session.settle,
        session.checkpoint,
        lambda: session.rollback(0),
    ]
    for call in calls:
        with pytest.raises(SessionClosedError):
            call()


@pytest.mark.parametrize("name", NAMES)
def test_sessions_of_one_drafter_do_not_touch_each_other(name: str) -> None:
    owner = drafter(name)
    first, second = owner.open([1, 2, 3, 4, 1, 2]), owner.open([1, 2, 5, 4, 1, 2])
    first.settle()
    second.settle()
    alone = first.propose(8, 8)
    second.extend([5, 4])
    second.propose(8, 8)
    assert same(first.propose(8, 8), alone)


def test_names_and_options_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown drafter 'sufix'; known: off"):
        make_drafter("sufix")
    with pytest.raises(ValueError, match="plain decode path"):
        make_drafter("off")
    with pytest.raises(ValueError, match=r"has no option 'depth'; it has: none$"):
        make_drafter("suffix", depth=3)
