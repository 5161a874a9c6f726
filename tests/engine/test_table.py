"""The table: seats that are taken and given back, its columns, and what its check finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.sequence import Sequence
from server.engine.stops import StopMatcher
from server.engine.table import NUM_COLUMNS, Table
from tests.engine.requests import request_of
from tests.fakes.token_table import table_of
from tests.profiles import examples


def sequence_in(table: Table) -> Sequence:
    return Sequence(
        request_of("r", max_tokens=20),
        0,
        1,
        max_model_len=64,
        table=table,
        eos_ids=frozenset({1}),
        root_key=b"",
    )


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60))
def test_seats_are_nobody_s_twice_and_a_new_one_is_blank(moves: list[int]) -> None:
    """Each number takes a seat with so many end ids, or, where it is even, gives one back."""
    table = Table(block_size=4, max_model_len=64)
    seats: dict[int, int] = {}
    for move in moves:
        if move % 2 == 0 and seats:
            seat, _ = seats.popitem()
            table.blocks[seat] = 0
            table.give_back(seat)
        else:
            seat = table.take_seat(list(range(move)))
            assert seat not in seats
            assert table.gain_seat[seat] == -1, "no drafter"
            table.gain_seat[seat] = 0
            assert not table.numbers[:, seat].any() and not table.blocks[seat].any()
            assert table.numbers.shape[0] == NUM_COLUMNS
            table.numbers[:, seat] = move  # stays where it is when the table grows
            table.blocks[seat] = seats[seat] = move
        for seat, value in seats.items():
            assert (table.numbers[:, seat] == value).all() and (table.blocks[seat] == value).all()
            assert [i for i in table.ends[seat].tolist() if i >= 0] == list(range(value))
            assert table.num_tokens[seat] == value, "a column is a line of the numbers"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux alone tells of pages")
def test_who_waits_takes_no_memory_for_blocks() -> None:
    """A thousand requests of a hundred choices may."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, table = resident(), Table(block_size=16, max_model_len=1 << 17)
    seats = [table.take_seat([1]) for _ in range(5000)]
    assert resident() - before < 0.1 * table.blocks.nbytes
    assert not table.blocks[seats[-1]].any()


def test_verified_tokens_are_never_taken_back() -> None:
    one = sequence_in(Table(block_size=4, max_model_len=64))
    one.append([8, 9, 7])
    one.verify(2)
    with pytest.raises(ValueError, match="2 tokens are verified"):
        one.rollback(1)
    with pytest.raises(ValueError):
        one.rollback(4)
    with pytest.raises(ValueError):
        one.verify(1)
    one.rollback(2)
    assert one.output_ids() == (8, 9)


def test_a_stop_string_begins_in_no_token_that_was_taken_back() -> None:
    one = sequence_in(Table(block_size=4, max_model_len=64))
    one.matcher = StopMatcher((b"ab",), table_of([b"", b"a", b"b"]), True)
    one.append([1, 2, 1])
    for token in (1, 2, 1):
        one.matcher.push(token)
    one.rollback(2)
    assert one.matcher.push(2) is None, "ab|a|b with its second a taken back"
    one.rollback(1)
    assert one.matcher.push(2) == b"ab"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("num_released", 2),
        ("num_verified", 3),
        ("num_tokens", 30),
        ("num_computed", 9),
        ("room", 9),
        ("num_published", 2),
        ("num_blocks", 1),
    ],
)
def test_a_number_that_cannot_be_is_found(column: str, value: int) -> None:
    table = Table(block_size=4, max_model_len=64)
    one = sequence_in(table)
    one.append([8, 9])
    one.num_verified, one.num_released, one.num_computed = 1, 1, 5
    one.num_blocks, one.room = 2, 8
    table.blocks[one.seat, :2] = 5, 6
    table.check([one.seat])
    getattr(table, column)[one.seat] = value
    with pytest.raises(AssertionError):
        table.check([one.seat])


def test_a_seat_that_is_lost_is_found() -> None:
    table = Table(block_size=4, max_model_len=64)
    sequence_in(table)
    with pytest.raises(AssertionError, match="lost"):
        table.check([])
