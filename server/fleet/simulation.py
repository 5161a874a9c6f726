"""The capacity model: simulates a fleet with measured step costs and real arrivals.

    simulation = Simulation(table.cost, num_replicas=4, max_rows=512, routing=numbers)
    outcome = simulation.run(arrivals)          # seconds of each request, load of each replica
    replicas_for(arrivals, 1.0, simulate)       # how many replicas hold this p95

Each replica makes steps as the engine does: those that run get their tokens, prompts get rows that
are left (up to a bound where somebody runs), and the step takes what the cost table says. The
router is the fleet's own (routing.TaskRouting). Not simulated: prefix caches beyond what the router
knows, preemption, failures. All times are simulated, except the CPU time of the router's choices.
"""

from __future__ import annotations

import gc
import heapq
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from server.fleet.costs import StepCosts, TaskHabit
from server.fleet.routing import Job, ReplicaView, TaskRouting
from server.fleet.scaling import ReplicaWork
from server.fleet.simulated_scaling import SimulatedScaling

StepCost = Callable[[float, float], float]
"""(rows, keys attended to over all rows) -> seconds of a step; engine.budget.CostTable.cost."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. at_s: seconds from the trace's beginning."""

    at_s: float
    task: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class RoutingNumbers:
    """The routing section of cluster.yaml, and how many ingresses share it."""

    num_routers: int = 1
    target_load: float = 0.7
    cold_cost: float = 0.3


@dataclass(slots=True)
class Outcome:
    """The result of a trace. Seconds by request, in order of arrival; busy_s by replica.

    route_s: CPU seconds that the router took, by request. num_away: requests that ran away from
    their task's homes. state_bytes: what the router remembers at the end.
    """

    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    route_s: list[float] = field(default_factory=list)
    num_away: int = 0
    seconds: float = 0.0
    state_bytes: int = 0
    changes: list[tuple[float, int]] = field(default_factory=list)
    """With an autoscaler: (seconds, replicas from then on)."""

    @property
    def load(self) -> float:
        """Share of the time in which a replica made steps, on average."""
        return sum(self.busy_s) / (len(self.busy_s) * max(self.seconds, 1e-9))

    @property
    def imbalance(self) -> float:
        """The busiest replica's seconds over the mean."""
        mean = sum(self.busy_s) / len(self.busy_s)
        return max(self.busy_s) / mean if mean > 0.0 else 1.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of them do not exceed; 0.0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


class _Run:
    """A request on its way."""

    __slots__ = ("arrival", "index", "left", "steps")

    def __init__(self, index: int, arrival: Arrival, steps: int) -> None:
        self.index = index
        self.arrival = arrival
        self.left = max(1, arrival.num_prompt_tokens)
        self.steps = steps


