"""The parts of a server's decode step, from two readings of its /metrics while streams decode.

`outside` is the wall time between steps (channel, API, sockets, idle), `overhead` all that is not
the model: wall - model. Steps with prompts in them are left out, as the readings lie between the
last stream's first token and the end of the first stream that ends.
"""

from __future__ import annotations

import asyncio
import re
import time

import httpx

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
