"""Picklable factories: what a composition root gives to start_process, with a FakeRunner."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from server.engine.batch import Batch
from server.engine.engine import Engine
from server.engine.process import EngineFactory
from tests.engine.requests import engine_over
from tests.fakes.fake_drafters import random_drafter
from tests.fakes.fake_runner import FakeModel


def _always_fail(batch: Batch) -> None:
    raise RuntimeError("the device is gone")


def _hang(batch: Batch) -> None:
    if 9 in batch.token_ids:
        time.sleep(3600)


_FAILURES = {"": None, "always": _always_fail, "hang": _hang}


def _raise(payload: Any) -> Any:
    raise ValueError("no such corpus")


def build(step_s: float = 0.0, fail: str = "", device: str = "cpu") -> Engine:
    """An engine over FakeModel(16, seed=5) with a drafter "d" and controls of its own."""
    engine, _ = engine_over(
        FakeModel(16, seed=5), {"d": random_drafter(1, 16)}, num_blocks=256, max_model_len=512,
        device=device, step_s=step_s, fail=_FAILURES[fail],
    )  # fmt: skip
    engine.controls |= {
        "echo": lambda payload: payload,
        "fail": _raise,
        "odd": lambda payload: object(),
        "long": lambda _: lambda: threading.current_thread().name,
    }
    return engine


def refuse() -> Engine:
    """A factory whose model cannot be loaded."""
    raise ValueError("the model is unsupported")


def factory(**fields: Any) -> EngineFactory:
    """build() with fields, picklable."""
    return partial(build, **fields)
