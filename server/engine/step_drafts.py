"""StepDrafts: the drafts of one step, from the sequences that draw in it to trees with blocks.

The policy is planner.py's. This module knows sequences: who has a session, which trees get blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from server.engine.drafting import CheckedTree
from server.engine.plan import Plan, Scheduled
from server.engine.planner import DraftPlanner, StepShape
from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence
from server.engine.sessions import DraftSessions


@dataclass(frozen=True, slots=True)
class Proposed:
    """trees: one or None per item of the step's plan. seconds: that proposing took. ceiling: the
    most nodes that could have paid. has_asked: whether any session was asked, or could have been.
    """

    trees: SequenceOf[CheckedTree | None]
    seconds: float = 0.0
    ceiling: int = 0
    has_asked: bool = False


class StepDrafts:
    """Writes the sequences' `no_draft_reason` and `is_resting`. max_draft_rows: most nodes a
    step."""

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

    def propose(self, plan: Plan, *, is_plain: bool) -> Proposed:
        """Trees for a step; what is chosen has its blocks. is_plain: nobody may draft."""
        trees: list[CheckedTree | None] = [None] * len(plan.items)
        drawing = [(i, item) for i, item in enumerate(plan.items) if item.draws]
        for _, item in drawing:
            item.sequence.no_draft_reason = self._sessions.no_draft_reason(item.sequence)
        places = [i for i, item in drawing if not item.sequence.no_draft_reason]
        if not places or is_plain:
            return Proposed(trees)
        began = time.perf_counter()
        shape = self._shape([item for _, item in drawing], plan.num_rows)
        sequences = [plan.items[i].sequence for i in places]
        resting = self._planner.who_rests([s.draft_record for s in sequences], shape)
        for sequence, is_resting in zip(sequences, resting, strict=True):
            sequence.is_resting = is_resting
            if is_resting:
                sequence.no_draft_reason = "budget"
        places = [i for i in places if self._sessions.may_draft(plan.items[i].sequence)]
        if not places:
            return Proposed(trees, time.perf_counter() - began)
        asks = [self._sessions.ask(plan.items[i].sequence) for i in places]
        drafts = self._planner.plan(asks, shape, self._room(plan.num_rows))
        for at, error in drafts.errors:
            self._sessions.disable(plan.items[places[at]].sequence, error)
        for i, tree, reason in zip(places, drafts.trees, drafts.reasons, strict=True):
            sequence = plan.items[i].sequence
            sequence.no_draft_reason = reason
            if tree is not None:
                trees[i] = self._fit(sequence, tree)
        has_asked = not all(resting)
        return Proposed(trees, time.perf_counter() - began, drafts.ceiling, has_asked)

    def are_off(self, items: SequenceOf[Scheduled]) -> bool:
        """Whether nobody will draft in a step of these items, each of one row that draws. True
        counts as such a step for those who rest from drafting."""
        records = [
            item.sequence.draft_record
            for item in items
            if not self._sessions.no_draft_reason(item.sequence)
        ]
        if not records:
            return True
        shape = self._shape(items, len(items))
        if not self._planner.nobody_drafts(records, shape, self._room(len(items))):
            return False
        self._planner.who_rests(records, shape)
        for record in records:
            record.allowance()
        return True

    def _shape(self, drawing: SequenceOf[Scheduled], num_rows: int) -> StepShape:
        mean_len = sum(item.start + item.num_rows for item in drawing) / len(drawing)
        return StepShape(len(drawing), num_rows, mean_len, self._scheduler.num_awaiting_first)

    def _room(self, num_rows: int) -> int:
        return min(self._max_draft_rows, self._scheduler.max_num_batched_tokens - num_rows)

    def _fit(self, sequence: Sequence, tree: CheckedTree) -> CheckedTree | None:
        """As much of a tree as gets blocks; drafts never preempt anybody for theirs."""
        num = self._scheduler.reserve_drafts(sequence, len(tree.token_ids))
        if num:
            return tree.prune(num)
        sequence.draft_record.decay()
        sequence.no_draft_reason = "budget"
        return None
