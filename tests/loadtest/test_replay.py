"""loadtest.replay: tables and curves of answers, a model's own, what drafting costs, the fit."""

from __future__ import annotations

import json
import random
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafters.auto.trust import Trust
from drafters.published.grammys import BigramTable
from drafters.replay import Recording, read_recordings
from loadtest import replay
from loadtest.peer_drafters import tree_of_paths
from loadtest.recordings import open_ids
from tests.json_lines import write_lines
from tests.loadtest.conftest import Ended, write_sets

NUM = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets, each with answers of one kind."""

    def row(word: str, i: int) -> dict[str, str]:
        return {"prompt": f"{i}:", "completion": f"the {word} number {i} is long and green"}

    rows = {"alpha": partial(row, "river"), "beta": partial(row, "meadow")}
    return write_sets(tmp_path_factory.mktemp("data"), 40, rows)


def run(*words: object) -> int:
    return replay.main([str(word) for word in words])


def test_ids_are_those_of_the_models_folder(folder: Path, own_cache: Path) -> None:
    with pytest.raises(ValueError, match="tailor models fetch"):
        open_ids("smollm2-135m-instruct")
    assert open_ids(str(folder)).tokenizer.encode("a b").ids


def test_paths_become_one_tree() -> None:
    paths = [[8, 9, 10], [8, 9], [8, 11], [9]]
    tree = tree_of_paths(paths, budget=16, max_depth=16)
    assert tree.token_ids.tolist() == [8, 9, 10, 11, 9]
    assert tree.parents.tolist() == [-1, 0, 1, 0, -1]
    # Cut by budget and by depth, parents stay.
    assert tree_of_paths(paths, budget=2, max_depth=16).token_ids.tolist() == [8, 9]
    flat = tree_of_paths(paths, budget=16, max_depth=1)
    assert (flat.token_ids.tolist(), flat.parents.tolist()) == ([8, 9], [-1, -1])
    assert len(tree_of_paths([], budget=4, max_depth=4)) == 0


def test_the_table_of_recorded_outputs(
    model: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outputs that follow the corpus: `auto` beats what reads the prompt alone, and the two
    columns of a model's bigrams appear with its table."""
    for split, first in (("train", 0), ("test", 40)):
        lines = [
            {"prompt_ids": [50 + i, 7, 8], "output_ids": [*range(10, 30), 60 + i]}
            for i in range(first, first + 12)
        ]
        write_lines(tmp_path / "own" / "town" / f"{split}.jsonl", lines)
    next_ids = np.arange(1, 129, dtype=np.int32)[:, None] % 128
    BigramTable("model", next_ids, np.full((128, 1), 0.5, np.float32)).save(tmp_path / "bigrams")
    assert run("table", "--recorded", tmp_path / "own", "--budgets", 4, "--model", model[0],
               "--bigrams", tmp_path / "bigrams") == 0  # fmt: skip
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    (cell,) = result["cells"]
    figures = {column: all_three[-1] for column, all_three in cell["tokens_per_step"].items()}
    assert (cell["data"], cell["nodes"], cell["requests"]) == ("town", 4, 12)
    assert figures["auto"] > 3.5 and figures["prompt"] == figures["trie"] == 1.0
    assert figures["auto, tree in prefill"] >= figures["auto"]
    # One draft of three tokens that all follow: a table as good as this one is a corpus.
    assert figures["bigram"] == figures["grammys, table"] > 3.0
    low, high = cell["ratio_95"]
    assert low <= cell["ratio"] <= high and not cell["best_other"].startswith("auto")
    assert result["summary"]["4"]["lowest_ratio"] == cell["ratio"]
    assert result["machine"]["commit"] and f"| town | {figures['prompt']:.2f}" in out


