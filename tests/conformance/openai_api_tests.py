"""Runs the API tests that the openai-python source package ships against a running server.

    python tests/conformance/openai_api_tests.py --base-url http://127.0.0.1:8000/v1

Fetches the source package of `openai` from the package index at run time (pip download), builds a
virtual environment with it beside it, takes its tests of completions, chat, models and decisions,
puts the served model's name where they name one of OpenAI's, and runs them with pytest. Nothing of
that package is kept in this repository. Prints what was left out and why, and ends in one JSON
line; the exit status is pytest's.

The chat tests say nothing about the length of an answer: on a slow machine let --model name a task
with a small sampling.max_tokens.

Needs the network for the package index, and the server to accept the key "My API Key" if it has
keys. Not collected by `pytest tests/`: the name has no test_ prefix on purpose.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from environment import environment, options_of, run, served_model, work_folder

DEFAULT_VERSION = "3.52.0"
TEST_FILES = (
    "tests/api_resources/test_completions.py",
    "tests/api_resources/chat/test_completions.py",
    "tests/api_resources/chat/completions/test_messages.py",
    "tests/api_resources/test_models.py",
    "tests/api_resources/test_decisions.py",
)
MODEL_NAMES = re.compile(r'"(?:gpt|davinci|babbage|o\d)[A-Za-z0-9.-]*"|(?<=model=)"model"')
# What the package's own conftest and helpers import.
TEST_REQUIREMENTS = ("pytest", "pytest-asyncio", "rich", "aiohttp")

DESELECTED = {
    "with_all_params and not Decisions": (
        "sends every field at once with contradictory values (best_of=0 with n=1, echo with "
        'suffix, logit_bias of "foo", stream=False with stream_options; audio, web search and old '
        "functions in a chat): made for a mock that answers anything"
    ),
    "(TestModels or TestAsyncModels) and delete and not path_params": (
        "DELETE /v1/models deletes a fine-tuned model; the server has none"
    ),
    "(TestCompletions or TestAsyncCompletions) and (retrieve or update or list or delete) "
    "and not path_params": "stored chat completions: this server stores none",
    "(TestMessages or TestAsyncMessages) and list and not path_params": (
        "messages of stored chat completions"
    ),
}


def fetch_source(version: str, folder: Path) -> Path:
    """Download and unpack the sdist; its root. Raises CalledProcessError or RuntimeError."""
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
            "--no-binary", "openai", f"openai=={version}", "--dest", str(folder),
        ],
        check=True,
    )  # fmt: skip
    archives = list(folder.glob("openai-*.tar.gz"))
    if len(archives) != 1:
        raise RuntimeError(f"pip download left {len(archives)} archives")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"openai-{version}"


def name_served_model(source: str, model: str) -> str:
    """The test file's text with every OpenAI model name, as a whole string, replaced."""
    return MODEL_NAMES.sub(f'"{model}"', source)


def selection() -> str:
    """pytest's -k expression that leaves out DESELECTED."""
    return " and ".join(f"not ({expression})" for expression in DESELECTED)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options_of(__doc__)
    parser.add_argument("--openai-version", default=DEFAULT_VERSION)
    options = parser.parse_args(arguments)
    base_url, version = options.base_url.rstrip("/"), options.openai_version
    model = options.model or served_model(base_url, "My API Key")
    with work_folder(options.work_dir) as folder:
        root = folder / f"openai-{version}"
        if not root.is_dir():
            fetch_source(version, folder)
        python = environment(folder, "openai", [f"openai[aiohttp]=={version}", *TEST_REQUIREMENTS])
        for name in TEST_FILES:
            path = root / name
            path.write_text(name_served_model(path.read_text(), model))
        results = folder / "results.xml"
        status = run(
            [
                python, "-m", "pytest", *TEST_FILES,
                "--override-ini", "addopts=", "--tb=short", "-q",
                "-p", "no:cacheprovider", "-k", selection(), "--junitxml", results,
            ],
            root,
            TEST_API_BASE_URL=base_url,
        )  # fmt: skip
        suites = ElementTree.parse(results).getroot().iter("testsuite")
        counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
        for suite in suites:
            for key in counts:
                counts[key] += int(suite.get(key, "0"))
    for expression, reason in DESELECTED.items():
        print(f"left out: {expression}: {reason}")
    told = {"tool": "openai_api_tests", "openai_version": version, "model": model, **counts}
    print(json.dumps({**told, "left_out": list(DESELECTED)}))
    return status


if __name__ == "__main__":
    sys.exit(main())
