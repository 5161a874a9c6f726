"""Requests to a fleet of tests.fleet.run_fleet, and what is read of their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from cyclopts import Parameter

NUM_TASKS = 24


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOptions:
    """Which parts, and how much of each."""

    part: Annotated[tuple[str, ...], Parameter(help="repeat; all without one")] = ()
    seconds: Annotated[float, Parameter(help="of each throughput")] = 10.0
    rounds: Annotated[int, Parameter(help="first tokens of each")] = 150
    times: Annotated[int, Parameter(help="requests of each task")] = 16
    requests: Annotated[int, Parameter(help="in flight with faults")] = 2000


def many() -> httpx.Limits:
    """As many connections as anybody wants."""
    return httpx.Limits(max_connections=4096, max_keepalive_connections=4096)


def body(task: int, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A completion of ids that goes on to its last token."""
    return {
        "model": f"task-{task}", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, **more,
    }  # fmt: skip


async def generated(client: httpx.AsyncClient) -> float:
    """Tokens that the ingress has told of so far."""
    lines = (await client.get("/metrics")).text.splitlines()
    told = [line for line in lines if line.startswith("tailor_generation_tokens_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in told)
