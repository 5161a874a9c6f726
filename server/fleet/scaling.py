"""How many replicas a model needs: the work that waits, at what steps were measured to cost.

A new request's first token comes when the prompts that wait before it are computed, and when there
is a seat. `first_token_s` says how long that is for the last one in the queue when the work is
spread over so many replicas; `replicas_for` takes the fewest that keep it within the target, and
gives one up only when the rest would keep it with room to spare, so that it does not swing. Pure.

The cost of a replica's steps and the size of a task's requests are measured while serving; the
router weighs a home against another replica with the same numbers.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from server.config.cluster import ReplicasConfig
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

    def seat_s(self) -> float:
        """Seconds of a full replica that one sequence takes in one step."""
        return self.step_s(self.seats) / self.seats


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
        self.recent = (_blended(before[0], rows), _blended(before[1], step_s))
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

    def habits(self) -> dict[str, TaskHabit]:
        """By task, of those that finished a choice."""
        return {
            task: TaskHabit(tokens / finished, tokens / steps if steps else 1.0)
            for task, (finished, tokens, steps) in self._tasks.items()
            if finished > 0.0 and tokens > 0.0
        }


def _blended(before: float, new: float) -> float:
    return before * _KEPT_OF_RECENT + new * (1.0 - _KEPT_OF_RECENT)


# --- how many replicas ----------------------------------------------------------------------------

_PROMPT_TOKENS = 256.0  # of a request that nobody has seen yet
_MAX_ROWS = 512
_STEPS = 64.0


@dataclass(frozen=True, slots=True)
class Work:
    """Of one model, now. num_running: sequences that hold a seat. num_queued: requests that have
    none. queued_rows: prompt tokens of those. costs: of a step; None before one was measured.
    max_rows: in a step. steps: of an output."""

    num_running: float = 0.0
    num_queued: float = 0.0
    queued_rows: float = 0.0
    costs: StepCosts | None = None
    max_rows: int = _MAX_ROWS
    steps: float = _STEPS

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits and nothing runs."""
        return self.num_running <= 0.0 and self.num_queued <= 0.0 and self.queued_rows <= 0.0


def first_token_s(work: Work, num: float, seat_load: float = 1.0) -> float:
    """Seconds until the last request of the queue has its first token, on `num` replicas. Falls
    with num, rises with all that waits or runs."""
    costs = work.costs or StepCosts()
    seats = max(1.0, costs.seats * seat_load)
    running = min(work.num_running / num, costs.seats)
    room = max(1.0, work.max_rows - running)  # rows of a step that prompts get
    rows = work.queued_rows / num
    num_steps = max(1.0, rows / room)
    prefill_s = num_steps * (costs.base_s + running * costs.row_s) + rows * costs.row_s
    turns = max(0.0, (work.num_running + work.num_queued) / num - seats) / seats
    return prefill_s + turns * work.steps * costs.step_s(costs.seats)


def replicas_for(work: Work, current: int, config: ReplicasConfig) -> int:
    """How many replicas there should be, of those that the config allows. current: how many there
    are.

    More work never gives fewer, a tighter target never gives fewer.
    """
    if work.is_idle:
        return config.min
    least, most, scaling = max(1, config.min), config.most, config.scaling
    current = min(max(current, least), most)

    def fewest(low: int, high: int, target_s: float) -> int:
        """Of low..high, those that hold the target; high where none does."""
        seconds = partial(first_token_s, work, seat_load=scaling.seat_load)
        among = range(low, high)
        return low + bisect.bisect_left(among, True, key=lambda num: seconds(num) <= target_s)

    if first_token_s(work, current, scaling.seat_load) > scaling.first_token_s:
        return fewest(current, most, scaling.first_token_s)
    return fewest(least, current, scaling.first_token_s * (1.0 - scaling.spare))


def work_of(told: Mapping[str, Mapping[Any, float]], num_waiting_outside: float) -> Work:
    """The sum over replicas. told: what replicas tell (EngineReplica.work), by name, then by
    replica. num_waiting_outside: requests that no replica has taken yet; each counts as long as
    prompts are on average.
    """
    running, waiting = _sum(told, "num_running"), _sum(told, "num_waiting")
    prompt = _mean(told, "prompt_tokens") or _PROMPT_TOKENS
    base_s = _mean(told, "base_s")
    costs = None
    if base_s > 0.0:
        seats = max(1, round(_mean(told, "seats")))
        costs = StepCosts(base_s, max(0.0, _mean(told, "row_s")), seats)
    return Work(
        num_running=running,
        num_queued=waiting + max(0.0, num_waiting_outside),
        queued_rows=_sum(told, "waiting_rows") + max(0.0, num_waiting_outside) * prompt,
        costs=costs,
        max_rows=max(1, round(_mean(told, "max_rows") or _MAX_ROWS)),
        steps=max(1.0, _mean(told, "steps") or _STEPS),
    )


def _sum(told: Mapping[str, Mapping[Any, float]], name: str) -> float:
    return math.fsum(max(0.0, value) for value in told.get(name, {}).values())


def _mean(told: Mapping[str, Mapping[Any, float]], name: str) -> float:
    """Of the replicas that know it."""
    known = [value for value in told.get(name, {}).values() if value > 0.0]
    return math.fsum(known) / len(known) if known else 0.0


class WorkPolicy:
    """replicas_for as a policy of Serve's autoscaler, whose context it is called with. config: a
    ReplicasConfig's fields. Serve waits with what it says, up and down, as its config says."""

    def __init__(self, **config: Any) -> None:
        self._config = ReplicasConfig.model_validate(config)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """(replicas, state to keep). context: ray.serve.config.AutoscalingContext."""
        told = context.aggregated_metrics or {}
        outside = float(context.total_queued_requests or 0.0)
        if context.current_num_replicas == 0:  # it sleeps, or those that were asked for start
            waits = outside > 0.0 or float(context.total_num_requests) > 0.0
            return max(int(waits), context.target_num_replicas), {}
        if not told.get("seats"):  # a replica is there and has told nothing yet
            return context.target_num_replicas, {}
        return replicas_for(work_of(told, outside), context.target_num_replicas, self._config), {}
