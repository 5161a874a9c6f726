"""Stop strings on bytes, the walk along a tree, and the one place that cuts a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.tree import DraftTree
from server.engine.commit import (
    StopCut,
    count_step,
    cut,
    rejected_paths,
    sources_of,
    why_ended,
)
from server.engine.sequence import Sequence
from server.engine.stops import StopMatcher, StopTable
from server.engine.table import Table
from server.engine.trees import (
    DRAW,
    END,
    END_ID,
    END_NODE,
    FAILED,
    GOES_ON,
    LENGTH,
    NUM_ACCEPTED,
    NUM_CHOICE_LINES,
    NUM_FOUND_LINES,
    NUM_IDS,
    SEAT,
    TODO,
    Trees,
    checked,
    follow,
)
from server.types import Request, SamplingParams, StepCounts

TABLE = StopTable.from_list([b"", b"a", b"b", b"ab", b"\xe4\xb8", b"\xad", b"<end>"], [6])


def choice(num_output: int = 0, table: Table | None = None, **sampling: Any) -> Sequence:
    """A choice of at most 100 tokens that 9 (EOS), 7 and 8 end, and that has so many."""
    values: dict[str, Any] = {"max_tokens": 100, "stop_token_ids": (7, 8)} | sampling
    sequence = Sequence(
        Request("r", "task", "fake", (3, 4), SamplingParams(**values)),
        0,
        1,
        max_model_len=256,
        table=table or Table(block_size=4, max_model_len=256),
        eos_ids=frozenset({9}),
        stop_table=TABLE,
        root_key=b"",
    )
    if num_output:
        sequence.append([5] * num_output)
    return sequence


def followed(
    sequence: Sequence, nodes: list[tuple[int, int]], drawn: list[int]
) -> tuple[list[int], list[int], int]:
    """(ids that stand, accepted nodes, what the last one ends) of a tree of (id, parent)."""
    table, num = sequence.table, len(nodes)
    choices = np.zeros((NUM_CHOICE_LINES, 1), np.int32)
    choices[[SEAT, END_NODE], 0] = sequence.seat, num
    runs, found = np.empty((3, num + 1), np.int32), np.empty((1, NUM_FOUND_LINES), np.int32)
    tree = np.zeros((3, num), np.int32)
    tree[:2] = np.array(nodes, np.int32).reshape(num, 2).T
    follow(
        table.numbers, table.blocks, table.ends, table.block_size, choices, tree,
        np.array(drawn, np.int32), runs, found, np.empty((2, num), np.int32),
        np.empty(num, np.int32),
    )  # fmt: skip
    ids = runs[0, : found[0, NUM_IDS]].tolist()
    return ids, runs[2, : found[0, NUM_ACCEPTED]].tolist(), int(found[0, END])


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
    # root -> 0:5 -> 2:6 -> 4:10, root -> 1:11 -> 3:6
    nodes, one = [(5, -1), (11, -1), (6, 0), (6, 1), (10, 2)], choice()
    assert followed(one, nodes, [5, 6, 0, 10, 0, 1]) == ([5, 6, 10, 1], [0, 2, 4], GOES_ON)
    assert followed(one, nodes, [11, 6, 6, 10, 0, 1]) == ([11, 6, 0], [1, 3], GOES_ON)
    assert followed(one, nodes, [0, 6, 6, 10, 0, 1]) == ([0], [], GOES_ON)
    assert followed(one, nodes, [5, 1, 6, 10, 0, 1]) == ([5, 1], [0], GOES_ON)


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
    """Of a chain all of whose nodes are drawn."""
    one = choice(num_output)
    ids, path, why = followed(one, [(id_, i - 1) for i, id_ in enumerate(run[:-1])], run)
    assert ids == run[: want.num_kept] and cut(one, ids, why) == want
    assert path == list(range(min(want.num_kept, len(run) - 1)))


def test_what_was_accepted_before_a_draw_without_an_answer_stands() -> None:
    nodes = [(5, -1), (6, 0)]
    assert followed(choice(), nodes, [5, 6, -1]) == ([5, 6], [0, 1], FAILED)
    assert followed(choice(), nodes, [-1, 6, 0]) == ([], [], FAILED)


def test_a_simple_choice_is_emitted_into_its_columns_and_others_are_left_alone() -> None:
    table = Table(block_size=4, max_model_len=256)
    plain, other = choice(3, table), choice(3, table)
    plain.is_simple = 1
    plain.num_computed = other.num_computed = 5
    plain.num_blocks, plain.num_verified = 3, 3
    choices = np.zeros((NUM_CHOICE_LINES, 2), np.int32)
    choices[SEAT], choices[DRAW] = (plain.seat, other.seat), (0, 3)
    choices[END_NODE, 0] = 2
    found = np.empty((2, NUM_FOUND_LINES), np.int32)
    came = np.empty(2, np.int32)
    follow(
        table.numbers, table.blocks, table.ends, 4, choices,
        np.array([[5, 6], [-1, 0], [1, 2]], np.int32), np.array([5, 6, 2, 1], np.int32),
        np.empty((3, 4), np.int32), found, np.empty((2, 2), np.int32), came,
    )  # fmt: skip
    assert came.tolist() == [1, 1]
    assert (plain.num_tokens, plain.last_id, plain.num_computed) == (8, 2, 7)
    assert plain.num_verified == plain.num_released == plain.num_output == 6
    assert found[0, TODO] and not found[1, TODO]
    assert (other.num_tokens, other.last_id, other.num_computed) == (5, 5, 5)


def test_one_token_ends_what_it_ends_in_a_run() -> None:
    assert [why_ended(choice(), token) for token in (1, 7, 9)] == [GOES_ON, END_ID, END_ID]
    assert why_ended(choice(99), 1) == LENGTH


def test_a_stop_string_cuts_inside_a_run_and_leaves_the_matcher_there() -> None:
    one = choice(stop=(b"bb",))
    assert cut(one, [1, 2, 2, 1], GOES_ON) == StopCut(3, "stop", b"bb")
    assert one.matcher is not None and one.matcher.checkpoint() == b"b"


def test_min_tokens_ignores_strings_that_end_early() -> None:
    one = choice(stop=(b"a",), min_tokens=2, stop_token_ids=())
    assert cut(one, [1, 1, 1], GOES_ON) == StopCut(3, "stop", b"a")


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


def tree(parents: list[int], source: list[int], survival: list[float] | None = None) -> DraftTree:
    num = len(parents)
    claimed = np.array(survival or [0.5] * num, np.float32)  # cut to the parent's
    return DraftTree(np.arange(num, dtype=np.int32), np.array(parents, np.int32), claimed,
                     np.array(source, np.uint8))  # fmt: skip


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
