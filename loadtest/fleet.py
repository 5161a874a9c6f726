"""What a fleet gives: throughput, what an ingress costs, what task routing saves, what it survives.

    python -m loadtest.fleet                    # all parts, below seven minutes on two cores
    python -m loadtest.fleet --part ingress     # one of them; repeat for more

The engines are the real Engine on a runner that sleeps for each step instead of computing, so that
the machine's cores do not bound what is measured; they live in the tests (tests.fleet.run_fleet).
All parts run on one Ray of three nodes of this machine. Needs Ray.

    throughput  tokens a second of 1, 2 and 3 replicas whose seats are full; of 1, so many times
    ingress     first tokens of a fleet of one replica against one server with the same engine, in
                turn: the difference of their medians and of their 95th percentiles
    routing     24 tasks with long templates on 3 replicas, whose KV caches hold a third of them and
                which draft from what they have answered: cached prompt tokens and accepted tokens a
                step, counted, routed by task and by Ray Serve
    scaling     a load that steps up and down for 90 s on 1 to 3 replicas: replicas over
                time, and how long whole answers took
    faults      2,000 requests in flight, half of them streams. One after the other the fleet is
                updated, an engine's process halted (SIGSTOP) and another's killed, a replica's
                killed, Ray's head dies and comes back, a node is lost; then the head dies for good
                and fewer requests follow: none lost, none answered twice, texts those of a single
                server

Prints a table, then one JSON line; exits 1 when a goal is missed. Tests use FleetProcess, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
from cyclopts import Parameter
from rich.console import Console

from loadtest.options import ResultOptions, emit, program
from loadtest.peer import UNBOUNDED, ServerRefused, free_port, stream, total
from server.commands.options import as_options
from server.machine_code import make_ready

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def starts_alone() -> Iterator[None]:
    """Only one fleet of this machine's tests starts at a time: Ray's processes wait for each other
    for seconds, which two starts take from each other."""
    with open(Path(tempfile.gettempdir()) / f"tailor-fleets-{os.getuid()}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class FleetProcess:
    """A context manager. options: tests.fleet.run_fleet's, which says what it can be asked. One of
    Ray's ten processes may miss its time on a busy machine: a start that takes longer than start_s
    is ended, all its processes with it, and tried once more."""

    def __init__(self, *options: str, start_s: float = 240.0) -> None:
        self._options = options
        self._start_s = start_s
        self._lines: queue.Queue[str] = queue.Queue()
        self._process: subprocess.Popen[str]
        self.port = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FleetProcess:
        with starts_alone():
            for last in (False, True):
                self._start()
                try:
                    self.port = int(self.wait_for("READY", self._start_s) or self.port)
                    break
                except TimeoutError:
                    self._end()
                    if last:
                        raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(40)
        self._end()

    def ask(self, line: str, answer: str, timeout_s: float = 30.0) -> str:
        """Tell it something; returns the rest of the line that begins with `answer`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.wait_for(answer, timeout_s)

    def deploy(self, *options: str) -> None:
        """Another fleet on the same Ray: run_fleet's options for it."""
        self.ask(f"deploy {shlex.join(options)}", "READY", 2 * self._start_s)

    def wait_for(self, start: str, timeout_s: float) -> str:
        """The rest of the next line that begins so. Raises TimeoutError."""
        said: list[str] = []
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no {start} in {timeout_s} s; it said: {said[-20:]}") from None
            if line.startswith(start):
                return line[len(start) :].strip()
            if line == "":
                raise TimeoutError(f"it ended; it said: {said[-20:]}")
            said.append(line)

    def _start(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "tests.fleet.run_fleet", str(self.port), *self._options]
        self._lines = queue.Queue()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        process, lines = self._process, self._lines
        self._reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        self._reader.start()

    def _end(self) -> None:
        """End every process of its session: Ray's among them."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self._reader.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n") or " ")
    lines.put("")


NUM_TASKS = 24


@as_options
class FleetOptions:
    """Which parts, and how much of each."""

    part: Annotated[tuple[str, ...], Parameter(help="repeat; all without one")] = ()
    seconds: Annotated[float, Parameter(help="of each throughput")] = 10.0
    rounds: Annotated[int, Parameter(help="first tokens of each")] = 150
    times: Annotated[int, Parameter(help="requests of each task")] = 16
    requests: Annotated[int, Parameter(help="in flight with faults")] = 2000


def body(task: int, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A completion of ids that goes on to its last token."""
    return {
        "model": f"task-{task}", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, **more,
    }  # fmt: skip