def test_curves_of_requests_in_turn(folder: Path, data: Path, ended: Ended) -> None:
    """Who remembers answers of one kind makes more of each request than who does not."""
    words = ["curves", "--data", data, "--model", folder, "--budgets", 8]
    cell, other = ended(replay.main, *words)["cells"]
    assert (cell["data"], other["data"], cell["requests"]) == ("alpha", "beta", 40)
    figures = cell["tokens_per_step"]
    cold, learning, corpus = (figures[f"auto, {name}"] for name in ("cold", "learning", "corpus"))
    assert len(cold) == 3 and learning[-1] > 1.5 * cold[-1] and corpus[-1] > learning[0]
    assert figures["auto, wrong corpus"][-1] > 0.9 * cold[-1]
    more = ["--sets", "alpha", "--columns", "auto, cold"]
    (again,) = ended(replay.main, *words, *more)["cells"]
    assert again["tokens_per_step"] == {"auto, cold": cold}


def test_ablations_tell_what_each_part_brings(folder: Path, data: Path, ended: Ended) -> None:
    words = ["ablations", "--data", data, "--model", folder, "--sets", "alpha", "--budgets", 8]
    result = ended(replay.main, *words)
    (cell,) = result["cells"]
    figures = {column: curve[0] for column, curve in cell["tokens_per_step"].items()}
    off = [f"auto, no {part}" for part in ("template", "copied", "corpus", "learning")]
    assert list(figures) == ["auto", *off]
    # The number is that of the prompt, and what stands behind it no other answer's last tokens say.
    assert figures["auto, no template"] < figures["auto"] > figures["auto, no corpus"]
    assert min(result["summary"]["8"]["over"]["auto, no template"]) > 1.0
    (cell,) = ended(replay.main, *words, "--cold")["cells"]
    cold = {column: curve[0] for column, curve in cell["tokens_per_step"].items()}
    assert list(cold) == ["auto", "auto, no copied"] and cold["auto"] < figures["auto"]


def test_long_answers_that_repeat_what_came_before(folder: Path, data: Path, ended: Ended) -> None:
    words = ["repeats", "--data", data, "--model", folder, "--budgets", 16]
    found = ended(replay.main, *words, "--columns", "prompt,auto")
    cells = {cell["data"]: cell for cell in found["cells"]}
    assert list(cells) == ["corrected", "replaced", "called"]
    for cell in cells.values():
        assert cell["requests"] == 4 and cell["best_other"] == "prompt"
        assert cell["tokens_per_step"]["auto"][-1] > 3.0


def test_ratios_are_of_all_requests_and_paired() -> None:
    ours = [(10, 2), (10, 4), (10, 4)]
    other = [(10, 4), (10, 8), (10, 8)]
    assert replay.curve(ours)[-1] == 3.0
    assert replay.ratio_interval(ours, other) == (2.0, 2.0)
    cell = replay.cell_of({"a": other, "b": [(10, 10)] * 3, "auto": ours}, "auto")
    assert (cell["best_other"], cell["ratio"]) == ("a", 2.0)
    summary = replay.summary_of([{"nodes": 4, **cell}, {"nodes": 4, **cell, "ratio": 1.0}], "auto")
    assert summary["4"]["median_ratio"] == 1.5 and summary["4"]["lowest_ratio"] == 1.0
    assert summary["4"]["over"]["b"] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "words", [[], ["--data", "none"], ["--sets", "gamma"], ["--budgets", "0"], ["--frob"]]
)
def test_what_cannot_be_replayed_is_refused(
    words: list[str], model: tuple[Path, Any], data: Path
) -> None:
    given = [] if "--data" in words or not words else ["--data", data]
    assert run("table", "--model", model[0], *given, *words) == 2


