"""Programs of this checkout in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*words: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """What `python words` prints, whose end must be a good one. env: more of its environment."""
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-3000:])
    return done.stdout
