"""`tailor serve`: options over a server.yaml, then a running server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter
from pydantic import SecretStr

from server.commands.options import DEFAULT_MODEL, WEIGHTS, Dtype, WeightsForm
from server.commands.own_engine import check_places, model_name
from server.config import (
    DEFAULT_TASK,
    DEFAULT_TASKS,
    EngineConfig,
    KeyConfig,
    ListenConfig,
    ModelConfig,
    ServerConfig,
    TaskConfig,
    load_server_config,
)
from server.config.server import LogConfig
from server.config.server import with_overrides as over
from server.config.yaml_file import MemorySize, Section, parse_device_list, parse_memory
from server.errors import ConfigError, TailorError
from server.wiring.task_set import server_tasks

if TYPE_CHECKING:
    from server.api.engines.client import EngineClient

HELLO_PROMPT = "The capital of France is"

_IMPORTS = (
    "server.wiring.engine", "server.engine.probe", "server.model.packed_folder",
    "server.model.cpu.runner", "server.model.loader", "server.logs", "server.engine.task_store",
    "server.engine.grammar_tokenizer", "drafters.auto.drafter",
)  # fmt: skip
"""What engines import, while this process reads tokenizers and tasks."""

_WHERE = Group("Where", sort_key=1)
_WHAT = Group("What", sort_key=2)
_HOW = Group("How", sort_key=3)


def _parsed(parse: Callable[[str], Any], **more: Any) -> Parameter:
    """An option of one word that server.yaml's own function reads."""
    return Parameter(converter=lambda _, tokens: parse(tokens[0].value), n_tokens=1, **more)


def _key(section: type[Section], key: str, **more: Any) -> Parameter:
    """An option that is a key of server.yaml: it is told as there."""
    field = section.model_fields[key]
    default = "" if field.default in (None, False) else f" ({field.default})"
    return Parameter(help=f"{field.description}{default}", **more)


@Parameter(name="*", group=_WHERE)
@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the server listens, and which keys it takes."""

    config: Annotated[Path | None, Parameter(metavar="FILE", help="a server.yaml; options win")] = (
        None
    )
    host: Annotated[str | None, _key(ListenConfig, "host")] = None
    port: Annotated[int | None, _key(ListenConfig, "port")] = None
    ssl_certfile: Annotated[str | None, _key(ListenConfig, "ssl_certfile", metavar="FILE")] = None
    ssl_keyfile: Annotated[str | None, _key(ListenConfig, "ssl_keyfile", metavar="FILE")] = None
    api_key: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="KEY",
            help="a key that clients must send; may be repeated. Better: set TAILOR_API_KEY, "
            "because other users of a machine can see its command lines",
        ),
    ] = ()


@Parameter(name="*", group=_WHAT)
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoice:
    """Which model and which tasks are served."""

    model: Annotated[
        str | None,
        Parameter(
            help=f"a built-in name, a folder, a GGUF file or a Hugging Face id ({DEFAULT_MODEL})"
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="NAME",
            consume_multiple=True,
            help="what requests call the model; metrics have the first of several",
        ),
    ] = ()
    adapter: Annotated[
        str | None, Parameter(metavar="DIR", help="a PEFT LoRA to merge into the model")
    ] = None
    generation_config: Annotated[
        Literal["auto", "none"] | None, _key(ModelConfig, "generation_config")
    ] = None
    tasks: Annotated[
        Path | None,
        Parameter(
            metavar="DIR",
            help=f"folder of task files ({DEFAULT_TASKS}, or Tailor's own where that is not)",
        ),
    ] = None


@Parameter(name="*", group=_HOW)
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How the engines run the model."""

    device: Annotated[
        tuple[str, ...] | None,
        _parsed(
            parse_device_list,
            metavar="LIST",
            help="cpu, cuda or cuda:N; several with commas run one engine each (cpu)",
        ),
    ] = None
    dtype: Annotated[Dtype | None, _key(EngineConfig, "dtype")] = None
    weights: Annotated[WeightsForm | None, WEIGHTS] = None
    max_model_len: Annotated[int | None, _key(EngineConfig, "max_model_len")] = None
    max_num_seqs: Annotated[int | None, _key(EngineConfig, "max_num_seqs")] = None
    max_num_batched_tokens: Annotated[int | None, _key(EngineConfig, "max_num_batched_tokens")] = (
        None
    )
    kv_cache_memory: Annotated[
        MemorySize | None,
        _parsed(
            parse_memory,
            accepts_keys=False,
            metavar="SIZE",
            help='a fraction of free memory ("0.4", "40%") or an amount ("2GiB")',
        ),
    ] = None
    threads: Annotated[int | None, _key(EngineConfig, "threads")] = None
    no_prefix_cache: Annotated[
        bool, Parameter(help="do not share KV blocks between equal prompt starts")
    ] = False


