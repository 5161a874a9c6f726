"""Which replica of a model serves a request: a task has home replicas, and leaves them when that
pays.  What makes a task fast is on the replicas where it ran before: its drafter's corpus and what
was learned, its calibration, its slice of the LM head, the KV blocks of its template. So a task has
home replicas, by rendezvous hashing: a replica that comes or goes moves only the tasks that it is a
home of. A task has as many homes as its load fills. Among the homes, and two others drawn by chance
(power of two choices), the request goes where it costs least: the wait there, the prompt tokens
that are not in the prefix cache, the steps at that replica's measured cost, what it takes from
those that run there, and away from home what the task is slower by.

A choice reads these few only, however many replicas there are; a task's homes are ranked anew when
replicas come or go.

This module does not import Ray; its clock and its random numbers are arguments.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from server.fleet.scaling import StepCosts, TaskHabit

CHUNK = 64
"""Prompt tokens in a link of a prefix chain."""
_MAX_LINKS = 64
_MAX_PLACES = 4  # replicas remembered of a link
_RATE_S = 30.0  # seconds over which a task's load is averaged
_SHRINK = 0.3  # of a home that must be spare before one is given up
_KEPT_HOMES = 16  # of a task's ranking
_DRAWN = 8  # replicas that are drawn by chance: two to compare, the others to try after those

SLOW = 4.0
"""So many times the usual seconds of a step are slow."""
TRIAL_S = 10.0
"""After so long a slow replica gets a request again, whose steps tell how it is now."""


def prefix_chain(scope: str, prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """A hash of each start of a prompt that is a multiple of CHUNK tokens long, shortest first.

    scope: Request.scope; one scope's prompts say nothing about another's.
    """
    links = []
    digest = hashlib.blake2b(scope.encode(), digest_size=8)
    data = array("i", prompt_ids[: CHUNK * _MAX_LINKS]).tobytes()
    size = CHUNK * array("i").itemsize
    for start in range(0, len(data) - size + 1, size):
        digest.update(data[start : start + size])
        links.append(int.from_bytes(digest.copy().digest(), "little"))
    return tuple(links)


@dataclass(frozen=True, slots=True)
class Job:
    """What the router needs of a Request. chain: of its prompt (prefix_chain). avoid: replicas that
    could not serve it just now."""

    task: str
    num_prompt_tokens: int
    max_tokens: int
    num_choices: int = 1
    chain: tuple[int, ...] = ()
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as the router sees it now.

    num_open: requests there, running and waiting. costs: None before it has measured a step.
    is_stuck: whether its engine makes no progress, or is slow: it gets nothing while another does.
    """

    num_open: int = 0
    costs: StepCosts | None = None
    is_stuck: bool = False


