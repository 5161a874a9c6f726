"""Stop strings on bytes, and what is told of a step's drafts. Where a run of tokens ends, by stop
strings too, is held by test_lossless.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drafters.tree import DraftTree
from server.engine.commit import count_step, rejected_paths
from server.engine.stops import StopMatcher
from server.engine.trees import Trees, checked
from server.types import StepCounts
from tests.fakes.fake_drafters import tree_of
from tests.fakes.token_table import table_of

TABLE = table_of([b"", b"a", b"b", b"ab", b"\xe4\xb8", b"\xad"])


def test_ids_past_the_table_add_nothing() -> None:
    matcher = StopMatcher((b"ab",), TABLE, True)
    assert [matcher.push(t) for t in (1, 1000, 2)] == [None, None, b"ab"]


def test_what_was_rejected_is_told_as_paths() -> None:
    #  root ── 7 ── 8 ── 9      7 and 8 are accepted; then 9 and 5 are not, nor is 6 ── 4 nor 3
    #     ├─── 6 ── 4
    #     └─── 3        (5 stands beside 9)
    ids, parents, source = [7, 6, 8, 4, 9, 3, 5], [-1, -1, 0, 1, 2, -1, 2], [*"abaaacb"]
    assert rejected_paths(ids, parents, source, [0, 2]) == [
        (0, "b", (6, 4)), (2, "a", (9,)), (0, "c", (3,)), (2, "b", (5,)),
    ]  # fmt: skip
    assert rejected_paths([7, 8], [-1, 0], [*"aa"], []) == [(0, "a", (7, 8))]
    assert rejected_paths([7, 8], [-1, 0], [*"aa"], [0, 1]) == []


def tree(parents: list[int], source: list[int], survival: list[float] | None = None) -> DraftTree:
    return tree_of(range(len(parents)), parents, survival or 0.5, source)  # cut to the parent's


def trees(*each: DraftTree | None, why: str = "") -> Trees:
    """Of these items."""
    found, errors = checked(each, np.full((len(each), 2), 100))
    assert not errors
    return replace(found, why=(why,) * len(each))


def count(of: Trees, item: int, path: list[int], names: tuple[str, ...]) -> StepCounts:
    """Of a path that stands."""
    runs = np.array([[0] * len(path), [0] * len(path), path], np.int32)
    return count_step(of, item, runs, 0, len(path), names)


def test_claimed_chances_are_counted_by_tenths() -> None:
    a = count(trees(tree([-1, 0, -1], [0, 0, 0], [1.0, 0.55, 0.04])), 0, [0], ("own",))
    assert a.expected_accepted == pytest.approx(1.59)
    assert a.by_survival == ((0, 1, 0), (5, 1, 0), (9, 1, 1))
    b = count(trees(tree([-1, 0], [0, 0], [0.95, 0.5])), 0, [0, 1], ("own",))
    both = a.plus(b)
    assert sorted(both.by_survival) == [(0, 1, 0), (5, 2, 1), (9, 2, 2)]
    assert both.expected_accepted == pytest.approx(3.04)


def test_counts_of_a_step_and_their_sum() -> None:
    names = ("own", "prediction")
    a = count(trees(tree([-1, 0, -1], [0, 1, 1])), 0, [0, 1], names)._replace(
        expected_accepted=0.0, by_survival=(),
    )  # fmt: skip
    assert a == StepCounts(
        num_steps=1,
        num_drafts=1,
        num_drafted=3,
        num_accepted=2,
        accepted_by_depth=(1, 1),
        offered_by_depth=(1, 1),
        by_source=(("own", 1, 1), ("prediction", 2, 1)),
        accepted_prediction_tokens=1,
        rejected_prediction_tokens=1,
    )
    plain = count(trees(None, why="budget"), 0, [], ("own",))
    assert plain == StepCounts(num_steps=1, no_draft_reason="budget")
    more = count(trees(tree([-1], [0])), 0, [], ("own",))
    both = a.plus(plain).plus(more)
    assert (both.num_steps, both.num_drafts, both.num_drafted, both.num_accepted) == (3, 2, 4, 2)
    assert both.accepted_by_depth == (1, 1) and both.offered_by_depth == (2, 1)
    assert both.by_source == (("own", 2, 1), ("prediction", 2, 1))


def test_a_step_s_choices_are_counted_apart() -> None:
    two = trees(tree([-1], [1], [0.3]), None, tree([-1, 0, -1], [0, 2, 2]), why="x")
    counts = [count(two, item, [0], ("a", "b", "c")) for item in (0, 2)]
    assert [c.by_source for c in counts] == [(("b", 1, 1),), (("a", 1, 1), ("c", 2, 0))]
    assert [c.offered_by_depth for c in counts] == [(1,), (1, 1)]
    assert count(two, 1, [], ("a",)) == StepCounts(num_steps=1, no_draft_reason="x")