_PLACE, _MODEL, _ENGINE = Place(), ModelChoice(), EngineOptions()


def serve(
    place: Place = _PLACE,
    what: ModelChoice = _MODEL,
    how: EngineOptions = _ENGINE,
    *,
    hello: Annotated[
        bool,
        Parameter(
            help="when ready, complete a prompt over HTTP, print it, and say what to type next"
        ),
    ] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, _key(LogConfig, "level")
    ] = None,
    log_format: Annotated[Literal["console", "json"] | None, _key(LogConfig, "format")] = None,
) -> int:
    start_s = time.monotonic()
    config = server_config(place, what, how)
    config = over(config, "log", {"format": log_format, "level": log_level})
    # Check everything before minutes of fetching and loading.
    keys, tasks = check_server(config)
    from server.engine.process import EngineProcess

    waiting = [EngineProcess(_IMPORTS) for model in config.models for _ in model.devices]
    from server import logs
    from server.api.serving import check_certificate, listen
    from server.commands.idle_prior import make_priors
    from server.wiring.model import ready_folder
    from server.wiring.server import plan_server, run_server

    logs.configure(config.log.format, config.log.level)
    check_certificate(config.listen)
    listener = listen(config.listen.host, config.listen.port)
    folders = {m.name: ready_folder(m, config.engine) for m in config.models}
    plan = plan_server(config, tasks, folders, lambda: server_tasks(config))

    def on_ready(port: int, client: EngineClient) -> None:
        url = config.listen.url(port)
        took_s = time.monotonic() - start_s
        print(f"Tailor is ready on {url} after {took_s:.1f} s.", flush=True)
        if hello:
            threading.Thread(
                target=_hello,
                args=(url, config, list(tasks), keys[0] if keys else None),
                name="hello",
                daemon=True,
            ).start()
        if config.engine.idle_prior == "auto":
            beside.append(asyncio.create_task(make_priors(_priors(config, client), client)))

    beside: list[asyncio.Task[None]] = []  # a loop alone holds no task; its end cancels them
    return run_server(plan, listener, on_ready=on_ready, processes=waiting)


def _priors(config: ServerConfig, client: EngineClient) -> dict[str, Path]:
    """Where the priors of the built-in models lie that a CPU serves without a merged adapter."""
    from server.model.catalog import BUILT_IN
    from server.wiring.engine import prior_file

    return {
        model.path: prior_file(info.fingerprint)
        for model in config.models
        if model.path in BUILT_IN
        and "cpu" in model.devices
        and model.adapter is None
        and (info := client.info(model.name)) is not None
    }


def check_server(config: ServerConfig) -> tuple[list[str], dict[str, TaskConfig]]:
    """The keys' secrets and the tasks; checks all that can be checked before loading.

    Raises ConfigError.
    """
    known: dict[str, str] = {}  # ids by secret
    for key in config.keys:
        secret = key.secret()
        if secret in known:
            raise ConfigError(f"{key.where}: has the same secret as key {known[secret]}")
        known[secret] = key.id
    tasks = server_tasks(config)
    adapters = {one.name for model in config.models for one in model.adapters}
    names = {*tasks, *(model.name for model in config.models), *adapters}
    for key in config.keys:
        for name in key.tasks or ():
            if name not in names:  # a typing error would lock users out
                raise ConfigError(f"{key.where}: tasks: no task, model or adapter is {name!r}")
    for model in config.models:
        if "cpu" in model.devices and model.over(config.engine).weights == "fp8":
            raise ConfigError(
                f"model {model.name}: weights: fp8 is for cuda; on a CPU int8 and int4 are the "
                "small ones"
            )
    check_places(config.models)
    return list(known), tasks


