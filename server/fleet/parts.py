"""What the replicas of a fleet are made of: the same parts as a single server.

A FleetParts is pickled once and sent to every replica. It holds no weights and no open file; each
replica reads what it needs where it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from server.config import ServerConfig, TaskConfig

if TYPE_CHECKING:
    from server.api.engines.slot import EngineSpec
    from server.api.engines.supervisor import RestartPolicy
    from server.api.served_model import ServedModel
    from server.fleet.changes import FollowedAdmin


@dataclass(frozen=True, slots=True)
class Front:
    """What an ingress needs beside its engines: see create_app."""

    tasks: Mapping[str, TaskConfig]
    models: Mapping[str, ServedModel]
    drafters: tuple[str, ...]
    task_admin: FollowedAdmin | None


class FleetParts(Protocol):
    """Composition; picklable. Both methods may block."""

    @property
    def server(self) -> ServerConfig:
        """What every part is configured by."""

    def front(self) -> Front:
        """For an ingress. Raises ConfigError, ModelError."""

    def engine(self, model: str, rank: int, num_cpus: float, num_gpus: float) -> EngineSpec:
        """For the replica of a model with this rank, which has so much of its machine."""


@dataclass(frozen=True, slots=True)
class ServedParts:
    """The parts of `tailor serve`."""

    server: ServerConfig

    def front(self) -> Front:
        """Tokenizers, chat templates and tasks of every model."""
        from drafters import DRAFTER_NAMES

        plan = self._plan(self.server)
        return Front(plan.tasks, plan.models, DRAFTER_NAMES, plan.task_set)

    def engine(self, model: str, rank: int, num_cpus: float, num_gpus: float) -> EngineSpec:
        """A process of its own, as in a single server. Its name tells what it keeps on disk from
        that of other replicas, and is the same again when a replica is replaced."""
        from server.api.engines.slot import EngineSpec
        from server.engine.host import start_process
        from server.wiring.engine import build_engine

        chosen = next(m for m in self.server.models if m.name == model)
        device = "cuda" if num_gpus > 0 else "cpu"  # Ray shows a replica its own GPUs alone
        chosen = chosen.model_copy(update={"devices": (device,)})
        engine = self.server.engine
        if engine.threads is None and num_cpus >= 1:
            engine = engine.model_copy(update={"threads": int(num_cpus)})
        # Tasks that name no model run on the first of server.yaml, which this one may not be.
        others = [m for m in self.server.models if m.name != model]
        first = self.server.models[0].name == model
        config = self.server.model_copy(
            update={"engine": engine, "models": (chosen, *others) if first else (*others, chosen)}
        )
        order = next(order for order in self._plan(config).orders if order.model == model)
        name = f"{model}/{rank}"
        order = replace(order, name=name, device=device)
        start = functools.partial(
            start_process, functools.partial(build_engine, order), name=name, device=device
        )
        return EngineSpec(name, model, device, start)

    def _plan(self, config: ServerConfig) -> Any:
        from server.commands.own_engine import ready_folder
        from server.commands.serve import server_tasks
        from server.wiring.server import plan_server

        folders = {m.name: ready_folder(m, config.engine) for m in config.models}
        return plan_server(config, server_tasks(config), folders, lambda: server_tasks(config))


def restart_policy(config: ServerConfig) -> RestartPolicy:
    """How an engine is started again in its replica, as in a single server."""
    from server.api.engines.supervisor import RestartPolicy

    return RestartPolicy(**config.restart.model_dump())
