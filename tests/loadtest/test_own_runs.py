"""Drafters on a real model: what is recorded of it, replayed, and answered again with drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from drafters.replay import read_recordings
from loadtest import own_runs
from loadtest.recordings import EOS
from tests.model.tiny_models import save_tiny

NUM = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    reference = save_tiny(folder, "llama", max_position_embeddings=1024)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([EOS])  # an id past the model's own: it never comes
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, reference


def run(*arguments: object) -> None:
    assert own_runs.main([str(argument) for argument in arguments]) == 0


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def recorded(model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, _ = model
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("own")
    (data / "town").mkdir()
    for split in ("train", "test"):
        lines = [{"prompt": f"{split} {i} " * (100 if i == 1 else 3)} for i in range(NUM + 2)]
        file = data / "town" / f"{split}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(
        "record", "--model", folder, "--tokenizer", folder / "tokenizer.json", "--data", data,
        "--sets", "town", "--examples", NUM, "--max-tokens", 24, "--max-prompt", 80, "-o", out,
    )  # fmt: skip
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


def test_recorded_answers_are_replayed_with_every_drafter(
    model: tuple[Path, Any], recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = model[0] / "tokenizer.json"
    capsys.readouterr()
    run("replay", "--tokenizer", tokenizer, "--recorded", recorded, "--budgets", 4, 8)
    told = last_json(capsys)
    assert [(cell["data"], cell["budget"]) for cell in told["cells"]] == [("town", 4), ("town", 8)]
    for cell in told["cells"]:
        assert set(cell) - {"data", "budget"} == set(own_runs.columns(0))
        assert all(cell[column] >= 1.0 for column in own_runs.columns(0))
        gain = cell["auto"] / cell["auto, no logits"]
        assert told["gain, median"][str(cell["budget"])] == pytest.approx(gain, abs=1e-3)


def test_live_answers_are_the_recorded_ones(
    model: tuple[Path, Any], recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = model
    capsys.readouterr()
    run(
        "live", "--model", folder, "--tokenizer", folder / "tokenizer.json",
        "--recorded", recorded, "--budgets", 8, "--columns", "auto", "token recycling",
    )  # fmt: skip
    (cell,) = last_json(capsys)["cells"]
    assert cell["same text"] is True
    assert cell["tokens"] == NUM * 23  # behind the first
    for column in ("auto", "token recycling"):
        drafted = sum(num for num, _ in cell[f"{column}: sources"].values())
        kept = sum(num for _, num in cell[f"{column}: sources"].values())
        assert drafted > kept > 0
        assert cell[column] > 1.0
    assert "logits" in cell["auto: sources"]


def test_a_model_is_needed_to_record(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        own_runs.main(["record"])
    assert "--model" in capsys.readouterr().err
