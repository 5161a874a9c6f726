"""Programs of this checkout in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*words: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """What `python words` prints, whose end must be a good one. env: more of its environment."""
    return _run(sys.executable, *words, cwd=cwd, **env)


def run_bash(line: str, cwd: Path = ROOT, **env: str) -> str:
    """The same of a line of shell, whose `tailor` is this checkout's."""
    tailor = f'tailor() {{ "{sys.executable}" -m server.commands.cli "$@"; }}\n'
    return _run("bash", "-c", tailor + line, cwd=cwd, **env)


def _run(*words: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (words[-1], done.stdout[-1000:], done.stderr[-3000:])
    return done.stdout
