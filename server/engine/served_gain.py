"""What drafts gain, measured: the same prompts served with drafts and without, a few in turn.

Two engines over one runner, each as an engine is after a start: nothing is cached, nothing was
learned, no scope's drafts were judged. The first prompts of both are therefore what the first
requests of a server are, and answers are learned as a task's are. They take turns of TURN prompts
a client, so that what else the machine does meets both sides; each turn begins with nothing cached,
because the two write over each other's blocks.

A request's seconds are its shares of the steps that it was open in, so that their spread tells how
far the gain of other prompts may lie from this one (server.engine.forecast.ratio_error).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from server.engine.engine import Engine
from server.engine.forecast import ratio_error
from server.engine.task_store import TaskStore
from server.types import Delta, Request, SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from drafters.base import Drafter
    from server.engine.step_times import CostTable
    from server.engine.stops import StopTable

MakeDrafter = Callable[[str, str, SpeculationParams, "TaskStore | None"], "Drafter"]
"""(drafter's name, task, speculation, what was learned) -> Drafter, as the server makes it."""

TURN = 8
"""Prompts of a turn for each client."""


@dataclass(slots=True)
class Served:
    """How one engine answered. outputs, seconds: by prompt. num_steps: of all choices, the one that
    ends a prompt not counted; num_nodes: that were drafted in all of them. host_s: of the seconds,
    those outside the model. sources: accepted nodes by source."""

    outputs: list[list[int]]
    seconds: list[float]
    num_steps: int = 0
    num_nodes: int = 0
    host_s: float = 0.0
    sources: dict[str, int] = field(default_factory=dict)

    def note(self, deltas: Iterable[Delta]) -> set[int]:
        """What a step emitted. Returns the prompts that are answered. Raises RuntimeError."""
        ended = set()
        for delta in deltas:
            if delta.finish_reason in ("error", "abort"):
                raise RuntimeError(delta.error or delta.finish_reason)
            at, counts = int(delta.request_id), delta.counts
            self.outputs[at] += delta.token_ids
            self.num_steps += counts.num_steps
            self.num_nodes += counts.num_drafted
            for source, _, kept in counts.by_source:
                self.sources[source] = self.sources.get(source, 0) + kept
            if delta.finish_reason is not None:
                ended.add(at)
                self.num_steps -= 1
        return ended

    @property
    def tokens_per_step(self) -> float:
        """As drafters.replay counts them."""
        return sum(len(output) - 1 for output in self.outputs) / max(1, self.num_steps)

    @property
    def nodes_per_step(self) -> float:
        """Over the same steps."""
        return self.num_nodes / max(1, self.num_steps)


@dataclass(frozen=True, slots=True)
class Gain:
    """Both sides of the same prompts, and how many requests were open at once."""

    plain: Served
    drafted: Served
    num_clients: int

    @property
    def speedup(self) -> float:
        """Seconds without drafts over seconds with them."""
        return sum(self.plain.seconds) / sum(self.drafted.seconds)

    @property
    def error(self) -> float:
        """Standard error of the speedup, by the prompts' own spread."""
        return ratio_error(self.plain.seconds, self.drafted.seconds)


@dataclass(frozen=True, slots=True)
class GainMeter:
    """What both sides share. engine: its runner, settings and model are used, and what it has
    cached is dropped; it must be idle. cost: what the sides' budgets begin with; copies of it are
    refreshed. task: whose requests they are. fingerprint: of the tokenizer. stop_table: for stop
    strings, as the engine's."""

    engine: Engine
    make_drafter: MakeDrafter
    cost: CostTable
    task: str
    sampling: SamplingParams
    fingerprint: str
    stop_table: StopTable | None = None

    def measure(
        self,
        prompts: Sequence[Sequence[int]],
        speculation: SpeculationParams,
        *,
        num_clients: int = 1,
        most_s: float = math.inf,
    ) -> Gain:
        """Serve prompts, num_clients at once, until all are answered or most_s seconds are over
        (then as many turns as there were). Raises RuntimeError for a request that fails, and
        ValueError without a prompt."""
        if not prompts:
            raise ValueError("no prompts to serve")
        sides = _Side(self, SpeculationParams()), _Side(self, speculation)
        began = time.monotonic()
        turn = TURN * num_clients
        try:
            for first in range(0, len(prompts), turn):
                if first and time.monotonic() - began > most_s:
                    break
                for side in sides:
                    side.answer(prompts[first : first + turn], num_clients)
        finally:
            for side in sides:
                side.close()
            self.engine.pool.drop_cache()
        return Gain(sides[0].served, sides[1].served, num_clients)


class _Side:
    """An engine over the meter's runner, and what it has answered."""

    def __init__(self, meter: GainMeter, speculation: SpeculationParams) -> None:
        memory = TaskStore(None, fingerprint=meter.fingerprint)
        self._meter, self._speculation, self._memory = meter, speculation, memory

        def make(task: str, asked: SpeculationParams) -> Drafter:
            return meter.make_drafter(asked.drafter, task, asked, memory)

        self._engine = Engine(
            meter.engine.runner,
            {speculation.drafter: make},
            meter.engine.settings,
            stop_table=meter.stop_table,
            cost=copy.deepcopy(meter.cost),
            memory=memory,
        )
        self.served = Served([], [])

    def close(self) -> None:
        """Forget what was learned."""
        self._memory.close()

    def answer(self, prompts: Sequence[Sequence[int]], num_clients: int) -> None:
        """Answer further prompts, so many at once. Raises RuntimeError for one that fails."""
        engine, served = self._engine, self.served
        engine.pool.drop_cache()
        first = len(served.outputs)
        served.outputs += [[] for _ in prompts]
        served.seconds += [0.0] * len(prompts)
        waiting = list(enumerate(prompts, first))[::-1]
        opened: set[int] = set()
        while waiting or opened:
            began = time.perf_counter()
            while waiting and len(opened) < num_clients:
                at, prompt = waiting.pop()
                engine.submit(self._request(at, prompt))
                opened.add(at)
            deltas = engine.step()
            share_s = (time.perf_counter() - began) / len(opened)
            for at in opened:
                served.seconds[at] += share_s
            served.host_s += engine.stats().host_s
            opened -= served.note(deltas)

    def _request(self, at: int, prompt: Sequence[int]) -> Request:
        meter = self._meter
        room = meter.engine.info.max_model_len - len(prompt)
        sampling = replace(
            meter.sampling,
            max_tokens=min(meter.sampling.max_tokens, room),
            seed=(meter.sampling.seed + at) % (1 << 63),
        )
        return Request(
            request_id=str(at),
            task=meter.task,
            model=meter.engine.info.name,
            prompt_ids=tuple(prompt),
            sampling=sampling,
            speculation=self._speculation,
            arrival_s=time.monotonic(),
        )
