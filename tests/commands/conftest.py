"""What tests of several commands begin with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.model.tiny_models import save_tiny


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model of two layers; who changes it copies it first."""
    made = tmp_path_factory.mktemp("shallow") / "tiny"
    save_tiny(made, "llama", num_hidden_layers=2)
    return made


@pytest.fixture
def folder(shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and a cache that knows the model from the test before."""
    monkeypatch.setenv("TAILOR_CACHE_DIR", str(shallow.parent / "cache"))
    return Path(shutil.copytree(shallow, tmp_path / "tiny"))
