"""Traces of when requests came, for loadtest.load's trace replay.

A trace is a file of JSON lines in one of two forms:

    {"at_s": 0.31, "task": "squad", "max_tokens": 32}    and optionally "prompt"
    a line of Tailor's own log (`tailor serve --log-format json`), event "request"

Of a log line the arrival is `timestamp` - `duration_ms`, the task `task`, and the length
`completion_tokens`; a log holds no prompts, so they are drawn from the data set that stands for the
task. Other lines of a log, and requests that brought no token, are left out.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


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
