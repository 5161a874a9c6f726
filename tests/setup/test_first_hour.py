"""docs/first-hour.md is followed, in its order, on a tiny model: from data to a trained task.

What differs from a person's hour: nothing is installed, the model is a tiny one of that name, the
port is a free one, whatever else runs on the machine is left out of account, a fifth of the
rows is enough, two forms of the weights are compared, and the commands run in this process, with
the words that bash makes of them; but the first server is a process of its own.
"""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from server.commands.cli import main
from tests.processes import Running, run_bash
from tests.setup import pages
from tests.setup.built_in import save_default_model
from tests.setup.serve_here import serve_here

PAGE = pages.DOCS / "first-hour.md"
WORDS = "tailor() { printf '%s\\0' \"$@\"; }\n"
INSTALL = ("sudo", "git", "make", ". ")  # tests/docker/prove.py installs in a clean Debian


def _keep(file: Path, num: int) -> None:
    """The first rows of a CSV file with a header."""
    with file.open(newline="") as lines:
        rows = list(csv.reader(lines))
    assert len(rows) > num
    with file.open("w", newline="") as out:
        csv.writer(out).writerows(rows[: 1 + num])


def test_the_first_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_default_model(tmp_path / "cache")
    shutil.copytree(pages.ROOT / "configs" / "tasks", tmp_path / "configs" / "tasks")
    for name, value in {
        "TAILOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(pages.ROOT),
        "TAILOR_API_KEY": "sk-births", "TAILOR_ADMIN_KEY": "sk-operator",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("server.commands.tasks._FORMS", ("float32", "int8"))
    monkeypatch.chdir(tmp_path)
    found = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    assert len(found) >= 8
    url = ""
    with ExitStack() as servers:
        for language, block in found:
            if language == "python":
                exec(compile(block, PAGE.name, "exec"), {})
                _keep(tmp_path / "train.csv", 60)
                _keep(tmp_path / "test.csv", 15)
                continue
            for line in block.splitlines():
                if line.startswith((*INSTALL, "export")):
                    continue
                if line.startswith("tailor serve"):
                    words = shlex.split(line)[2:]
                    if not url:
                        first = servers.enter_context(Running(words, cwd=tmp_path))
                        url = first.url
                    else:
                        assert first.stop(signal.SIGTERM) == 0
                        url = servers.enter_context(serve_here(*words)).url
                    continue
                if "tasks tune" in line or "tasks make" in line:
                    line = line.replace("--limit 60", "--limit 15") + " --even-if-busy"
                if line.startswith("tailor eval"):
                    line += f" --url {url}"
                if url:
                    line = line.replace("http://127.0.0.1:8000", url)
                told = run_bash(f"set -o pipefail\n{WORDS}{line}", tmp_path)
                if line.startswith("tailor "):
                    assert main(told.split("\0")[:-1]) == 0, line
                    told = capsys.readouterr().out
                assert told.strip(), line
        assert url != first.url and (tmp_path / "births.tailor-task").is_file()
