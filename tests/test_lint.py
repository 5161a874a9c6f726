"""The linters' exceptions are needed: a rule that a file no longer breaks applies to it again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _breaches(files: str, rule: str) -> int:
    """How often `files` (a pattern of per-file-ignores) breaks `rule` without the exceptions."""
    paths = sorted(str(path) for path in ROOT.glob(files) if path.suffix == ".py" or path.is_dir())
    assert paths, f"{files} names no file"
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--output-format", "json", "--select", rule,
         "--config", "lint.per-file-ignores={}", *paths],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return len(json.loads(done.stdout))


def test_every_exception_in_pyproject_is_needed() -> None:
    if shutil.which("ruff", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("ruff is not installed")
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    idle = [
        f"{files}: {rule}"
        for files, rules in lint["per-file-ignores"].items()
        for rule in rules
        if not _breaches(files, rule)
    ]
    assert not idle, f"take these out of per-file-ignores in pyproject.toml: {idle}"
