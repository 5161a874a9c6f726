"""Recovery: finds out which request made a step fail.

A runner that raises does not say which request made it raise. So every sequence of the failed step
gives its blocks back and is computed again, one alone at a time (`suspect`). A sequence that fails
alone fails for good. If a step did not fit the device's memory, no sequence is blamed while steps
can be made smaller. This module records; the engine preempts sequences and ends them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from server.engine.sequence import Sequence, Status


class RunnerBrokenError(RuntimeError):
    """Too many steps failed in a row, single requests too: the runner cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Blame:
    """Which sequences a failed step concerns. culprit: failed alone, and fails for good. others: to
    recompute."""

    culprit: Sequence | None
    others: list[Sequence]


class Recovery:
    """Counts failed steps and keeps the suspects. Written by the engine's loop alone. is_isolating:
    whether there was a suspect when last asked."""

    def __init__(self, max_failures: int) -> None:
        """max_failures: failed steps in a row after which the runner counts as broken."""
        self.num_failed_steps = 0
        self.is_isolating = False
        self._max_failures = max_failures
        self._num_in_a_row = 0
        self._suspects: list[Sequence] = []

    @property
    def suspect(self) -> Sequence | None:
        """The sequence that must run alone in the next step, or None."""
        while self._suspects and self._suspects[0].status is Status.FINISHED:
            self._suspects.pop(0)
        self.is_isolating = bool(self._suspects)
        return self._suspects[0] if self._suspects else None

    @property
    def is_broken(self) -> bool:
        """Whether too many steps failed in a row."""
        return self._num_in_a_row >= self._max_failures

    def give_up(self) -> None:
        """The suspect cannot be seated alone: all sequences run together again."""
        self._suspects.clear()
        self.is_isolating = False

    def step_done(self, has_drawn: bool) -> None:
        """A step succeeded. has_drawn: it drew, which clears its suspect."""
        self._num_in_a_row = 0
        if self._suspects and has_drawn:
            self._suspects.pop(0)

    def step_failed(self, sequences: Iterable[Sequence], *, was_too_large: bool = False) -> Blame:
        """A step of these sequences failed. was_too_large: later steps are smaller, so no sequence
        is blamed."""
        self.num_failed_steps += 1
        sequences = list(sequences)
        alive = [s for s in sequences if s.status is Status.RUNNING]
        if was_too_large:
            return Blame(None, alive)
        self._num_in_a_row += 1
        if len(alive) == 1 and len(sequences) == 1:
            return Blame(alive[0], [])
        self._suspects = sorted(
            {id(s): s for s in (*self._suspects, *alive)}.values(), key=lambda s: s.order
        )
        return Blame(None, alive)
