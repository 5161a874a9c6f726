"""loadtest/gpu_check.py where there is no GPU: it says so; and a dry run of its code on the CPU."""

from __future__ import annotations

import json

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
