"""Sets derived from a repository, and the curves of requests in turn over them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from drafters.auto.describe import CHANCE
from drafters.auto.drafter import AutoDrafter
from drafters.corpus import build_corpus
from drafters.replay import Recording
from loadtest import choice_bound, learning_curves, repository_sets
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


@pytest.fixture
def told(tmp_path: Path) -> list[str]:
    """The arguments of two sets, each with answers of one kind, and of their tokenizer."""
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
    return ["--data", str(tmp_path), "--tokenizer", str(tmp_path / "tokenizer.json")]


def test_curves_of_requests_in_turn(told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Who remembers answers of one kind makes more of each request than who does not."""
    assert learning_curves.main([*told, "--only", "alpha", "--budgets", "8"]) == 0
    (cell,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    assert (cell["data"], cell["budget"], cell["requests"]) == ("alpha", 8, 40)
    cold, learning, corpus = (cell[f"auto, {column}"] for column in ("cold", "learning", "corpus"))
    assert len(cold) == 3 and learning[-1] > 1.5 * cold[-1] and corpus[-1] > learning[0]
    assert cell["auto, wrong corpus"][-1] > 0.9 * cold[-1]
    only = ["--only", "alpha", "--budgets", "8", "--columns", "auto, cold"]
    assert learning_curves.main([*told, *only]) == 0
    (again,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    assert again["auto, cold"] == cold and "auto, learning" not in again


def test_what_learning_gains_beside_a_memory() -> None:
    """The median over the sets, of all requests; a column that was not replayed is not told."""
    shares = (1.5, 3.0, 1.2)
    cells = [
        {
            "data": "x",
            "budget": 16,
            "auto, learning": [9.0, 9.0, 2.0 * share],
            "arctic": [1, 1, 2.0],
        }
        for share in shares
    ]
    assert learning_curves.over_arctic(cells) == {"16": {"arctic": [1.2, 1.5, 3.0]}}


def test_a_wrong_corpus_needs_a_second_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        learning_curves.main(["--data", ".", "--sets", "alpha"])
    assert "at least two" in capsys.readouterr().err


def test_curves_of_a_models_own_answers(
    told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the model held likely is noted as the answers are replayed; there is no corpus."""
    (tmp_path / "own" / "alpha").mkdir(parents=True)
    output = [*range(40, 60), 1]
    entry = {
        "prompt_ids": [5, 6, 7],
        "output_ids": output,
        "likely_ids": [[token, 2, 3] for token in output],
        "likely_chances": [[0.8, 0.1, 0.05]] * len(output),
    }
    (tmp_path / "own" / "alpha" / "test.jsonl").write_text((json.dumps(entry) + "\n") * 3)
    own = ["--recorded", str(tmp_path / "own"), *told[2:]]
    assert learning_curves.main([*own, "--budgets", "8"]) == 0
    (cell,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    assert cell["requests"] == 3 and "auto, corpus" not in cell
    assert min(cell["auto, learning"][-1], cell["auto, learning, no logits"][-1]) > 2.0
    assert cell["auto, cold"][-1] < 1.5


def test_no_choice_is_better_than_the_oracles(
    told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--sets", "alpha", "--budgets", "4", "--examples", "6"]
    assert choice_bound.main([*told, *few]) == 0
    (cell,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    assert 1.5 < cell["auto"] <= cell["oracle"] <= 5.0


def test_the_chance_that_is_described_is_the_trees() -> None:
    examples = [([5, 6, i], [9, 10, 11 + i % 3, 12, 30 + i, 2]) for i in range(30)]
    corpus = build_corpus(examples, fingerprint="x", n_max=2, p_min=1)
    text = choice_bound.Replayed(
        AutoDrafter(corpus=corpus, eos_token_ids=(2,), min_survival=0.0),
        Recording([5, 6, 7, 9, 10], [9, 10, 11, 12, 40, 2]),
    )
    while text.position < 5:
        tree = text.session.propose(8, 1)
        tokens, features = text.candidates(())
        known = dict(zip(tokens.tolist(), features[:, CHANCE].tolist(), strict=True))
        told = dict(zip(tree.token_ids.tolist(), tree.survival.tolist(), strict=True))
        assert told and {token: known[token] for token in told} == pytest.approx(told, rel=1e-4)
        # And behind a drafted token, where the tree is two deep.
        tree = text.session.propose(8, 2)
        behind = [i for i, parent in enumerate(tree.parents) if parent == 0]
        tokens, features = text.candidates([int(tree.token_ids[0])])
        chances = dict(zip(tokens.tolist(), features[:, CHANCE].tolist(), strict=True))
        for i in behind:
            own = chances[int(tree.token_ids[i])] * tree.survival[0]
            assert own == pytest.approx(float(tree.survival[i]), rel=1e-4)
        text.emit(1)
    text.session.close()
