"""adapters_speed: its figures on a tiny model."""

from __future__ import annotations

from pathlib import Path

from loadtest.adapters_speed import CASES, measure, write_adapter
from loadtest.weight_forms import runner_of
from server.engine.batch import AdaptingRunner
from tests.model.tiny_models import save_tiny


def test_every_case_is_timed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_tiny(tmp_path / "model", "llama")
    write_adapter(tmp_path / "model", tmp_path / "adapter", 4, 1)
    runner, _ = runner_of(str(tmp_path / "model"), "float32", adapter=None, threads=1, max_rows=8)
    assert isinstance(runner, AdaptingRunner)
    try:
        runner.hold_adapter(0, runner.pack_adapter(str(tmp_path / "adapter")))
        found = measure(runner, 1, 4, 16, 2)
    finally:
        runner.close()
    assert tuple(found) == CASES
    assert all(figures["ms"] > 0 for figures in found.values())
