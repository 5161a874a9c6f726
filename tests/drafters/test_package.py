"""The wheel holds what the package reads beside its code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_wheel_has_the_default_trust(tmp_path: Path) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    out.mkdir()
    skipped = shutil.ignore_patterns("__pycache__")
    for part in ("drafters", "vocab_store"):
        shutil.copytree(ROOT / part, tree / part, ignore=skipped)
    (tree / "server").mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE", "server/__init__.py"):
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, tree / file)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    name = "drafters/auto/default_trust.json"
    with zipfile.ZipFile(wheel) as held:
        assert held.read(name) == (ROOT / name).read_bytes()
