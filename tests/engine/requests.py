"""Requests in few words, and what an engine tells of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from server.engine.engine import Engine
from server.engine.task_store import TaskStore
from server.types import Delta, Request, SamplingParams

_SAMPLING = {field.name for field in fields(SamplingParams)}


def request_of(name: str, prompt: Sequence[int] = (3, 4, 5), **given: Any) -> Request:
    """A greedy request of 8 tokens. given: fields of it and of its sampling."""
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    sampling |= {key: given.pop(key) for key in _SAMPLING & given.keys()}
    return Request(name, given.pop("task", "task"), "fake", tuple(prompt),
                   SamplingParams(**sampling), **given)  # fmt: skip


def finish(engine: Engine, *requests: Request, max_steps: int = 1000) -> dict[str, list[Delta]]:
    """Submit and step until nothing is open: all Deltas, by request. The engine's state is checked
    after every step."""
    for request in requests:
        engine.submit(request)
    told: dict[str, list[Delta]] = {}
    for _ in range(max_steps):
        for delta in engine.take_deltas() if not engine.has_work else engine.step():
            told.setdefault(delta.request_id, []).append(delta)
        engine.check()
        if not engine.has_work:
            check_idle(engine)
            return told
    raise AssertionError("the engine makes no progress")


def check_idle(engine: Engine) -> None:
    """Nothing is left of requests that have ended."""
    engine.tend()
    engine.check()
    seats, drafts = engine.gain.seats, engine.drafts
    if not engine.num_open:
        assert len(seats.free) == len(seats.table), "a seat at Gain was not given back"
        assert not drafts.num_open, "a choice that is gone is counted as one that may draft"


def in_the_table_s_time(engine: Engine) -> None:
    """What its steps take on this machine changes nothing."""
    engine.gain.cost.observe = lambda *arguments: None  # type: ignore
    engine.gain.host.observe = lambda *arguments: None  # type: ignore


def settled(memory: TaskStore) -> None:
    """Wait until its queue is empty and every layer that is due is built."""
    done = threading.Event()

    def finish() -> None:
        memory._tend()
        done.set()

    memory._put(finish)
    done.wait(10.0)


def ids_of(deltas: Sequence[Delta]) -> list[int]:
    """The tokens of one choice."""
    return [token for delta in deltas for token in delta.token_ids]
