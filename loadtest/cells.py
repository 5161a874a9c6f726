"""The cells of a load test: one server, one level, one round; how they are planned and run."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice

import httpx
from rich.console import Console
from rich.progress import Progress

from loadtest.peer import (
    UNBOUNDED,
    CpuMeter,
    Peer,
    PeerFailed,
    ServerKeys,
    ServerRefused,
    Timing,
    request_body,
    shuffled,
    stream,
)
from loadtest.prompts import Example


@dataclass(frozen=True, slots=True)
class Level:
    """One load level: N clients (closed loop), or requests a second (open loop). share: of the
    first server's capacity that `rate` is, where it was given so."""

    concurrency: int | None = None
    rate: float | None = None
    share: float | None = None

    @property
    def label(self) -> str:
        if self.share is not None:
            return f"{self.share:.0%} of capacity"
        return f"{self.concurrency} clients" if self.rate is None else f"{self.rate:g} req/s"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a cell. due_s: seconds after its start; None: when a client is free.

    task: what a Tailor server gets as `model`; "" for its own model.
    """

    example: Example
    task: str
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered request. index: its place in the cell. late_s: how long after its due time it
    was sent (open loop; else 0)."""

    index: int
    example: Example
    timing: Timing
    late_s: float = 0.0


@dataclass(slots=True)
class Cell:
    """What one server did at one level in one round; written by run_cell and measure only.

    answers: in the order in which they ended. foreign_cores: cores that others, idle servers among
    them, used meanwhile (CpuMeter). cpu_s: of the server's processes; None where they cannot be
    read.
    """

    server: str
    level: Level
    round_id: int
    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    foreign_cores: float = 0.0
    cpu_s: float | None = None

    @property
    def timings(self) -> list[Timing]:
        return [answer.timing for answer in self.answers]

    @property
    def num_tokens(self) -> int:
        return sum(answer.timing.num_tokens for answer in self.answers)

    @property
    def num_chars(self) -> int:
        return sum(len(answer.timing.text) for answer in self.answers)


