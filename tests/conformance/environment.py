"""What the conformance scripts share: an environment of their own for each suite.

A suite and what it needs is installed from the package index when its script runs, into a virtual
environment beside the script's other files, so that nothing of it meets this project's packages and
nothing of it is kept in this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def options_of(told: str | None) -> argparse.ArgumentParser:
    """The options that every script has, and what it tells of itself."""
    parser = argparse.ArgumentParser(
        description=told, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", required=True, help="of the running server, with /v1")
    parser.add_argument("--model", help="default: the first that GET /v1/models lists")
    parser.add_argument("--work-dir", type=Path, help="keep environments and reports here")
    return parser


@contextmanager
def work_folder(chosen: Path | None) -> Iterator[Path]:
    """The chosen folder, or one that is removed afterwards."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen.resolve()
        return
    with TemporaryDirectory() as scratch:
        yield Path(scratch)


def environment(folder: Path, name: str, requirements: Sequence[str]) -> Path:
    """A virtual environment with these packages; its python. Made once in a kept folder.

    Raises CalledProcessError when pip fails.
    """
    place = folder / f"venv-{name}"
    python, done = place / "bin" / "python", place / "installed.txt"
    wanted = "\n".join(requirements)
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *requirements]
        subprocess.run(install, check=True)
        done.write_text(wanted)
    return python


def run(words: Sequence[str | Path], folder: Path, **variables: str) -> int:
    """Run a program of an environment in a folder; its exit status."""
    # The suites must not find this project, nor settings of whoever runs them.
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OPENAI_API_KEY")}
    return subprocess.run([str(w) for w in words], cwd=folder, env={**kept, **variables}).returncode


def served_models(base_url: str, key: str = "none") -> list[str]:
    """What GET /v1/models lists."""
    request = urllib.request.Request(
        f"{base_url.rstrip('/')}/models", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return [model["id"] for model in json.load(response)["data"]]


def served_model(base_url: str, key: str = "none") -> str:
    """The first of them."""
    return served_models(base_url, key)[0]
