"""The cells of a load test: one server, one level, one round; how they are planned and run.

A trace (`loadtest.load --trace`) is a file of JSON lines in one of two forms:

    {"at_s": 0.31, "task": "squad", "max_tokens": 32}    and optionally "prompt"
    a line of Tailor's own log (`tailor serve --log-format json`), event "request"

Of a log line the arrival is `timestamp` - `duration_ms`, the task `task`, and the length
`completion_tokens`; a log holds no prompts, so they are drawn from the data set that stands for the
task. Other lines of a log, and requests that brought no token, are left out.

The parts of a server's decode step come from two readings of its /metrics while streams decode.
`outside` is the wall time between steps (channel, API, sockets, idle), `overhead` all that is not
the model: wall - model. Steps with prompts in them are left out, as the readings lie between the
last stream's first token and the end of the first stream that ends.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import re
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from loadtest.peer import (
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
class Arrival:
    """One request of a trace. at_s: seconds after the first one.

    task: a data set or a task, "" for whatever the mix draws. prompt: None to draw one.
    max_tokens: None for the load's own limit.
    """

    at_s: float
    task: str = ""
    prompt: str | None = None
    max_tokens: int | None = None


def read_trace(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first `limit` arrivals by time; the first is at 0.

    Raises OSError, and ValueError with file and line for what is neither form, or for no request.
    """
    found: list[Arrival] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                arrival = _arrival(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path.name}:{number}: no arrival: {error}") from None
            if arrival is not None:
                found.append(arrival)
    if not found:
        raise ValueError(f"{path.name}: no request")
    found.sort(key=lambda arrival: arrival.at_s)
    first_s = found[0].at_s
    return [replace(arrival, at_s=arrival.at_s - first_s) for arrival in found[:limit]]


def _arrival(entry: dict[str, Any]) -> Arrival | None:
    if "at_s" in entry:
        unknown = entry.keys() - {"at_s", "task", "prompt", "max_tokens"}
        if unknown:
            raise ValueError(f"unknown member {sorted(unknown)[0]!r}")
        prompt, num_tokens = entry.get("prompt"), entry.get("max_tokens")
        if num_tokens is not None and int(num_tokens) < 1:
            raise ValueError("max_tokens wants at least 1")
        return Arrival(
            float(entry["at_s"]),
            str(entry.get("task", "")),
            None if prompt is None else str(prompt),
            None if num_tokens is None else int(num_tokens),
        )
    if entry.get("event") != "request" or not entry.get("completion_tokens"):
        if "event" in entry:
            return None
        raise ValueError("neither at_s nor an event")
    ended = datetime.datetime.fromisoformat(entry["timestamp"])
    return Arrival(
        ended.timestamp() - entry["duration_ms"] / 1e3,
        str(entry["task"]),
        None,
        int(entry["completion_tokens"]),
    )


