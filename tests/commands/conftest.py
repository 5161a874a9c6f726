"""What tests of several commands begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.tiny_models import save_tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, with a cache of its own."""
    monkeypatch.setenv("TAILOR_CACHE_DIR", str(tmp_path / "cache"))
    made = tmp_path / "tiny"
    made.mkdir()
    save_tiny(made, "llama")
    return made
