"""What the replicas of a fleet are made of: the same parts as a single server.

A FleetParts is pickled once and sent to every replica. It holds no weights and no open file; each
replica reads what it needs where it runs.

Each part has a version. `tailor fleet up` on a fleet that runs deploys again: Serve replaces the
replicas whose version is another one, new ones first, and leaves the others alone. New weights at
the same path replace the engines of their model; ingresses, the desk and what they know stay.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from server.config import ServerConfig
from server.config.server import with_overrides
from server.engine.calibrations import digest

if TYPE_CHECKING:
    from server.api.engines.client import EngineSpec
    from server.config.cluster import LearningConfig
    from server.fleet.learning.builder import Sharing
    from server.wiring.server import ServerPlan


@dataclass(frozen=True, slots=True)
class FleetParts:
    """What `tailor serve` composes of server.yaml. learning: None where each replica learns for
    itself. The methods may block. Raises ConfigError, ModelError."""

    server: ServerConfig
    learning: LearningConfig | None = None

    @property
    def sharing(self) -> Sharing | None:
        """How what one replica learns reaches the others; None for no builders."""
        if self.learning is None:
            return None
        from server.fleet.learning.builder import Sharing
        from server.model.cache_folder import cache_dir

        return Sharing(self.learning.storage or str(cache_dir() / "fleet"), self.learning)

    def prepare(self) -> None:
        """Make what all replicas of one machine would else make at once, and show it: fetched and
        converted models, and machine code."""
        from server.wiring.model import ready_folder

        for model in self.server.models:
            ready_folder(model, self.server.engine)
        subprocess.run([sys.executable, "-m", "server.machine_code"], stdin=subprocess.DEVNULL)

    def plan(self, threads: int | None = None) -> ServerPlan:
        """What a single server would be made of. threads: of an engine, if server.yaml says
        nothing."""
        from server.wiring.model import ready_folder
        from server.wiring.server import plan_server
        from server.wiring.task_set import server_tasks

        own = self.server.engine.threads or threads
        config = with_overrides(self.server, "engine", {"threads": own})
        folders = {m.name: ready_folder(m, config.engine) for m in config.models}
        return plan_server(config, server_tasks(config), folders, lambda: server_tasks(config))

    def engine(self, model: str, rank: int, num_cpus: float, num_gpus: float) -> EngineSpec:
        """For the replica of a model with this rank, which has so much of its machine: a process of
        its own, as in a single server. Its name tells what it keeps on disk from that of other
        replicas, and is the same again when a replica is replaced."""
        from server.api.engines.client import EngineSpec
        from server.engine.process import start_process
        from server.wiring.engine import build_engine

        plan = self.plan(int(num_cpus) or None)
        name, device = f"{model}/{rank}", "cuda" if num_gpus > 0 else "cpu"
        mine = (order for order in plan.orders if order.runner.name == model)
        order = next(order for order in mine if order.runner.device.startswith(device))
        # Ray shows a replica its own GPUs alone.
        order = replace(order, name=name, runner=replace(order.runner, device=device))
        factory = functools.partial(build_engine, order, self.sharing)
        return EngineSpec(name, model, device, functools.partial(start_process, factory))

    def ingress_version(self) -> str:
        """Another one when ingresses are to be replaced, asked where the fleet is deployed: of
        server.yaml, its keys' secrets, the tasks' files and what an ingress reads of the models."""
        from server.wiring.task_set import tasks_folder

        tasks = tasks_folder(self.server.tasks)
        paths = [*(Path(m.path) for m in self.server.models), *([] if tasks is None else [tasks])]
        files = files_id([path for path in paths if path.exists()], endings=_FOR_INGRESS)
        secrets = [key.secret() for key in self.server.keys]  # which the dump hides
        return version_of(self.server.model_dump_json(), secrets, files)

    def engine_version(self, model: str) -> str:
        """Another one when the engines of a model are to be replaced: of what an engine is told,
        and the files of the model and its adapters."""
        chosen = next(m for m in self.server.models if m.name == model)
        named = [chosen.path, chosen.adapter, *(adapter.path for adapter in chosen.adapters)]
        paths = [Path(name) for name in named if name is not None and Path(name).exists()]
        told = [part.model_dump_json() for part in (chosen, self.server.engine, self.server.limits)]
        return version_of(told, self.learning, files_id(paths))


_FOR_INGRESS = (".json", ".jinja", ".model", ".txt", ".yaml")
"""How the names of a model's files end that an ingress reads: tokenizer, template, config."""


def version_of(*parts: object) -> str:
    """Of values whose repr tells all of them."""
    return digest(*map(repr, parts))


def files_id(paths: Iterable[Path], *, endings: Sequence[str] = ("",)) -> str:
    """Of files and of all that lies in folders: names, sizes and times of writing, of those whose
    name ends so. What is not there counts as such."""
    told: list[tuple[str, int, int]] = []
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.name.endswith(tuple(endings)):
                continue
            try:
                stat = file.stat()
            except OSError:
                told.append((str(file), -1, -1))
                continue
            if file.is_file():
                told.append((str(file), stat.st_size, stat.st_mtime_ns))
    return version_of(told)
