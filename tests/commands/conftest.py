"""What tests of several commands begin with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.json_lines import write_lines
from tests.model.tiny_models import save_tiny

VOCAB_ROWS = 512
"""Of `weightless`: more than its tokenizer has."""


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model of two layers; who changes it copies it first."""
    made = tmp_path_factory.mktemp("shallow") / "tiny"
    save_tiny(made, "llama", num_hidden_layers=2)
    return made


@pytest.fixture
def weightless(tmp_path: Path) -> Path:
    """A model's folder as far as commands read it that compute nothing."""
    made = tmp_path / "model"
    made.mkdir()
    byte_level_tokenizer().save(str(made / "tokenizer.json"))
    config = {"vocab_size": VOCAB_ROWS, "hidden_size": 16, "eos_token_id": 1}
    (made / "config.json").write_text(json.dumps(config))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Short prompts and answers of one form, which a few tokens of their own make much shorter."""
    lines = [
        {"prompt": f"{'abcdefgh'[i % 8]}:", "completion": f" !!ok!! {'xy'[i % 2]} ##"}
        for i in range(60)
    ]
    return write_lines(tmp_path / "train.jsonl", lines)


@pytest.fixture
def folder(shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and a cache that knows the model from the test before."""
    monkeypatch.setenv("TAILOR_CACHE_DIR", str(shallow.parent / "cache"))
    return Path(shutil.copytree(shallow, tmp_path / "tiny"))
