"""Composition: from a ServerConfig to engines, and from engines to a running server.

This module and cli.py are the only places that know every part. It is imported by the command
line and by each engine process (`build_engine`); torch is imported only in the latter.

    plan = plan_server(config, tasks, folders)     # cheap: tokenizers, no weights, no torch
    status = run_server(plan, listen(host, port))  # until a signal; returns the exit status
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters import DRAFTER_NAMES
from server.config import EngineConfig, ModelConfig, ServerConfig, TaskConfig
from server.errors import ConfigError, ModelError
from server.wiring.task_set import TaskSet

if TYPE_CHECKING:
    from drafters.base import Drafter
    from server.api.intake import ServedModel
    from server.engine.engine import Engine
    from server.engine.task_store import TaskMemory
    from server.logs import LogFormat
    from server.model.build import RunnerSpec
    from server.token_bytes import TokenBytes
    from server.types import SpeculationParams, VocabularyMode
    from vocab_store.profile import VocabProfile
    from vocab_store.slice import RequiredIds

__all__ = [
    "EngineOrder",
    "ProfileFiles",
    "ServerPlan",
    "build_engine",
    "listen",
    "make_task_drafter",
    "plan_server",
    "run_server",
    "served_model",
]

log = logging.getLogger("tailor.server")

_TARGET_STEP_S = {"cpu": 0.15, "cuda": 0.05}
"""Seconds a step may take while some sequences decode and others prefill: their prompt chunks
are cut to it by the measured cost of rows, so that a long prompt does not make the others wait.
Where decoding alone takes long, EngineSettings.prefill_ratio lets them take longer."""

_WARM_UP = "warm-up"

_OPTION_NAMES = {"mix.lambda": "mix.mixing"}
"""Where a drafter's parameter is called otherwise than in the papers and in task files."""


