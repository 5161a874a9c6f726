"""What tests of several commands begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.tiny_models import save_tiny


@pytest.fixture
def folder(tmp_path: Path, own_cache: Path) -> Path:
    """A model's folder, with a cache of its own."""
    made = tmp_path / "tiny"
    save_tiny(made, "llama")
    return made
