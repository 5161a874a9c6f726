"""Stop strings on bytes, the walk along a tree, and the one place that cuts a run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.accept import (
    StopCut,
    StopRules,
    count_step,
    cut,
    merge_counts,
    rejected_paths,
    sources_of,
)
from server.engine.ahead import follow
from server.engine.stops import StopMatcher, StopTable
from server.types import StepCounts

TABLE = StopTable.from_list([b"", b"a", b"b", b"ab", b"\xe4\xb8", b"\xad", b"<end>"], [6])
RULES = StopRules(frozenset({9}), frozenset({7, 8}), 100, 0)


def test_a_stop_string_is_found_across_tokens_and_inside_a_character() -> None:
    matcher = StopMatcher(("中".encode(),), TABLE, True)
    assert matcher.push(4) is None
    assert matcher.push(5) == "中".encode()


def test_special_tokens_count_only_when_they_are_not_skipped() -> None:
    assert StopMatcher((b"end",), TABLE, True).push(6) is None
    assert StopMatcher((b"end",), TABLE, False).push(6) == b"end"


def test_ids_past_the_table_add_nothing() -> None:
    matcher = StopMatcher((b"ab",), TABLE, True)
    assert [matcher.push(t) for t in (1, 1000, 2)] == [None, None, b"ab"]


def test_the_first_end_wins_then_the_longest() -> None:
    table = StopTable.from_list([b"xabc"])
    assert StopMatcher((b"abc", b"ab"), table, True).push(0) == b"ab"
    assert StopMatcher((b"bc", b"xabc", b"abc"), table, True).push(0) == b"xabc"


def test_a_table_must_fit_its_blob() -> None:
    with pytest.raises(ValueError, match="end at"):
        StopTable(np.array([0, 3]), np.zeros(2, np.uint8))


@given(
    st.lists(st.binary(max_size=4), min_size=1, max_size=6),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_checkpoint_and_rollback_are_exact(
    tokens: list[bytes], stops: list[str], data: st.DataObject
) -> None:
    table = StopTable.from_list(tokens)
    matcher = StopMatcher(tuple(s.encode() for s in stops), table, True)
    ids = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=12))
    marks = []
    for i in ids:
        marks.append(matcher.checkpoint())
        matcher.push(i)
    final = matcher.checkpoint()
    for at in range(len(ids)):
        matcher.rollback(marks[at])
        for i in ids[at:]:
            matcher.push(i)
        assert matcher.checkpoint() == final
        matcher.replay(ids)
        assert matcher.checkpoint() == final


def test_follow_takes_the_child_that_was_drawn() -> None:
    # root -> 0:5 -> 2:6 -> 4:7, root -> 1:8 -> 3:6
    tokens, parents = [5, 8, 6, 6, 7], [-1, -1, 0, 1, 2]
    assert follow(5, tokens, parents, [6, 0, 7, 0, 1]) == [0, 2, 4]
    assert follow(8, tokens, parents, [6, 6, 7, 0, 1]) == [1, 3]
    assert follow(9, tokens, parents, [6, 6, 7, 0, 1]) == []
    assert follow(5, tokens, parents, [1, 6, 7, 0, 1]) == [0]


@pytest.mark.parametrize(
    ("run", "num_output", "want"),
    [
        ([1, 2, 3], 0, StopCut(3)),
        ([1, 9, 3], 0, StopCut(2, "stop")),
        ([1, 2, 7, 9], 0, StopCut(3, "stop", 7)),
        ([1, 2, 3], 97, StopCut(3, "length")),
        ([1, 9, 3], 98, StopCut(2, "stop")),  # EOS on the last allowed token is a stop
        ([1, 2, 3], 99, StopCut(1, "length")),
    ],
)
def test_cut(run: list[int], num_output: int, want: StopCut) -> None:
    assert cut(run, num_output, RULES, None) == want


def test_a_stop_string_cuts_inside_a_run_and_leaves_the_matcher_there() -> None:
    matcher = StopMatcher((b"bb",), TABLE, True)
    assert cut([1, 2, 2, 1], 0, RULES, matcher) == StopCut(3, "stop", b"bb")
    assert matcher.checkpoint() == b"b"


def test_min_tokens_ignores_strings_that_end_early() -> None:
    rules = StopRules(frozenset(), frozenset(), 100, 2)
    matcher = StopMatcher((b"a",), TABLE, True)
    assert cut([1, 1, 1], 0, rules, matcher) == StopCut(3, "stop", b"a")


def test_every_kept_token_names_the_source_of_its_draft() -> None:
    names = ("own", "prediction")
    assert sources_of([0, 2], 3, [1, 0, 0], names) == ["prediction", "own", ""]
    assert sources_of([0, 2], 2, [1, 0, 0], names) == ["prediction", "own"]  # cut before the bonus
    assert sources_of([0], 2, [], names) == ["own", ""]
    assert sources_of([], 1, [], names) == [""]


def test_what_was_rejected_is_told_as_paths() -> None:
    #  root ── 7 ── 8 ── 9      7 and 8 are accepted; then 9 and 5 are not, nor is 6 ── 4 nor 3
    #     ├─── 6 ── 4
    #     └─── 3        (5 stands beside 9)
    ids, parents, source = [7, 6, 8, 4, 9, 3, 5], [-1, -1, 0, 1, 2, -1, 2], [0, 1, 0, 0, 0, 2, 1]
    assert rejected_paths(ids, parents, source, [0, 2]) == [
        (0, 1, (6, 4)), (2, 0, (9,)), (0, 2, (3,)), (2, 1, (5,)),
    ]  # fmt: skip
    assert rejected_paths([7, 8], [-1, 0], [], []) == [(0, 0, (7, 8))]
    assert rejected_paths([7, 8], [-1, 0], [], [0, 1]) == []


def test_claimed_chances_are_counted_by_tenths() -> None:
    a = count_step([-1, 0, -1], [0, 0, 0], [0], ("own",), "", [1.0, 0.55, 0.04])
    assert a.expected_accepted == pytest.approx(1.59)
    assert a.by_survival == ((9, 1, 1), (5, 1, 0), (0, 1, 0))
    both = merge_counts(a, count_step([-1, 0], [0, 0], [0, 1], ("own",), "", [0.95, 0.5]))
    assert sorted(both.by_survival) == [(0, 1, 0), (5, 2, 1), (9, 2, 2)]
    assert both.expected_accepted == pytest.approx(3.04)


def test_counts_of_a_step_and_their_sum() -> None:
    a = count_step([-1, 0, -1], [0, 1, 1], [0, 1], ("own", "prediction"), "")
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
    plain = count_step([], [], [], ("own",), "budget")
    assert plain == StepCounts(num_steps=1, no_draft_reason="budget")
    both = merge_counts(merge_counts(a, plain), count_step([-1], [], [], ("own",), ""))
    assert (both.num_steps, both.num_drafts, both.num_drafted, both.num_accepted) == (3, 2, 4, 2)
    assert both.accepted_by_depth == (1, 1) and both.offered_by_depth == (2, 1)
    assert both.by_source == (("own", 2, 1), ("prediction", 2, 1))
