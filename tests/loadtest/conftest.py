"""What tests of load tests share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.model.tiny_models import save_tiny


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON line that a program ended in."""
    result: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return result


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A file of JSON lines, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Two data sets of four prompts each, "alpha" and "beta"."""
    for name in ("alpha", "beta"):
        rows = [{"id": f"{name}-{i}", "prompt": f"{name} {i}"} for i in range(4)]
        write_lines(tmp_path / name / "test.jsonl", rows)
    return tmp_path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny model: its folder, and itself."""
    folder = tmp_path_factory.mktemp("model")
    return folder, save_tiny(folder, "llama", vocab_size=128, max_position_embeddings=1024)


@pytest.fixture(scope="session")
def folder(model: tuple[Path, Any]) -> Path:
    """The tiny model's folder."""
    return model[0]
