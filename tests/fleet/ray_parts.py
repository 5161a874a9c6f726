"""What fleets of tests are made of: the tests' tokenizer, and the real Engine on the FakeRunner."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.api.engines.client import EngineSpec
from server.config import DEFAULT_TASK, ServerConfig, TaskConfig
from server.config.cluster import LearningConfig
from server.config.task import SpeculationConfig
from server.engine.engine import Engine
from server.engine.process import EngineFactory, start_process
from server.engine.task_store import TaskStore
from server.fleet.learning.builder import Sharing
from server.fleet.parts import FleetParts, version_of
from server.machine_code import make_ready
from tests.api.real_engine import (
    CONTEXT,
    FINGERPRINT,
    MODEL,
    make_engine,
    make_learning_engine,
    task_drafters,
)
from tests.fakes.engine_thread import start_thread

if TYPE_CHECKING:  # a replica of an engine has no server
    from server.wiring.server import ServerPlan
    from tests.api.live import LiveServer

TASKS = tuple(f"task-{i}" for i in range(24))
CALM = {
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
}
"""Of the environment of Ray's processes: what they do by the clock, which is most of what they do
in a test, they do more seldom."""
DECIDING = 6  # last tokens of a text, which decide how it goes on in an engine that learns


def free_port(num: int = 1) -> int:
    """The first of so many ports that nobody listens on, below those that sockets get."""
    while True:
        first = random.randrange(10_000, 30_000)
        try:
            for port in range(first, first + num):
                with socket.socket() as taken:
                    taken.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def learning_engine(*, step_s: float = 0.0, row_s: float = 0.0) -> Engine:
    """An Engine that drafts from what it has answered. Its texts go on by their last DECIDING
    tokens, so they repeat what was answered after the same end of a prompt, and not themselves."""
    memory = TaskStore(None, fingerprint=FINGERPRINT, build_share=1e9)
    make_ready()
    return make_engine(
        drafters=task_drafters(memory, "auto"),
        memory=memory,
        model={"context": DECIDING, "boost": 12.0},
        step_s=step_s,
        row_s=row_s,
    )


@dataclass(frozen=True)
class FakeParts(FleetParts):
    """Over FakeRunners whose steps take step_s seconds and row_s a row.

    more_tasks: a file of further tasks' names, a line each, which a reload reads again. weights: of
    the engines; other weights are another version, which writes the same here. shared: a folder by
    which the engines learn from each other; then more_tasks draft by `auto` and say learn: persist.
    drafts: the engines draft and learn, each alone (learning_engine). text:
    another one is another model, which writes other texts. processes: each engine has a process of
    its own, as in a real fleet.
    """

    server: ServerConfig = field(default_factory=ServerConfig)
    step_s: float = 0.0
    drafts: bool = False
    more_tasks: Path | None = None
    weights: int = 0
    shared: str | None = None
    row_s: float = 0.0
    text: int = 0
    processes: bool = False

    @property
    def sharing(self) -> Sharing | None:
        if self.shared is None:
            return None
        return Sharing(self.shared, LearningConfig(append_s=0.2, look_s=0.5, publish_s=0.5))

    def prepare(self) -> None:
        """Nothing is to be made."""

    def ingress_version(self) -> str:
        return version_of(self.server.model_dump_json(), self.weights)

    def engine_version(self, model: str) -> str:
        return version_of(self.step_s, self.row_s, self.drafts, self.weights, self.text)

    def plan(self, threads: int | None = None) -> ServerPlan:
        from server.wiring.server import ServerPlan
        from server.wiring.task_set import TaskSet
        from tests.api.live import served

        tasks = self.tasks()
        model = served("tiny", CONTEXT)
        admin = TaskSet(
            tasks,
            load=self.tasks,
            models={"tiny": (Path(), FINGERPRINT)},
            kept=Path("nowhere") if self.more_tasks is None else self.more_tasks.parent,
        )
        return ServerPlan(self.server, tasks, {"tiny": model}, (), admin)

    def tasks(self) -> Mapping[str, TaskConfig]:
        """As they are in the files now."""
        from tests.api.live import PLAIN_TASK

        drafter = "auto" if self.drafts else "off"
        chosen = PLAIN_TASK.speculation.model_copy(update={"drafter": drafter})
        more = () if self.more_tasks is None else self.more_tasks.read_text().split()
        speculation = dict.fromkeys((DEFAULT_TASK, *TASKS, *more), chosen)
        if self.shared is not None:
            learns = SpeculationConfig(drafter="auto", learn="persist")
            speculation |= dict.fromkeys(more, learns)
        return {
            name: PLAIN_TASK.model_copy(update={"name": name, "speculation": one})
            for name, one in speculation.items()
        }

    def engine(self, model: str, rank: int, num_cpus: float, num_gpus: float) -> EngineSpec:
        factory: EngineFactory = self.make
        if self.sharing is not None:
            own = Path(f"{self.shared}-{rank}-{os.getpid()}")
            factory = partial(
                make_learning_engine, self.sharing, own, step_s=self.step_s, model=self.model
            )
        start_one = start_process if self.processes else start_thread
        return EngineSpec(f"{model}/{rank}", model, "cpu", partial(start_one, factory))

    def single(self, config: ServerConfig | None = None) -> LiveServer:
        """One server with the same engine, which a fleet must equal."""
        from drafters import DRAFTER_NAMES
        from tests.api.live import LiveServer

        return LiveServer(
            [self.engine("tiny", 0, 1.0, 0.0)], config=config, max_model_len=CONTEXT,
            tasks=self.tasks(), drafters=DRAFTER_NAMES,
        )  # fmt: skip

    def make(self) -> Engine:
        """One engine."""
        if self.drafts:
            return learning_engine(step_s=self.step_s, row_s=self.row_s)
        return make_engine(step_s=self.step_s, row_s=self.row_s, drafts=False, model=self.model)

    @property
    def model(self) -> dict[str, Any]:
        """FakeModel's."""
        return {**MODEL, "seed": self.text}
