"""Flights: steps that the runner has and the engine has not accepted yet, oldest first.

A step is usually accepted before the next one is planned. With `steps_ahead` the next one is
launched while it is still computed, where that one follows whatever is drawn: every running
sequence draws, and the row of its drawn token takes its id on the device. So the device has its
next step when one ends, and what the host does for it (stops, Deltas, text, the next Batch) costs
no time.

Without drafts that row takes the id by Batch.token_from. Behind a step with trees, whose ends are
not known yet, the Batch has an `Ahead` (ahead.py): the runner walks the trees, moves the KV of what
is accepted, and takes the trees that were prepared for it (foresight.py). When the step before is
accepted, `accepted` gives the flight the rows and trees that it came to have. Whether that pays is
measured (ahead_policy.py).

What the host learns one step late costs a row, never a token:

- a sequence that ended, was aborted or failed has rows in the step ahead, whose draws nobody reads;
  so has one of which a draw behind an accepted node had no answer;
- those rows write the KV of their positions into blocks that went back to the pool. Runners compute
  steps in the order of their launches, so whoever gets a block writes after them and reads only
  what it wrote itself. No published block is touched: the positions are behind all verified ones.

Nobody is admitted, preempted, forked or given rows of the LM head while two steps are in flight:
where one of that is due, no step is launched ahead, and the next one is planned as usual. Nor does
one go ahead in an engine that knows adapters, because they are put into memory, and dropped, at any
message. Grammars, penalties and `exact` wait as well, and slices where there are trees.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from server.engine.ahead import resolve
from server.engine.ahead_policy import AheadPolicy
from server.engine.batch import Batch, FollowingRunner, Runner
from server.engine.drafting import CheckedTree
from server.engine.plan import Built, Plan, Scheduled, Span
from server.engine.results import Results, StepFailedError, wait_for
from server.engine.sequence import Sequence, Status
from server.engine.step_drafts import Proposed, StepDrafts


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

    num_ahead, num_ahead_trees: steps that were launched ahead so far, and those of them behind
    trees. num_void_rows: rows of steps ahead whose draws nobody read. policy: whether trees are
    followed. beside_s: seconds of the step that was waited for last in which the device computed
    nothing: from the end of the one before it.
    """

    def __init__(self, runner: Runner, steps_ahead: int) -> None:
        """steps_ahead: wanted; a runner that takes one step at a time is not asked for more."""
        self._runner = runner
        most = runner.max_in_flight if steps_ahead else 1
        self._most = min(1 + steps_ahead, most)
        self._flying: deque[Flight] = deque()
        self._last_end_s = 0.0
        self._accepted_s = 0.0
        self.num_ahead = self.num_ahead_trees = self.num_void_rows = 0
        self.beside_s = 0.0
        self.policy = AheadPolicy()
        follows = isinstance(runner, FollowingRunner) and runner.follows_trees
        self._follows_trees = follows and most > 1

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def waits(self) -> bool:
        """Whether every step is waited for before the next one is planned."""
        return self._most == 1

    @property
    def figures(self) -> dict[str, Any]:
        """What EngineStats has of them."""
        return {"num_steps_ahead": self.num_ahead, "num_void_rows": self.num_void_rows}

    @property
    def oldest(self) -> Flight | None:
        """The step that is waited for next."""
        return self._flying[0] if self._flying else None

    def can_follow(self, flight: Flight) -> bool:
        """Whether the runner takes one more step behind this one."""
        return len(self._flying) < self._most and flight.error is None

    def may_follow_trees(self, flight: Flight) -> bool:
        """Whether the step behind this one may hang on its trees. Called once a step."""
        sequences = [item.sequence for item in flight.plan.items]
        return (
            self._follows_trees
            and any(sequence.drafter is not None for sequence in sequences)
            and all(s.head is None and not s.request.label_ids for s in sequences)
            and self.policy.pays()
        )

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
        self.num_ahead_trees += flight.drafts.foreseen is not None

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

    def is_void(self, flight: Flight, item: Scheduled, num_rows: int) -> bool:
        """Whether nobody reads what an item has drawn, by what its sequence came to be: it ended,
        or has not reached the item's row. Counts its rows, num_rows of them, if so."""
        sequence = item.sequence
        is_void = sequence.status is Status.FINISHED
        if flight.is_ahead:
            is_void = is_void or item.start + 1 != sequence.num_tokens
            self.num_void_rows += num_rows * is_void
        return is_void

    def accepted(self, flight: Flight, results: Results, drafts: StepDrafts) -> None:
        """A step was accepted: the one behind it, if any, has its rows and trees from now on."""
        self._observe(flight)
        behind = self.oldest
        if behind is None or behind.drafts.foreseen is None or behind.error is not None:
            return
        items = behind.plan.items
        size = items[0].sequence.block_size
        resolved = resolve(behind.batch, results.drawn.token_ids, size)
        batch = behind.batch = resolved.batch
        for item, num_accepted in zip(items, resolved.num_accepted, strict=True):
            item.start += num_accepted
        behind.drafts = drafts.settle(behind.drafts, items, resolved.options)
        roots = np.flatnonzero(batch.draw_parent < 0).tolist()
        num_keys = int(batch.prefix_len.sum()) + len(batch.path_slots)
        behind.built = Built(batch, [Span(root, 0, 0) for root in roots], num_keys)

    def _observe(self, flight: Flight) -> None:
        """Tell the policy of a step that drafted, or could have."""
        before, self._accepted_s = self._accepted_s, time.perf_counter()
        items = flight.plan.items
        if flight.plan.num_prefill_rows or (flight.is_ahead and flight.drafts.foreseen is None):
            return
        if not any(item.sequence.drafter is not None for item in items):
            return
        drawn = (item.sequence.num_tokens - item.start - item.num_rows for item in items)
        self.policy.observe(
            is_ahead=flight.is_ahead,
            num_tokens=sum(max(0, num) for num in drawn),
            num_choices=len(items),
            seconds=self._accepted_s - before,
        )

    def discard(self) -> None:
        """Wait for all steps and forget what they drew: a step before them has failed."""
        while self._flying:
            with suppress(StepFailedError):
                self.wait()