class TaskRouting:
    """Chooses replicas. One router of `num_routers` that share a fleet and see a part of it each.

    target_load: the share of a replica that a task may fill before it gets one more home.
    cold_cost: how much longer a task's steps take in all where it is not at home, 0.3 is 30 %.
    """

    def __init__(
        self,
        *,
        num_routers: int = 1,
        target_load: float = 0.7,
        cold_cost: float = 0.3,
        max_links: int = 65536,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        self._num_routers = num_routers
        self._target_load = target_load
        self._cold_cost = cold_cost
        self._max_links = max_links
        self._clock = clock
        self._chance = chance or random.Random()
        self._ids: list[str] = []
        self._there: frozenset[str] = frozenset()
        self._ranked: dict[str, list[str]] = {}  # the best homes of a task
        self._rates: dict[str, tuple[float, float, int]] = {}  # work a second, when, homes
        self._places: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self.habits: Mapping[str, TaskHabit] = {}

    # -- what is there ---------------------------------------------------------------------

    def set_replicas(self, replica_ids: Iterable[str]) -> None:
        """These replicas are there. Rankings are made anew only where the set changed."""
        ids = list(dict.fromkeys(replica_ids))
        there = frozenset(ids)
        if there != self._there:
            self._ranked.clear()
            self._ids, self._there = ids, there

    def ranking(self, task: str, num: int) -> list[str]:
        """The `num` best homes of a task, best first."""
        ranked = self._ranked.get(task)
        if ranked is None or len(ranked) < min(num, len(self._ids)):

            def weight(name: str) -> bytes:
                return hashlib.blake2b(f"{task}\0{name}".encode(), digest_size=8).digest()

            ranked = heapq.nlargest(max(num, _KEPT_HOMES), self._ids, key=weight)
            self._ranked[task] = ranked
        return ranked[:num]

    def num_homes(self, task: str) -> int:
        """How many homes a task's load asks for, as of its last request; at least 1."""
        return min(self._rates.get(task, (0.0, 0.0, 1))[2], max(1, len(self._ids)))

    def matched_tokens(self, job: Job) -> dict[str, int]:
        """Prompt tokens that each replica has seen before, of those that have seen any."""
        matched: dict[str, int] = {}
        for i in range(len(job.chain) - 1, -1, -1):
            for name in self._places.get(job.chain[i], ()):
                if name in self._there:
                    matched.setdefault(name, (i + 1) * CHUNK)
        return matched

    # -- the choice ------------------------------------------------------------------------

    def choose(self, job: Job, view: Callable[[str], ReplicaView | None]) -> list[str]:
        """The replicas to try, best first, none twice: its homes, the one with the longest shared
        start, and some by chance; where there are no more than those, all. One that hangs or is to
        be avoided is among them only where all do or are.

        view: a replica as it is now, None for one that can take no request; asked for few of them.
        """
        matched = self.matched_tokens(job)
        longest = max(matched, key=lambda n: matched[n], default=None)
        at_home = dict.fromkeys(self.ranking(job.task, self.num_homes(job.task)))
        drawn = self._chance.sample(self._ids, min(_DRAWN, len(self._ids)))
        few = dict.fromkeys((*at_home, *drawn))
        if longest is not None:
            few.setdefault(longest)
        seen = {name: v for name in few if (v := view(name)) is not None}
        there = {n: v for n, v in seen.items() if not v.is_stuck and n not in job.avoid}
        if not there:  # all are to be looked at, but this is rare
            every = {name: v for name in self._ids if (v := view(name)) is not None}
            going = {n: v for n, v in every.items() if not v.is_stuck} or every
            there = {n: v for n, v in going.items() if n not in job.avoid} or going
        later = [name for name in there if name not in at_home and name != longest][2:]
        asked = [name for name in there if name not in later]
        usual = _usual([there[name].costs for name in asked])

        def cost_s(name: str) -> float:
            known = matched.get(name, 0)
            return self.cost_s(job, there[name], usual, is_home=name in at_home, matched=known)

        return sorted(asked, key=cost_s) + later  # stable: homes first, in their order

    def cost_s(
        self, job: Job, view: ReplicaView, usual: StepCosts, *, is_home: bool, matched: int = 0
    ) -> float:
        """Seconds that a request takes of its client and of those that run beside it.

        usual: the costs of a replica that has measured none. matched: prompt tokens that it has in
        its prefix cache.
        """
        costs = view.costs or usual
        habit = self._habit(job)
        steps = habit.steps * (1.0 if is_home else 1.0 + self._cold_cost)
        beside = min(view.num_open, costs.seats - 1)
        prefill_s = max(1, job.num_prompt_tokens - matched) * costs.row_s
        decode_s = steps * costs.step_s(beside + job.num_choices)
        turns = max(0, view.num_open + job.num_choices - costs.seats) / costs.seats
        taken_s = beside * (prefill_s + steps * job.num_choices * costs.row_s)
        return turns * decode_s + prefill_s + decode_s + taken_s

    def routed(self, job: Job, replica_id: str, costs: StepCosts | None = None) -> None:
        """A request went to a replica: its prompt will be there, and its task has this load."""
        for link in job.chain:
            before = self._places.pop(link, ())
            new = (replica_id, *(n for n in before if n != replica_id))[:_MAX_PLACES]
            self._places[link] = new
        while len(self._places) > self._max_links:
            self._places.popitem(last=False)
        self._count(job, costs or StepCosts())

    # -- parts -----------------------------------------------------------------------------

    def _habit(self, job: Job) -> TaskHabit:
        habit = self.habits.get(job.task) or TaskHabit()
        return TaskHabit(min(habit.output_tokens, max(1, job.max_tokens)), habit.tokens_a_step)

    def _count(self, job: Job, costs: StepCosts) -> None:
        """The task's load: seconds of a full replica that its requests take in a second."""
        now_s = self._clock()
        rate, then_s, homes = self._rates.get(job.task, (0.0, now_s, 1))
        seat_s = costs.seat_s()
        work_s = (
            job.num_prompt_tokens * costs.row_s + job.num_choices * self._habit(job).steps * seat_s
        )
        rate = rate * math.exp((then_s - now_s) / _RATE_S) + work_s / _RATE_S
        wanted = rate * self._num_routers / self._target_load
        if wanted > homes:
            homes = math.ceil(wanted)
        elif wanted < homes - 1 - _SHRINK:
            homes = max(1, math.ceil(wanted + _SHRINK))
        self._rates[job.task] = (rate, now_s, homes)


class Pace:
    """Which replicas are slow, and get nothing but a trial now and then.

    A slow replica (its machine is busy with something else, its clock is lowered, its memory swaps)
    still answers, so nobody replaces it; but what runs there takes several times as long. Each
    replica's last steps are compared with what steps of as many rows cost at the others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tried_s: dict[str, float] = {}  # of those that are slow

    def read(
        self, recent: Mapping[str, tuple[float, float]], costs: Mapping[str, StepCosts]
    ) -> None:
        """What replicas told last. recent: (rows, seconds) of each one's last steps
        (CostMeter.recent). costs: of all."""
        known = sorted(costs.values(), key=lambda one: one.step_s(8))
        slow: list[str] = []
        if len(known) > 1:
            usual = known[(len(known) - 1) // 2]
            slow = [name for name, (rows, s) in recent.items() if s > SLOW * usual.step_s(rows)]
        if 2 * len(slow) > len(known):  # then it is the others that are fast
            slow = []
        now_s = self._clock()
        self._tried_s = {name: self._tried_s.get(name, now_s) for name in slow}

    def is_out(self, name: str) -> bool:
        """Whether a replica is slow and has no trial now."""
        tried_s = self._tried_s.get(name)
        return tried_s is not None and self._clock() < tried_s + TRIAL_S

    def routed(self, name: str) -> None:
        """A request went to a replica; the next trial of a slow one is later."""
        if name in self._tried_s:
            self._tried_s[name] = self._clock()


def _usual(costs: Sequence[StepCosts | None]) -> StepCosts:
    """The middle of those that are known, for those that are not."""
    known = sorted((c for c in costs if c is not None), key=lambda c: c.step_s(8))
    return known[len(known) // 2] if known else StepCosts()