class _Replica:
    """One engine: what waits, what is read, and in which step each of those that run is over."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: deque[_Run] = deque()
        self.reading: deque[_Run] = deque()
        self.running: list[tuple[int, int, _Run]] = []
        self.num_steps = 0
        self.num_open = 0
        self.busy_s = 0.0
        self.keys = 0.0
        self.is_stepping = False

    def begin(self, seats: int, max_rows: int, prefill_rows: int) -> tuple[int, list[_Run]]:
        """(rows of the next step, requests whose prompt ends in it)."""
        while self.waiting and len(self.running) + len(self.reading) < seats:
            self.reading.append(self.waiting.popleft())
        rows, read = len(self.running), []
        if rows:
            max_rows = min(max_rows, rows + prefill_rows)
        while self.reading and rows < max_rows:
            run = self.reading[0]
            chunk = min(run.left, max_rows - rows)
            run.left -= chunk
            rows += chunk
            if run.left:
                break
            read.append(self.reading.popleft())
        return rows, read


class Simulation:
    """See the top of this file. One run at a time.

    step_cost: of the engine. num_replicas: of them. seats, max_rows: server.yaml's
    engine.max_num_seqs and max_num_batched_tokens. prefill_rows: most prompt rows of a step in
    which others decode; None for half of max_rows, as in EngineSettings. habit: tokens that a step
    gives a sequence (its output_tokens are the trace's own). overhead_s: what ingress and network
    add to a first token.
    """

    def __init__(
        self,
        step_cost: StepCost,
        *,
        num_replicas: int,
        seats: int = 64,
        max_rows: int = 512,
        prefill_rows: int | None = None,
        habit: TaskHabit | None = None,
        routing: RoutingNumbers | None = None,
        overhead_s: float = 0.0,
    ) -> None:
        self._seconds = [step_cost(float(rows), 0.0) for rows in range(max_rows + 1)]
        self._key_s = max(0.0, step_cost(1.0, 1e6) - self._seconds[1]) / 1e6
        self._seats = seats
        self._max_rows = max_rows
        self._prefill_rows = prefill_rows or max(16, max_rows // 2)
        self._tokens_a_step = 1.0 if habit is None else max(1.0, habit.tokens_a_step)
        self._numbers = routing or RoutingNumbers()
        self._overhead_s = overhead_s
        self._names = [f"replica-{i}" for i in range(num_replicas)]
        one, many = self._seconds[1], self._seconds[min(max_rows, max(2, seats))]
        row_s = max(0.0, many - one) / max(1, min(max_rows, max(2, seats)) - 1)
        self._costs = StepCosts(max(1e-9, one - row_s), row_s, seats)
        self._now_s = 0.0

    def run(
        self, arrivals: Sequence[Arrival], seed: int = 0, scaling: SimulatedScaling | None = None
    ) -> Outcome:
        """Play a trace, ascending in time, until its last request has ended. scaling: a new one; it
        says which replicas there are, in place of num_replicas."""
        outcome = Outcome([0.0] * len(arrivals), [0.0] * len(arrivals))
        numbers = self._numbers
        self._now_s = 0.0
        routing = TaskRouting(
            num_routers=numbers.num_routers,
            target_load=numbers.target_load,
            cold_cost=numbers.cold_cost,
            clock=lambda: self._now_s,
            chance=random.Random(seed),
        )
        names = self._names if scaling is None else scaling.names
        routing.set_replicas(names)
        routing.habits = _habits_of(arrivals, self._tokens_a_step)
        replicas = {name: _Replica(name) for name in names}
        views = {name: ReplicaView(0, self._costs) for name in names}
        ends: list[tuple[float, int, _Replica, list[_Run]]] = []
        order = 0
        coming = iter(enumerate(arrivals))
        following = next(coming, None)
        while following is not None or ends:
            soonest_s = min(
                following[1].at_s if following else math.inf, ends[0][0] if ends else math.inf
            )
            if scaling is not None and scaling.next_s <= soonest_s:
                self._look(scaling, routing, views, replicas)
                continue
            if following is not None and (not ends or following[1].at_s <= ends[0][0]):
                index, arrival = following
                self._now_s = arrival.at_s
                replica = self._place(index, arrival, routing, views, replicas, outcome)
                following = next(coming, None)
            else:
                self._now_s, _, replica, read = heapq.heappop(ends)
                self._end_step(replica, read, outcome)
                replica.is_stepping = False
            if replica.name in views:  # it has not been given up
                views[replica.name] = ReplicaView(replica.num_open, self._costs)
            if not replica.is_stepping and replica.num_open:
                order += 1
                step_s, read = self._begin_step(replica)
                heapq.heappush(ends, (self._now_s + step_s, order, replica, read))
        outcome.busy_s = [replica.busy_s for replica in replicas.values()]
        outcome.seconds = self._now_s - (arrivals[0].at_s if arrivals else 0.0)
        outcome.state_bytes = _size_of(routing)
        outcome.changes = [] if scaling is None else scaling.changes
        return outcome

    # -- parts -----------------------------------------------------------------------------

    def _look(
        self,
        scaling: SimulatedScaling,
        routing: TaskRouting,
        views: dict[str, ReplicaView],
        replicas: dict[str, _Replica],
    ) -> None:
        """The autoscaler looks; replicas come, or get nothing more and end what they have."""
        self._now_s = scaling.next_s
        habits = routing.habits.values()
        steps = sum(habit.steps for habit in habits) / max(1, len(habits))
        works = {name: self._work(replicas[name], steps) for name in scaling.names}
        if scaling.look(self._now_s, works):
            routing.set_replicas(scaling.names)
            for name in views.keys() - set(scaling.names):
                del views[name]
            for name in scaling.names:
                replicas.setdefault(name, _Replica(name))
                views.setdefault(name, ReplicaView(0, self._costs))

    def _work(self, replica: _Replica, steps: float) -> ReplicaWork:
        """What a replica reports. steps: of an output."""
        waiting_rows = sum(run.left for run in replica.waiting)
        return ReplicaWork(
            num_running=len(replica.running) + len(replica.reading),
            num_waiting=len(replica.waiting),
            waiting_rows=waiting_rows,
            base_s=self._costs.base_s,
            row_s=self._costs.row_s,
            seats=self._seats,
            max_rows=self._max_rows,
            steps=steps,
            prompt_tokens=waiting_rows / max(1, len(replica.waiting)),
        )

    def _place(
        self,
        index: int,
        arrival: Arrival,
        routing: TaskRouting,
        views: dict[str, ReplicaView],
        replicas: dict[str, _Replica],
        outcome: Outcome,
    ) -> _Replica:
        """A request arrives and goes to the replica that the router chooses."""
        job = Job(arrival.task, arrival.num_prompt_tokens, max(1, arrival.num_output_tokens))
        began_s = time.thread_time()
        name = routing.choose(job, views)[0]
        routing.routed(job, name, self._costs)
        outcome.route_s.append(time.thread_time() - began_s)
        is_home = name in routing.ranking(job.task, routing.num_homes(job.task))
        outcome.num_away += not is_home
        num_tokens = max(1, arrival.num_output_tokens)
        slower = 1.0 if is_home else 1.0 + self._numbers.cold_cost
        # Away from home fewer drafts come true; a step gives one token all the same.
        steps = min(num_tokens, math.ceil(num_tokens / self._tokens_a_step * slower))
        replica = replicas[name]
        replica.waiting.append(_Run(index, arrival, steps))
        replica.num_open += 1
        return replica

    def _begin_step(self, replica: _Replica) -> tuple[float, list[_Run]]:
        rows, read = replica.begin(self._seats, self._max_rows, self._prefill_rows)
        step_s = self._seconds[rows] + self._key_s * replica.keys
        replica.is_stepping = True
        replica.busy_s += step_s
        return step_s, read

    def _end_step(self, replica: _Replica, read: list[_Run], outcome: Outcome) -> None:
        """The step's tokens are there: first ones of prompts that ended, last ones of others."""
        replica.num_steps += 1
        replica.keys += len(replica.running) * self._tokens_a_step
        told_s = self._now_s + self._overhead_s
        for run in read:
            outcome.first_s[run.index] = told_s - run.arrival.at_s
            over = replica.num_steps + run.steps - 1
            heapq.heappush(replica.running, (over, run.index, run))
            replica.keys += run.arrival.num_prompt_tokens
        while replica.running and replica.running[0][0] <= replica.num_steps:
            _, index, run = heapq.heappop(replica.running)
            outcome.total_s[index] = told_s - run.arrival.at_s
            replica.num_open -= 1
            held = run.arrival.num_prompt_tokens + (run.steps - 1) * self._tokens_a_step
            replica.keys = max(0.0, replica.keys - held)


def replicas_for(
    arrivals: Sequence[Arrival], p95_s: float, simulate: Callable[[int], Outcome]
) -> tuple[int, Outcome] | None:
    """The fewest replicas whose first token comes within p95_s for 95 % of a trace's requests, and
    their Outcome; None where more replicas do not help. simulate: simulates the trace with so
    many."""
    low, num = 0, 1
    outcome = simulate(num)
    while (told_s := percentile(outcome.first_s, 95)) > p95_s:
        low, num = num, num * 2
        if num > 2 * len(arrivals):
            return None
        outcome = simulate(num)
        if percentile(outcome.first_s, 95) > max(p95_s, 0.999 * told_s):
            return None
    while num - low > 1:
        middle = (low + num) // 2
        tried = simulate(middle)
        if percentile(tried.first_s, 95) > p95_s:
            low = middle
        else:
            num, outcome = middle, tried
    return num, outcome


def synthetic(
    rate: float, seconds: float, num_tasks: int, *, prompt: int = 256, output: int = 64
) -> Iterator[Arrival]:
    """Arrivals at random, `rate` a second, of tasks of which the k-th gets 1/k of the first one's;
    lengths are between half and one and a half of what is given. The same ones each time."""
    chance = random.Random(7)
    shares = [1.0 / (k + 1) for k in range(num_tasks)]
    tasks = chance.choices(range(num_tasks), shares, k=max(1, int(rate * seconds * 1.2) + 10))
    at_s = 0.0
    for task in tasks:
        at_s += chance.expovariate(rate)
        if at_s > seconds:
            return
        long, short = (round(mean * (0.5 + chance.random())) for mean in (prompt, output))
        yield Arrival(at_s, f"task-{task}", max(1, long), max(1, short))


def _habits_of(arrivals: Sequence[Arrival], tokens_a_step: float) -> dict[str, TaskHabit]:
    """The habits that the fleet's replicas would have reported for these tasks."""
    sums: dict[str, list[float]] = {}
    for arrival in arrivals:
        pair = sums.setdefault(arrival.task, [0.0, 0.0])
        pair[0] += arrival.num_output_tokens
        pair[1] += 1.0
    return {
        task: TaskHabit(max(1.0, tokens / num), tokens_a_step)
        for task, (tokens, num) in sums.items()
    }


def _size_of(routing: TaskRouting) -> int:
    """Bytes of everything that a router holds, each object once."""
    seen: set[int] = set()
    left: list[object] = [vars(routing)]
    size = 0
    while left:
        one = left.pop()
        is_code = isinstance(one, type) or callable(one) or isinstance(one, random.Random)
        if id(one) in seen or is_code:
            continue
        seen.add(id(one))
        size += sys.getsizeof(one)
        left.extend(gc.get_referents(one))
    return size
