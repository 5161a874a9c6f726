"""Sets derived from a repository, and the curves of requests in turn over them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from loadtest import learning_curves, repository_sets
from loadtest.recordings import EOS
from tests.api.tiny_tokenizers import byte_level_tokenizer

NUM_FILES = 12


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve commits, each of a function and a manifest of its own; one more is a bot's."""
    folder = tmp_path_factory.mktemp("repository")

    def git(*arguments: str, author: str = "Ada") -> None:
        told = ["-c", f"user.name={author}", "-c", "user.email=a@example.invalid"]
        subprocess.run(["git", "-C", str(folder), *told, *arguments], check=True)

    git("init", "-q")
    for i in range(NUM_FILES + 1):
        (folder / f"d{i}" / "e").mkdir(parents=True)
        (folder / f"d{i}" / "e" / "part.py").write_text(
            f'def area{i}(side):\n    """Return the area of square number {i}, which is what a'
            f' caller asks for.\n    """\n    return side * side + {i}\n'
        )
        (folder / f"d{i}" / "e" / "part.yaml").write_text(
            f"kind: Square\nmetadata:\n  name: square-{i}\nspec:\n  side: {i}\n  area: {i * i}\n"
        )
        git("add", "-A")
        author = "Release Bot" if i == NUM_FILES else "Ada"
        git("commit", "-qm", f"Add square {i} and its manifest, for who needs areas", author=author)
    return folder


@pytest.mark.parametrize("what", ["commits", "docstrings", "manifests"])
def test_no_example_stands_in_both_parts(what: str, repository: Path, tmp_path: Path) -> None:
    out = tmp_path / what
    told = [what, "--repository", str(repository), "--test", "4", "-o", str(out)]
    assert repository_sets.main(told) == 0
    parts = {
        split: [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    }
    num = NUM_FILES + (what != "commits")
    assert len(parts["test"]) == 4 and len(parts["train"]) == num - 4
    prompts = [entry["prompt"] for part in parts.values() for entry in part]
    assert len(set(prompts)) == num
    last = parts["test"][-1]
    if what == "commits":  # the newest are the test, and no bot's are in
        assert last["completion"].startswith(f"Add square {NUM_FILES - 1} ")
        assert "+def area" in last["prompt"]
    elif what == "docstrings":
        assert '"""' not in last["prompt"] and "return side" in last["prompt"]
        assert last["completion"].startswith("Return the area of square")
    else:
        assert json.loads(last["completion"])["kind"] == "Square"


def test_what_is_no_repository_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        repository_sets.main(["commits", "--repository", str(tmp_path), "-o", str(tmp_path / "o")])
    assert "git log" in capsys.readouterr().err


def test_curves_of_requests_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers of one kind: who remembers them makes more of each request than who does not."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, word in (("alpha", "river"), ("beta", "meadow")):
        (tmp_path / name).mkdir()
        for split, first in (("train", 0), ("test", 100)):
            lines = [
                {"prompt": f"{i}:", "completion": f"the {word} number {i} is long and green"}
                for i in range(first, first + 40)
            ]
            file = tmp_path / name / f"{split}.jsonl"
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = ["--data", str(tmp_path), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert learning_curves.main([*told, "--only", "alpha", "--budgets", "8"]) == 0
    (cell,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    assert (cell["data"], cell["budget"], cell["requests"]) == ("alpha", 8, 40)
    cold, learning, corpus = (cell[f"auto, {column}"] for column in ("cold", "learning", "corpus"))
    assert len(cold) == 3 and learning[-1] > 1.5 * cold[-1] and corpus[-1] > learning[0]
    assert cell["auto, wrong corpus"][-1] > 0.9 * cold[-1]


def test_a_wrong_corpus_needs_a_second_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        learning_curves.main(["--data", ".", "--sets", "alpha"])
    assert "at least two" in capsys.readouterr().err
