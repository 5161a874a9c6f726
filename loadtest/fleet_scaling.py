"""The scaling part of loadtest.fleet: a load that steps up and down.

Replicas come and go by what waits. Told is how many there were over time, and how long whole
answers took. The engines sleep for each step, as long as its rows ask.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from loadtest.completion import stream
from loadtest.fleet_process import FleetProcess
from loadtest.fleet_traffic import FleetOptions, body, many

MOST, NUM_TASKS = 3, 12
STEP_S, ROW_S = 0.03, 0.0005
LOADS = ((20.0, 2.0), (35.0, 16.0), (35.0, 2.0))  # seconds, requests a second


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. at_s: seconds from the beginning."""

    at_s: float
    task: int
    num_prompt_tokens: int
    num_output_tokens: int


def arrivals() -> Iterator[Arrival]:
    """Each of LOADS after the other, the same ones each time; the k-th task gets 1/k of the first
    one's, lengths are between half and one and a half of 40 and 32 tokens."""
    chance = random.Random(7)
    shares = [1.0 / (k + 1) for k in range(NUM_TASKS)]
    begins_s = 0.0
    for seconds, rate in LOADS:
        at_s = chance.expovariate(rate)
        while at_s < seconds:
            [task] = chance.choices(range(NUM_TASKS), shares)
            prompt, output = (round(mean * (0.5 + chance.random())) for mean in (40, 32))
            yield Arrival(begins_s + at_s, task, prompt, output)
            at_s += chance.expovariate(rate)
        begins_s += seconds


async def play(url: str) -> list[float]:
    """Seconds to the end of each answer."""
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=many()) as client:
        began_s = time.perf_counter()

        async def ask(arrival: Arrival) -> float:
            await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.perf_counter()))
            prompt = [50 + (arrival.task + k * 7) % 300 for k in range(arrival.num_prompt_tokens)]
            prompt[0] = 50 + int(arrival.at_s * 1e3) % 300  # nothing of it is in a prefix cache
            asked = body(arrival.task, prompt, arrival.num_output_tokens, stream=True)
            timing = await stream(client, "", asked)
            return timing.end_s - timing.start_s

        return await asyncio.gather(*(ask(arrival) for arrival in arrivals()))


def num_up(metrics: str) -> int:
    """Engine replicas that are up, of what an ingress tells."""
    pattern = r'^tailor_engine_up{engine="tiny/\d+",[^}]*} 1.0$'
    return len(re.findall(pattern, metrics, re.MULTILINE))


def at(changes: list[tuple[float, int]], when_s: float) -> int:
    """How many there were then."""
    return next((num for began_s, num in reversed(changes) if began_s <= when_s), changes[0][1])


def replica_s(changes: list[tuple[float, int]], until_s: float) -> float:
    """Seconds of replicas, over all of them, in the time from 0."""
    ends = [began_s for began_s, _ in changes[1:]] + [until_s]
    return sum(
        num * max(0.0, min(end_s, until_s) - max(0.0, began_s))
        for (began_s, num), end_s in zip(changes, ends, strict=True)
    )


async def _measure(fleet: FleetProcess) -> tuple[list[float], list[tuple[float, int]]]:
    """(seconds of whole answers, how many replicas there were from when on)."""
    changes: list[tuple[float, int]] = []
    async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as client:
        playing = asyncio.create_task(play(fleet.url))
        began_s = time.perf_counter()
        while not playing.done():
            num = num_up((await client.get("/metrics")).text)
            if not changes or changes[-1][1] != num:
                changes.append((time.perf_counter() - began_s, num))
            await asyncio.wait({playing}, timeout=0.5)
    return playing.result(), changes


def measure_scaling(fleet: FleetProcess, console: Console, options: FleetOptions) -> dict[str, Any]:
    """Replicas over time and the seconds of whole answers."""
    del options
    fleet.deploy(
        "--least", "1", "--replicas", str(MOST), "--step-s", str(STEP_S), "--row-s", str(ROW_S)
    )  # fmt: skip
    total_s, changes = asyncio.run(_measure(fleet))
    until_s = sum(seconds for seconds, _ in LOADS)
    for when_s in range(0, round(until_s), 5):
        console.print(f"{when_s:6} s: {at(changes, when_s)} replicas")
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