def server_config(place: Place, what: ModelChoice, how: EngineOptions) -> ServerConfig:
    """server.yaml (or the defaults) with the command line's options over it, and with its keys and
    those of the environment. Raises ConfigError."""
    config = ServerConfig() if place.config is None else load_server_config(place.config)
    config = over(config, "listen", _given(place, ListenConfig))
    engine = _given(how, EngineConfig)
    engine["prefix_cache"] = False if how.no_prefix_cache else None
    config = over(config, "engine", engine)
    tasks = config.tasks if what.tasks is None else str(what.tasks)
    named = {key.env for key in config.keys}  # the file says whose key such a variable holds
    plain_key, admin_key = (
        None if name in named else os.environ.get(name)
        for name in ("TAILOR_API_KEY", "TAILOR_ADMIN_KEY")
    )
    plain: dict[str, Any] = {key: {"key": SecretStr(key)} for key in place.api_key}
    if plain_key:
        plain.setdefault(plain_key, {"env": "TAILOR_API_KEY"})
    keys = [KeyConfig(id=f"command-line-{i}", **key) for i, key in enumerate(plain.values(), 1)]
    if admin_key:
        keys.append(KeyConfig(id="command-line-admin", env="TAILOR_ADMIN_KEY", admin=True))
    return config.model_copy(
        update={
            "models": _models(config.models, what, how.device),
            "keys": (*config.keys, *keys),
            "tasks": tasks,
        }
    )


def _given(options: Place | EngineOptions, section: type[Section]) -> dict[str, Any]:
    """The options that are called as a section's keys."""
    return {key: getattr(options, key) for key in section.model_fields if hasattr(options, key)}


def _models(
    models: tuple[ModelConfig, ...], what: ModelChoice, devices: tuple[str, ...] | None
) -> tuple[ModelConfig, ...]:
    """The models of server.yaml, or the one that the options name."""
    if what.model == "":
        raise ConfigError("--model: it is empty")
    named = tuple(dict.fromkeys(what.served_model_name))
    if what.model is not None:
        option = "--served-model-name" if named else "--model"
        models = (_named(what.model, named or (model_name(what.model),), option),)
    elif named:
        if len(models) != 1:
            raise ConfigError(
                "--served-model-name needs --model when server.yaml has several models"
            )
        called = _named(models[0].path, named, "--served-model-name")
        for adapter in models[0].adapters:
            if adapter.name in named:
                raise ConfigError(f"--served-model-name: {adapter.name!r} is an adapter's name")
        models = (models[0].model_copy(update={"name": called.name, "aliases": called.aliases}),)
    if what.adapter is not None and len(models) != 1:
        raise ConfigError("--adapter needs --model when server.yaml has several models")
    options = {
        "adapter": what.adapter, "generation_config": what.generation_config, "devices": devices
    }  # fmt: skip
    update = {key: value for key, value in options.items() if value is not None}
    return tuple(model.model_copy(update=update) for model in models)


def _named(path: str, names: Sequence[str], option: str) -> ModelConfig:
    """The model at a path, called so. option: that gave the names. Raises ConfigError."""
    try:
        return ModelConfig(name=names[0], aliases=tuple(names[1:]), path=path)
    except ValueError:
        hint = "; give one with --served-model-name" if option == "--model" else ""
        shown = ", ".join(map(repr, names))
        raise ConfigError(f"{option}: {shown} cannot be a model's name{hint}") from None


def _hello(url: str, config: ServerConfig, tasks: Sequence[str], key: str | None) -> None:
    """Ask for a first completion over HTTP and print it, with what to do next."""
    from server.client.http import Endpoint, call

    body = {
        "model": config.models[0].name,
        "prompt": HELLO_PROMPT,
        "max_tokens": 24,
        "temperature": 0,
        "stop": ["."],
    }
    try:
        answer = call(Endpoint(url, key), "POST", "/completions", body, timeout_s=120.0)
        text = answer["choices"][0]["text"]
    except (TailorError, KeyError, TypeError) as error:
        print(f"The first completion failed: {error}", file=sys.stderr, flush=True)
        return
    auth = '  -H "authorization: Bearer $TAILOR_API_KEY" \\\n' if key is not None else ""
    own = [name for name in tasks if name != DEFAULT_TASK]
    page = f"In a browser, drafts in colour and figures:  {url}/dashboard\n\n"
    told = f'Tasks, each a name for the "model" field:  {", ".join(own[:12])}\n\n'
    print(
        f"\n{HELLO_PROMPT}{text}\n\n"
        f"{page if config.dashboard.enabled else ''}"
        f"{told if own else ''}"
        "Next, in another terminal:\n\n"
        f"curl {url}/v1/completions -H 'content-type: application/json' \\\n{auth}"
        f"  -d '{json.dumps(body)}'\n\n"
        f"curl {url}/v1/models\n\n"
        "Ctrl-C stops the server.",
        flush=True,
    )
