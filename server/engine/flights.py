"""Flights: steps that the runner has and the engine has not accepted yet, oldest first.

A step is usually accepted before the next one is planned. With `steps_ahead` the next one is
launched while it is still computed, where that one follows whatever is drawn: every running
sequence draws one token without drafts, and the row of that token takes its id on the device
(Batch.token_from). So the device has its next step when one ends, and what the host does for it
(stops, Deltas, text, the next Batch) costs no time.

What the host learns one step late costs a row, never a token:

- a sequence that ended, was aborted or failed has a row in the step ahead, whose draw nobody reads;
- that row writes the KV of its position into a block that went back to the pool. Runners compute
  steps in the order of their launches, so whoever gets the block writes after it and reads only
  what it wrote itself. No published block is touched: the position is behind all verified ones.

Nobody is admitted, preempted, forked or given rows of the LM head while two steps are in flight:
where one of that is due, no step is launched ahead, and the next one is planned as usual. Nor does
one go ahead in an engine that knows adapters, because they are put into memory, and dropped, at any
message.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from server.engine.batch import Batch, Runner
from server.engine.plan import Built, Plan, Scheduled
from server.engine.results import Results, StepFailedError, wait_for
from server.engine.sequence import Sequence, Status
from server.engine.step_drafts import Proposed


@dataclass(slots=True)
class Flight:
    """A step that was launched.

    batch: as the runner has it. is_ahead: it was launched before the step before it was accepted.
    error: what its launch raised.
    """

    plan: Plan
    drafts: Proposed
    built: Built
    batch: Batch
    is_ahead: bool = False
    launched_s: float = 0.0
    error: Exception | None = None


class Flights:
    """The steps in flight of one engine: at most one, or with steps_ahead two.

    num_ahead: steps that were launched ahead so far. beside_s: seconds of the step that was waited
    for last in which the device computed nothing: from the end of the one before it.
    """

    def __init__(self, runner: Runner, steps_ahead: int) -> None:
        """steps_ahead: wanted; a runner that takes one step at a time is not asked for more."""
        self._runner = runner
        most = runner.max_in_flight if steps_ahead else 1
        self._most = min(1 + steps_ahead, most)
        self._flying: deque[Flight] = deque()
        self._last_end_s = 0.0
        self.num_ahead = 0
        self.beside_s = 0.0

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def oldest(self) -> Flight | None:
        """The step that is waited for next."""
        return self._flying[0] if self._flying else None

    def can_follow(self, flight: Flight) -> bool:
        """Whether the runner takes one more step behind this one."""
        return len(self._flying) < self._most and flight.error is None

    def launch(self, flight: Flight) -> None:
        """Give a step to the runner. What that raises is raised by `wait`, in the step's turn."""
        flight.launched_s = time.perf_counter()
        try:
            if flight.plan.copies:
                copies = np.array(flight.plan.copies, np.int32)
                self._runner.copy_blocks(copies[:, 0].copy(), copies[:, 1].copy())
            self._runner.launch(flight.batch)
        except Exception as error:
            flight.error = error
        self._flying.append(flight)
        self.num_ahead += flight.is_ahead

    def wait(self) -> Results:
        """What the oldest step drew. Raises StepFailedError."""
        flight = self._flying.popleft()
        if flight.error is not None:
            raise StepFailedError(flight.error) from flight.error
        began = max(flight.launched_s, self._last_end_s)
        results = wait_for(self._runner.wait, lambda: time.perf_counter() - began)
        ended = time.perf_counter()
        self.beside_s = max(0.0, ended - self._last_end_s - results.model_s)
        self._last_end_s = ended
        return results

    def discard(self) -> None:
        """Wait for all steps and forget what they drew: a step before them has failed."""
        while self._flying:
            with suppress(StepFailedError):
                self.wait()


def following(flight: Flight, running: SequenceOf[Sequence]) -> list[Scheduled]:
    """The rows of the step after `flight`, known before its draws are; none if it cannot be known.

    running: all running sequences. One that ends by its length has no row. Every other one must
    have drawn from the full head or a fixed slice, without drafts, choices that fork off, and
    anything that changes with the drawn token: a grammar's mask, counts of penalties.
    """
    items: list[Scheduled] = []
    num_known = 0
    for item, tree, span in zip(
        flight.plan.items, flight.drafts.trees, flight.built.spans, strict=True
    ):
        sequence = item.sequence
        if sequence.status is not Status.RUNNING:
            continue
        if not item.draws or tree is not None or not _is_plain(sequence):
            return []
        num_known += 1
        if sequence.num_output + 1 < sequence.rules.max_output:
            at = item.start + item.num_rows
            items.append(Scheduled(sequence, at, 1, draws=True, token_from=span.draw))
    return items if num_known == len(running) else []


def _is_plain(sequence: Sequence) -> bool:
    head = sequence.head
    return (
        sequence.grammar is None
        and not sequence.siblings
        and not sequence.request.sampling.has_penalties
        and (head is None or head.mode == "slice")
    )
