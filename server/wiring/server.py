"""From a ServerConfig to engines, and from engines to a running server.

Only this folder and the commands import every part. Torch is imported only in the engines'
processes.

    plan = plan_server(config, tasks, folders)     # cheap: tokenizers, no weights, no torch
    status = run_server(plan, listen(host, port))  # until a signal; returns the exit status
"""

from __future__ import annotations

import functools
import hashlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafters import DRAFTER_NAMES
from server.config import DEFAULT_TASK, EngineConfig, ModelConfig, ServerConfig, TaskConfig
from server.errors import ConfigError
from server.machine import cores
from server.model.build import RunnerSpec
from server.model.cache_folder import cache_dir
from server.wiring.engine import EngineOrder, build_engine, profile_reader
from server.wiring.model import AdapterSet, served_model
from server.wiring.task_set import TaskSet, tasks_folder
from vocab_store.profile import model_facts

if TYPE_CHECKING:
    from server.api.engines.client import EngineClient
    from server.api.served_model import ServedModel
    from server.channel import EngineHandle
    from server.engine.process import EngineProcess
    from server.metrics import Metrics
    from server.token_bytes import TokenBytes

log = logging.getLogger("tailor.server")


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server that could be started: all files read, nothing loaded."""

    config: ServerConfig
    tasks: Mapping[str, TaskConfig]
    models: Mapping[str, ServedModel]
    orders: tuple[EngineOrder, ...]
    task_set: TaskSet


def plan_server(
    config: ServerConfig,
    tasks: Mapping[str, TaskConfig],
    folders: Mapping[str, Path],
    reload_tasks: Callable[[], Mapping[str, TaskConfig]] | None = None,
) -> ServerPlan:
    """Read tokenizers and sizes, and write one EngineOrder per device.

    folders: each model's folder by the model's name. reload_tasks: reads the tasks again; None:
    they are fixed. Raises ModelError, and ConfigError for a corpus that cannot be used.
    """
    models: dict[str, ServedModel] = {}
    orders: list[EngineOrder] = []
    # Engines on the CPU share its cores unless threads is set.
    engine = config.engine
    num_on_cpu = sum(device == "cpu" for model in config.models for device in model.devices)
    if engine.threads is None and num_on_cpu > 1:
        engine = engine.model_copy(update={"threads": max(1, cores() // num_on_cpu)})
    for model in config.models:
        folder, own = folders[model.name], model.over(engine)
        served = models[model.name] = served_model(model, folder, own.max_model_len)
        mine = _tasks_of(model, config, tasks)
        orders += _orders(config, model, own, folder, mine, served.table)
    adapters = AdapterSet(models, folders)
    for model in config.models:
        for one in model.adapters:
            adapters.add(adapters.read(one, model.name))
    orders = [replace(order, adapters=adapters.orders(order.runner.name)) for order in orders]

    def checked(tasks: Mapping[str, TaskConfig]) -> Mapping[str, TaskConfig]:
        for model in config.models:
            mine = _tasks_of(model, config, tasks)
            _check_profiles(mine, folders[model.name], models[model.name])
        _check_adapters(config, tasks, adapters)
        return tasks

    task_set = TaskSet(
        checked(tasks),
        load=lambda: checked(tasks if reload_tasks is None else reload_tasks()),
        models={name: (folders[name], m.table.fingerprint.hex()) for name, m in models.items()},
        kept=cache_dir() / "tasks" / _namespace(config),
        adapters=adapters,
        enrichments={
            m.name: Path(m.adapter).expanduser() / "enrichment.json"
            for m in config.models
            if m.adapter is not None and models[m.name].own_ids
        },
    )
    return ServerPlan(config, task_set.tasks, models, tuple(orders), task_set)


def _check_adapters(
    config: ServerConfig, tasks: Mapping[str, TaskConfig], adapters: AdapterSet
) -> None:
    """Raise ConfigError unless every task's adapter is served beside its model and no adapter or
    alias has a task's name, which would never be reached; one line for each problem."""
    others = {*adapters.served, *(alias for model in config.models for alias in model.aliases)}
    problems = [
        f"task {name}: an adapter or an alias has the same name" for name in tasks if name in others
    ]
    first = config.models[0].name
    for task in tasks.values():
        if task.adapter is None:
            continue
        served = adapters.served.get(task.adapter)
        if served is None or served.name != (task.model or first):
            problems.append(
                f"task {task.name}: adapter: {task.adapter} is no adapter of the model "
                f"{task.model or first}"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def _tasks_of(
    model: ModelConfig, config: ServerConfig, tasks: Mapping[str, TaskConfig]
) -> list[TaskConfig]:
    """The tasks that run on a model; those that name none run on the first."""
    first = config.models[0].name
    return [task for task in tasks.values() if (task.model or first) == model.name]


def _orders(
    config: ServerConfig,
    model: ModelConfig,
    engine: EngineConfig,
    folder: Path,
    own: Sequence[TaskConfig],
    table: TokenBytes,
) -> list[EngineOrder]:
    """One model's engines, one a device. engine: as they run it. own: the tasks that run on it."""
    modes = {task.vocabulary.mode for task in own if task.name != DEFAULT_TASK}
    slices_only = engine.full_head == "auto" and modes == {"slice"}
    slices_only = slices_only and all(device == "cpu" for device in model.devices)
    vocabularies = dict.fromkeys(
        (mode, task.vocabulary.profile)
        for task in own
        for mode in (task.vocabulary.mode, *(() if slices_only else ("exact",)))
        if task.vocabulary.profile is not None and mode != "full" and mode in task.vocabulary.modes
    )
    # Adapters that may come to be in memory at once; admins may load any.
    places = engine.max_adapters
    if not any(key.admin for key in config.keys):
        places = min(places, len(model.adapters))
    return [
        EngineOrder(
            name=f"{model.name}/{i}",
            runner=RunnerSpec(
                name=model.name,
                folder=str(folder),
                sizes=engine.sizes(device),
                adapter=model.adapter,
                device=device,
                dtype=engine.dtype,
                weights=engine.weights,
                kv_dtype=engine.kv_cache_dtype,
                max_model_len=engine.max_model_len,
                threads=engine.threads,
                full_head="stream" if slices_only else engine.full_head,
                cuda_graphs=engine.cuda_graphs != "off",
                adapter_places=places,
            ),
            table=str(table.path),
            drafters=DRAFTER_NAMES,
            grammars=engine.structured_outputs,
            namespace=_namespace(config),
            vocabularies=tuple(vocabularies),
            slices_only=slices_only,
            log_format=config.log.format,
            log_level=config.log.level,
        )
        for i, device in enumerate(model.devices)
    ]


def _namespace(config: ServerConfig) -> str:
    """The namespace of a server: servers of different task folders keep their files apart."""
    folder = tasks_folder(config.tasks) or Path("configs/tasks")
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24]


