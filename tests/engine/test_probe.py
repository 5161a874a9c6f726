"""The cost prober runs real steps, and its answer is kept and reread."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.engine.batch import Batch
from server.engine.probe import VERSION, load_or_measure, make_prober
from server.types import ModelInfo
from tests.fakes.fake_runner import FakeModel, FakeRunner

INFO = ModelInfo("fake", 16, 1024, (2,), 64, 16, "cpu", "float32", "f", 8, 512)


class RecordingRunner(FakeRunner):
    """Keeps its Batches; 2 ms a step and 1 ms a row."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(FakeModel(), replace(INFO, **sizes), step_s=0.002, row_s=0.001)
        self.batches: list[Batch] = []

    def launch(self, batch: Batch) -> None:
        assert batch.positions.max() < self.info.max_model_len
        self.batches.append(batch)
        super().launch(batch)


def test_a_probe_is_a_decode_step_with_a_draft() -> None:
    runner = RecordingRunner()
    assert make_prober(runner)(5, 30) > 0.0
    (batch,) = runner.batches
    assert batch.num_rows == batch.num_draws == 5
    assert batch.num_draft_rows == 4
    assert batch.prefix_len.tolist() == [31] * 5
    # Each row's path is its ancestors inside the draft and itself.
    for r in range(5):
        start, num = batch.path_start[r], batch.path_len[r]
        assert batch.path_slots[start : start + num].tolist() == list(range(31, 31 + r))
        assert r == 0 or batch.path_slots[start + num - 1] == batch.slots[r]


def test_the_table_is_measured_once_and_what_is_quicker_later_takes_its_place(
    tmp_path: Path,
) -> None:
    path = tmp_path / "costs" / "table.json"
    runner = RecordingRunner()
    table = load_or_measure(runner, path, max_rows=16)
    assert table.cost(8) - table.cost(1) == pytest.approx(0.007, abs=0.004)
    num_steps = len(runner.batches)
    runner.batches.clear()
    again = load_or_measure(runner, path, max_rows=16)
    assert len(runner.batches) < num_steps / 2, "a second start looks at a few rows once"
    assert all(again.cost(rows) <= table.cost(rows) for rows in range(1, 30))
    for sizes in ({"max_num_batched_tokens": 8}, {"max_model_len": 16}):
        small = RecordingRunner(**sizes)  # which takes no step as large as some that are known
        assert load_or_measure(small, path, max_rows=16).cost(16) <= again.cost(16)
        assert 0 < len(small.batches) < num_steps / 2
    plain = json.loads(path.read_text())
    assert plain["likely_s"] == table.likely_s <= 1e-9 * INFO.vocab_size
    dear = {**plain, "seconds": [10 * seconds for seconds in plain["seconds"]]}
    path.write_text(json.dumps(dear))  # as if measured beside other work
    mended = load_or_measure(runner, path, max_rows=16)
    assert mended.cost(8) < 0.5 * 10 * table.cost(8)
    assert json.loads(path.read_text())["seconds"] == mended.as_dict()["seconds"]
    sleepy = {**plain, "seconds": [1.0] * len(plain["seconds"])}
    path.write_text(json.dumps(sleepy))
    runner.batches.clear()
    assert load_or_measure(runner, path, max_rows=16).cost(8) == 1.0 and not runner.batches


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", f'{{"version": {VERSION}, "rows": [2]}}', '{"version": 1}']
)
def test_a_damaged_table_is_measured_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(damage)
    runner = RecordingRunner()
    load_or_measure(runner, path, max_rows=4)
    assert runner.batches
    assert json.loads(path.read_text())["version"] == VERSION
