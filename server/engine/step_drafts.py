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
from server.engine.draft_record import DraftRecord
from server.engine.draft_worth import MANY
from server.engine.drafting import CheckedTree
from server.engine.plan import Rows, Scheduler
from server.engine.planner import DraftPlanner, StepShape
from server.engine.sequence import Sequence
from server.engine.sessions import DraftSessions
from server.engine.trees import Trees


@dataclass(frozen=True, slots=True)
class Proposed:
    """trees: one or None per item of the step's rows. seconds: that proposing took. ceiling: the
    most nodes that could have paid. has_asked: whether any session was asked, or could have been.
    """

    trees: SequenceOf[CheckedTree | None]
    seconds: float = 0.0
    ceiling: int = 0
    has_asked: bool = False


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
    """Steps of the same choices in which all of them rest, so that none is looked at. num_left: of
    them that are still to come; num_done: that the choices' scopes have not been told of."""

    seats: Int32
    records: list[DraftRecord]
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
            if not reason and self._sessions.begins_blank(sequence):
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
        resting = self._planner.who_rests([s.draft_record for s in sequences], shape)
        may_draft = self._who_may_draft(sequences, resting, shape.num_draws)
        places = [i for i, may in zip(places, may_draft, strict=True) if may]
        if not places:
            self._begin_rest(rows, sequences)
            return Proposed(trees, time.perf_counter() - began)
        asks = [self._sessions.ask(rows.sequences[i]) for i in places]
        room = self._scheduler.max_num_batched_tokens - rows.num_rows
        drafts = self._planner.plan(asks, shape, min(self._max_draft_rows, room))
        for at, error in drafts.errors:
            self._sessions.disable(rows.sequences[places[at]], error)
        for i, tree, reason in zip(places, drafts.trees, drafts.reasons, strict=True):
            sequence = rows.sequences[i]
            sequence.no_draft_reason = reason
            if tree is not None:
                trees[i] = self._fit(sequence, tree)
        seconds, has_asked = time.perf_counter() - began, not all(ask.rests for ask in asks)
        if has_asked:
            spent_s = seconds + self._sessions.take_spent()
            self._planner.budget.host.observe_asking(spent_s, resting.count(False))
        return Proposed(trees, seconds, drafts.ceiling, has_asked)

    def _who_may_draft(
        self, sequences: SequenceOf[Sequence], resting: SequenceOf[bool], num_draws: int
    ) -> list[bool]:
        """Which of the sequences are planned for. resting: whose scopes rest. Where many choices
        decode, one that sits out by itself is told nothing meanwhile, as if its scope did."""
        may_draft: list[bool] = []
        for sequence, is_resting in zip(sequences, resting, strict=True):
            if not sequence.num_output:  # an answer's first tree says little about the others
                sequence.draft_record.note_in(None)
            sits_out = is_resting
            if is_resting:
                sequence.no_draft_reason = "budget"
            elif num_draws >= MANY and sequence.draft_record.sits_out():
                sequence.no_draft_reason, sits_out = "cooldown", True
            may_draft.append(self._sessions.may_draft(sequence, sits_out))
        return may_draft

    # Most steps of a server with many clients are like the one before and draft nothing. What is
    # known not to pay must not cost a tenth of a millisecond in each of them either.

    def _begin_rest(self, rows: Rows, sequences: SequenceOf[Sequence]) -> None:
        """Nobody drafts in this step. How many like it may follow without a look at each choice:
        none that ends a rest or brings a choice to its last token. sequences: that might draft."""
        if rows.num_rows != len(rows.sequences) or len(sequences) != len(rows.sequences):
            return  # a prompt's rows, or choices without a drafter
        records = [sequence.draft_record for sequence in sequences]
        num_left = min(s.num_left - 2 for s in sequences)
        num_left = min(num_left, self._planner.rest_left(records))
        if num_left > 0:
            self._rest = _Rest(rows.seats, records, num_left)

    def _rests_on(self, rows: Rows) -> bool:
        """Whether a step is one of those that _begin_rest foresaw; it is counted. False ends the
        rest, and tells the scopes how long they have rested."""
        rest = self._rest
        if rest is None:
            return False
        if rest.num_left and rest.seats is rows.seats:
            rest.num_left -= 1
            rest.num_done += 1
            return True
        self._rest = None
        if rest.num_done:
            self._planner.rested(rest.records, rest.num_done)
        return False

    def _fit(self, sequence: Sequence, tree: CheckedTree) -> CheckedTree | None:
        """As much of a tree as gets blocks; drafts never preempt anybody for theirs."""
        num = self._scheduler.reserve_drafts(sequence, len(tree.token_ids))
        if num:
            return tree.prune(num)
        sequence.draft_record.decay()
        sequence.no_draft_reason = "budget"
        return None
