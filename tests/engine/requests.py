"""Engines and requests in few words, and what an engine tells of them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.engine.task_store import TaskStore
from server.types import Delta, Request, SamplingParams
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info

_SAMPLING = {field.name for field in fields(SamplingParams)}
_SETTINGS = {field.name for field in fields(EngineSettings)}
_INFO = inspect.signature(fake_info).parameters.keys()
_RUNNER = inspect.signature(FakeRunner).parameters.keys()


def engine_over(
    model: FakeModel, drafters: Mapping[str, Any] | None = None, *,
    kind: type[FakeRunner] = FakeRunner, **given: Any,
) -> tuple[Engine, FakeRunner]:  # fmt: skip
    """An engine and its runner. given: fields of fake_info, of EngineSettings (here as there 8
    sequences and 64 rows in a step), and further arguments of FakeRunner and Engine."""
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | given
    sizes = {key: given.pop(key) for key in (_SETTINGS | _INFO) & given.keys()}
    parts = {key: given.pop(key) for key in _RUNNER & given.keys()}
    own = {key: sizes[key] for key in _INFO & sizes.keys()}
    info = fake_info(vocab_size=model.vocab_size, **own)
    runner = kind(model, info, **parts)
    settings = EngineSettings(**{key: sizes[key] for key in _SETTINGS & sizes.keys()})
    return Engine(runner, drafters or {}, settings, **given), runner


def request_of(name: str, prompt: Sequence[int] = (3, 4, 5), **given: Any) -> Request:
    """A greedy request of 8 tokens. given: fields of it and of its sampling."""
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    sampling |= {key: given.pop(key) for key in _SAMPLING & given.keys()}
    return Request(name, given.pop("task", "task"), "fake", tuple(prompt),
                   SamplingParams(**sampling), **given)  # fmt: skip


def finish(engine: Engine, *requests: Request) -> dict[str, list[Delta]]:
    """Submit and step until nothing is open: all Deltas, by request. The engine's state is checked
    after every step."""
    for request in requests:
        engine.submit(request)
    told: dict[str, list[Delta]] = {}
    for _ in range(1000):
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
