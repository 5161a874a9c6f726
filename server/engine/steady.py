"""SteadySteps: plain decode steps that are like the one before, in little of the host's time.

While the same choices decode, one row and one token each, a step differs from the one before in the
ids, positions and slots of its rows. So its plan and its Batch are kept and moved on in place, and
a token that comes alone and ends nothing is emitted here. A step's weights push the host's code and
data out of the core's caches: what a step does not touch costs it nothing.

The usual way of the engine is taken for a step as soon as anything else may be due in it: somebody
comes, waits or has left, a block is missing, drafts may pay again; and for a token that ends its
choice, or has logprobs or a stop string.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from server.engine.accept import plain_step
from server.engine.adapters import AdapterShelf
from server.engine.admission import Admission
from server.engine.batch import Int32
from server.engine.plan import Built, Plan
from server.engine.results import Results
from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence, Status
from server.engine.step_drafts import Proposed, Step, StepDrafts
from server.types import Delta, StepCounts

MOST = 64
"""Steps behind a planned one until the next is planned."""


@dataclass(frozen=True, slots=True)
class _Simple:
    """A choice whose tokens come alone. ends: ids that end it. counts: of each of its steps."""

    ends: frozenset[int]
    counts: StepCounts


@dataclass(slots=True)
class _Kept:
    """Steps that follow each other.

    step: the step. ids: what its rows drew. num_left: steps that may still follow it. num_inside:
    of them those before the first whose row begins a block. may_draft: whether the choices have
    drafters, which rest. simple: of each sequence.
    """

    step: Step
    sequences: list[Sequence]
    simple: list[_Simple | None]
    columns: Int32
    ids: Int32
    num_inside: int
    may_draft: bool
    num_left: int = MOST


class SteadySteps:
    """Moves the kept step on. Writes what the engine writes of its sequences after a step."""

    def __init__(
        self,
        scheduler: Scheduler,
        drafts: StepDrafts,
        admission: Admission,
        adapters: AdapterShelf,
    ) -> None:
        self._scheduler = scheduler
        self._drafts = drafts
        self._admission = admission
        self._adapters = adapters
        self._kept: _Kept | None = None

    def has(self, step: Step) -> bool:
        """Whether a step was made here."""
        return self._kept is not None and self._kept.step is step

    def keep(self, step: Step, results: Results) -> None:
        """A step was accepted the usual way: the next one may be like it."""
        self._kept = None
        items, columns, scheduler = step.plan.items, step.built.columns, self._scheduler
        sequences = [item.sequence for item in items]
        if columns is None or sequences != scheduler.running:
            return
        may_draft = any(s.drafter is not None for s in sequences)
        if step.plan.num_prefill_rows or (may_draft and not self._drafts.is_resting):
            return
        if step.built.batch.num_likely or not all(map(_is_plain, sequences)):
            return
        batch = step.built.batch
        tables = batch.block_tables
        num, size = len(items), sequences[0].block_size
        wider = min(MOST // size + 1, sequences[0].table.shape[0] - tables.shape[1])
        columns = columns.copy()
        batch = replace(
            batch,
            token_ids=columns[0],
            token_from=np.full(num, -1, np.int32),
            positions=columns[1],
            slots=columns[2],
            prefix_len=columns[3],
            draw_positions=columns[3],
            block_tables=np.pad(tables, ((0, 0), (0, wider))),
        )
        built = Built(batch, step.built.spans, step.built.num_keys)
        self._kept = _Kept(
            Step(Plan(items, num_rows=num), Proposed([None] * num), built),
            sequences,
            [_simple(s) for s in sequences],
            columns,
            results.drawn.token_ids,
            min(-s.num_computed % size for s in sequences),
            may_draft,
        )

    def drop(self) -> None:
        """The next step is planned."""
        self._kept = None

    def next(self) -> Step | None:
        """The step behind the kept one; None where it has to be planned."""
        kept, scheduler = self._kept, self._scheduler
        if kept is None:
            return None
        if self._adapters.num_known:
            self._adapters.poll()
        if (
            kept.num_left == 0
            or scheduler.waiting
            or self._admission.num_preparing
            or kept.sequences != scheduler.running
            or (kept.num_inside == 0 and not scheduler.reserve_rows(kept.sequences))
            or (kept.may_draft and not self._drafts.rests_on(kept.step.plan))
        ):
            self._kept = None
            return None
        kept.num_left -= 1
        columns, step = kept.columns, kept.step
        columns[1:] += 1
        columns[0] = kept.ids
        if kept.num_inside == 0:
            self._begin_blocks(kept)
        step.built.num_keys += columns.shape[1]
        return step

    def _begin_blocks(self, kept: _Kept) -> None:
        """Put the blocks that rows begin with this step into the Batch."""
        size = kept.sequences[0].block_size
        tables = kept.step.built.batch.block_tables
        for row, sequence in enumerate(kept.sequences):
            at, inside = divmod(sequence.num_computed, size)
            if inside == 0:
                block = int(sequence.table[at])
                tables[row, at] = block
                kept.columns[2, row] = block * size
        kept.num_inside = min(size - s.num_computed % size for s in kept.sequences)

    def accept(self, results: Results, deltas: list[Delta]) -> Iterator[tuple[Sequence, int]]:
        """Emit what the step drew, and add it to `deltas`. Gives the sequences, each with its draw,
        whose token is to be emitted the usual way."""
        kept = self._kept
        assert kept is not None
        kept.ids = results.drawn.token_ids
        for draw, token in enumerate(results.ids):
            sequence = kept.sequences[draw]
            if sequence.status is not Status.RUNNING:
                continue  # it ended while this step was under way
            sequence.num_computed += 1
            simple = kept.simple[draw]
            if simple is None or token < 0 or token in simple.ends or sequence.num_left == 1:
                yield sequence, draw
                continue
            sequence.append_one(token)
            request_id, choice_id = sequence.request.request_id, sequence.choice_id
            deltas.append(Delta(request_id, choice_id, (token,), counts=simple.counts))
        kept.num_inside -= 1
        if kept.num_inside == 0:
            for sequence in kept.sequences:
                if sequence.status is Status.RUNNING:
                    self._scheduler.publish(sequence)


def _is_plain(sequence: Sequence) -> bool:
    """Whether nothing but its length changes from token to token for the runner."""
    return (
        sequence.status is Status.RUNNING
        and sequence.num_pending == 1
        and sequence.grammar is None
        and sequence.head is None
        and sequence.has_fixed_params
        and (sequence.drafter is None or sequence.is_resting)
    )


def _simple(sequence: Sequence) -> _Simple | None:
    request, rules = sequence.request, sequence.rules
    if (
        sequence.matcher is not None
        or request.sampling.num_logprobs is not None
        or request.report_sources
        or request.report_rejected
        or sequence.num_released != sequence.num_output
    ):
        return None
    return _Simple(rules.eos_ids | rules.stop_ids, plain_step(sequence.no_draft_reason))
