"""`tailor eval`: the metrics against other people's, and the command on files and on a server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from server.commands.quality import estimate, exact, f1, json_fields, repetition, rouge_l
from tests.client.test_bulk import answering
from tests.commands.command_line import Tailor
from tests.json_lines import write_lines

WORDS = "the quick brown fox jumps over a lazy dog and Rome 42".split()


def test_rouge_l_is_that_of_rouge_score() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    random = Random(3)
    for _ in range(300):
        gold, output = (" ".join(random.choices(WORDS, k=random.randrange(1, 12))) for _ in "ab")
        assert rouge_l(gold, output) == pytest.approx(scorer.score(gold, output)["rougeL"].fmeasure)
        assert 0.0 <= rouge_l(gold, output) <= f1(gold, output) <= 1.0


def test_scores_of_known_pairs() -> None:
    assert exact("a  b\n", " a b") == 1.0 and exact("a b", "a B") == 0.0
    assert f1("the cat sat", "The cat!") == pytest.approx(2 * 2 / 5)
    assert f1("a a b", "a b b") == pytest.approx(2 * 2 / 6)
    assert f1("", "") == 1.0 and f1("x", "") == 0.0
    assert rouge_l("a b c d", "a c b d") == pytest.approx(6 / 8)
    assert rouge_l("a b " * 20_000, "b a " * 20_000) == pytest.approx(1 - 1 / 40_000), "in no hour"
    assert json_fields('{"a": 1, "b": [1, 2]}', '{"b": [1, 2], "a": 1}') == 1.0
    assert json_fields('{"a": 1, "b": 2}', '{"a": 1, "b": 3}') == 0.5
    assert json_fields('{"a": 1}', '{"a": "1"}') == 0.0, "a number is no string"
    assert json_fields('{"a": 1}', "a: 1") == 0.0
    assert repetition("one two three four") == 0.0
    assert repetition("a b c d " * 10) > 0.8


def test_an_interval_holds_the_truth_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 answers of which each is right with chance 0.3, 200 times: 95 % intervals cover 0.3 in at
    least 88 % (a false alarm below 1 in 10,000)."""
    monkeypatch.setattr("server.commands.quality._NUM_RESAMPLES", 300)  # of 1000: a third is enough
    random = Random(7)
    hits = 0
    for _ in range(200):
        found = estimate([float(random.random() < 0.3) for _ in range(80)])
        hits += found.low <= 0.3 <= found.high
        assert found.low <= found.mean <= found.high and found.num == 80
    assert hits >= 176


# --- the command ---


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"prompt": f"Town {i}?", "completion": "Rome" if i % 2 else "Paris"} for i in range(10)]
    return write_lines(tmp_path / "test.jsonl", rows)


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_file_of_answers(data: Path, tmp_path: Path, tailor: Tailor) -> None:
    lines: list[dict[str, Any]] = [{"line": i, "text": " Rome", "key": "k"} for i in range(1, 10)]
    lines.append({"line": 10, "error": {"message": "busy"}, "key": "k"})
    answers = write_lines(tmp_path / "answers.jsonl", lines)
    words = ["eval", "--data", data, "--answers", answers]
    told = tailor(*words, "--json")
    assert told.out.count("\n") == 1
    report = told.json
    assert (report["metric"], report["rows"], report["without_an_answer"]) == ("f1", 10, 1)
    assert report["metrics"]["exact"]["mean"] == 0.4, "rows 2, 4, 6 and 8; 10 has no answer"
    shown = tailor(*words).out
    assert "10 rows, 1 without an answer count 0" in shown and "exact     40.0%" in shown
    assert "data    Paris" in shown and "answer   Rome" in shown


def test_recordings_are_matched_by_prompt(data: Path, tmp_path: Path, tailor: Tailor) -> None:
    pairs = [(i, "Rome" if i % 2 else "Paris") for i in range(9, -1, -1)]
    lines = [
        {"prompt_ids": [1], "output_ids": [2], "prompt": f"Town {i}?", "completion": c}
        for i, c in pairs
    ]
    answers = write_lines(tmp_path / "own.jsonl", lines)
    found = tailor("eval", "--data", data, "--answers", answers, "--json").json
    assert found["score"] == 1.0


@pytest.fixture
def url() -> Iterator[str]:
    def answer(_: int, body: Any) -> tuple[int, dict[str, str], Any]:
        text = "Rome" if "prompt" in body else None
        assert text or body["messages"] == [{"role": "user", "content": "Where?"}]
        choice = (
            {"message": {"role": "assistant", "content": "Rome"}}
            if text is None
            else {"text": text}
        )
        return 200, {}, {"choices": [{**choice, "finish_reason": "stop"}], "usage": {}}

    with answering(answer) as (address, _):
        yield address


def test_a_running_server_and_the_task_s_own_metric(
    url: str, data: Path, tmp_path: Path, tailor: Tailor
) -> None:
    tasks = tmp_path / "configs" / "tasks"
    tasks.mkdir(parents=True)
    (tasks / "towns.yaml").write_text("metric: exact\n")
    words = ["eval", "--data", data, "--task", "towns", "--url", url, "--json"]
    report = tailor(*words).json
    assert (report["metric"], report["score"]) == ("exact", 0.5)
    chosen = tailor(*words, "--limit", 1, "--metric", "rouge_l").json
    assert (chosen["metric"], chosen["rows"], chosen["score"]) == ("rouge_l", 1, 0.0)


def test_why_the_server_refuses_rows_is_told_once(data: Path, tailor: Tailor) -> None:
    refused: tuple[int, dict[str, str], Any] = (400, {}, {"error": {"message": "too long"}})
    with answering(lambda *_: refused) as (url, _):
        told = tailor("eval", "--data", data, "--task", "towns", "--url", url)
    assert "10 rows, 10 without an answer count 0" in told.out
    assert told.err.count("is refused: too long") == 1


def test_csv_and_messages(url: str, tmp_path: Path, tailor: Tailor) -> None:
    table = tmp_path / "test.csv"
    table.write_text('question,answer\n"Where, then?",Rome\nAnd now?,Paris\n')
    words = ["eval", "--task", "t", "--url", url, "--json", "--data"]
    fields = ["--prompt-field", "question", "--field", "answer"]
    assert tailor(*words, table, *fields).json["score"] == 0.5
    # As OpenAI's files of examples have it, and pandas.
    turns = [{"role": "user", "content": "Where?", "weight": 0, "name": float("nan")},
             {"role": "assistant", "content": "Rome", "weight": 1}]  # fmt: skip
    chat = write_lines(tmp_path / "chat.jsonl", [{"messages": turns}])
    assert tailor(*words, chat).json["score"] == 1.0


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.jsonl", '{"prompt": "x"}\n', "a.jsonl:1: completion: is missing .*--field says"),
        ("a.jsonl", "", "no rows"),
        ("a.parquet", "PAR1", "a.parquet: "),
        ("a.jsonl", '{"prompt": "x", "completion": "y"}\n', "give --answers FILE, or --task"),
    ],
)
def test_bad_data_is_told(name: str, text: str, told: str, tmp_path: Path, tailor: Tailor) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert re.search(told, tailor("eval", "--data", file, status=1).err)


def test_parquet_without_pyarrow_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tailor: Tailor
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    words = ["eval", "--data", tmp_path / "a.parquet", "--task", "t"]
    assert "pip install pyarrow" in tailor(*words, status=1).err
