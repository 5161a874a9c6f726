"""Checks a model's folder, adapter and device before anything is fetched or loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from drafters.json_text import parsed
from server.config import ModelConfig
from server.errors import ConfigError

ADAPTER_FILE = "adapter_config.json"


def check_places(models: Iterable[ModelConfig]) -> None:
    """Raises ConfigError with a line for each folder and device that cannot be used."""
    problems = [problem for model in models for problem in _problems(model)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _problems(model: ModelConfig) -> Iterable[str]:
    folder = Path(model.path).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        yield _no_model(model, folder)
    if model.adapter is not None:
        adapter = Path(model.adapter).expanduser()
        if not adapter.is_dir():
            yield f"model {model.name}: adapter: {adapter}: no such folder"
        elif not (adapter / ADAPTER_FILE).is_file():
            yield (
                f"model {model.name}: adapter: {adapter}: holds no {ADAPTER_FILE}; an adapter is a "
                "folder that PEFT saved"
            )
    for one in model.adapters:
        if not (Path(one.path).expanduser() / ADAPTER_FILE).is_file():
            yield (
                f"model {model.name}: adapters: {one.path}: holds no {ADAPTER_FILE}; an adapter is "
                "a folder that PEFT saved"
            )
    for device in model.devices:
        problem = None if device == "cpu" else _gpu_problem(device)
        if problem is not None:
            yield f"model {model.name}: device {device}: {problem}"


def _no_model(model: ModelConfig, folder: Path) -> str:
    """Why a folder without a config.json is no model, and what it is."""
    if not (folder / ADAPTER_FILE).is_file():
        return (
            f"model {model.name}: {folder}: holds no config.json; a model's folder has config.json,"
            " *.safetensors and tokenizer.json"
        )
    try:
        base = parsed((folder / ADAPTER_FILE).read_text(encoding="utf-8")).get(
            "base_model_name_or_path"
        )
    except (OSError, ValueError, AttributeError):
        base = None
    return (
        f"model {model.name}: {folder}: is an adapter and no model; serve its base with it: "
        f"--model {base or 'BASE'} --adapter {folder}"
    )


def _gpu_problem(device: str) -> str | None:
    """Why an engine cannot run on a CUDA device; None where it can. torch is not imported."""
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
