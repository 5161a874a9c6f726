"""The scaling part of loadtest.fleet: a load that steps up and down, on a fleet and in the model.

Replicas come and go by what waits, between one and three; what is told is how many there were over
time and how long whole answers took, of both. The model is given the measured step costs, and the
time that an update took to put a new replica in the place of an old one. When replicas report their
work is chance, so the model is asked for several PHASES of that; a fleet is one draw.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from typing import Any

import httpx
from rich.console import Console

from loadtest.fleet_model import (
    MAX_ROWS,
    NUM_TASKS,
    ROW_S,
    SEATS,
    STEP_S,
    measured_overhead_s,
    play,
    step_costs,
)  # fmt: skip
from loadtest.fleet_process import FleetProcess
from loadtest.fleet_traffic import FleetOptions, percentile
from server.fleet.costs import CostMeter, StepCosts
from server.fleet.scaling import ScalingNumbers
from server.fleet.simulated_scaling import ScalingTimes, SimulatedScaling
from server.fleet.simulation import Arrival, Outcome, Simulation, synthetic

MOST = 3
LOADS = ((20.0, 2.0), (35.0, 16.0), (35.0, 2.0))  # seconds, requests a second
# What tests.fleet.ray_parts.fake_cluster says.
NUMBERS = ScalingNumbers(least=1, most=MOST, first_token_s=0.2)
PHASES = (0.0, 2.5, 5.0, 7.5)
TIMES = ScalingTimes(up_after_s=0.5, down_after_s=1.0, look_back_s=11.0)


def stepped() -> list[Arrival]:
    """The load: each of LOADS after the other."""
    arrivals: list[Arrival] = []
    begins_s = 0.0
    for seconds, rate in LOADS:
        some = synthetic(rate, seconds, NUM_TASKS, prompt=40, output=32)
        arrivals += [replace(arrival, at_s=arrival.at_s + begins_s) for arrival in some]
        begins_s += seconds
    return arrivals


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


def simulate(
    arrivals: list[Arrival], costs: StepCosts, overhead_s: float, times: ScalingTimes
) -> Outcome:
    """The load in the capacity model, with its autoscaler."""

    def cost(rows: float, _: float) -> float:
        return costs.step_s(rows) if rows else 0.0

    return Simulation(
        cost, num_replicas=1, seats=SEATS, max_rows=MAX_ROWS, overhead_s=overhead_s
    ).run(arrivals, scaling=SimulatedScaling(NUMBERS, times))


async def _measure(
    fleet: FleetProcess, arrivals: list[Arrival], meter: CostMeter
) -> tuple[list[float], list[tuple[float, int]]]:
    """(seconds of whole answers, how many replicas there were from when on)."""
    changes: list[tuple[float, int]] = []
    async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as client:
        playing = asyncio.create_task(play(fleet.url, arrivals))
        began_s = time.perf_counter()
        while not playing.done():
            num = num_up((await client.get("/metrics")).text)
            if not changes or changes[-1][1] != num:
                changes.append((time.perf_counter() - began_s, num))
            await asyncio.to_thread(step_costs, fleet, meter)
            await asyncio.wait({playing}, timeout=0.5)
    return playing.result()[1], changes


def measure_scaling(fleet: FleetProcess, console: Console, options: FleetOptions) -> dict[str, Any]:
    """Replicas over time and the 95th percentile of whole answers, simulated and measured."""
    del options
    fleet.deploy(
        "--least", "1", "--replicas", str(MOST), "--step-s", str(STEP_S), "--row-s", str(ROW_S)
    )  # fmt: skip
    began_s = time.perf_counter()
    fleet.ask("update", "UPDATED", 120.0)
    start_s = time.perf_counter() - began_s
    arrivals, meter = stepped(), CostMeter()
    overhead_s = measured_overhead_s(fleet)
    total_s, changes = asyncio.run(_measure(fleet, arrivals, meter))
    costs = meter.costs(SEATS)
    if costs is None:
        raise RuntimeError("no replica told what a step costs")
    simulated = [
        simulate(arrivals, costs, overhead_s, replace(TIMES, start_s=start_s, phase_s=phase_s))
        for phase_s in PHASES
    ]
    until_s = sum(seconds for seconds, _ in LOADS)
    console.print("second   measured   simulated (mean)")
    for when_s in range(0, round(until_s), 5):
        mean = sum(at(outcome.changes, when_s) for outcome in simulated) / len(simulated)
        console.print(f"{when_s:6} {at(changes, when_s):10} {mean:11.2f}")
    told: dict[str, Any] = {"start_s": start_s, "overhead_ms": overhead_s * 1e3}
    told["measured"] = _summary(total_s, changes, until_s)
    told["simulated"] = [_summary(o.total_s, o.changes, until_s) for o in simulated]
    for name, each in (("measured", [told["measured"]]), ("simulated", told["simulated"])):
        for one in each:
            console.print(
                f"{name}: {one['replica_s']:.0f} replica seconds, whole answers p50 "
                f"{one['total_p50_s']:.2f} s, p95 {one['total_p95_s']:.2f} s"
            )
    return told


def _summary(
    total_s: list[float], changes: list[tuple[float, int]], until_s: float
) -> dict[str, Any]:
    return {
        "replicas": changes,
        "replica_s": replica_s(changes, until_s),
        "total_p50_s": percentile(total_s, 50),
        "total_p95_s": percentile(total_s, 95),
    }
