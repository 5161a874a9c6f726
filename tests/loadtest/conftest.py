"""What tests of load tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from loadtest import figures
from tests.json_lines import write_lines

Ended = Callable[..., dict[str, Any]]
"""The fixture `ended`: a program's main, its words, which are made text, and its exit status."""


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str]) -> Ended:
    """Runs a program and returns the JSON line that it ended in."""

    def run(main: Callable[[list[str]], int], *words: object, status: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert main([str(word) for word in words]) == status, words
        result: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        return result

    return run


def write_sets(folder: Path, num: int, rows: Mapping[str, Callable[[int], Any]]) -> Path:
    """Data sets by name, `num` lines to learn from and as many, from number 100, to test with."""
    for name, row in rows.items():
        for split, first in (("train", 0), ("test", 100)):
            lines = (row(i) for i in range(first, first + num))
            write_lines(folder / name / f"{split}.jsonl", lines)
    return folder


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every interval: the usual number takes most of a report's time."""
    monkeypatch.setattr(figures, "NUM_RESAMPLES", 500)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Two data sets of four prompts each, "alpha" and "beta"."""
    for name in ("alpha", "beta"):
        rows = [{"id": f"{name}-{i}", "prompt": f"{name} {i}"} for i in range(4)]
        write_lines(tmp_path / name / "test.jsonl", rows)
    return tmp_path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny model of one layer: its folder, and itself."""
    from tests.model.tiny_models import save_tiny

    folder = tmp_path_factory.mktemp("model")
    return folder, save_tiny(folder, "llama", num_hidden_layers=1, max_position_embeddings=1024)


@pytest.fixture(scope="session")
def folder(model: tuple[Path, Any]) -> Path:
    """The tiny model's folder."""
    return model[0]
