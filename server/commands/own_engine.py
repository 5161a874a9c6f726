"""A model in the command's own process: its folder, its name, its Engine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from server.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.api.served_model import ServedModel
    from server.commands.options import ModelOptions
    from server.commands.progress import Bar
    from server.config import EngineConfig, ModelConfig
    from server.engine.engine import Engine


def model_name(model: str) -> str:
    """The name in requests of a model that was given without one."""
    from server.model.catalog import BUILT_IN

    path = Path(model).expanduser()
    if model in BUILT_IN:
        return model
    if path.suffix == ".gguf":
        return path.stem
    if path.is_dir() or model.startswith((".", "/", "~")):
        return path.resolve().name
    return model.partition("@")[0]


def serves_file(model: ModelConfig, engine: EngineConfig) -> bool:
    """Whether a model is served from its GGUF as it is: asked for, or nothing else is."""
    from server.model.catalog import BUILT_IN
    from server.model.gguf_folder import is_gguf_path

    weights, dtype = model.weights or engine.weights, model.dtype or engine.dtype
    if weights != "auto":
        return weights == "file"
    on_cpu = all(device == "cpu" for device in model.devices)
    is_gguf = model.path in BUILT_IN or is_gguf_path(model.path)
    return dtype == "auto" and model.adapter is None and on_cpu and is_gguf


def ready_folder(model: ModelConfig, engine: EngineConfig) -> Path:
    """The model's folder. Fetching and converting, once, is done by a process of its own, because
    it loads torch and the whole model, and this one will only speak HTTP."""
    from server.model.catalog import cached_folder
    from server.model.gguf_folder import cached_file_folder

    kind = (model.weights or engine.weights) if serves_file(model, engine) else "float32"
    folder = (cached_folder if kind == "float32" else cached_file_folder)(model.path)
    if folder is None:
        command = [sys.executable, "-m", "server.commands.cli", "models", "fetch", model.path]
        command += ["--form", kind]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(done.returncode)  # it has said why
        folder = Path(done.stdout.strip().splitlines()[-1])
    return folder


class OwnTokenizer:
    """A model's tokenizer in the ids that the model reads and writes: with an adapter's own tokens,
    where it has some, prompts are given and outputs read as the server does it. All else is the
    tokenizer's own.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served, self._tokenizer = served, served.tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        """As tokenizers' `encode`; a whole prompt is one with add_special_tokens."""
        found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not add_special_tokens or self._served.reads is None:
            return found
        return SimpleNamespace(ids=self._served.prompt_ids(found.ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of an output."""
        ids = list(token_ids)
        if self._served.own_ids:
            whole = self._served.table.join(ids, skip_special=skip_special_tokens)
            return whole.decode(errors="replace")
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


@contextlib.contextmanager
def own_engine(
    options: ModelOptions, bar: Bar, drafters: tuple[str, ...]
) -> Iterator[tuple[ServedModel, Engine]]:
    """(the ServedModel, its Engine in this process) of a command's options.

    drafters: to be compiled before the Engine is given. Raises ConfigError, ModelError.
    """
    from dataclasses import replace

    from server.config import EngineConfig, ModelConfig, ServerConfig, parse_device_list
    from server.wiring.engine import build_engine
    from server.wiring.places import check_places
    from server.wiring.server import plan_server

    try:
        devices = parse_device_list(options.device)
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from None
    try:
        name = ModelConfig(name=model_name(options.model), path=options.model).name
    except ValueError:
        name = "model"
    if options.weights == "nf4":
        raise ConfigError("--weights nf4 is trained over; served, its numbers are floats or int8")
    model = ModelConfig(
        name=name,
        path=options.model,
        adapter=options.adapter,
        devices=devices[:1],
        dtype=options.dtype,
        weights=options.weights,
    )
    if options.threads is not None and options.threads < 1:
        raise ConfigError("--threads: must be at least 1")
    check_places((model,))
    config = ServerConfig(models=(model,), engine=EngineConfig(threads=options.threads))
    plan = plan_server(config, {}, {name: ready_folder(model, config.engine)})
    bar("loading the model (the first time here: compiling and measuring too)", 0, None)
    engine = build_engine(replace(plan.orders[0], drafters=drafters, log_level="WARNING"))
    try:
        yield plan.models[name], engine
    finally:
        engine.close()
