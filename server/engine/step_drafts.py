"""StepDrafts: the drafts of one step, from the sequences that draw in it to trees with blocks.

The policy is planner.py's. This module knows sequences: who has a session, which trees get blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from drafters.arrays import Int32
from server.engine.batch import Batch
from server.engine.build import Built
from server.engine.drafting import CheckedTree
from server.engine.gain import REST, StepShape
from server.engine.plan import Rows, Scheduler
from server.engine.planner import DraftPlanner
from server.engine.sequence import Sequence
from server.engine.sessions import DraftSessions
from server.engine.trees import Trees


@dataclass(frozen=True, slots=True)
class Proposed:
    """trees: one or None per item of the step's rows. seconds: that proposing took. ceiling: the
    most nodes that could have paid. num_asked: sessions that were asked."""

    trees: SequenceOf[CheckedTree | None]
    seconds: float = 0.0
    ceiling: int = 0
    num_asked: int = 0


NO_DRAFTS = Proposed(())
"""Of a step in which nobody has a drafter."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step as it is given to the runner. batch: that of `built`, with slices. has_drafters:
    whether any of its choices has one."""

    rows: Rows
    drafts: Proposed
    trees: Trees
    built: Built
    batch: Batch
    has_drafters: bool


@dataclass(slots=True)
class _Rest:
    """Steps of the same choices in which nobody is asked, so that none is looked at. gain_seats: of
    those that have a drafter. num_left: of them that are still to come; num_done: that were."""

    seats: Int32
    gain_seats: list[int]
    shape: StepShape
    num_left: int
    num_done: int = 0


class StepDrafts:
    """Writes the sequences' `no_draft_reason`. max_draft_rows: most nodes a step."""

    def __init__(
        self,
        scheduler: Scheduler,
        sessions: DraftSessions,
        planner: DraftPlanner,
        max_draft_rows: int,
    ) -> None:
        self._scheduler = scheduler
        self._sessions = sessions
        self._planner = planner
        self._max_draft_rows = max_draft_rows
        self._rest: _Rest | None = None

    def propose(self, rows: Rows, *, is_plain: bool) -> Proposed:
        """Trees for a step; what is chosen has its blocks. is_plain: nobody may draft."""
        trees: list[CheckedTree | None] = [None] * len(rows.sequences)
        if self._rests_on(rows):
            return Proposed(trees)
        drawing = np.flatnonzero(rows.draws)
        places: list[int] = []
        for i in drawing.tolist():
            sequence = rows.sequences[i]
            reason = self._sessions.no_draft_reason(sequence)
            if not (reason or rows.is_plain) and self._sessions.begins_blank(sequence):
                reason = "prefill"
            sequence.no_draft_reason = reason
            if not reason:
                places.append(i)
        if not places or is_plain:
            return Proposed(trees)
        began = time.perf_counter()
        mean_len = float((rows.start + rows.num)[drawing].mean())
        num_waiting = self._scheduler.num_awaiting_first
        shape = StepShape(drawing.shape[0], rows.num_rows, mean_len, num_waiting)
        sequences = [rows.sequences[i] for i in places]
        room = min(self._max_draft_rows, self._scheduler.max_num_batched_tokens - rows.num_rows)
        reasons, ceiling = self._decide(sequences, shape, room)
        places = [
            i for i, why in zip(places, reasons, strict=True) if self._may_draft(rows, i, why)
        ]
        if not places:
            self._begin_rest(rows, sequences, shape)
            return Proposed(trees, time.perf_counter() - began)
        asks = [self._sessions.ask(rows.sequences[i]) for i in places]
        drafts = self._planner.plan(asks, shape, ceiling, room)
        for at, error in drafts.errors:
            self._sessions.disable(rows.sequences[places[at]], error)
        for i, tree, reason in zip(places, drafts.trees, drafts.reasons, strict=True):
            sequence = rows.sequences[i]
            sequence.no_draft_reason = reason
            if tree is not None:
                trees[i] = self._fit(sequence, tree)
        num_asked = sum(not ask.why_not for ask in asks)
        return Proposed(trees, time.perf_counter() - began, ceiling, num_asked)

    def _decide(
        self, sequences: SequenceOf[Sequence], shape: StepShape, room: int
    ) -> tuple[SequenceOf[str], int]:
        """Who is asked. Those that rested are watched first. room: nodes that fit."""
        gain = self._planner.gain
        for sequence in sequences:
            if sequence.is_resting:
                told = sequence.prompt_len + sequence.num_told
                gain.watch(sequence.gain_seat, sequence.ids[: sequence.num_tokens], told)
        wanted = sum(s.request.speculation.max_draft_tokens for s in sequences)
        return gain.ask([s.gain_seat for s in sequences], shape, min(wanted, room))

    def _may_draft(self, rows: Rows, i: int, why_not: str) -> bool:
        """Whether an item's choice is planned for: it is asked, or a grammar may force tokens."""
        sequence = rows.sequences[i]
        sequence.no_draft_reason = why_not
        if not sequence.num_output and self._planner.gain.is_asked(sequence.gain_seat):
            # Its prompt leaves no room for nodes: the step after it drafts from this one's rows.
            return self._sessions.may_draft(sequence, is_resting=False) and not why_not
        return self._sessions.may_draft(sequence, bool(why_not))

    # Most steps of a server with many clients are like the one before and draft nothing. What is
    # known not to pay must not cost a tenth of a millisecond in each of them either.

    def _begin_rest(self, rows: Rows, sequences: SequenceOf[Sequence], shape: StepShape) -> None:
        """Nobody drafts in this step. Some like it follow without a look at each choice, none that
        brings a choice to its last token. sequences: that might draft."""
        if rows.num_rows != len(rows.sequences) or len(sequences) != len(rows.sequences):
            return  # a prompt's rows, or choices without a drafter
        num_left = min(REST - 1, min(s.num_left - 2 for s in sequences))
        if num_left > 0:
            gain_seats = [sequence.gain_seat for sequence in sequences]
            self._rest = _Rest(rows.seats, gain_seats, shape, num_left)

    def _rests_on(self, rows: Rows) -> bool:
        """Whether a step is one of those that _begin_rest foresaw; it is counted. False ends the
        rest, and tells Gain how long they have rested."""
        rest = self._rest
        if rest is None:
            return False
        if rest.num_left and rest.seats is rows.seats:
            rest.num_left -= 1
            rest.num_done += 1
            return True
        self._rest = None
        self._planner.gain.rested(rest.gain_seats, rest.shape, rest.num_done)
        return False

    def _fit(self, sequence: Sequence, tree: CheckedTree) -> CheckedTree | None:
        """As much of a tree as gets blocks; drafts never preempt anybody for theirs."""
        num = self._scheduler.reserve_drafts(sequence, len(tree.token_ids))
        if num:
            return tree if num == len(tree.token_ids) else tree.prune(num)
        sequence.no_draft_reason = "room"
        return None
