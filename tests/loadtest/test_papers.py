"""loadtest.papers: every table of the three papers on a tiny model and two sets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loadtest import papers
from tests.loadtest.conftest import Ended, write_sets


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """squad: answers that repeat their prompts; massive_en: answers of one kind."""

    def row(answer: str, i: int) -> dict[str, str]:
        return {"prompt": f"Where? the river {i} runs here. It", "completion": answer.format(i=i)}

    answers = {"squad": "the river {i} runs", "massive_en": "intent: play, song"}
    rows = {name: partial(row, answer) for name, answer in answers.items()}
    return write_sets(tmp_path_factory.mktemp("data"), 30, rows)


def _tables(ended: Ended, *words: object) -> dict[str, dict[str, Any]]:
    """The first words of a title -> {set: its line as column -> value}."""
    found = {}
    for table in ended(papers.main, *words)["tables"]:
        columns = [str(column) for column in table["columns"]]
        lines = {line[0]: dict(zip(columns, line, strict=True)) for line in table["lines"]}
        found[table["title"].split()[0].strip(",:")] = lines
    return found


def test_tasc(folder: Path, data: Path, ended: Ended) -> None:
    found = _tables(ended, "tasc", "--data", data, "--model", folder, "--examples", 8)
    of = found["lambda"]["massive_en"]
    assert of["1.0"] > of["0.0"], "one answer for all: the corpus knows it, the prompt does not"
    assert found["N-Grammys"]["massive_en"]["TASC-spec"] == of["0.75"]
    assert 0.9 < found["Acceptance"]["massive_en"]["1"] <= 1.0
    lengths = found["Table"]["massive_en"]
    assert set(lengths) == {"set", "neither", "drafts, 16 nodes", "own tokens", "both"}
    assert lengths["both"] <= lengths["own tokens"] < lengths["neither"]


def test_trie(folder: Path, data: Path, ended: Ended) -> None:
    words = ("trie", "--data", data, "--model", folder, "--examples", 6, "--sets", "squad")
    found = _tables(ended, *words)
    grid, times = found["n/L_p"]["squad"], found["13/3"]["squad"]
    assert grid["13/3"] == times["ours"] > 2.0
    assert found["Context"]["squad"]["trie, clean"] == grid["13/3"]
    histogram = found["Steps"]["squad"]
    shares = [value for column, value in histogram.items() if column != "set"]
    assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0.0
    nodes = found["num_draft"]["squad"]
    assert nodes["8"] <= nodes["256"]


def test_vocabtailor(folder: Path, data: Path, ended: Ended) -> None:
    words = ("vocabtailor", "--data", data, "--model", folder, "--sets", "squad")
    (table,) = ended(papers.main, *words)["tables"]
    rows = {line[1]: line for line in table["lines"]}
    tight, loose = rows["tau 0.0"], rows["tau 0.1"]
    assert loose[-1] <= tight[-1] <= rows["unfiltered"][-1]
    assert rows["tau 0.01"][2] == "0 + [105]" and rows["VP"][2] == ""


def test_data_that_is_not_there_is_named(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert papers.main(["trie", "--data", str(tmp_path / "no"), "--model", str(folder)]) == 2
    assert "--data" in capsys.readouterr().err
    words = ["trie", "--data", str(data), "--model", str(folder), "--examples", "2"]
    assert papers.main([*words, "--sets", "squad,hagrid"]) == 0
    assert f"hagrid is not in {data}: left out" in capsys.readouterr().err
