"""loadtest/gpu_check.py where there is no GPU: it says so; and a dry run of its code on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest import gpu_check


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "no CUDA device" in lines[0]
    assert json.loads(lines[-1])["error"] == "no CUDA device"


def test_dry_run_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--shape", "tiny", "--repeats", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert report["ok"] and report["bandwidth_gb_s"] > 0
    kinds = [step["kind"] for step in report["steps"]]
    assert kinds == ["decode", "tree", "sampled", "chunk"]
    assert all(step["wall_ms"] > 0 for step in report["steps"])
    assert sum(line.startswith("tiny") for line in lines) == 4
    found = report["vocabulary"]
    for place in ("device", "stream", "cpu"):
        mine = [line for line in found if line["place"] == place]
        checks = [line for line in mine if "ok" in line]
        assert len(checks) == 3 and all(line["ok"] for line in checks)
        assert all(line["other_ids"] == 0 for line in checks)
        assert {line["window_rows"] for line in mine if "verify_ms" in line} == {4, 6}
        timed = [line for line in mine if "wall_ms" in line]
        assert {line["what"] for line in timed} == {"full", "slice 1 %", "slice 10 %"}
        assert all(0 < line["head_ms"] < line["wall_ms"] for line in timed)


def test_results_are_kept_as_they_come_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case that fails is told with its error; those after it, and the other parts, are done."""

    class OutOfResources(Exception):  # as Triton's: of no kind that is usual
        pass

    measure, out = gpu_check.measure, tmp_path / "results.jsonl"
    left: list[int] = []

    def fails_once(*arguments: Any) -> tuple[float, float]:
        # What came before is on the disk by now.
        left.append(len(out.read_text().splitlines()))
        if len(left) == 2:
            raise OutOfResources("shared memory")
        return measure(*arguments)

    def no_vocabulary(*_: Any) -> Any:
        raise TypeError("no vocabulary")

    monkeypatch.setattr(gpu_check, "measure", fails_once)
    monkeypatch.setattr(gpu_check.gpu_vocabulary, "check", no_vocabulary)
    words = ["--device", "cpu", "--shape", "tiny", "--repeats", "1", "--out", str(out)]
    assert gpu_check.main(words) == 1
    assert left == [1, 2, 3, 4]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["part"] for line in lines] == ["device", *["step"] * 4, "error"]
    steps = lines[1:5]
    assert steps[1]["error"] == "OutOfResources: shared memory" and steps[1]["wall_ms"] is None
    assert all(step["wall_ms"] > 0 for step in steps if "error" not in step)
    assert lines[5]["error"] == "TypeError: no vocabulary"
    assert not json.loads(capsys.readouterr().out.splitlines()[-1])["ok"]


def test_a_tree_s_paths_lie_within_its_own_rows() -> None:
    case = gpu_check.Case("tree", 3, 6, 20)
    batch = gpu_check.batch_of(case, 256)
    for r in range(batch.num_rows):
        path = batch.path_slots[batch.path_start[r] :][: batch.path_len[r]]
        own = batch.slots[batch.seq_ids == batch.seq_ids[r]]
        assert set(path) <= set(own)
        assert path.shape[0] == 0 or path[-1] == batch.slots[r]
        assert batch.positions[r] == batch.prefix_len[r] - 1 + path.shape[0]
    assert gpu_check.blocks_needed(case) == batch.block_tables.size


def test_the_floor_counts_a_tied_head_once() -> None:
    """Weights of the tiny shape by hand."""
    module = gpu_check.build(gpu_check.SHAPES["tiny"], torch.device("cpu"), torch.float32)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert gpu_check.weight_bytes(module) == 4 * (2 * layer + 64 + 256 * 64)
