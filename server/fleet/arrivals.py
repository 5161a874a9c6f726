"""Arrivals of a request log, for the capacity model.

A server whose log.format is json writes a line a request when it ends: `event` "request", when,
how long it took, its task, model and numbers of tokens; never what it said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime

from server.errors import ConfigError
from server.fleet.simulation import Arrival


def arrivals_of(lines: Iterable[str], model: str, *, load: float = 1.0) -> list[Arrival]:
    """The requests for one model, ascending; the first is at 0. Lines of other kinds are skipped.

    load: how many times as fast they come. Raises ConfigError where there is none.
    """
    found: list[tuple[float, str, int, int]] = []
    for line in lines:
        arrival = _arrival_of(line, model)
        if arrival is not None:
            found.append(arrival)
    if not found:
        raise ConfigError(
            f"the log has no request for the model {model}; is it a JSON log (log.format: json)?"
        )
    found.sort()
    first_s = found[0][0]
    return [
        Arrival((at_s - first_s) / load, task, num_prompt, num_output)
        for at_s, task, num_prompt, num_output in found
    ]


def _arrival_of(line: str, model: str) -> tuple[float, str, int, int] | None:
    """(when it came, task, prompt tokens, output tokens) of one request with an output."""
    try:
        told = json.loads(line)
        if told.get("event") != "request" or told.get("model") != model:
            return None
        ended_s = datetime.fromisoformat(told["timestamp"]).timestamp()
        num_prompt, num_output = int(told["prompt_tokens"]), int(told["completion_tokens"])
        arrived_s = ended_s - float(told["duration_ms"]) / 1e3
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return None if num_output < 1 else (arrived_s, str(told["task"]), num_prompt, num_output)