async def told(client: httpx.AsyncClient, name: str) -> float:
    """What the ingress tells of a series now, over all its labels."""
    return total((await client.get("/metrics")).text, name)


NUM_TEXTS = 200
"""Different requests; each is sent several times."""


def request(i: int) -> dict[str, Any]:
    """The i-th of the different requests: some at temperature 0, the others with a seed."""
    asked = body(i % NUM_TASKS, [60 + (i * 7 + k) % 300 for k in range(8)], 24 + i % 40)
    return asked if i % 3 == 0 else {**asked, "temperature": 0.9, "seed": i}


async def answer(client: httpx.AsyncClient, i: int, is_stream: bool) -> str:
    """The text; raises ServerRefused and httpx.HTTPError where there is none."""
    if is_stream:
        return (await stream(client, "", {**request(i), "stream": True})).text
    response = await client.post("/v1/completions", json=request(i))
    if response.status_code != 200:
        raise ServerRefused(f"status {response.status_code}: {response.text[:200]}")
    text: str = response.json()["choices"][0]["text"]
    return text


async def expected(url: str) -> list[str]:
    """What a single server answers to each request."""
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=UNBOUNDED) as client:
        return await asyncio.gather(*(answer(client, i, False) for i in range(NUM_TEXTS)))


class Flight:
    """num_requests that are open at once, and what has become of them."""

    def __init__(self, url: str, wanted: list[str], num_requests: int) -> None:
        self._url = url
        self._wanted = wanted
        self._num_requests = num_requests
        self.num_answered = 0
        self.num_lost = 0
        self.num_wrong = 0
        self.problems: set[str] = set()

    async def run(self, events: list[tuple[int, Callable[[], object]]]) -> float:
        """All of them; each event, in a thread, when so many are answered. Returns seconds."""
        began_s = time.perf_counter()
        async with httpx.AsyncClient(base_url=self._url, timeout=280, limits=UNBOUNDED) as client:
            asking = [asyncio.create_task(self._ask(client, i)) for i in range(self._num_requests)]
            for when, event in events:
                while self.num_answered + self.num_lost < when:
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(event)
            await asyncio.gather(*asking)
        return time.perf_counter() - began_s

    async def _ask(self, client: httpx.AsyncClient, i: int) -> None:
        which = i % NUM_TEXTS
        try:
            text = await answer(client, which, is_stream=i // NUM_TEXTS % 2 == 1)
        except (ServerRefused, ValueError, httpx.HTTPError) as error:
            self.num_lost += 1
            self.problems.add(f"{type(error).__name__}: {str(error)[:160]}")
            return
        self.num_answered += 1
        if text != self._wanted[which]:
            self.num_wrong += 1
            told = f"{len(text)} characters of {len(self._wanted[which])}"
            self.problems.add(f"{request(which)}: {told}: {text[:40]!r}")


def measure_faults(fleet: FleetProcess, console: Console, options: FleetOptions) -> dict[str, Any]:
    """Requests that were lost, and answers that were not a single server's: none."""
    with FleetProcess("--single") as single:
        wanted = asyncio.run(expected(single.url))
    fleet.deploy("--replicas", "4", "--step-s", "0.03", "--processes")
    num = options.requests
    flight = Flight(fleet.url, wanted, num)
    faults = [
        ("update", "UPDATED", ""),
        ("signal", "SIGNALLED", f" {signal.SIGSTOP.value}"),
        ("signal", "SIGNALLED", f" {signal.SIGKILL.value}"),
        ("kill", "KILLED", ""),
        ("behead", "BEHEADED", ""),
        ("lose", "LOST", ""),
    ]
    events: list[tuple[int, Callable[[], object]]] = [
        (num * (i + 1) // 8, partial(fleet.ask, command + option, answer, 120))
        for i, (command, answer, option) in enumerate(faults)
    ]
    took_s = asyncio.run(flight.run(events))
    # Nobody starts it again now, and Ray's processes go on without it for some time.
    fleet.ask("headless", "HEADLESS")
    headless = Flight(fleet.url, wanted, num // 20)
    headless_s = asyncio.run(headless.run([]))
    for problem in sorted(flight.problems | headless.problems)[:8]:
        console.print(f"not as it should be: {problem}", markup=False)
    for name, one, seconds in (
        ("an update, an engine halted, one killed, a replica, the head, a node", flight, took_s),
        ("without Ray's head", headless, headless_s),
    ):
        console.print(
            f"{name}: {one.num_answered} answered in {seconds:.0f} s, {one.num_lost} lost, "
            f"{one.num_wrong} with another text"
        )
    return {
        "requests": num,
        "seconds": took_s,
        "num_lost": flight.num_lost,
        "num_wrong": flight.num_wrong,
        "num_lost_headless": headless.num_lost,
        "num_wrong_headless": headless.num_wrong,
    }


MOST, SCALED_TASKS = 3, 12
STEP_S, ROW_S = 0.03, 0.0005
LOADS = ((20.0, 2.0), (35.0, 16.0), (35.0, 2.0))  # seconds, requests a second


def arrivals() -> Iterator[tuple[float, int, int, int]]:
    """(seconds from the beginning, task, prompt tokens, output tokens) of each request.

    Each of LOADS after the other, the same ones each time; the k-th task gets 1/k of the first
    one's, lengths are between half and one and a half of 40 and 32 tokens."""
    chance = random.Random(7)
    shares = [1.0 / (k + 1) for k in range(SCALED_TASKS)]
    begins_s = 0.0
    for seconds, rate in LOADS:
        at_s = chance.expovariate(rate)
        while at_s < seconds:
            [task] = chance.choices(range(SCALED_TASKS), shares)
            prompt, output = (round(mean * (0.5 + chance.random())) for mean in (40, 32))
            yield begins_s + at_s, task, prompt, output
            at_s += chance.expovariate(rate)
        begins_s += seconds


async def play(url: str) -> tuple[list[float], list[tuple[float, int]]]:
    """(seconds to the end of each answer, how many replicas there were from when on)."""
    changes: list[tuple[float, int]] = []
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=UNBOUNDED) as client:
        began_s = time.perf_counter()

        async def ask(at_s: float, task: int, num_prompt_tokens: int, num_tokens: int) -> float:
            await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            prompt = [50 + (task + k * 7) % 300 for k in range(num_prompt_tokens)]
            prompt[0] = 50 + int(at_s * 1e3) % 300  # nothing of it is in a prefix cache
            timing = await stream(client, "", body(task, prompt, num_tokens, stream=True))
            return timing.end_s - timing.start_s

        playing = asyncio.gather(*(ask(*arrival) for arrival in arrivals()))
        while not playing.done():
            num = round(await told(client, "tailor_engine_up"))
            if not changes or changes[-1][1] != num:
                changes.append((time.perf_counter() - began_s, num))
            await asyncio.wait({playing}, timeout=0.5)
    return playing.result(), changes


def replica_s(changes: list[tuple[float, int]], until_s: float) -> float:
    """Seconds of replicas, over all of them, in the time from 0."""
    ends = [began_s for began_s, _ in changes[1:]] + [until_s]
    return sum(
        num * max(0.0, min(end_s, until_s) - max(0.0, began_s))
        for (began_s, num), end_s in zip(changes, ends, strict=True)
    )


def measure_scaling(fleet: FleetProcess, console: Console, options: FleetOptions) -> dict[str, Any]:
    """Replicas over time and the seconds of whole answers."""
    del options
    fleet.deploy(
        "--least", "1", "--replicas", str(MOST), "--step-s", str(STEP_S), "--row-s", str(ROW_S)
    )  # fmt: skip
    total_s, changes = asyncio.run(play(fleet.url))
    until_s = sum(seconds for seconds, _ in LOADS)
    for when_s, num in changes:
        console.print(f"{when_s:6.0f} s: {num} replicas")
    told: dict[str, Any] = {
        "replicas": changes,
        "replica_s": replica_s(changes, until_s),
        "total_p50_s": float(np.percentile(total_s, 50)),
        "total_p95_s": float(np.percentile(total_s, 95)),
    }
    console.print(
        f"{told['replica_s']:.0f} replica seconds, whole answers p50 {told['total_p50_s']:.2f} s, "
        f"p95 {told['total_p95_s']:.2f} s"
    )
    return told


app, main = program("fleet", __doc__)
SEATS = 16  # of the tests' engine
GOALS = (
    ("throughput", "linear", 0.95, True),
    ("ingress", "p50_ms", 3.0, False),
    ("ingress", "p95_ms", 8.0, False),
    ("routing", "cached", 1.3, True),
    ("routing", "accepted", 1.3, True),
)
"""Part, figure, its goal, and whether it is the least that is wanted."""
NUM_ANSWERS = 12
"""Answers that a task gives, the k-th of them 1/k times as often as the first."""


async def throughput(url: str, num_replicas: int, seconds: float) -> float:
    """Tokens a second while every seat of every replica is taken."""
    ended = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=UNBOUNDED) as client:

        async def ask(i: int) -> None:
            while not ended.is_set():
                answer = await client.post("/v1/completions", json=body(i % NUM_TASKS, [60], 30))
                answer.raise_for_status()

        asking = [asyncio.create_task(ask(i)) for i in range(2 * SEATS * num_replicas)]
        await asyncio.sleep(5.0)
        loop = asyncio.get_running_loop()
        generated = partial(told, client, "tailor_generation_tokens_total")
        before, began_s = await generated(), loop.time()
        await asyncio.sleep(seconds)
        after, took_s = await generated(), loop.time() - began_s
        ended.set()
        await asyncio.gather(*asking)
    return (after - before) / took_s


async def routed(url: str, times: int) -> tuple[float, float]:
    """(cached prompt tokens of all prompt tokens, accepted tokens a step) of a mix of tasks."""
    chance = random.Random(3)
    order = [task for task in range(NUM_TASKS) for _ in range(times)]
    chance.shuffle(order)
    weights = [1.0 / (k + 1) for k in range(NUM_ANSWERS)]
    ends = chance.choices(range(NUM_ANSWERS), weights, k=len(order))
    waiting = iter(enumerate(zip(order, ends, strict=True)))
    sums = [0.0] * 4
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=UNBOUNDED) as client:

        async def ask() -> None:
            for i, (task, end) in waiting:
                prompt = [50 + (task * 37 + k * (7 + task)) % 300 for k in range(160)]
                prompt += [50 + (i * 11 + k * 3) % 300 for k in range(10)]
                # What decides how the fake model goes on (tests.fleet.ray_parts.DECIDING).
                prompt += [50 + (task * 13 + end * 29 + k) % 300 for k in range(6)]
                asked = body(task, prompt, 32, include_speculation=True)
                answer = (await client.post("/v1/completions", json=asked)).json()
                usage, speculation = answer["usage"], answer["speculation"]
                sums[0] += usage["prompt_tokens_details"]["cached_tokens"]
                sums[1] += usage["prompt_tokens"]
                sums[2] += speculation["accepted_tokens"]
                sums[3] += speculation["steps"]

        await asyncio.gather(*(ask() for _ in range(12)))
    return sums[0] / sums[1], sums[2] / max(1.0, sums[3])


