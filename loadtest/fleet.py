"""What a fleet gives: throughput by replicas, what an ingress costs, and what task routing saves.

    python -m loadtest.fleet                    # all three, some three minutes on two cores
    python -m loadtest.fleet --only ingress     # one of: throughput, ingress, routing

The engines are the real Engine on a runner that sleeps for each step instead of computing, so that
the machine's cores do not bound what is measured; they live in the tests (tests.fleet.run_fleet).
Needs Ray.

    throughput  tokens a second of 1, 2 and 3 replicas whose seats are full; of 1, so many times
    ingress     first tokens of a fleet of one replica against one server with the same engine, in
                turn: the difference of their medians and of their 95th percentiles
    routing     24 tasks with long templates on 3 replicas, whose KV caches hold a third of them:
                cached prompt tokens and accepted tokens a step, routed by task and by Ray Serve

Prints a table, then ends in one JSON line. Exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from drafters import make_drafter
from loadtest import machine
from loadtest.options import add_result_options, emit, refuse_busy_machine
from loadtest.peer import free_port

ROOT = Path(__file__).resolve().parent.parent
SEATS = 16  # of the tests' engine
NUM_TASKS = 24
GOALS = {"linear": 0.95, "p50_ms": 3.0, "p95_ms": 8.0, "cached": 1.3}
_START_S = 150.0


@dataclass(frozen=True, slots=True)
class Server:
    """A fleet or a single server that listens."""

    url: str


@contextlib.contextmanager
def started(*options: str) -> Iterator[Server]:
    """tests.fleet.run_fleet with these options, until the end. Raises TimeoutError."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fleet.run_fleet", str(port), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        end_s = time.monotonic() + _START_S
        for line in process.stdout:
            if line.startswith("READY"):
                break
            if time.monotonic() > end_s:
                raise TimeoutError("the fleet does not start")
        else:
            raise TimeoutError("the fleet ended before it was ready")
        told = line.split()
        yield Server(f"http://127.0.0.1:{told[1] if len(told) > 1 else port}")
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def body(task: int, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A completion of ids that goes on to its last token."""
    return {
        "model": f"task-{task}", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, **more,
    }  # fmt: skip


async def throughput(server: Server, num_replicas: int, seconds: float) -> float:
    """Tokens a second while every seat of every replica is taken."""
    ended = asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=_many()) as client:

        async def ask(i: int) -> None:
            while not ended.is_set():
                answer = await client.post("/v1/completions", json=body(i % NUM_TASKS, [60], 30))
                answer.raise_for_status()

        asking = [asyncio.create_task(ask(i)) for i in range(2 * SEATS * num_replicas)]
        await asyncio.sleep(6.0)
        before, began_s = await _generated(client), time.monotonic()
        await asyncio.sleep(seconds)
        after, took_s = await _generated(client), time.monotonic() - began_s
        ended.set()
        await asyncio.gather(*asking)
    return (after - before) / took_s


async def _generated(client: httpx.AsyncClient) -> float:
    """Tokens that the ingress has told of so far."""
    lines = (await client.get("/metrics")).text.splitlines()
    told = [line for line in lines if line.startswith("tailor_generation_tokens_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in told)


def first_tokens(servers: list[Server], rounds: int) -> list[list[float]]:
    """Milliseconds to the first token of a stream, `rounds` for each server, in turn."""
    told: list[list[float]] = [[] for _ in servers]
    clients = [httpx.Client(base_url=server.url, timeout=30) for server in servers]
    for i in range(rounds + 5):
        for client, times in zip(clients, told, strict=True):
            began_s = time.perf_counter()
            asked = body(i % NUM_TASKS, [60 + i % 50], 2, stream=True)
            with client.stream("POST", "/v1/completions", json=asked) as answer:
                lines = answer.iter_lines()
                next(line for line in lines if line.startswith("data: {"))
                took_s = time.perf_counter() - began_s
                for _ in lines:
                    pass
            if i >= 5:
                times.append(took_s * 1e3)
    for client in clients:
        client.close()
    return told


async def routed(server: Server, times: int) -> tuple[float, float]:
    """(cached prompt tokens of all prompt tokens, accepted tokens a step) of a mix of tasks."""
    order = [task for task in range(NUM_TASKS) for _ in range(times)]
    random.Random(3).shuffle(order)
    waiting = iter(enumerate(order))
    sums = [0.0] * 4
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=_many()) as client:

        async def ask() -> None:
            for i, task in waiting:
                prompt = [50 + (task * 37 + k * (7 + task)) % 300 for k in range(160)]
                prompt += [50 + (i * 11 + k * 3) % 300 for k in range(16)]
                asked = body(task, prompt, 24, include_speculation=True)
                answer = (await client.post("/v1/completions", json=asked)).json()
                usage, speculation = answer["usage"], answer["speculation"]
                sums[0] += usage["prompt_tokens_details"]["cached_tokens"]
                sums[1] += usage["prompt_tokens"]
                sums[2] += speculation["accepted_tokens"]
                sums[3] += speculation["steps"]

        await asyncio.gather(*(ask() for _ in range(12)))
    return sums[0] / sums[1], sums[2] / max(1.0, sums[3])


def _many() -> httpx.Limits:
    return httpx.Limits(max_connections=512, max_keepalive_connections=512)


def percentile(values: list[float], percent: float) -> float:
    """The value below which `percent` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def measure_throughput(console: Console, seconds: float) -> dict[str, Any]:
    """Tokens a second of 1, 2, 3 replicas."""
    rates = []
    for num in (1, 2, 3):
        with started("--replicas", str(num), "--step-s", "0.1") as server:
            rates.append(asyncio.run(throughput(server, num, seconds)))
        of_one = rates[-1] / rates[0] / num
        console.print(f"{num} replicas: {rates[-1]:7.1f} tokens/s, {of_one:.3f} of linear")
    linear = min(rate / rates[0] / (i + 1) for i, rate in enumerate(rates))
    return {"tokens_per_s": rates, "linear": linear}


def measure_ingress(console: Console, rounds: int) -> dict[str, Any]:
    """What the fleet adds to a first token."""
    step = ("--step-s", "0.03")
    with started("--replicas", "1", *step) as fleet, started("--single", *step) as single:
        times = first_tokens([fleet, single], rounds)
    told: dict[str, Any] = {}
    for percent in (50, 95):
        of_fleet, of_one = (percentile(values, percent) for values in times)
        told[f"p{percent}_ms"] = of_fleet - of_one
        console.print(
            f"first token p{percent}: fleet {of_fleet:.1f} ms, one server {of_one:.1f} ms, "
            f"added {of_fleet - of_one:.1f} ms"
        )
    return told


def measure_routing(console: Console, times: int) -> dict[str, Any]:
    """Cached prompt tokens and accepted tokens a step, by policy."""
    warm_up = getattr(make_drafter("suffix"), "warm_up", None)
    if warm_up is not None:  # compiled once here, not by three replicas while requests wait
        warm_up()
    told: dict[str, Any] = {}
    for policy in ("tasks", "serve"):
        options = ("--replicas", "3", "--step-s", "0.01", "--policy", policy, "--drafts")
        with started(*options) as server:
            told[policy] = asyncio.run(routed(server, times))
        cached, accepted = told[policy]
        console.print(
            f"{policy:5}: {cached:.1%} of prompt tokens cached, {accepted:.2f} accepted/step"
        )
    told["cached"], told["accepted"] = (
        told["tasks"][i] / max(1e-9, told["serve"][i]) for i in range(2)
    )
    console.print(f"by task: {told['cached']:.2f} x cached, {told['accepted']:.2f} x accepted")
    return told


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=("throughput", "ingress", "routing"))
    parser.add_argument("--seconds", type=float, default=15.0, help="of each throughput (15)")
    parser.add_argument("--rounds", type=int, default=150, help="first tokens of each (150)")
    parser.add_argument("--times", type=int, default=16, help="requests of each task (16)")
    add_result_options(parser)
    options = parser.parse_args()
    refuse_busy_machine(options.max_load)
    console = Console(highlight=False)
    told: dict[str, Any] = {}
    if options.only in (None, "throughput"):
        told["throughput"] = measure_throughput(console, options.seconds)
    if options.only in (None, "ingress"):
        told["ingress"] = measure_ingress(console, options.rounds)
    if options.only in (None, "routing"):
        told["routing"] = measure_routing(console, options.times)
    missed = missed_goals(told)
    for goal in missed:
        console.print(f"missed: {goal}")
    emit({"fleet": told, "missed": missed, "machine": machine.describe()}, options.json)
    return 1 if missed else 0


def missed_goals(told: dict[str, Any]) -> list[str]:
    """What lies on the wrong side of GOALS, of what was measured."""
    missed = []
    for part, name, at_least in (
        ("throughput", "linear", True),
        ("ingress", "p50_ms", False),
        ("ingress", "p95_ms", False),
        ("routing", "cached", True),
    ):
        if part not in told:
            continue
        value, goal = told[part][name], GOALS[name]
        if (value < goal) if at_least else (value > goal):
            missed.append(f"{part} {name}: {value:.3f}, goal {goal}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
