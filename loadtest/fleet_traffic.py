"""Requests to a fleet of tests.fleet.run_fleet, and what is read of their answers."""

from __future__ import annotations

import json
import time
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


def percentile(values: list[float], percent: float) -> float:
    """The value below which `percent` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def generated(client: httpx.AsyncClient) -> float:
    """Tokens that the ingress has told of so far."""
    lines = (await client.get("/metrics")).text.splitlines()
    told = [line for line in lines if line.startswith("tailor_generation_tokens_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in told)


def first_tokens(urls: list[str], rounds: int) -> list[list[float]]:
    """Milliseconds to the first token of a stream, `rounds` for each server, in turn."""
    told: list[list[float]] = [[] for _ in urls]
    clients = [httpx.Client(base_url=url, timeout=30) for url in urls]
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


async def streamed(client: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, float, float]:
    """(text, seconds to the first token, seconds to the end) of a stream.

    Raises ValueError for one that does not end as it should, httpx.HTTPError for one that breaks.
    """
    began_s = time.perf_counter()
    text, first_s, num_ends = "", 0.0, 0
    asked = {**asked, "stream": True}
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}")
        async for line in answer.aiter_lines():
            num_ends += line == "data: [DONE]"
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter() - began_s
                told = json.loads(line[6:])
                if "error" in told:
                    raise ValueError(told["error"]["message"])
                text += told["choices"][0]["text"]
    if num_ends != 1:
        raise ValueError(f"{num_ends} ends")
    return text, first_s, time.perf_counter() - began_s
