"""The simulator part of loadtest.fleet: one trace of arrivals on a fleet and in the capacity model.

The engines sleep for each step, as long as its rows ask; what they tell of their steps is what the
model is given. So what differs is what the model leaves out: HTTP, Ray, and how long a request
takes from there to the engine and back, of which the model is told one number, measured alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
from rich.console import Console

from loadtest.fleet_process import FleetProcess
from loadtest.fleet_traffic import FleetOptions, body, first_tokens, many, percentile, streamed
from server.fleet.costs import CostMeter, StepCosts
from server.fleet.simulation import Arrival, Outcome, Simulation, synthetic

NUM_REPLICAS, SEATS, MAX_ROWS = 3, 16, 128
STEP_S, ROW_S = 0.03, 0.0005
RATE, SECONDS, NUM_TASKS = 12.0, 25.0, 12


async def play(url: str, arrivals: list[Arrival]) -> tuple[list[float], list[float], float]:
    """(seconds to each first token, to each end, of them all) on a fleet."""
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=many()) as client:
        began_s = time.perf_counter()

        async def ask(arrival: Arrival) -> tuple[float, float]:
            task = int(arrival.task.rpartition("-")[2])
            await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.perf_counter()))
            prompt = [50 + (task + k * 7) % 300 for k in range(arrival.num_prompt_tokens)]
            prompt[0] = 50 + int(arrival.at_s * 1e3) % 300  # nothing of it is in a prefix cache
            _, first_s, total_s = await streamed(
                client, body(task, prompt, arrival.num_output_tokens)
            )
            return first_s, total_s

        times = await asyncio.gather(*(ask(arrival) for arrival in arrivals))
        took_s = time.perf_counter() - began_s - arrivals[0].at_s
    return [first for first, _ in times], [total for _, total in times], took_s


def step_costs(fleet: FleetProcess, meter: CostMeter) -> None:
    """What the replicas' steps took, for the meter."""
    for rows, step_s in json.loads(fleet.ask("steps", "STEPS")):
        meter.observe(rows, step_s)


def measured_overhead_s(fleet: FleetProcess) -> float:
    """What a first token takes beside its step, where nothing else runs."""
    [alone] = first_tokens([fleet.url], 20)
    return max(0.0, percentile(alone, 50) / 1e3 - STEP_S - ROW_S)


def measure_simulator(
    fleet: FleetProcess, console: Console, options: FleetOptions
) -> dict[str, Any]:
    """Simulated over measured, of first tokens, whole answers and tokens a second."""
    del options
    fleet.deploy(
        "--replicas", str(NUM_REPLICAS), "--step-s", str(STEP_S), "--row-s", str(ROW_S)
    )  # fmt: skip
    arrivals = list(synthetic(RATE, SECONDS, NUM_TASKS, prompt=40, output=32))
    meter = CostMeter()

    async def both() -> tuple[list[float], list[float], float]:
        playing = asyncio.create_task(play(fleet.url, arrivals))
        while not playing.done():
            await asyncio.wait({playing}, timeout=0.5)
            await asyncio.to_thread(step_costs, fleet, meter)
        return playing.result()

    overhead_s = measured_overhead_s(fleet)
    first_s, total_s, took_s = asyncio.run(both())
    costs = meter.costs(SEATS)
    if costs is None:
        raise RuntimeError("no replica told what a step costs")
    simulated = simulate(arrivals, costs, overhead_s)
    told: dict[str, Any] = {
        "base_ms": costs.base_s * 1e3,
        "row_ms": costs.row_s * 1e3,
        "overhead_ms": overhead_s * 1e3,
    }
    for name, theirs, ours in (
        ("first", simulated.first_s, first_s),
        ("total", simulated.total_s, total_s),
    ):
        for percent in (50, 95):
            model, measured = percentile(theirs, percent), percentile(ours, percent)
            told[f"{name}_p{percent}"] = model / measured
            console.print(
                f"{name} p{percent}: simulated {model * 1e3:.0f} ms, measured "
                f"{measured * 1e3:.0f} ms, {model / measured:.2f} x"
            )
    told["throughput"] = took_s / simulated.seconds
    console.print(f"tokens a second: {told['throughput']:.2f} x")
    return told


def simulate(arrivals: list[Arrival], costs: StepCosts, overhead_s: float) -> Outcome:
    """The trace in the capacity model."""

    def cost(rows: float, _: float) -> float:
        return costs.step_s(rows) if rows else 0.0

    return Simulation(
        cost, num_replicas=NUM_REPLICAS, seats=SEATS, max_rows=MAX_ROWS, overhead_s=overhead_s
    ).run(arrivals)
