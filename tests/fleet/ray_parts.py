"""What fleets of tests are made of: the tests' tokenizer, and the real Engine on the FakeRunner."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from server.api.engines.slot import EngineSpec
from server.config import DEFAULT_TASK, ListenConfig, ServerConfig, TaskConfig
from server.config.cluster import ClusterConfig
from server.engine.host import start_thread
from server.fleet.parts import Front
from server.wiring.task_set import TaskSet
from tests.api.live import PLAIN_TASK, TABLE, served
from tests.api.real_engine import CONTEXT, make_engine

TASKS = tuple(f"task-{i}" for i in range(24))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@dataclass(frozen=True)
class FakeParts:
    """parts.FleetParts over FakeRunners whose steps take step_s seconds.

    more_tasks: a file of further tasks' names, a line each, which a reload reads again.
    """

    server: ServerConfig = field(default_factory=ServerConfig)
    step_s: float = 0.0
    drafts: bool = False
    more_tasks: Path | None = None

    def front(self) -> Front:
        tasks = self.tasks()
        drafters = ("off", "suffix") if self.drafts else ("off",)
        model = served("tiny", CONTEXT)
        admin = TaskSet(
            tasks,
            load=self.tasks,
            models={"tiny": (Path(), TABLE.fingerprint.hex())},
            uploads=None if self.more_tasks is None else self.more_tasks.parent / "uploads",
        )
        return Front(tasks, {"tiny": model}, drafters, admin)

    def tasks(self) -> Mapping[str, TaskConfig]:
        """As they are in the files now."""
        task = PLAIN_TASK
        if not self.drafts:
            off = task.speculation.model_copy(update={"drafter": "off"})
            task = task.model_copy(update={"speculation": off})
        more = () if self.more_tasks is None else self.more_tasks.read_text().split()
        names = (DEFAULT_TASK, *TASKS, *more)
        return {name: task.model_copy(update={"name": name}) for name in names}

    def engine(self, model: str, rank: int, num_cpus: float, num_gpus: float) -> EngineSpec:
        name = f"{model}/{rank}"
        factory = partial(make_engine, step_s=self.step_s, drafts=self.drafts)
        start = partial(start_thread, factory, name=name, device="cpu")
        return EngineSpec(name, model, "cpu", start)


def fake_server(**sections: object) -> ServerConfig:
    """A server.yaml of the model "tiny" on a free port."""
    from server.config import ModelConfig

    return ServerConfig(
        listen=ListenConfig(port=free_port()),
        models=(ModelConfig(name="tiny", path="tiny"),),
        **sections,  # type: ignore[arg-type]
    )


def fake_cluster(
    replicas: int = 2,
    ingresses: int = 1,
    *,
    http: str = "direct",
    policy: str = "tasks",
    own_ports: int | None = None,
) -> ClusterConfig:
    """A cluster.yaml of small replicas."""
    return ClusterConfig.model_validate(
        {
            "server": "server.yaml",
            "ingress": {
                "replicas": ingresses,
                "num_cpus": 0.1,
                "http": http,
                "own_ports": own_ports,
            },
            "replicas": {"min": replicas, "num_cpus": 0.1, "health_check_s": 1.0},
            "routing": {"policy": policy},
        }
    )
