"""`tailor serve` in the process of a test, which has imported what engines need: another process
would import it again, for seconds. tests/setup/test_serve.py runs it as a person does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from drafters import DRAFTER_NAMES
from server.api.engines.client import EngineSpec
from server.commands.cli import main
from server.engine.engine import Engine
from server.wiring.engine import build_engine
from server.wiring.server import ServerPlan
from tests.api.live import LiveServer
from tests.fakes.engine_thread import start_thread


@contextlib.contextmanager
def serve_here(*words: str) -> Iterator[LiveServer]:
    """What the command serves with these words, on a port that is free, with a small KV cache."""
    plans: list[ServerPlan] = []

    def planned(plan: ServerPlan, listener: socket.socket, **_: Any) -> int:
        listener.close()
        plans.append(plan)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.wiring.server.run_server", planned)
        patch.setattr("server.engine.process.EngineProcess", lambda imports: None)
        assert main(["serve", "--port", "0", "--kv-cache-memory", "64MiB", *words]) == 0
    (plan,) = plans
    specs = []
    for order in plan.orders:
        engine = build_engine(order)  # no server waits for it
        start = partial(start_thread, partial(_made, engine))
        specs.append(EngineSpec(order.name, order.runner.name, order.runner.device, start))
    with LiveServer(
        specs,
        config=plan.config, tasks=plan.tasks, models=plan.models, drafters=DRAFTER_NAMES,
        task_admin=plan.task_set,
    ) as server:  # fmt: skip
        yield server


def _made(engine: Engine) -> Engine:
    return engine