SERIES = ("step_time", "step_model_time", "propose_time", "step_host_time")
_SAMPLE = re.compile(r"^tailor_(\w+?)_seconds_(sum|count)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
_ROWS = re.compile(r"^tailor_step_rows_sum(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def parse_steps(metrics: str) -> dict[str, float]:
    """Sums over all engines: `num_steps`, `rows` and the seconds of each of SERIES."""
    found = dict.fromkeys(SERIES, 0.0) | {"num_steps": 0.0}
    for name, kind, value in _SAMPLE.findall(metrics):
        if kind == "sum" and name in SERIES:
            found[name] += float(value)
        elif kind == "count" and name == "step_time":
            found["num_steps"] += float(value)
    found["rows"] = sum(float(value) for value in _ROWS.findall(metrics))
    return found


def per_step(before: dict[str, float], after: dict[str, float], wall_s: float) -> dict[str, float]:
    """Mean milliseconds a step between two readings of parse_steps, wall_s apart.

    Raises ValueError when no step was made.
    """
    steps = after["num_steps"] - before["num_steps"]
    if steps <= 0:
        raise ValueError("no step between the two readings")
    mean = {name: (after[name] - before[name]) / steps for name in (*SERIES, "rows")}
    wall = wall_s / steps
    return {
        "num_steps": steps,
        "rows": mean["rows"],
        "wall_ms": 1000 * wall,
        "step_ms": 1000 * mean["step_time"],
        "model_ms": 1000 * mean["step_model_time"],
        "drafter_ms": 1000 * mean["propose_time"],
        "host_ms": 1000 * mean["step_host_time"],
        "outside_ms": 1000 * (wall - mean["step_time"]),
        "overhead_ms": 1000 * (wall - mean["step_model_time"]),
        "overhead_share": (wall - mean["step_model_time"]) / wall,
    }


class StepWatch:
    """Reads a server's /metrics twice while `num_streams` streams decode."""

    def __init__(self, client: httpx.AsyncClient, url: str, num_streams: int) -> None:
        self._client, self._url, self._num_waiting = client, url, num_streams
        self._readings: list[asyncio.Task[tuple[dict[str, float], float]]] = []

    def began(self) -> None:
        """A stream has its first token."""
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self._readings.append(asyncio.create_task(self._read()))

    def ended(self) -> None:
        """A stream has ended."""
        if len(self._readings) == 1:
            self._readings.append(asyncio.create_task(self._read()))

    async def found(self) -> dict[str, float] | None:
        """`per_step`; None where the streams did not decode together, or the server has no such
        metrics."""
        if len(self._readings) < 2:
            return None
        (before, began_s), (after, ended_s) = await asyncio.gather(*self._readings)
        try:
            return per_step(before, after, ended_s - began_s)
        except ValueError:
            return None

    async def _read(self) -> tuple[dict[str, float], float]:
        response = await self._client.get(f"{self._url}/metrics")
        return parse_steps(response.text), time.perf_counter()


KV_USAGE = re.compile(r"^(?:tailor_|vllm:)kv_cache_usage_perc(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Level:
    """One load level: N clients (closed loop), requests a second, or a trace at so many times its
    own speed (open loop). share: of the first server's capacity that `rate` is, where it was
    given so."""

    concurrency: int | None = None
    rate: float | None = None
    speed: float | None = None
    share: float | None = None

    @property
    def label(self) -> str:
        if self.speed is not None:
            return f"trace x{self.speed:g}"
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
    max_tokens: int
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
    """What one server did at one level in one round; written by run_cell only.

    answers: in the order in which they ended. foreign_cores: cores that others used meanwhile
    (CpuMeter). cpu_s: of the server's processes; None where they cannot be read. kv_usage_after:
    the server's KV use once it was idle (fixed prompts); None for a server without that metric.
    steps: the parts of its decode steps, where they were read (loadtest.cells).
    """

    server: str
    level: Level
    round_id: int
    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    foreign_cores: float = 0.0
    cpu_s: float | None = None
    kv_usage_after: float | None = None
    steps: dict[str, float] | None = None

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
    now, times = 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        times.append(now)
    return times


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of every level, the same for all servers.

    examples: the draws of the mix, or fixed prompts. tasks: the task of a data set, where it has
    one. trace: the arrivals that a `speed` level replays, with the example of each. wave: fixed
    prompts only: a cell has one request for each client, and at least so many, the prompts in turn.
    fresh: a round has so many of the examples, the next ones; the first example is for warming up.
    reads_steps: whether a cell with one request for each client reads the parts of decode steps.
    """

    examples: Sequence[Example]
    max_tokens: int
    tasks: Mapping[str, str] = field(default_factory=dict)
    trace: Sequence[tuple[Arrival, Example]] = ()
    wave: int | None = None
    fresh: int | None = None
    reads_steps: bool = False

    def asks(self, level: Level, round_id: int) -> list[Ask]:
        """What a cell sends, in order of time."""
        if level.speed is not None:
            return [
                Ask(
                    example,
                    self.tasks.get(example.task, ""),
                    arrival.max_tokens or self.max_tokens,
                    arrival.at_s / level.speed,
                )
                for arrival, example in self.trace
            ]
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
            Ask(example, self.tasks.get(example.task, ""), self.max_tokens, due_s)
            for example, due_s in zip(examples, due, strict=True)
        ]


def trace_examples(
    arrivals: Sequence[Arrival],
    draw: Callable[[Mapping[str, float], int], Sequence[Example]],
    weights: Mapping[str, float],
    tasks: Mapping[str, str],
) -> list[tuple[Arrival, Example]]:
    """Each arrival with its own prompt, or one drawn from its data set, or from the whole mix.

    draw: (weights, number) -> examples. An arrival's task is a data set of the mix, or what `tasks`
    sends one as. Raises ValueError for another.
    """
    sets = {task: name for name, task in tasks.items()} | {name: name for name in weights}
    wanted: dict[str, int] = {}
    for arrival in arrivals:
        if arrival.prompt is None:
            wanted[arrival.task] = wanted.get(arrival.task, 0) + 1
    drawn = {}
    for task, number in wanted.items():
        if task and task not in sets:
            raise ValueError(
                f"the trace has requests of {task!r}: say with --as DATASET={task} "
                "which data set of --mix stands for it"
            )
        chosen = {sets[task]: 1.0} if task else weights
        drawn[task] = iter(draw(chosen, number))
    return [
        (
            arrival,
            next(drawn[arrival.task])
            if arrival.prompt is None
            else Example(sets.get(arrival.task, arrival.task), "", arrival.prompt, ""),
        )
        for arrival in arrivals
    ]


def parse_kv_usage(metrics: str) -> float | None:
    """The highest KV usage of all engines in a Prometheus text; None when it has none."""
    found = [float(value) for value in KV_USAGE.findall(metrics)]
    return max(found) if found else None


async def kv_usage_when_idle(client: httpx.AsyncClient, url: str, wait_s: float) -> float | None:
    """KV use once it is 0, or what it still is after wait_s; None without such a metric."""
    deadline = time.monotonic() + wait_s
    while True:
        response = await client.get(f"{url}/metrics")
        usage = parse_kv_usage(response.text) if response.status_code == 200 else None
        if usage is None or usage == 0.0 or time.monotonic() > deadline:
            return usage
        await asyncio.sleep(0.2)


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
    salt: str,
    reads_steps: bool = False,
) -> Cell:
    """Send every request at this level; failures are booked, not raised."""
    cell = Cell(peer.name, level, round_id)
    together = reads_steps and peer.dialect == "tailor" and level.concurrency == len(asks)
    watch = StepWatch(client, peer.url, len(asks)) if together else None

    async def one(index: int, due_s: float | None) -> None:
        ask = asks[index]
        tailor = peer.dialect == "tailor"
        body = request_body(
            peer.dialect, (tailor and ask.task) or peer.model, ask.example.prompt,
            max_tokens=ask.max_tokens, salt=f"{salt}-{index}", extra=peer.extra,
        )  # fmt: skip
        if tailor:
            body["include_speculation"] = True
        late = 0.0 if due_s is None else max(0.0, time.perf_counter() - due_s)
        try:
            timing = await stream(
                client, peer.url, body, on_first_token=None if watch is None else watch.began
            )
        except (ServerRefused, httpx.HTTPError) as error:
            reason = f"{ask.example.task}: {error or type(error).__name__}"
            cell.failures.append(reason[:200])
            return
        if watch is not None:
            watch.ended()
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
    if watch is not None:
        cell.steps = await watch.found()
    return cell


@asynccontextmanager
async def flooded(peer: Peer) -> AsyncIterator[None]:
    """While this lasts, the peer's `flood` key asks for 256 prompts with 128 choices each, in one
    request after the other. Begins once some of them were answered. Raises PeerFailed when the
    server refuses it, httpx.HTTPError."""
    if not peer.flood:
        yield
        return
    body = {
        "model": peer.model, "prompt": ["a"] * 256, "n": 128, "max_tokens": 1, "temperature": 1.0,
        "stream": True,
    }  # fmt: skip
    begun = asyncio.Event()
    headers = {"authorization": f"Bearer {peer.flood}"}

    async def flood() -> None:
        async with httpx.AsyncClient(timeout=900.0, headers=headers) as client:
            while True:
                async with client.stream(
                    "POST", f"{peer.url}/v1/completions", json=body
                ) as response:
                    if response.status_code != 200:
                        text = (await response.aread())[:300].decode(errors="replace")
                        raise PeerFailed(f"{peer.name} refuses the flood: {text}")
                    async for _ in response.aiter_lines():
                        begun.set()

    flooding = asyncio.create_task(flood())
    waiting = asyncio.create_task(begun.wait())
    try:
        await asyncio.wait({flooding, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if flooding.done():
            flooding.result()
        yield
    finally:
        for task in (flooding, waiting):
            task.cancel()
        await asyncio.gather(flooding, waiting, return_exceptions=True)


async def capacity(
    peer: Peer, num_clients: int, plan: Plan, conduct: Conduct, console: Console
) -> float:
    """Requests a second that a server answers in a closed loop of so many clients: the median of
    the rounds. Raises PeerFailed when a request fails."""
    cells: list[Cell] = []
    await measure([peer], [Level(concurrency=num_clients)], plan, conduct, cells, console)
    for cell in cells:
        if cell.failures:
            raise PeerFailed(f"{peer.name}: {cell.failures[0]}")
    return statistics.median(len(cell.answers) / cell.wall_s for cell in cells)


class IdleShares:
    """CPU that the servers used while it was another one's turn."""

    def __init__(self, meter: CpuMeter) -> None:
        self._meter = meter
        self._cpu_s: dict[str, float] = {}
        self._wall_s: dict[str, float] = {}

    def book(self, busy: Peer, before: Mapping[str, float], wall_s: float) -> None:
        """A turn of `busy` has ended; `before` is the meter's reading at its beginning."""
        name = busy.process_name
        for other, used_s in self._meter.read().items():
            if other != name and other in before:
                self._cpu_s[other] = self._cpu_s.get(other, 0.0) + used_s - before[other]
                self._wall_s[other] = self._wall_s.get(other, 0.0) + wall_s

    def shares(self) -> dict[str, float]:
        """Cores of each server, of those that could be read."""
        return {name: round(s / self._wall_s[name], 4) for name, s in self._cpu_s.items()}


async def measure(
    peers: Sequence[Peer],
    levels: Sequence[Level],
    plan: Plan,
    conduct: Conduct,
    cells: list[Cell],
    console: Console,
) -> dict[str, float]:
    """Fills `cells` as they are made, so that an interrupted measurement keeps what it has.

    Warm-ups are left out. Returns each server's CPU share while it was others' turn.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    salt = f"{time.time_ns():x}"
    meter = CpuMeter(peers)
    idle = IdleShares(meter)
    async with httpx.AsyncClient(timeout=900.0, limits=limits, auth=ServerKeys(peers)) as client:

        async def quietest(peer: Peer, level: Level, round_id: int) -> Cell:
            kept: Cell | None = None
            for attempt in range(conduct.num_tries):
                before, foreign, began = meter.read(), meter.foreign_s(), time.perf_counter()
                # The same salt for on and off would let the second one read the first one's
                # prefixes: one salt per cell.
                async with flooded(peer):
                    cell = await run_cell(
                        client, peer, level, round_id, plan.asks(level, round_id),
                        salt=peer.salt(f"{salt}-{round_id}-{level.label}-{attempt}"),
                        reads_steps=plan.reads_steps,
                    )  # fmt: skip
                wall_s, used = time.perf_counter() - began, meter.read()
                process = peer.process_name
                if process in before and process in used:
                    cell.cpu_s = used[process] - before[process]
                cell.foreign_cores = max(0.0, (meter.foreign_s() - foreign) / wall_s)
                idle.book(peer, before, wall_s)
                if plan.wave is not None:
                    cell.kv_usage_after = await kv_usage_when_idle(client, peer.url, 5.0)
                if kept is None or cell.foreign_cores < kept.foreign_cores:
                    kept = cell
                if len(peers) > 1:
                    await asyncio.sleep(conduct.pause_s)
                if cell.foreign_cores <= conduct.max_foreign:
                    break
            assert kept is not None
            return kept

        with Progress(console=console) as progress:
            total = conduct.num_rounds * len(levels) * len(peers)
            bar = progress.add_task("cells", total=total)
            first = plan.asks(levels[0], -1)[: conduct.num_warmups]
            for peer in peers if first else ():
                one = Level(concurrency=levels[0].concurrency or 1)
                await run_cell(client, peer, one, -1, first, salt=peer.salt(f"{salt}-warm"))
            for round_id in range(conduct.first_round, conduct.first_round + conduct.num_rounds):
                for level in levels:
                    for peer in shuffled(peers, round_id, level.label):
                        progress.update(bar, description=f"{peer.name} {level.label}")
                        cells.append(await quietest(peer, level, round_id))
                        progress.update(bar, advance=1)
    return idle.shares()
