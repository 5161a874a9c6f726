"""What a first user meets: a wheel outside a clone, models that are here, reasons told at once."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from server.commands import own_engine, serve
from server.commands.own_engine import check_places
from server.commands.serve import ModelChoice, Place, server_config
from server.config import ModelConfig, load_server_config
from server.errors import ConfigError
from server.wiring.task_set import server_tasks
from tests.commands.command_line import Tailor
from tests.model.tiny_models import save_built_in, save_tiny

ROOT = Path(__file__).parents[2]
TASKS = {"completion", "extraction", "rag-qa", "sql", "summarize", "tagging"}


def test_tasks_of_the_folder_go_before_those_that_are_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = server_config(Place(), ModelChoice(), serve.EngineOptions())
    assert set(server_tasks(config)) == TASKS
    (tmp_path / "configs" / "tasks").mkdir(parents=True)
    (tmp_path / "configs" / "tasks" / "mine.yaml").write_text("description: mine\n")
    assert set(server_tasks(config)) == {"mine", "completion"}


# --- models that are here ---


@pytest.fixture
def cache(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    save_built_in(own_cache, "smollm2-135m-instruct")
    other = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    (other / "model.safetensors").write_bytes(b"x" * 3_000_000)
    return tmp_path


def test_models_are_listed_shown_and_removed(cache: Path, tailor: Tailor) -> None:
    out = tailor("models", "list").out
    assert str(cache / "cache" / "models") in out and " here " in out
    assert "org/tiny" in out and "3 MB here" in out and "239 MB to fetch" in out
    assert "smollm2-135m-instruct" in out and "Apache-2.0" in out
    out = tailor("models", "show", "smollm2-135m-instruct").out
    assert "LlamaForCausalLM" in out and "supported      yes" in out and "2048" in out
    assert "supported      no: " in tailor("models", "show", "org/tiny").out
    assert "removed org/tiny: 3 MB" in tailor("models", "rm", "org/tiny").out
    assert not (cache / "hub" / "models--org--tiny").exists()
    for name in ("gemma-3-270m", "org/tiny", "nothing"):
        assert "not on this machine" in tailor("models", "rm", name, status=1).err


def test_a_folder_of_ones_own_is_never_removed(cache: Path, tailor: Tailor) -> None:
    mine = cache / "mine"
    save_tiny(mine, "llama", vocab_size=260)
    assert "of your own" in tailor("models", "rm", mine, status=1).err
    assert (mine / "config.json").is_file()


# --- reasons, told before anything is loaded ---


def _model(path: Path, **more: object) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "path": str(path), **more})


def test_an_adapter_given_as_a_model_is_told(tmp_path: Path, tailor: Tailor) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    told = tailor("serve", "--port", 0, "--model", folder, status=1).err
    base = f"serve its base with it: --model org/base --adapter {folder}"
    assert f"is an adapter and no model; {base}" in told
    (folder / "adapter_config.json").unlink()
    told = tailor("serve", "--port", 0, "--model", folder, status=1).err
    assert "holds no config.json" in told


def test_a_missing_adapter_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter: .*/none: no such folder"):
        check_places([_model(tmp_path, adapter=str(tmp_path / "none"))])


@pytest.mark.parametrize(
    ("version", "num_gpus", "device", "told"),
    [
        ("2.13.0+cpu", 1, "cuda", "is its CPU build"),
        ("2.13.0", 0, "cuda:0", "no NVIDIA GPU, or its driver is not installed"),
        ("2.13.0", 2, "cuda:2", "there are only 2 here"),
        ("2.13.0", 2, "cuda:1", None),
        ("2.13.0+cpu", 0, "cpu", None),
    ],
)
def test_a_missing_device_is_told_at_once(
    version: str, num_gpus: int, device: str, told: str | None, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(metadata, "version", lambda _: version)
    monkeypatch.setattr(own_engine, "_num_gpus", lambda: num_gpus)
    (tmp_path / "config.json").write_text("{}")
    if told is None:
        check_places([_model(tmp_path, devices=(device,))])
        return
    with pytest.raises(ConfigError, match=f"device {device}: .*{told}"):
        check_places([_model(tmp_path, devices=(device,))])


def test_errors_of_keys_name_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tailor: Tailor
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "keys:\n  - {id: a, key: same}\n  - {id: b, key: same}\n  - id: c\n    env: NO\n"
    )
    monkeypatch.delenv("NO", raising=False)
    with pytest.raises(ConfigError, match=r"server\.yaml:4: key c: NO is empty"):
        load_server_config(file).keys[2].secret()
    monkeypatch.setenv("NO", "other")
    told = tailor("serve", "--config", file, status=1).err
    assert "server.yaml:3: key b: has the same secret as key a" in told
    model = "models: [{name: m, path: m, adapters: [{name: slots, path: slots}]}]\n"
    file.write_text(f"{model}keys:\n  - id: a\n    key: x\n    tasks: [m, slots, nobody]\n")
    told = tailor("serve", "--config", file, status=1).err
    assert "server.yaml:3: key a: tasks: no task, model or adapter is 'nobody'" in told
    (tmp_path / "key").write_bytes(b"\xff\xfe\n")
    file.write_text("keys:\n  - {id: a, file: key}\n")
    told = tailor("serve", "--config", file, status=1).err
    assert f"server.yaml:2: key a: {tmp_path / 'key'}: a key is printable ASCII" in told