async def first_tokens(urls: list[str], rounds: int) -> list[list[float]]:
    """Milliseconds to the first token of a stream, `rounds` for each server, in turn."""
    told: list[list[float]] = [[] for _ in urls]
    async with httpx.AsyncClient(timeout=30) as client:
        for i in range(rounds + 5):
            for url, times in zip(urls, told, strict=True):
                asked = body(i % NUM_TASKS, [60 + i % 50], 2, stream=True)
                timing = await stream(client, url, asked)
                if i >= 5:
                    times.append(1e3 * timing.ttft_s)
    return told


def measure_throughput(
    fleet: FleetProcess, console: Console, options: FleetOptions
) -> dict[str, Any]:
    """Tokens a second of 1, 2, 3 replicas."""
    rates = []
    for num in (1, 2, 3):
        fleet.deploy("--replicas", str(num), "--step-s", "0.1")
        rates.append(asyncio.run(throughput(fleet.url, num, options.seconds)))
        of_one = rates[-1] / rates[0] / num
        console.print(f"{num} replicas: {rates[-1]:7.1f} tokens/s, {of_one:.3f} of linear")
    linear = min(rate / rates[0] / (i + 1) for i, rate in enumerate(rates))
    return {"tokens_per_s": rates, "linear": linear}


def measure_ingress(fleet: FleetProcess, console: Console, options: FleetOptions) -> dict[str, Any]:
    """What the fleet adds to a first token."""
    fleet.deploy("--replicas", "1", "--step-s", "0.03")
    with FleetProcess("--single", "--step-s", "0.03") as single:
        times = asyncio.run(first_tokens([fleet.url, single.url], options.rounds))
    told: dict[str, Any] = {}
    for percent in (50, 95):
        of_fleet, of_one = (float(np.percentile(values, percent)) for values in times)
        told[f"p{percent}_ms"] = of_fleet - of_one
        console.print(
            f"first token p{percent}: fleet {of_fleet:.1f} ms, one server {of_one:.1f} ms, "
            f"added {of_fleet - of_one:.1f} ms"
        )
    return told


