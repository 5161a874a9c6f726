from __future__ import annotations

from pathlib import Path

import pytest

from loadtest import footprint
from server.model.gguf_index import GgufIndex


def test_nothing_is_a_model_of_a_few_kilobytes(tmp_path: Path) -> None:
    file = tmp_path / "nothing.gguf"
    footprint.write_nothing(file)
    assert file.stat().st_size < 60_000
    index = GgufIndex(file)
    assert index.fields["general.architecture"] == "llama"
    assert "blk.0.attn_q.weight" in index.tensors


def test_memory_is_told_as_a_share_of_file_and_kv() -> None:
    nothing = {"model": "nothing", "ready_s": 1.0, "resident": 200.0, "anonymous": 100.0}
    row = {"model": "m", "ready_s": 2.0, "resident": 300.0, "anonymous": 150.0,
           "with_schema": 325.0, "schema_first_s": 0.5, "schema_next_s": 0.1,
           "file_and_kv": 100.0}  # fmt: skip
    shown = footprint.table([row], nothing)
    assert row["above"] == pytest.approx(1.0) and row["above_with_schema"] == pytest.approx(1.25)
    assert shown.row_count == 2