# --- engines --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """All that an engine process needs, as plain values that can be pickled.

    name: the engine's. table: file of the id -> bytes table. folder: the model's. drafters: to be
    compiled before the engine is ready, so that no request waits for it. vocabularies: (mode,
    profile) of those tasks that cut the LM head, to be copied before the engine is ready.
    namespace: tells servers of other tasks apart in what is kept of tasks. learns: whether a task
    learns.
    """

    name: str
    model: str
    folder: str
    adapter: str | None
    device: str
    dtype: str
    max_model_len: int | None
    table: str
    engine: EngineConfig
    max_waiting_requests: int
    max_waiting_tokens: int
    drafters: tuple[str, ...]
    namespace: str = ""
    learns: bool = False
    log_format: LogFormat = "console"
    log_level: str = "info"
    vocabularies: tuple[tuple[VocabularyMode, str], ...] = ()


def _runner_spec(order: EngineOrder) -> RunnerSpec:
    from server.model.build import RunnerSpec

    engine = order.engine
    return RunnerSpec(
        name=order.model,
        folder=order.folder,
        adapter=order.adapter,
        device=order.device,
        dtype=order.dtype,
        max_model_len=order.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        kv_bytes=engine.kv_cache_memory.num_bytes,
        kv_fraction=engine.kv_cache_memory.fraction or 0.0,
        threads=engine.threads,
        full_head=engine.full_head,
    )


def build_engine(order: EngineOrder) -> Engine:
    """Load the model and make its Engine. Called inside the engine's own process.

    Raises ModelError and its kin for a model that cannot be served, ValueError for numbers that
    do not fit the device.
    """
    from server import logs

    logs.configure(order.log_format, order.log_level, engine=order.name)
    from server import token_bytes
    from server.engine.engine import Engine, EngineSettings
    from server.engine.grammar import GrammarCompiler, load_grammar_tokenizer
    from server.engine.probe import load_or_measure
    from server.engine.stops import StopTable
    from server.engine.task_store import TaskMemory
    from server.model.build import build_runner

    table = token_bytes.open_table(order.table)
    runner = build_runner(_runner_spec(order))
    settings = EngineSettings(
        max_num_seqs=order.engine.max_num_seqs,
        max_num_batched_tokens=order.engine.max_num_batched_tokens,
        prefill_rows=max(16, order.engine.max_num_batched_tokens // 2),
        max_waiting_requests=order.max_waiting_requests,
        max_waiting_tokens=order.max_waiting_tokens,
        prefix_cache=order.engine.prefix_cache,
        slice_rows=order.engine.slice_cache_rows,
        target_step_s=_TARGET_STEP_S[order.device.partition(":")[0]],
    )
    fingerprint = table.fingerprint.hex()
    memory = TaskMemory(_memory_folder(order, runner.info.fingerprint), fingerprint=fingerprint)
    drafters = {
        name: functools.partial(
            make_task_drafter,
            name,
            fingerprint,
            runner.info.eos_token_ids,
            model=runner.info.fingerprint,
            memory=memory,
        )
        for name in DRAFTER_NAMES
        if name != "off"
    }
    stops = StopTable(table.offsets, table.blob, (int(i) for i in table.special_ids))
    cost_file = _cost_file(order, runner.info.fingerprint)
    if not cost_file.exists():
        log.info("the first start of this model here: compiling and measuring, about a minute")
    cost = load_or_measure(runner, cost_file)
    grammars = None
    if order.engine.structured_outputs:
        grammars = GrammarCompiler(
            functools.partial(
                load_grammar_tokenizer,
                Path(order.folder) / "tokenizer.json",
                runner.info.vocab_size,
                runner.info.eos_token_ids,
            ),
            runner.info.vocab_size,
        )
        grammars.load()
    profiles = ProfileFiles(table, runner.info.eos_token_ids)
    engine = Engine(
        runner,
        drafters,
        settings,
        stop_table=stops,
        cost=cost,
        grammars=grammars,
        profiles=profiles,
        memory=memory,
    )
    _warm_up(engine, order.drafters, order.vocabularies)
    if order.learns:
        _warm_up_learning()
    return engine


class ProfileFiles:
    """Vocabulary profiles by file. A file that is replaced is read again; who has the old one
    keeps it."""

    def __init__(self, table: TokenBytes, eos_token_ids: Sequence[int]) -> None:
        """table: of the model's tokenizer. Every profile must hold the EOS ids, the special ids
        and the byte tokens."""
        self._table = table
        self._eos_token_ids = tuple(eos_token_ids)
        self._required: RequiredIds | None = None
        self._loaded: dict[str, tuple[tuple[int, int], VocabProfile]] = {}

    def __call__(self, name: str) -> VocabProfile:
        """The profile in a file. Raises VocabStoreError (a ValueError) or OSError."""
        from vocab_store.profile import VocabProfile
        from vocab_store.slice import RequiredIds

        found = os.stat(name)
        stamp = (found.st_mtime_ns, found.st_size)
        known = self._loaded.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        if self._required is None:
            self._required = RequiredIds.from_tokens(self._table, self._eos_token_ids)
        profile = VocabProfile.load(
            name, fingerprint=self._table.fingerprint, required=self._required
        )
        self._loaded[name] = (stamp, profile)
        return profile


def _memory_folder(order: EngineOrder, fingerprint: str) -> Path:
    """Where an engine keeps calibration and learned outputs: by tasks, engine and model."""
    import hashlib

    from server.model.catalog import cache_dir

    key = hashlib.sha256(f"{order.name}|{fingerprint}".encode()).hexdigest()[:24]
    return cache_dir() / "tasks" / order.namespace / "engines" / key


def _cost_file(order: EngineOrder, fingerprint: str) -> Path:
    """Where the cost of a step is kept: by device, model with dtype, and threads."""
    import hashlib

    from server.model.catalog import cache_dir

    threads = order.engine.threads or len(os.sched_getaffinity(0))
    key = f"{order.device}|{_device_name(order.device)}|{fingerprint}|{threads}"
    return cache_dir() / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _device_name(device: str) -> str:
    if device != "cpu":
        import torch

        return torch.cuda.get_device_name(device)
    import platform

    return f"{platform.node()} {platform.processor() or platform.machine()}"


def _warm_up(
    engine: Engine,
    drafters: Sequence[str],
    vocabularies: Sequence[tuple[VocabularyMode, str]] = (),
) -> None:
    """Run a short request with each drafter and each profile, so that what is compiled or copied
    on first use is there before the engine says it is ready. Nothing of it stays in the prefix
    cache. From numba's cache all drafters take half a second; without it, once, a quarter of a
    minute."""
    from drafters import make_drafter
    from server.types import Request, SamplingParams, SpeculationParams, VocabularyParams

    for name in drafters:
        warm_up = None if name == "off" else getattr(make_drafter(name), "warm_up", None)
        if warm_up is not None:
            warm_up()
    usual = [i for i in range(3, 64) if i not in engine.info.eos_token_ids][:3]
    runs = [(name, VocabularyParams()) for name in dict.fromkeys(("off", *drafters))]
    runs += [("off", VocabularyParams(mode, profile)) for mode, profile in vocabularies]
    for i, (name, vocabulary) in enumerate(runs):
        engine.submit(
            Request(
                request_id=f"warm-up-{i}",
                task=_WARM_UP,
                model=engine.info.name,
                prompt_ids=tuple(usual * 4),
                sampling=SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
                speculation=SpeculationParams(name, 0 if name == "off" else 4),
                vocabulary=vocabulary,
            )
        )
        deltas = engine.take_deltas()
        while engine.has_work:
            deltas += engine.step()
        for delta in deltas:
            if delta.finish_reason == "error":
                raise ModelError(f"{engine.info.name} cannot be run: {delta.error}")
    engine.pool.drop_cache()


def _warm_up_learning() -> None:
    """Compile what builds layers of learned outputs: later it would hold up a step."""
    import numpy as np

    from drafters.learned import build_layer

    example = np.arange(12, dtype=np.int32) % 5
    build_layer([(example, example), (example, example)], base=None, fingerprint="")


def make_task_drafter(
    name: str,
    fingerprint: str,
    eos_token_ids: tuple[int, ...],
    task: str,
    speculation: SpeculationParams,
    *,
    model: str | None = None,
    memory: TaskMemory | None = None,
) -> Drafter:
    """The drafter that a task or request names, with its options and the task's corpus.

    memory: what the task has learned is drafted from too, and its calibration goes on.
    fingerprint: of the tokenizer; a corpus of another one is refused. eos_token_ids: never
    drafted, because what comes after them is cut off. model: the model's fingerprint; bigrams of
    another one are refused (None: not checked). Raises ValueError.
    """
    from drafters import make_drafter

    options: dict[str, Any] = {}
    if name in ("auto", "prompt", "suffix"):
        options["eos_token_ids"] = eos_token_ids
    for key, value in speculation.options:
        section, _, option = _OPTION_NAMES.get(key, key).partition(".")
        if section == name:
            options[option] = value
    corpus_id = ""
    if speculation.corpus is not None and name in ("auto", "mix"):
        from drafters.corpus import Corpus

        try:
            options["corpus"] = Corpus.load(speculation.corpus, fingerprint=fingerprint)
            corpus_id = content_id(Path(speculation.corpus))
        except OSError as error:
            raise ValueError(f"corpus of task {task}: {error.strerror}") from None
    if name == "grammys" and "table" in options:
        from drafters.array_file import FingerprintError
        from drafters.published.grammys import BigramTable
        from server.engine.bigrams import model_fingerprint

        expected = None if model is None else model_fingerprint(model)
        try:
            options["table"] = BigramTable.load(options["table"], fingerprint=expected)
        except OSError as error:
            raise ValueError(f"bigrams of task {task}: {error.strerror}") from None
        except FingerprintError:
            raise ValueError(
                f"bigrams of task {task}: {options['table']} was taken from another model; make it "
                "again with `tailor corpus bigrams`"
            ) from None
    if memory is not None and speculation.learn_tokens > 0 and name in ("auto", "mix"):
        layer = memory.learned(
            task, speculation.learn_scope, speculation.corpus, speculation.learn_tokens
        )
        if layer is not None:
            options["learned" if name == "auto" else "corpus"] = layer
    drafter = make_drafter(name, **options)
    if memory is not None and task != _WARM_UP:
        memory.calibrate(task, drafter, corpus_id)
    return drafter


def content_id(path: Path) -> str:
    """Names a file by its size and samples of its content: a copy is the same, an edit is not.

    Raises OSError.
    """
    import hashlib

    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for i in range(16):
            file.seek(size * i // 16)
            digest.update(file.read(4096))
    return digest.hexdigest()[:24]


# --- the API's side -------------------------------------------------------------------------------


def served_model(model: ModelConfig, folder: Path, max_model_len: int | None) -> ServedModel:
    """What the API needs of a model: its tokenizer, its sizes, its name. Reads no weights.

    The id -> bytes table is written into the cache folder beside the converted models, once per
    tokenizer, so that the engines can map it. Raises ModelError.
    """
    from tokenizers import Tokenizer

    from server import token_bytes
    from server.api.chat_template import load_chat_template
    from server.api.intake import ServedModel
    from server.model.supported import check_raw

    config_file, tokenizer_file = folder / "config.json", folder / "tokenizer.json"
    try:
        raw = json.loads(config_file.read_text(encoding="utf-8"))
        check_raw(raw)
        vocab_size, limit = int(raw["vocab_size"]), int(raw["max_position_embeddings"])
        created = int(config_file.stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{config_file}: {type(error).__name__}: {str(error)[:200]}") from None
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{tokenizer_file}: {str(error)[:200]}") from None
    table = token_bytes.load_or_build(tokenizer, _table_file(folder), vocab_size)
    # Rows past the tokenizer's ids pad the tables: runners do not know them, nor may a request.
    known = tokenizer.get_vocab(with_added_tokens=True)
    vocab_size = min(vocab_size, max(known.values(), default=-1) + 1)
    try:
        chat = load_chat_template(folder, tokenizer)
    except (OSError, ValueError) as error:
        log.warning("%s cannot chat: %s", model.name, str(error)[:200])
        chat = None
    return ServedModel(
        name=model.name,
        tokenizer=tokenizer,
        table=table,
        vocab_size=vocab_size,
        max_model_len=min(limit, max_model_len or limit),
        created=created,
        fingerprint=f"tailor-{table.fingerprint.hex()[:12]}",
        chat=chat,
    )


def _table_file(folder: Path) -> Path:
    from server.model.catalog import cache_dir, sha256_of

    tables = cache_dir() / "tokens"
    tables.mkdir(parents=True, exist_ok=True)
    return tables / f"{sha256_of(folder / 'tokenizer.json')[:24]}.bin"


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
    from server.model.catalog import cache_dir

    models: dict[str, ServedModel] = {}
    orders: list[EngineOrder] = []
    engine = config.engine
    num_on_cpu = sum(device == "cpu" for model in config.models for device in model.devices)
    if engine.threads is None and num_on_cpu > 1:  # they share the cores
        threads = max(1, len(os.sched_getaffinity(0)) // num_on_cpu)
        engine = engine.model_copy(update={"threads": threads})
    for model in config.models:
        folder = folders[model.name]
        max_model_len = model.max_model_len or config.engine.max_model_len
        models[model.name] = served_model(model, folder, max_model_len)
        own = [t for t in tasks.values() if (t.model or config.models[0].name) == model.name]
        _check_profiles(own, folder, models[model.name])
        for i, device in enumerate(model.devices):
            orders.append(
                EngineOrder(
                    name=f"{model.name}/{i}",
                    model=model.name,
                    folder=str(folder),
                    adapter=model.adapter,
                    device=device,
                    dtype=model.dtype or config.engine.dtype,
                    max_model_len=max_model_len,
                    table=str(_table_file(folder)),
                    engine=engine,
                    max_waiting_requests=config.limits.max_queued_requests,
                    max_waiting_tokens=config.limits.max_queued_tokens,
                    drafters=DRAFTER_NAMES,
                    namespace=_namespace(config),
                    learns=any(task.speculation.learn for task in tasks.values()),
                    vocabularies=tuple(
                        dict.fromkeys(
                            (mode, t.vocabulary.profile)
                            for t in own
                            for mode in (t.vocabulary.mode, "exact")
                            if t.vocabulary.profile is not None
                            and mode != "full"
                            and mode in t.vocabulary.modes
                        )
                    ),
                    log_format=config.log.format,
                    log_level=config.log.level,
                )
            )

    def load() -> Mapping[str, TaskConfig]:
        fresh = tasks if reload_tasks is None else reload_tasks()
        for model in config.models:
            own = [t for t in fresh.values() if (t.model or config.models[0].name) == model.name]
            _check_profiles(own, folders[model.name], models[model.name])
        return fresh

    kept = cache_dir() / "tasks" / _namespace(config)
    task_set = TaskSet(
        tasks,
        load=load,
        models={name: (folders[name], m.table.fingerprint.hex()) for name, m in models.items()},
        uploads=kept / "uploads",
        learned=kept / "engines",
    )
    return ServerPlan(config, task_set.tasks, models, tuple(orders), task_set)


def _namespace(config: ServerConfig) -> str:
    """Servers of different task folders keep nothing of each other's tasks."""
    import hashlib

    folder = Path(config.tasks or "configs/tasks").resolve()
    return hashlib.sha256(str(folder).encode()).hexdigest()[:24]


