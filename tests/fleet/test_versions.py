"""What makes a part of the fleet another one."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import SecretStr

from server.config import KeyConfig, ModelConfig, ServerConfig
from server.config.cluster import LearningConfig
from server.fleet.parts import FleetParts, files_id, version_of


def test_new_weights_replace_the_engines_of_their_model_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "tokenizer.json").write_text("{}")
    models = tuple(ModelConfig(name=n, path=str(tmp_path / n)) for n in ("a", "b"))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    parts = FleetParts(ServerConfig(models=models, tasks=str(tasks)))
    before = (parts.ingress_version(), parts.engine_version("a"), parts.engine_version("b"))
    assert before == (parts.ingress_version(), parts.engine_version("a"), parts.engine_version("b"))
    (tmp_path / "a" / "model.safetensors").write_bytes(b"others!")
    os.utime(tmp_path / "a" / "model.safetensors", ns=(1, 1))
    assert parts.engine_version("a") != before[1]
    assert (parts.ingress_version(), parts.engine_version("b")) == (before[0], before[2])
    (tasks / "t.yaml").write_text("name: t\n")
    assert parts.ingress_version() != before[0] and parts.engine_version("b") == before[2]
    shared = FleetParts(parts.server, LearningConfig())
    assert shared.engine_version("b") != before[2]


def test_another_secret_replaces_the_ingresses_alone(tmp_path: Path) -> None:
    def versions(secret: str) -> tuple[str, str]:
        (tmp_path / "key").write_text(f"{secret}-2\n")
        keys = (
            KeyConfig(id="written", key=SecretStr(secret)),
            KeyConfig(id="in-a-file", file=str(tmp_path / "key")),
        )
        models = (ModelConfig(name="a", path="a"),)
        parts = FleetParts(ServerConfig(models=models, tasks=str(tmp_path / "tasks"), keys=keys))
        return parts.ingress_version(), parts.engine_version("a")

    before = versions("old")
    assert before == versions("old")
    after = versions("new")
    assert after[0] != before[0] and after[1] == before[1]


def test_a_name_tells_values_and_files(tmp_path: Path) -> None:
    assert version_of("ab", "c") != version_of("a", "bc")
    assert files_id([tmp_path / "none"]) == files_id([tmp_path / "none"])
    assert files_id([tmp_path / "none"]) != files_id([tmp_path])