def measure_routing(fleet: FleetProcess, console: Console, options: FleetOptions) -> dict[str, Any]:
    """Cached prompt tokens and accepted tokens a step, by policy."""
    make_ready()  # once here, not by three replicas while requests wait
    told: dict[str, Any] = {}
    for policy in ("tasks", "serve"):
        fleet.deploy("--replicas", "3", "--step-s", "0.01", "--policy", policy, "--drafts")
        told[policy] = asyncio.run(routed(fleet.url, options.times))
        cached, accepted = told[policy]
        console.print(
            f"{policy:5}: {cached:.1%} of prompt tokens cached, {accepted:.2f} accepted/step"
        )
    told["cached"], told["accepted"] = (
        told["tasks"][i] / max(1e-9, told["serve"][i]) for i in range(2)
    )
    console.print(f"by task: {told['cached']:.2f} x cached, {told['accepted']:.2f} x accepted")
    return told


Part = Callable[[FleetProcess, Console, FleetOptions], dict[str, Any]]
PARTS: dict[str, Part] = {
    "throughput": measure_throughput,
    "ingress": measure_ingress,
    "routing": measure_routing,
    "scaling": measure_scaling,
    "faults": measure_faults,  # the last one: of the three nodes it leaves two
}


_FLEET, _RESULTS = FleetOptions(), ResultOptions()


@app.default
def fleet(*, options: FleetOptions = _FLEET, results: ResultOptions = _RESULTS) -> int:
    """Measure the parts on one Ray, print, and compare with the goals."""
    results.refuse_busy_machine()
    console = Console(highlight=False)
    found: dict[str, Any] = {}
    with FleetProcess("--nodes", "3", "--replicas", "1") as process:
        for name, measure in PARTS.items():
            if not options.part or name in options.part:
                found[name] = measure(process, console, options)
    missed = missed_goals(found)
    for goal in missed:
        console.print(f"missed: {goal}")
    emit("fleet", {"fleet": found, "missed": missed}, results.json)
    return 1 if missed else 0


def missed_goals(told: dict[str, Any]) -> list[str]:
    """What lies on the wrong side of GOALS, of what was measured."""
    missed = []
    for part, name, goal, is_least in GOALS:
        value = told.get(part, {}).get(name, goal)
        if (value < goal) if is_least else (value > goal):
            missed.append(f"{part} {name}: {value:.3f}, goal {goal}")
    for name, num in told.get("faults", {}).items():
        if name.startswith("num_") and num:
            missed.append(f"faults {name}: {num}, goal 0")
    return missed


if __name__ == "__main__":
    sys.exit(main())
