"""Table: what the engine knows of its open choices, in columns by seat. See docs/architecture.md.

A *seat* is a line of the table. A choice has one from its arrival to its end; `Sequence` names its
numbers one by one, and what a step does for all choices reads and writes whole columns: plan.py,
build.py, commit.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drafters.arrays import Int32, Int32x2, Int64x2
from drafters.jit import compiled, entry

(
    PROMPT_LEN, MAX_OUTPUT, NUM_TOKENS, LAST_ID, NUM_COMPUTED, NUM_VERIFIED, NUM_RELEASED,
    NUM_BLOCKS, ROOM, NUM_PUBLISHED, NUM_STEPS, ADAPTER, IS_PLAIN, IS_SIMPLE,
    GAIN_SEAT, NUM_COLUMNS,
) = range(16)  # fmt: skip
"""The lines of Table.numbers. Compiled code knows the columns by these."""

CHUNK, LACKS_ROOM = 1, 2
"""What `scan` finds of a seat: more than one row is pending; its one row has no block to be written
to."""

_FIRST_SEATS = 16


class Column:
    """A number of a Sequence that lies in its table's column of this name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._line = _NAMES.index(name)

    def __get__(self, sequence: Any, owner: type | None = None) -> int:
        number: int = sequence.table.numbers.item(self._line, sequence.seat)
        return number

    def __set__(self, sequence: Any, value: int) -> None:
        sequence.table.numbers[self._line, sequence.seat] = value


