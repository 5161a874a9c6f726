"""The cost of a replica's steps and the size of a task's requests, measured while serving.

The router weighs a home against another replica with these numbers, and the autoscaler turns a
queue into seconds of work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.types import Delta

_KEPT = 0.98  # of the old sums, at each new measurement
_KEPT_OF_TASK = 0.95  # at each finished choice
_KEPT_OF_RECENT = 0.6
_MAX_TASKS = 256


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A step of `rows` rows takes base_s + rows x row_s seconds; seats: sequences in one step."""

    base_s: float = 0.02
    row_s: float = 0.001
    seats: int = 64

    def step_s(self, rows: float) -> float:
        """Seconds of a step."""
        return self.base_s + rows * self.row_s

    def seat_s(self, rows_a_sequence: float = 1.0) -> float:
        """Seconds of a full replica that one sequence takes in one step."""
        return self.step_s(self.seats * rows_a_sequence) / self.seats

    def told(self) -> list[float]:
        """As plain values; the inverse of `of`."""
        return [self.base_s, self.row_s, self.seats]

    @staticmethod
    def of(told: object) -> StepCosts | None:
        """The StepCosts of what `told` returned; None for anything else."""
        if not isinstance(told, list | tuple) or len(told) != 3:
            return None
        base_s, row_s, seats = told
        if base_s <= 0.0 or row_s < 0.0 or seats < 1:
            return None
        return StepCosts(float(base_s), float(row_s), int(seats))


@dataclass(frozen=True, slots=True)
class TaskHabit:
    """A task's requests: tokens of an output, and tokens that a step gives one sequence."""

    output_tokens: float = 64.0
    tokens_a_step: float = 1.0

    @property
    def steps(self) -> float:
        """Steps of one output."""
        return self.output_tokens / max(1.0, self.tokens_a_step)


class CostMeter:
    """Fits StepCosts to the steps that an engine tells of, and the habits of its tasks.

    Sums are decayed, so that the costs follow the machine. While all steps had the same number of
    rows, the cost of a row is unknown: then base_s has all of it.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weight, rows, seconds, rows squared, rows x seconds
        self.recent: tuple[float, float] | None = None
        """Rows and seconds of the last few steps."""
        self._tasks: dict[str, list[float]] = {}  # finished, tokens, steps

    def observe(self, rows: float, step_s: float) -> None:
        """What steps had and took, in the mean."""
        if rows < 1.0 or step_s <= 0.0:
            return
        new = (1.0, rows, step_s, rows * rows, rows * step_s)
        before = self.recent or (rows, step_s)
        self.recent = (_mean(before[0], rows), _mean(before[1], step_s))
        self._sums = [old * _KEPT + more for old, more in zip(self._sums, new, strict=True)]

    def costs(self, seats: int) -> StepCosts | None:
        """The costs of a step; None before one was measured."""
        weight, rows, seconds, squares, products = self._sums
        if weight == 0.0:
            return None
        spread = weight * squares - rows * rows
        row_s = 0.0
        if spread > 1e-6 * squares * weight:
            row_s = max(0.0, (weight * products - rows * seconds) / spread)
        base_s = (seconds - row_s * rows) / weight
        if base_s <= 0.0:  # a line through the origin
            base_s, row_s = 1e-4, seconds / rows
        return StepCosts(base_s, row_s, seats)

    def count(self, task: str, delta: Delta) -> None:
        """A Delta of a request of this task."""
        sums = self._tasks.get(task)
        if sums is None:
            if len(self._tasks) >= _MAX_TASKS:
                del self._tasks[next(iter(self._tasks))]
            sums = self._tasks[task] = [0.0, 0.0, 0.0]
        sums[1] += len(delta.token_ids)
        sums[2] += delta.counts.num_steps
        if delta.finish_reason is not None:
            sums[0] += 1.0
            for i in range(3):
                sums[i] *= _KEPT_OF_TASK

    def habits(self) -> dict[str, list[float]]:
        """Tokens of an output and tokens a step, by task, of those that finished one."""
        return {
            task: [tokens / finished, tokens / steps if steps else 1.0]
            for task, (finished, tokens, steps) in self._tasks.items()
            if finished > 0.0 and tokens > 0.0
        }


def habits_of(told: Mapping[str, Any]) -> dict[str, TaskHabit]:
    """TaskHabits from what CostMeter.habits told; entries that are none are left out."""
    habits = {}
    for task, pair in told.items():
        if isinstance(pair, list | tuple) and len(pair) == 2 and min(pair) > 0.0:
            habits[task] = TaskHabit(float(pair[0]), float(pair[1]))
    return habits


def _mean(before: float, new: float) -> float:
    return before * _KEPT_OF_RECENT + new * (1.0 - _KEPT_OF_RECENT)