def following(
    flight: Flight, running: SequenceOf[Sequence]
) -> tuple[list[Scheduled], list[CheckedTree | None]]:
    """The rows of the step after `flight`, known before its draws are, and the trees that these
    sequences have in `flight`; none if they cannot be known.

    They stand where they do if no node of a tree is accepted. running: all running sequences. One
    that ends by its length has no row. Every other one must have drawn from the full head or a
    fixed slice, without choices that fork off, and anything that changes with the drawn token: a
    grammar's mask, counts of penalties, and behind trees min_tokens.
    """
    items: list[Scheduled] = []
    trees: list[CheckedTree | None] = []
    num_known = 0
    for item, tree, span in zip(
        flight.plan.items, flight.drafts.trees, flight.built.spans, strict=True
    ):
        sequence = item.sequence
        if sequence.status is not Status.RUNNING:
            continue
        at = item.start + item.num_rows
        if not item.draws or at != sequence.num_tokens or not _is_plain(sequence):
            return [], []
        if tree is not None and sequence.num_output + 1 < sequence.rules.min_tokens:
            return [], []
        num_known += 1
        if sequence.num_output + 1 < sequence.rules.max_output:
            items.append(Scheduled(sequence, at, 1, draws=True, token_from=span.draw))
            trees.append(tree)
    return (items, trees) if num_known == len(running) else ([], [])


def _is_plain(sequence: Sequence) -> bool:
    head = sequence.head
    return (
        sequence.grammar is None
        and not sequence.siblings
        and not sequence.request.sampling.has_penalties
        and (head is None or head.mode == "slice")
    )
