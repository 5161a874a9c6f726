"""Run: a step at the runner, and where it raises, which request made it.

A runner that raises does not say which request made it raise. So every sequence of the failed step
gives its blocks back and is computed again, one alone at a time (`Recovery.suspect`), without
drafts. One that fails then fails for good. Whose steps with drafts have failed twice drafts no
more. If a step did not fit the device's memory, no sequence is blamed while steps can be made
smaller. This module records; the engine preempts and ends them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

from server.engine.batch import NO_TOKEN_LEFT, Drawn, Int32
from server.engine.sequence import Sequence, Status


class StepFailedError(Exception):
    """The runner raised `error`: the step has no results."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def guarded(call: Callable[..., None], *arguments: Any) -> None:
    """Call the runner. Raises StepFailedError for whatever it raises."""
    try:
        call(*arguments)
    except Exception as error:
        raise StepFailedError(error) from error


def wait_for(draw: Callable[[], Drawn], launched: float) -> Drawn:
    """What `draw` returns. launched: when the step was (time.perf_counter), for where the runner
    tells no seconds. Raises StepFailedError for whatever `draw` raises."""
    try:
        drawn = draw()
    except Exception as error:
        raise StepFailedError(error) from error
    return drawn if drawn.model_s else replace(drawn, model_s=time.perf_counter() - launched)


def draw_failure(problem: str, sequence: Sequence) -> tuple[str, str]:
    """(message, code) for a request of which no token could be drawn."""
    if problem != NO_TOKEN_LEFT:
        return problem, "engine_error"
    grammar = sequence.grammar
    if grammar is not None and grammar.problem and not grammar.is_dead_end:
        return f"the grammar cannot be followed any further: {grammar.problem}", "grammar_limit"
    what = "grammar, " if grammar is not None else ""
    return (
        f"No token satisfies the request's constraints after {sequence.num_output} tokens: "
        f"{what}allowed_token_ids, logit_bias and min_tokens together exclude every one.",
        "constraint_unsatisfiable",
    )


# -- where a step has failed -----------------------------------------------------------------------

MAX_FAILURES = 8  # failed steps in a row after which the runner counts as broken


class RunnerBrokenError(RuntimeError):
    """Too many steps failed in a row, single requests too: the runner cannot be used any more."""


class Recovery:
    """Counts failed steps and keeps the suspects. Written by the engine's loop alone.

    num_failed_steps: that the runner failed, all of them recomputed or failed for good.
    num_in_a_row: of them since the last step that did not. is_isolating: whether there was a
    suspect when last asked.
    """

    def __init__(self) -> None:
        self.num_failed_steps = 0
        self.is_isolating = False
        self.num_in_a_row = 0
        self._suspects: list[Sequence] = []

    @property
    def suspect(self) -> Sequence | None:
        """The sequence that must run alone in the next step, or None."""
        while self._suspects and self._suspects[0].status is Status.FINISHED:
            self._suspects.pop(0)
        self.is_isolating = bool(self._suspects)
        return self._suspects[0] if self._suspects else None

    def give_up(self) -> None:
        """The suspect cannot be seated alone: all sequences run together again."""
        self._suspects.clear()
        self.is_isolating = False

    def step_done(self, draws: Int32) -> None:
        """A step succeeded. draws: of Rows; one that drew clears its suspect."""
        self.num_in_a_row = 0
        if self._suspects and draws.any():
            self._suspects.pop(0)

    def step_failed(
        self, sequences: SequenceOf[Sequence], *, was_too_large: bool
    ) -> tuple[Sequence | None, list[Sequence]]:
        """A step of these sequences failed: who was isolated, and fails for good, and whom to
        recompute. was_too_large: later steps are smaller, so no sequence is blamed."""
        self.num_failed_steps += 1
        alive = [s for s in sequences if s.status is Status.RUNNING]
        if was_too_large:
            return None, alive
        self.num_in_a_row += 1
        if self.is_isolating and alive:
            return alive[0], []
        self._suspects = sorted(
            {id(s): s for s in (*self._suspects, *alive)}.values(), key=lambda s: s.order
        )
        return None, alive