class Table:
    """Columns by seat, int32. docs/architecture.md has what each holds, who writes it, and what is
    true between steps.

    numbers: [NUM_COLUMNS, seats], whose lines are the columns below. blocks: [seats, blocks of the
    longest text], the KV blocks of each seat in the order of positions, 0 past num_blocks. ends:
    [seats, most], the ids that end a choice, -1 where there are fewer. They move when the table
    grows, as a choice arrives: nobody keeps them from step to step.
    """

    prompt_len: Int32
    max_output: Int32
    num_tokens: Int32
    last_id: Int32
    num_computed: Int32
    num_verified: Int32
    num_released: Int32
    num_blocks: Int32
    room: Int32
    num_published: Int32
    num_steps: Int32
    adapter: Int32
    is_plain: Int32
    is_simple: Int32
    gain_seat: Int32

    def __init__(self, *, block_size: int, max_model_len: int) -> None:
        self.block_size = block_size
        self.numbers: Int32x2 = np.zeros((NUM_COLUMNS, 0), np.int32)
        self.blocks: Int32x2 = np.zeros((0, -(-max_model_len // block_size)), np.int32)
        self.ends: Int32x2 = np.full((0, 4), -1, np.int32)
        self._free: list[int] = []
        self._grow(_FIRST_SEATS)

    def take_seat(self, end_ids: list[int]) -> int:
        """A seat whose numbers are 0, and whose choice does not draft yet. end_ids: that end its
        choice."""
        if not self._free:
            self._grow(2 * self.numbers.shape[1])
        seat = self._free.pop()
        self.numbers[:, seat] = 0
        self.gain_seat[seat] = -1
        if len(end_ids) > self.ends.shape[1]:
            wider = len(end_ids) - self.ends.shape[1]
            self.ends = np.pad(self.ends, ((0, 0), (0, wider)), constant_values=-1)
        self.ends[seat] = -1
        self.ends[seat, : len(end_ids)] = end_ids
        return seat

    def give_back(self, seat: int) -> None:
        """The seat's choice has ended, and has no blocks any more."""
        self._free.append(seat)

    def check(self, seats: Sequence[int], ended: Sequence[int] = ()) -> None:
        """Raise AssertionError unless what is true between steps is true of exactly these seats.
        ended: those of choices that have ended and are to be given back."""
        num = self.numbers.shape[1]
        every = [*seats, *ended, *self._free]
        assert sorted(every) == list(range(num)), "a seat is lost or taken twice"
        at = np.array(seats, np.int64)
        size, output = self.block_size, (self.num_tokens - self.prompt_len)[at]
        computed, verified = self.num_computed[at], self.num_verified[at]
        blocks = self.num_blocks[at]
        assert (self.num_released[at] <= verified).all() and (verified <= output).all()
        assert (output <= self.max_output[at]).all()
        assert (computed <= self.num_tokens[at]).all() and (computed <= blocks * size).all()
        assert (self.room[at] <= blocks * size).all()
        assert (self.num_published[at] * size <= self.prompt_len[at] + verified).all()
        places = np.arange(self.blocks.shape[1])
        assert not self.blocks[at][places >= blocks[:, None]].any(), "a block behind the last"
        assert not self.blocks[[*ended, *self._free]].any(), "a block of nobody"

    def _grow(self, num_seats: int) -> None:
        old = self.numbers.shape[1]
        more = num_seats - old
        self.numbers = np.pad(self.numbers, ((0, 0), (0, more)))
        # Only those that run have blocks: who waits takes no memory for them.
        blocks: Int32x2 = np.zeros((num_seats, self.blocks.shape[1]), np.int32)
        used = np.flatnonzero(self.numbers[NUM_BLOCKS, :old])
        blocks[used] = self.blocks[used]
        self.blocks = blocks
        self.ends = np.pad(self.ends, ((0, more), (0, 0)), constant_values=-1)
        self._free += range(num_seats - 1, old - 1, -1)
        for name, column in zip(_NAMES, self.numbers, strict=True):
            setattr(self, name, column)


_NAMES = tuple(Table.__annotations__)
"""Of the columns, in the order of their lines."""


@entry
@compiled
def scan(numbers: Int32x2, seats: Int32, found: Int32) -> int:
    """Look at the seats that run, before a step is planned. numbers: of the Table. found: int32
    [seats], written: CHUNK, LACKS_ROOM or 0. Returns all of these."""
    every = 0
    for i in range(seats.shape[0]):
        seat = seats[i]
        start, found[i] = numbers[NUM_COMPUTED, seat], 0
        if numbers[NUM_TOKENS, seat] - start > 1:
            found[i] = CHUNK
        elif start >= numbers[ROOM, seat]:
            found[i] = LACKS_ROOM
        every |= found[i]
    return every


MAY_DRAFT, NOT_DRAWN, NO_DRAFTER, TOO_SHORT, FIRST = range(5)
"""What `consider` finds of a seat: FIRST draws its first token."""
FOUND, LEFT, OF_GAIN, ASKED, NUM_TOLD = range(5)
"""The lines that `consider` writes: what it found, tokens that may come, the choice's seat at Gain,
and -1, in place of which that seat is written where its drafter is asked."""


@entry
@compiled
def consider(numbers: Int32x2, seats: Int32, draws: Int32, told: Int64x2) -> tuple[int, int]:
    """Look for whom to draft. numbers: of the Table. draws: 1 where a seat's last row is drawn
    from. told: int64 [NUM_TOLD, seats], written. Returns how many draw, and the tokens of all that
    do."""
    num_draws, num_keys = 0, 0
    for i in range(seats.shape[0]):
        seat = seats[i]
        num_output = numbers[NUM_TOKENS, seat] - numbers[PROMPT_LEN, seat]
        left = numbers[MAX_OUTPUT, seat] - num_output
        told[LEFT, i], told[OF_GAIN, i], told[ASKED, i] = left, numbers[GAIN_SEAT, seat], -1
        if draws[i]:
            num_draws += 1
            num_keys += numbers[NUM_TOKENS, seat]
        if not draws[i]:
            told[FOUND, i] = NOT_DRAWN
        elif num_output == 0:
            told[FOUND, i] = FIRST
        elif numbers[GAIN_SEAT, seat] < 0:
            told[FOUND, i] = NO_DRAFTER
        else:
            told[FOUND, i] = TOO_SHORT if left <= 1 else MAY_DRAFT
    return num_draws, num_keys


@entry
@compiled
def widest(numbers: Int32x2, seats: Int32) -> int:
    """The most blocks that one of these seats has."""
    width = 0
    for seat in seats:
        width = max(width, numbers[NUM_BLOCKS, seat])
    return width


@entry
@compiled
def advance(numbers: Int32x2, seats: Int32, start: Int32, num: Int32) -> None:
    """The rows [start[i], start[i] + num[i]) of each seat are computed."""
    for i in range(seats.shape[0]):
        numbers[NUM_COMPUTED, seats[i]] = start[i] + num[i]


@entry
@compiled
def describe(
    numbers: Int32x2, seats: Int32, num: Int32, start: Int32, draws: Int32
) -> tuple[int, int, bool]:
    """Of the next num[i] rows of each seat: written, int32, the first position and whether the last
    row is drawn from; returned, (all rows, those of prompts and of what is computed again, whether
    all seats are plain)."""
    num_rows, num_prefill, is_plain = 0, 0, True
    for i in range(seats.shape[0]):
        seat = seats[i]
        start[i] = numbers[NUM_COMPUTED, seat]
        draws[i] = start[i] + num[i] == numbers[NUM_TOKENS, seat]
        num_rows += num[i]
        if num[i] > 1 or start[i] < numbers[PROMPT_LEN, seat]:
            num_prefill += num[i]
        if not numbers[IS_PLAIN, seat]:
            is_plain = False
    return num_rows, num_prefill, is_plain
