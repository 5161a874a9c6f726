"""A model in the command's own process: its folder, its name, its Engine; and what of its folder,
adapter and device cannot be used, told before anything is fetched or loaded."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from drafters.json_text import object_in
from server.errors import ConfigError

if TYPE_CHECKING:
    from server.api.served_model import ServedModel
    from server.commands.options import Bar, ModelOptions
    from server.config import ModelConfig
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
    from server.config import EngineConfig, ServerConfig
    from server.wiring.engine import build_engine
    from server.wiring.model import ready_folder
    from server.wiring.server import plan_server

    model = checked_model(options)
    config = ServerConfig(models=(model,), engine=EngineConfig(threads=options.threads))
    plan = plan_server(config, {}, {model.name: ready_folder(model, config.engine)})
    bar("loading the model (the first time here: compiling and measuring too)", 0, None)
    order = replace(plan.orders[0], drafters=drafters, log_level="WARNING")
    with contextlib.closing(build_engine(order)) as engine:
        yield plan.models[model.name], engine


# --- what is looked at before anything is fetched or loaded ---------------------------------------

ADAPTER_FILE = "adapter_config.json"
_NO_ADAPTER = f"holds no {ADAPTER_FILE}; an adapter is a folder that PEFT saved"


def checked_model(options: ModelOptions) -> ModelConfig:
    """The model of a command's options. Raises ConfigError for what cannot be used."""
    from server.config import ModelConfig

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
        devices=(options.device,),
        dtype=options.dtype,
        weights=options.weights,
    )
    check_places((model,))
    return model


def check_places(models: Iterable[ModelConfig]) -> None:
    """Raises ConfigError with a line for each folder and device that cannot be used."""
    problems = [problem for model in models for problem in _problems(model)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _problems(model: ModelConfig) -> Iterable[str]:
    folder = Path(model.path).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        what = "holds no config.json; a model's folder has config.json, *.safetensors and "
        what += "tokenizer.json"
        if (folder / ADAPTER_FILE).is_file():
            base = object_in(folder / ADAPTER_FILE).get("base_model_name_or_path")
            what = (
                "is an adapter and no model; serve its base with it: "
                f"--model {base or 'BASE'} --adapter {folder}"
            )
        yield f"model {model.name}: {folder}: {what}"
    merged = [] if model.adapter is None else [("adapter", model.adapter)]
    for key, path in [*merged, *(("adapters", one.path) for one in model.adapters)]:
        adapter = Path(path).expanduser()
        if not (adapter / ADAPTER_FILE).is_file():
            lacks = _NO_ADAPTER if adapter.is_dir() else "no such folder"
            yield f"model {model.name}: {key}: {adapter}: {lacks}"
    for device in model.devices:
        problem = device_problem(device)
        if problem is not None:
            yield f"model {model.name}: device {device}: {problem}"


def device_problem(device: str) -> str | None:
    """Why nothing can run on a device; None where it can. torch is not imported."""
    if device == "cpu":
        return None
    if "+cpu" in metadata.version("torch"):
        return "the torch that is installed here is its CPU build; install its CUDA build"
    num = _num_gpus()
    if num == 0:
        return "there is no NVIDIA GPU, or its driver is not installed; use --device cpu"
    index = int(device.partition(":")[2] or 0)
    if index >= num:
        return f"there {'is' if num == 1 else 'are'} only {num} here, from cuda:0"
    return None


def _num_gpus() -> int:
    """GPUs that this process may use, as the driver counts them; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