def _check_profiles(tasks: Sequence[TaskConfig], folder: Path, served: ServedModel) -> None:
    """Every profile of a model's tasks can be read and holds what the model needs.

    Raises ConfigError that names the task.
    """
    from vocab_store.command import model_facts

    cut = [t for t in tasks if t.vocabulary.profile is not None]
    if not cut:
        return
    for task in cut:
        assert task.vocabulary.profile is not None
        try:
            ProfileFiles(served.table, model_facts(folder)[2])(task.vocabulary.profile)
        except OSError as error:
            raise ConfigError(
                f"task {task.name}: vocabulary.profile: {task.vocabulary.profile}: {error.strerror}"
            ) from None
        except ValueError as error:  # VocabStoreError
            raise ConfigError(f"task {task.name}: vocabulary.profile: {error}") from None


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Taken before a model is loaded, so that a busy port is told at once.

    Raises ConfigError.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            taken.listen(2048)
        except OSError:
            taken.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; see --host and --port"
        ) from None
    taken.setblocking(False)
    return taken


def run_server(
    plan: ServerPlan,
    listener: socket.socket,
    *,
    on_ready: Callable[[int], None] | None = None,
) -> int:
    """Start every engine and serve until a signal. Returns the exit status (see api.app.serve).

    listener: from `listen`; closed at the end.
    on_ready: called once with the port, on the event loop, when every model has an engine.
    """
    from server.api.app import create_app, run_loop, serve
    from server.api.engines.client import EngineClient, EngineSpec, RestartPolicy
    from server.engine.host import start_process
    from server.metrics.series import Metrics
    from server.tracing import open_tracer

    config = plan.config
    traces = None
    if config.tracing.endpoint is not None:
        traces = open_tracer(
            config.tracing.endpoint,
            service_name=config.tracing.service_name,
            sample_ratio=config.tracing.sample_ratio,
        )

    for order in plan.orders:
        log.info("loading %s on %s", order.model, order.device)

    async def main() -> int:
        metrics = Metrics(vllm_aliases=config.metrics.vllm_aliases)
        client = EngineClient(
            [
                EngineSpec(
                    order.name,
                    order.model,
                    order.device,
                    functools.partial(
                        start_process,
                        functools.partial(build_engine, order),
                        name=order.name,
                        device=order.device,
                    ),
                )
                for order in plan.orders
            ],
            metrics=metrics,
            restart=RestartPolicy(
                max_restarts=config.restart.max_restarts,
                window_s=config.restart.window_s,
                first_delay_s=config.restart.first_delay_s,
                max_delay_s=config.restart.max_delay_s,
            ),
            max_queued_requests=config.limits.max_queued_requests,
            max_queued_tokens=config.limits.max_queued_tokens,
        )
        app = create_app(
            config,
            tasks=plan.tasks,
            models=plan.models,
            client=client,
            metrics=metrics,
            drafters=DRAFTER_NAMES,
            task_admin=plan.task_set,
            traces=traces,
        )
        return await serve(
            app,
            client,
            sockets=[listener],
            drain_s=config.limits.drain_s,
            max_header_bytes=config.limits.max_header_bytes,
            header_timeout_s=config.limits.header_timeout_s,
            send_timeout_s=config.limits.send_timeout_s,
            on_ready=on_ready,
        )

    with listener:
        try:
            return run_loop(main())
        finally:
            if traces is not None:
                traces.close()
