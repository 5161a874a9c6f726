"""The table: seats that are taken and given back, its columns, and what its check finds."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.sequence import Sequence
from server.engine.table import CHUNK, LACKS_ROOM, NUM_COLUMNS, Table, describe, scan
from tests.engine.requests import request_of
from tests.engine.scenarios import drive, make_drafter, make_engine, random_workload
from tests.profiles import examples


def sequence_in(table: Table) -> Sequence:
    return Sequence(
        request_of("r", max_tokens=20),
        0,
        1,
        max_model_len=64,
        table=table,
        eos_ids=frozenset({1}),
        stop_table=None,
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
            table.give_back(seats.popitem()[0])
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


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**48))
def test_what_a_step_finds_by_columns_is_what_each_choice_says(seed: int) -> None:
    """Of every state that random workloads pass through."""
    work = random_workload(Random(seed))
    engine, _ = make_engine(work, make_drafter(work, work.expected()))

    def each_step(_: int) -> None:
        table, running = engine.table, engine.scheduler.running
        seats = np.array([s.seat for s in running], np.int32)
        num = np.array([min(2, s.num_pending) for s in running], np.int32)
        found, start, draws = (np.empty(len(running), np.int32) for _ in range(3))
        every = scan(table.numbers, seats, found)
        counts = describe(table.numbers, seats, num, start, draws)
        prefill = 0
        for i, sequence in enumerate(running):
            pending, at = sequence.num_pending, sequence.num_computed
            lacks = LACKS_ROOM if at >= sequence.room else 0
            assert found[i] == (CHUNK if pending > 1 else lacks)
            assert start[i] == at and draws[i] == (num[i] == pending)
            prefill += num[i] if num[i] > 1 or at < sequence.prompt_len else 0
            assert sequence.last_id == sequence.ids[sequence.num_tokens - 1]
        assert every == np.bitwise_or.reduce(found, initial=0)
        assert counts == (num.sum(), prefill, all(s.is_plain for s in running))

    drive(work, engine, each_step)
