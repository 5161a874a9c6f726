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
    faults      2,000 requests in flight, half of them streams, while the fleet is updated, an
                engine hangs, and an engine, a replica, Ray's head and a node die: none lost, none
                answered twice, texts those of a single server

Prints a table, then ends in one JSON line. Exits 1 when a goal is missed.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from loadtest.completion import stream
from loadtest.fleet_faults import measure_faults
from loadtest.fleet_process import FleetProcess
from loadtest.fleet_scaling import measure_scaling
from loadtest.fleet_traffic import NUM_TASKS, FleetOptions, body, generated, many
from loadtest.options import ResultOptions, emit, program, run
from server.machine_code import make_ready

app = program("fleet", __doc__)
SEATS = 16  # of the tests' engine
GOALS = {"linear": 0.95, "p50_ms": 3.0, "p95_ms": 8.0, "cached": 1.3, "accepted": 1.3}
NUM_ANSWERS = 12
"""Answers that a task gives, the k-th of them 1/k times as often as the first."""


async def throughput(url: str, num_replicas: int, seconds: float) -> float:
    """Tokens a second while every seat of every replica is taken."""
    ended = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=many()) as client:

        async def ask(i: int) -> None:
            while not ended.is_set():
                answer = await client.post("/v1/completions", json=body(i % NUM_TASKS, [60], 30))
                answer.raise_for_status()

        asking = [asyncio.create_task(ask(i)) for i in range(2 * SEATS * num_replicas)]
        await asyncio.sleep(5.0)
        loop = asyncio.get_running_loop()
        before, began_s = await generated(client), loop.time()
        await asyncio.sleep(seconds)
        after, took_s = await generated(client), loop.time() - began_s
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
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=many()) as client:

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
    for part, name, at_least in (
        ("throughput", "linear", True),
        ("ingress", "p50_ms", False),
        ("ingress", "p95_ms", False),
        ("routing", "cached", True),
        ("routing", "accepted", True),
    ):
        if part not in told:
            continue
        value, goal = told[part][name], GOALS[name]
        if (value < goal) if at_least else (value > goal):
            missed.append(f"{part} {name}: {value:.3f}, goal {goal}")
    for name, num in told.get("faults", {}).items():
        if name.startswith("num_") and num:
            missed.append(f"faults {name}: {num}, goal 0")
    return missed


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
