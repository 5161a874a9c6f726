"""What README and docs say their examples answer is what the default model answers.

tests/setup/test_readme_runs.py follows every command on a tiny model; here the examples whose
answer a page tells are asked of the real one, smollm2-135m-instruct.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from server.model.catalog import model_folder
from tests.api.live import LiveServer
from tests.processes import run_bash
from tests.setup import pages
from tests.setup.serve_here import serve_here

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The model in the form that `tailor serve` takes by itself."""
    folder = model_folder("smollm2-135m-instruct", "auto")
    words = ["--model", str(folder), "--served-model-name", "smollm2-135m-instruct",
             "--tasks", str(pages.ROOT / "configs" / "tasks"), "--max-num-seqs", "4"]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with serve_here(*words) as running:
            yield running


def _block(page: str, holds: str) -> str:
    """The one Python block of a page that has `holds`."""
    text = (pages.DOCS / page).read_text(encoding="utf-8")
    (found,) = [b for b in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M) if holds in b]
    return str(found)


@pytest.mark.parametrize(
    ("page", "holds", "answer"),
    [
        ("index.md", "Birthplace", " London\nYear: 1815\n"),
        ("drafting.md", "prediction", ' {"name": "Ada Lovelace", "city": "London", "born": 1815} '),
        ("api.md", "structured_outputs", '{"name":"Ada Lovelace","city":"London","born":1815}\n'),
        ("api.md", "chat.completions", "The capital of Japan is Tokyo.\n"),
        ("api.md", "decisions", "delivery 1."),
    ],
)
def test_python_prints_what_the_page_says(
    server: LiveServer, capsys: pytest.CaptureFixture[str], page: str, holds: str, answer: str
) -> None:
    pytest.importorskip("openai")
    names: dict[str, object] = {}
    code = _block(page, holds).replace("http://127.0.0.1:8000", server.url)
    exec(compile(code, page, "exec"), names)
    names["client"].close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out.startswith(answer)
    if page == "drafting.md":
        usage = names["answer"].usage.completion_tokens_details  # type: ignore[attr-defined]
        # 18 on a quiet machine: how many are drafted follows from what its steps cost.
        assert usage.accepted_prediction_tokens > 9


def test_the_first_request_says_paris(server: LiveServer) -> None:
    (line,) = [c for c in pages.commands() if "The capital of France is" in c]
    line = line.replace("http://127.0.0.1:8000", server.url)
    assert json.loads(run_bash(f"{line} -sS"))["choices"][0]["text"] == " Paris"


def test_the_one_in_the_terminal_says_london(server: LiveServer) -> None:
    (line,) = [c for c in pages.commands() if c.startswith("printf")]
    assert run_bash(f"{line} --url {server.url}", NO_COLOR="1").strip() == "London"
