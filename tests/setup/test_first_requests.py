"""After a start no request compiles anything: every client of the engine would wait for it, a
quarter of a minute for the first sampled draw of an installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.tiny_models import save_tiny


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_no_request_compiles_what_a_start_did_not(weights: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_tiny(folder, "llama")
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "TAILOR_CACHE_DIR": str(tmp_path / "cache")}
    words = [sys.executable, "-m", "tests.setup.first_requests", str(folder), weights]
    done = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}