def arrival_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which requests are due: a Poisson process of `rate` a second."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(num_requests)))


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of every level, the same for all servers.

    examples: the draws of the mix, or fixed prompts. tasks: the task of a data set, where it has
    one. wave: fixed prompts only: a cell has one request for each client, and at least so many, the
    prompts in turn. fresh: a round has so many of the examples, the next ones; the first example is
    for warming up.
    """

    examples: Sequence[Example]
    max_tokens: int
    tasks: Mapping[str, str] = field(default_factory=dict)
    wave: int | None = None
    fresh: int | None = None

    def asks(self, level: Level, round_id: int) -> list[Ask]:
        """What a cell sends, in order of time."""
        examples = self.examples
        if self.wave is not None:
            examples = list(islice(cycle(examples), max(level.concurrency or 1, self.wave)))
        if self.fresh is not None:
            first, rest = examples[:1], examples[1:]
            at = round_id * self.fresh
            examples = [rest[(at + i) % len(rest)] for i in range(self.fresh)]
            examples = first if round_id < 0 else examples
        due: Sequence[float | None] = [None] * len(examples)
        if level.rate is not None:
            due = arrival_times(len(examples), level.rate, round_id)
        return [
            Ask(example, self.tasks.get(example.task, ""), due_s)
            for example, due_s in zip(examples, due, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Conduct:
    """How a measurement is run.

    first_round: the number of the first of its rounds. num_warmups: unmeasured requests a server.
    max_foreign: a cell during which others used more cores than this is run again, num_tries times
    at most, and the least disturbed one is kept; the choice looks at others' CPU time only, never
    at a figure.
    """

    num_rounds: int
    num_warmups: int
    pause_s: float
    max_foreign: float = float("inf")
    num_tries: int = 1
    first_round: int = 0


async def run_cell(
    client: httpx.AsyncClient,
    peer: Peer,
    level: Level,
    round_id: int,
    asks: Sequence[Ask],
    *,
    max_tokens: int,
    salt: str,
) -> Cell:
    """Send every request at this level; failures are booked, not raised."""
    cell = Cell(peer.name, level, round_id)

    async def one(index: int, due_s: float | None) -> None:
        ask = asks[index]
        tailor = peer.dialect == "tailor"
        body = request_body(
            peer.dialect, (tailor and ask.task) or peer.model, ask.example.prompt,
            max_tokens=max_tokens, salt=f"{salt}-{index}", extra=peer.extra,
        )  # fmt: skip
        if tailor:
            body["include_speculation"] = True
        late = 0.0 if due_s is None else max(0.0, time.perf_counter() - due_s)
        try:
            timing = await stream(client, peer.url, body)
        except (ServerRefused, httpx.HTTPError) as error:
            reason = f"{ask.example.task}: {error or type(error).__name__}"
            cell.failures.append(reason[:200])
            return
        if not timing.chunk_s:  # EOS at once: a token that some servers neither show nor count
            timing.num_tokens = max(1, timing.num_tokens)
        cell.answers.append(Answer(index, ask.example, timing, late))

    began = time.perf_counter()
    if level.concurrency is None:
        tasks = []
        for index, ask in enumerate(asks):
            due = began + (ask.due_s or 0.0)
            delay = due - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(one(index, due)))
        await asyncio.gather(*tasks)
    else:
        waiting = iter(range(len(asks)))

        async def a_client() -> None:
            for index in waiting:
                await one(index, None)

        await asyncio.gather(*(a_client() for _ in range(level.concurrency)))
    cell.wall_s = time.perf_counter() - began
    return cell


def refuse_failures(cells: Sequence[Cell]) -> None:
    """Raises PeerFailed for the first request that failed."""
    for cell in cells:
        if cell.failures:
            raise PeerFailed(f"{cell.server}: {cell.failures[0]}")


async def capacity(
    peer: Peer, num_clients: int, plan: Plan, conduct: Conduct, console: Console
) -> float:
    """Requests a second that a server answers in a closed loop of so many clients: the median of
    the rounds. Raises PeerFailed when a request fails."""
    cells: list[Cell] = []
    await measure([peer], [Level(concurrency=num_clients)], plan, conduct, cells, console)
    refuse_failures(cells)
    return statistics.median(len(cell.answers) / cell.wall_s for cell in cells)


async def measure(
    peers: Sequence[Peer],
    levels: Sequence[Level],
    plan: Plan,
    conduct: Conduct,
    cells: list[Cell],
    console: Console,
) -> None:
    """Fills `cells` as they are made, so that an interrupted measurement keeps what it has.
    Warm-ups are left out."""
    salt = f"{time.time_ns():x}"
    meter = CpuMeter(peers)
    auth = ServerKeys(peers)
    async with httpx.AsyncClient(timeout=900.0, limits=UNBOUNDED, auth=auth) as client:

        async def quietest(peer: Peer, level: Level, round_id: int) -> Cell:
            tries: list[Cell] = []
            for attempt in range(conduct.num_tries):
                own_s, foreign_s, began = *meter.read(peer), time.perf_counter()
                # The same salt for on and off would let the second one read the first one's
                # prefixes: one salt per cell.
                cell = await run_cell(
                    client, peer, level, round_id, plan.asks(level, round_id),
                    max_tokens=plan.max_tokens,
                    salt=peer.salt(f"{salt}-{round_id}-{level.label}-{attempt}"),
                )  # fmt: skip
                wall_s, (own_then_s, foreign_then_s) = time.perf_counter() - began, meter.read(peer)
                if own_s is not None and own_then_s is not None:
                    cell.cpu_s = own_then_s - own_s
                cell.foreign_cores = max(0.0, (foreign_then_s - foreign_s) / wall_s)
                tries.append(cell)
                if len(peers) > 1:
                    await asyncio.sleep(conduct.pause_s)
                if cell.foreign_cores <= conduct.max_foreign:
                    break
            return min(tries, key=lambda cell: cell.foreign_cores)

        with Progress(console=console) as progress:
            total = conduct.num_rounds * len(levels) * len(peers)
            bar = progress.add_task("cells", total=total)
            first = plan.asks(levels[0], -1)[: conduct.num_warmups]
            for peer in peers if first else ():
                one = Level(concurrency=levels[0].concurrency or 1)
                await run_cell(
                    client, peer, one, -1, first,
                    max_tokens=plan.max_tokens, salt=peer.salt(f"{salt}-warm"),
                )  # fmt: skip
            for round_id in range(conduct.first_round, conduct.first_round + conduct.num_rounds):
                for level in levels:
                    for peer in shuffled(peers, round_id, level.label):
                        progress.update(bar, description=f"{peer.name} {level.label}")
                        cells.append(await quietest(peer, level, round_id))
                        progress.update(bar, advance=1)