def _check_profiles(tasks: Sequence[TaskConfig], folder: Path, served: ServedModel) -> None:
    """Every profile of a model's tasks can be read and holds what the model needs.

    Raises ConfigError that names the task.
    """
    for task in tasks:
        path = task.vocabulary.profile
        if path is None:
            continue
        try:
            profile_reader(served.table, model_facts(folder)[1])(path)
        except OSError as error:
            raise ConfigError(
                f"task {task.name}: vocabulary.profile: {path}: {error.strerror}"
            ) from None
        except ValueError as error:  # VocabStoreError
            raise ConfigError(f"task {task.name}: vocabulary.profile: {error}") from None


def run_server(
    plan: ServerPlan,
    listener: socket.socket,
    *,
    on_ready: Callable[[int, EngineClient], None] = lambda *_: None,
    processes: Sequence[EngineProcess] = (),
) -> int:
    """Start every engine and serve until a signal. Returns the exit status (see api.serving.serve).

    listener: from `listen`; closed at the end. processes: that wait, for the first engines.
    on_ready: called once with the port and the engines' client, on the event loop, when every model
    has an engine.
    """
    from server.api.app import create_app
    from server.api.gate import open_traces
    from server.api.serving import run_loop, serve
    from server.metrics import Metrics

    config = plan.config
    traces = open_traces(config.tracing)
    for order in plan.orders:
        log.info("loading %s on %s", order.runner.name, order.runner.device)
    for persists in (False, True):  # what is kept of requests, where and for how long
        told = sorted(
            f"{task.name} ({task.speculation.learn_max_tokens:,} tokens)"
            for task in plan.tasks.values()
            if task.speculation.learns and (task.speculation.learn == "persist") == persists
        )
        if told:
            where = "and on disk" if persists else "until the server stops"
            log.info(
                f"outputs of finished requests are drafted from, by API key and cache_salt: in "
                f"memory {where}; speculation.learn: false turns it off. Tasks, with the most that "
                f"is held of a key: {', '.join(told)}"
            )

    async def main() -> int:
        metrics = Metrics(vllm_aliases=config.metrics.vllm_aliases)
        client = _engine_client(plan, metrics, list(processes))
        app = create_app(
            config,
            tasks=plan.tasks,
            models=plan.models,
            client=client,
            drafters=DRAFTER_NAMES,
            task_admin=plan.task_set,
            traces=traces,
        )
        return await serve(
            app,
            client,
            limits=config.limits,
            sockets=[listener],
            certificate=config.listen.certificate,
            on_ready=lambda port: on_ready(port, client),
        )

    with listener:
        try:
            return run_loop(main())
        finally:
            if traces is not None:
                traces.close()


def _engine_client(
    plan: ServerPlan, metrics: Metrics, waiting: list[EngineProcess]
) -> EngineClient:
    """The client of every engine of a plan; each engine is a process of its own."""
    from server.api.engines.client import EngineClient, EngineSpec
    from server.engine.process import start_process

    config = plan.config
    started: set[str] = set()

    def start(order: EngineOrder) -> EngineHandle:
        # An engine that starts again gets the adapters that are served then.
        now = replace(
            order,
            adapters=plan.task_set.adapters.orders(order.runner.name),
            checks_adapters=order.name not in started,
        )
        started.add(order.name)
        waits = waiting.pop() if waiting else None
        return start_process(functools.partial(build_engine, now), waits)

    return EngineClient(
        [
            EngineSpec(one.name, one.runner.name, one.runner.device, functools.partial(start, one))
            for one in plan.orders
        ],
        metrics=metrics,
        restart=config.restart,
        limits=config.limits,
    )
