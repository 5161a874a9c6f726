"""Programs of this checkout in a process of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TAILOR = (sys.executable, "-m", "server.commands.cli")


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


class Running:
    """A `tailor serve` process with a small KV cache, and its output. Its context ends it, where
    nobody has yet."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str] | None = None, *,
        tailor: Sequence[str] = TAILOR, cwd: Path = ROOT,
    ) -> None:  # fmt: skip
        self.process = subprocess.Popen(
            [*tailor, "serve", "--port", "0", "--kv-cache-memory", "64MiB", *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=cwd, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.lines: list[str] = []
        try:
            self.url = self.wait_for(r"ready on (http://\S+) after")[1]
        except AssertionError:
            # Nobody else has this object yet, and what it leaves would fail a later test.
            self.__exit__()
            raise

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first further line that matches; fails when the process ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no {pattern!r} in:\n{''.join(self.lines)}")

    def ask(self, path: str, body: Any = None, key: str | None = None) -> Any:
        """GET, or POST a JSON body; the JSON answer. Raises urllib's HTTPError."""
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def stop(self, number: int) -> int:
        """Send a signal, read what is still told and return the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            assert self.process.stdout is not None
            with self.process.stdout as told:
                self.lines += told.readlines()