@pytest.fixture(scope="module")
def recorded(model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("own")
    for split in ("train", "test"):
        lines = [{"prompt": f"{split} {i} " * (100 if i == 1 else 3)} for i in range(NUM + 2)]
        write_lines(data / "town" / f"{split}.jsonl", lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILOR_CACHE_DIR", str(out / "cache"))
        assert run(
            "record", "--model", model[0], "--data", data, "--sets", "town", "--examples", NUM,
            "--max-tokens", 24, "--max-prompt", 80, "-o", out, "--weights", "float32",
        ) == 0  # fmt: skip
    return out


def test_answers_are_recorded_with_what_the_model_held_likely(
    model: tuple[Path, Any], recorded: Path
) -> None:
    _, reference = model
    tests = list(read_recordings(recorded / "town" / "test.jsonl"))
    assert len(tests) == NUM == len(list(read_recordings(recorded / "town" / "train.jsonl")))
    for test in tests:
        assert len(test.prompt_ids) <= 80  # the long one was left out
        assert len(test.likely_ids) == len(test.likely_chances) == len(test.output_ids)
        ids = torch.tensor([[*test.prompt_ids, *test.output_ids]])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(test.prompt_ids) - 1 : -1]
        chances, top = logits.softmax(-1).topk(8)
        assert [row[0] for row in test.likely_ids] == list(test.output_ids)  # greedy
        assert np.array_equal(np.asarray(test.likely_ids), top.numpy())
        np.testing.assert_allclose(np.asarray(test.likely_chances), chances.numpy(), atol=2e-4)


def test_a_models_own_answers_are_replayed_with_what_it_held_likely(
    folder: Path, recorded: Path, ended: Ended
) -> None:
    words = ["table", "--model", folder, "--recorded", recorded, "--budgets", "4,8"]
    cells = ended(replay.main, *words)["cells"]
    assert [(cell["data"], cell["nodes"]) for cell in cells] == [("town", 4), ("town", 8)]
    for cell in cells:
        assert {"auto", "auto, no logits", "token recycling", "logitspec"} <= set(
            cell["tokens_per_step"]
        )
        assert all(figures[-1] >= 1.0 for figures in cell["tokens_per_step"].values())


def test_live_answers_are_the_recorded_ones(folder: Path, recorded: Path, ended: Ended) -> None:
    words = ["live", "--model", folder, "--recorded", recorded, "--budgets", 8]
    (cell,) = ended(replay.main, *words)["cells"]
    assert cell["same text"] is True
    assert cell["tokens"] == NUM * 23  # behind the first
    for column in replay.columns(open_ids(str(folder))):
        drafted = sum(num for num, _ in cell[f"{column}: sources"].values())
        kept = sum(num for _, num in cell[f"{column}: sources"].values())
        assert drafted >= kept and cell[column] >= 1.0
    assert "logits" in cell["auto: sources"] and cell["auto"] > 1.0


def test_crossings_are_the_examples_then_joins_of_two() -> None:
    examples = [Recording([1], [5, 6, 7, 0]), Recording([2], [8, 6, 9, 0])]
    made = list(islice(replay.crossings(examples, random.Random(3)), 200))
    assert made[:2] == examples
    # Crossed at 6, which both hold, or an output joined with itself.
    outputs = {tuple(e.output_ids) for e in made[2:]}
    assert {(5, 6, 9, 0), (8, 6, 7, 0)} < outputs <= {
        (5, 6, 7, 0), (8, 6, 9, 0), (5, 6, 9, 0), (8, 6, 7, 0),
    }  # fmt: skip


def test_costs_of_every_drafter_and_of_a_corpus(
    folder: Path, data: Path, tmp_path: Path, ended: Ended
) -> None:
    words = ["costs", "--data", data, "--model", folder, "--folder", tmp_path]
    figures = ended(replay.main, *words, "--corpus-tokens", 4000, "--max-load", "1e9")
    corpus = figures["corpus"]
    assert 4000 <= corpus["tokens"] < 4100
    # A Python with numpy and numba in it; the whole machine is not what is measured.
    assert 0.03 < corpus["peak_gib"] < 2 and corpus["cpu_s"] > 0
    by_drafter = figures["drafters"]
    assert {"auto", "auto, corpus", "suffix", "trie", "mix"} <= set(by_drafter)
    for name, costs in by_drafter.items():
        assert all(value > 0 for value in costs.values()), name
    assert figures["trie"]["build_ms"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_fit_moves_what_was_asked_and_is_trust_that_loads(
    model: tuple[Path, Any], data: Path, recorded: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(replay, "ROUNDS", 1)
    for name, words in (("sources", ["--data", data]), ("logits", ["--recorded", recorded])):
        out = tmp_path / f"{name}.json"
        assert run("fit", "--model", model[0], *words, "--held-out", 10, "-o", out) == 0
        monkeypatch.setattr("drafters.auto.trust.DEFAULT_TRUST", out)
        made = json.loads(out.read_text())
        assert made and Trust().weights.shape == Trust().weights.shape
