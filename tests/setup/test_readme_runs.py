"""README and docs are followed: their commands, word for word, against a server on a tiny model.

What differs from a person's terminal: the two built-in models are tiny ones under the same names,
the port is a free one, two forms of the weights are compared, a load test asks less, and all of it
runs in this process. What a test elsewhere runs is named in ELSEWHERE.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest import load
from server.commands.cli import main
from tests.api.live import LiveServer
from tests.json_lines import write_lines
from tests.model.tiny_models import save_built_in
from tests.processes import run_bash
from tests.setup import pages
from tests.setup.built_in import save_default_model
from tests.setup.serve_here import serve_here

ROOT = pages.ROOT
KEY = "an-admin-key"
HERE = ("curl", "tailor tasks", "tailor corpus", "tailor replay", "tailor vocab", "tailor serve",
        "tailor run", "python -m loadtest.load")  # fmt: skip
ELSEWHERE = {
    "printf": "tests/setup/test_examples.py, with the model that it is for",
    "make serve": "tests/setup/test_serve.py: its one command, `tailor serve --hello`",
    "make test": "this run",
    "prometheus": "tests/monitoring/test_prometheus.py",
    "promtool": "tests/monitoring/test_prometheus.py",
    "python configs/grafana/dashboards.py": "tests/monitoring/test_grafana.py",
    "tailor adapters": "tests/setup/test_adapter_serving.py",
    "tailor fleet": "tests/fleet/test_fleet_page.py",
    "docker": "tests/docker/prove.py does its steps: no container engine here",
    "sudo": "needs root and a Debian of its own",
}
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def _starting(start: str) -> list[str]:
    return [line for line in pages.commands() if line.startswith(start)]


def test_every_command_is_run_here_or_elsewhere() -> None:
    unknown = [c for c in pages.commands() if not c.startswith((*HERE, *ELSEWHERE))]
    assert not unknown


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A newcomer's folder: the built-in models are there, and data of a task."""
    home = tmp_path_factory.mktemp("home")
    save_default_model(home / "cache", TEMPLATE)
    save_built_in(home / "cache", "gemma-3-270m", "gemma3")
    lines = [
        {"prompt": f"Town {i}:", "completion": f"kind: town, river: {'yes' if i % 3 else 'no'}"}
        for i in range(60)
    ]
    sets = ("squad", "massive_en", "advising_sql")
    for name in ("train.jsonl", "prompts.jsonl", *(f"data/{name}/test.jsonl" for name in sets)):
        write_lines(home / name, lines)
    shutil.copytree(ROOT / "configs" / "tasks", home / "configs" / "tasks")
    return home


@pytest.fixture(scope="module")
def environment(home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILOR_CACHE_DIR", str(home / "cache"))
        patch.setenv("TAILOR_ADMIN_KEY", KEY)
        patch.setattr("server.commands.tasks._FORMS", ("float32", "int8"))
        patch.chdir(home)
        yield


@pytest.fixture(scope="module")
def tuned(environment: None, home: Path) -> None:
    """`tailor tasks tune`, before the server starts, as the README says."""
    (line,) = _starting("tailor tasks tune")
    with pytest.MonkeyPatch.context() as patch:
        # What else runs beside the tests is nobody's deployment.
        patch.setattr("server.commands.tasks.OtherProcesses.share", lambda self: 0.0)
        status = main(shlex.split(line)[1:])
    assert status == 0
    assert (home / "configs" / "tasks" / "slots.yaml").is_file()


@pytest.fixture(scope="module")
def server(tuned: None) -> Iterator[LiveServer]:
    # With an adapter: tests/setup/test_first_hour.py.
    (line,) = [line for line in _starting("tailor serve") if "--adapter" not in line]
    with serve_here(*shlex.split(line)[2:]) as running:
        yield running


def test_a_fine_tuned_task(environment: None, home: Path) -> None:
    for what in ("analyze", "enrich", "train"):
        lines = _starting(f"tailor tasks {what}")
        assert lines
        for line in lines:
            assert main(shlex.split(line)[1:]) == 0, line
    (line,) = [line for line in _starting("tailor corpus build") if "--adapter" in line]
    assert main(shlex.split(line)[1:]) == 0, line
    (line,) = _starting("tailor tasks make")  # to its end: tests/setup/test_first_hour.py
    assert main([*shlex.split(line)[1:], "--skip", "tune", "--skip", "evaluate"]) == 0, line
    made = ("slots.enrichment.json", "slots-adapter/enrichment.json", "slots.corpus",
            "tuned/slots.yaml", "tuned/slots.make/adapter/adapter_config.json")  # fmt: skip
    assert all((home / name).is_file() for name in made)


def test_a_task_of_ones_own_by_hand(environment: None, home: Path) -> None:
    lines = _starting("tailor corpus") + _starting("tailor replay") + _starting("tailor vocab")
    lines = [line for line in lines if "--adapter" not in line]
    assert len(lines) >= 7
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, line
    made = ("task.corpus", "own.jsonl", "own.corpus", "task.vocab")
    assert all((home / name).is_file() for name in made)


def test_curl_gets_an_answer_everywhere(server: LiveServer) -> None:
    lines = _starting("curl")
    assert len(lines) >= 3
    for line in lines:
        line = line.replace("http://127.0.0.1:8000", server.url)
        if "/corpus" not in line:
            line += f" -H 'authorization: Bearer {KEY}'"
        answer = json.loads(run_bash(f"{line} -sS --fail-with-body"))
        if '"slots"' in line:
            assert answer["speculation"]["mean_tokens_per_step"] >= 1
        elif "/systemone" in line:
            assert answer["answers"]["topic"]["choice"] in ("delivery", "price")
        elif "/corpus" not in line:
            assert answer["choices"][0]["finish_reason"]


def test_a_file_of_prompts(server: LiveServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = _starting("tailor run")
    monkeypatch.setenv("TAILOR_API_KEY", KEY)
    assert main([*shlex.split(line)[1:], "--url", server.url]) == 0
    assert len((home / "answers.jsonl").read_text().splitlines()) == 60


def test_python_does_what_it_says(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    """All examples, one after the other, in one program."""
    pytest.importorskip("openai")
    blocks = pages.blocks("python")
    assert len(blocks) >= 4
    names: dict[str, Any] = {}
    for block in blocks:
        code = block.replace("http://127.0.0.1:8000", server.url)
        code = code.replace('api_key="none"', f'api_key="{KEY}"')
        before = names.get("client")
        exec(compile(code, "docs", "exec"), names)
        if before is not None and names["client"] is not before:
            before.close()
    names["client"].close()
    assert len(capsys.readouterr().out.splitlines()) >= 3
    assert names["topic"].choice in ("delivery", "price") and 0 <= names["anger"].score <= 2


def test_a_load_test_and_its_page(server: LiveServer, home: Path) -> None:
    (line,) = _starting("python -m loadtest.")
    words = [word.replace("http://127.0.0.1:8000", server.url) for word in shlex.split(line)[3:]]
    less = {"--data": "data", "--concurrency": "2", "--requests": "6", "--rounds": "2",
            "--tokens": "8"}  # fmt: skip
    for option, value in less.items():
        words[words.index(option) + 1] = value
    words += ["--pause", "0", "--max-load", "1000", "--key", "tailor-off=TAILOR_ADMIN_KEY"]
    assert load.main(words) == 0
    page = home / words[words.index("--html") + 1]
    assert "<html" in page.read_text(encoding="utf-8")
