"""loadtest/gpu_check.py where there is no GPU: it says so; a dry run of its parts on the CPU; and
what it keeps when a part fails, hangs or writes what is no result."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loadtest import gpu_check
from loadtest.gpu import correct, options, parts, steps
from loadtest.gpu.correct import SHAPES, Asked, build, weight_bytes
from server.model.gpu.adapters import LoraBank

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "no CUDA device" in lines[0]
    assert json.loads(lines[-1])["error"] == "no CUDA device"


def found(part: str, shape: str) -> list[dict[str, Any]]:
    return list(parts.lines_of(parts.Planned(part, shape, 0.0), CPU, torch.float32, 2))


def test_every_part_of_the_plan_is_known() -> None:
    assert {p.part for p in parts.VERDICT} == set(parts.PARTS)
    assert sum(p.limit_s for p in parts.VERDICT) + gpu_check.TESTS_S < 1.2 * gpu_check.TOTAL_S
    assert gpu_check.TOTAL_S <= 540


def test_trained_weights_are_compared_with_what_was_recorded(tmp_path: Path) -> None:
    """A slice that is made here, of a model with tied tables; one text that is another is told."""
    asked = Asked("tiny", CPU, torch.float32, 1)
    assert "skipped" in next(correct.check_real(asked, tmp_path))
    build(SHAPES["tiny"], CPU, torch.float32).save_pretrained(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"VOCABULARY": 200, "LAYERS": 1, "PROMPTS": 2, "NEW": 9}.items():
            patch.setattr(correct, name, value)
        patch.setattr(correct, "FIRST_ID", 3)
        correct.make(tmp_path / "whole", tmp_path / "slice")
        recorded = json.loads((tmp_path / "slice" / correct.RECORDED).read_text())
        assert [len(one["text"]) for one in recorded] == [9, 9]
        [line] = correct.check_real(asked, tmp_path / "slice")
        assert line["ok"] and line["same_ids"] == line["same_drafted_ids"] == 1.0
        recorded[1]["text"][4] = (recorded[1]["text"][4] + 1) % 200
        (tmp_path / "slice" / correct.RECORDED).write_text(json.dumps(recorded))
        assert not next(correct.check_real(asked, tmp_path / "slice"))["ok"]


def test_rows_of_a_step_are_what_transformers_says() -> None:
    lines = found("correct", "tiny-gemma")
    assert [line["ok"] for line in lines] == [True] * 4
    assert lines[0]["same_argmax"] == lines[1]["same_argmax"] == 1.0
    assert lines[2]["what"] == "drafted rows against decoded ones" and lines[2]["same_ids"]


def test_what_may_be_chosen_is_compared_with_another_way() -> None:
    shape = "tiny-gemma"
    [adapter] = found("adapters", shape)
    assert adapter["ok"] and adapter["moved_by"] > 0.1
    [tokens] = found("own-tokens", shape)
    assert tokens["ok"] and tokens["graph_same_bits"] and tokens["others_same_bits"]
    [narrow] = found("eight-bits", shape)
    assert narrow["ok"] and narrow["rounding"] > 0


def test_a_wrong_option_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that is not added, rows that are zeros."""
    embeds = LoraBank.embeds

    def zeros(own: LoraBank, batch: Any) -> Any:
        found = embeds(own, batch)
        return None if found is None else (found[0], 0 * found[1])

    with monkeypatch.context() as patch:
        patch.setattr(options, "_merge", lambda *_: None)
        assert not found("adapters", "tiny")[0]["ok"]
    with monkeypatch.context() as patch:
        patch.setattr(LoraBank, "embeds", zeros)
        assert not found("own-tokens", "tiny")[0]["ok"]


def test_the_reserve_is_told() -> None:
    [line] = found("reserve", "tiny")
    assert line["ok"] and line["kv_tokens"] > 0


def test_a_wrong_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that see one key too few: the chain's logprobs are not transformers'."""
    rows_of = correct.rows_of

    def short(ids: Any, start: int, targets: Any, *, is_chain: bool = False) -> Any:
        batch = rows_of(ids, start, targets, is_chain=is_chain)
        if is_chain:
            batch.prefix_len[1:] -= 20
        return batch

    monkeypatch.setattr(correct, "rows_of", short)
    assert not found("correct", "tiny")[1]["ok"]


def test_dry_run_of_the_other_parts() -> None:
    versions, device = found("machine", "tiny")
    assert versions["torch"] == torch.__version__ and device["gb_s"] > 0
    table = found("steps", "tiny")
    assert [row["kind"] for row in table] == ["decode", "tree", "sampled", "chunk"]
    assert all(row["wall_ms"] > 0 and "error" not in row for row in table)


def test_dry_run_of_vocabulary_slices() -> None:
    lines = found("vocabulary", "tiny-gemma")
    for place in ("device", "stream", "cpu"):
        mine = [line for line in lines if line["place"] == place]
        checks = [line for line in mine if "ok" in line]
        assert len(checks) == 3 and all(line["ok"] for line in checks)
        assert all(line["other_ids"] == 0 for line in checks)
        assert {line["window_rows"] for line in mine if "verify_ms" in line} == {4, 6}
        timed = [line for line in mine if "wall_ms" in line]
        assert {line["what"] for line in timed} == {"full", "slice 1 %", "slice 10 %"}
        assert all(0 < line["head_ms"] < line["wall_ms"] for line in timed)


def test_a_case_that_fails_is_told_and_those_after_it_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OutOfResources(Exception):  # as Triton's: of no kind that is usual
        pass

    measure, calls = steps.measure, iter(range(4))

    def fails_once(*arguments: Any) -> dict[str, float]:
        if next(calls) == 1:
            raise OutOfResources("shared memory")
        return measure(*arguments)

    monkeypatch.setattr(steps, "measure", fails_once)
    table = found("steps", "tiny")
    assert table[1]["error"] == "OutOfResources: shared memory" and table[1]["wall_ms"] is None
    assert all(row["wall_ms"] > 0 for row in table if "error" not in row) and len(table) == 4


def test_a_part_that_raises_ends_in_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"what": "first"}
        raise TypeError("no more")

    monkeypatch.setitem(parts.PARTS, "machine", broken)
    assert [line.get("error") for line in found("machine", "tiny")] == [None, "TypeError: no more"]


SCRIPT = """
import json, os, subprocess, sys, time
for word in sys.argv[1:]:
    print("words")
    print(json.dumps({"what": word, "ok": True}), flush=True)
    if word == "dies:x":
        os._exit(3)
    if word == "hangs:x":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        time.sleep(60)
    print(json.dumps({"done": word, "s": 0.1}), flush=True)
"""


def test_what_came_before_a_hang_is_kept_and_what_is_behind_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that ends well, one that dies, one that never ends and has a child, one behind them,
    and one for which there is no time left."""
    names = ("well", "dies", "hangs", "behind")
    plan = [parts.Planned(name, "x", 3.0 if name == "hangs" else 60.0) for name in names]
    out = tmp_path / "results.json"
    results = gpu_check.Results(out)
    began = time.monotonic()
    base = [sys.executable, "-c", SCRIPT]
    outcomes = gpu_check.run_parts(plan, base, results, began + 300)
    assert time.monotonic() - began < 40.0, "the child of the part that hangs was waited for"
    [late] = gpu_check.run_parts(plan[:1], base, results, time.monotonic())
    assert late["exit"] == "no time left"
    assert [o["exit"] for o in outcomes] == [0, 3, "no end after 3.0 s", 0]
    assert [o["lines"] for o in outcomes] == [1, 1, 1, 1]
    lines = json.loads(out.read_text())
    assert [line["what"] for line in lines if "what" in line] == [f"{name}:x" for name in names]
    assert "| words" in capsys.readouterr().out


# What torch, transformers, triton, numpy, numba and pytest bring along is not here.
NOT_THERE = (
    "cyclopts fastapi fontTools gguf httptools langcodes llguidance msgspec platformdirs "
    "prometheus_client psutil pydantic sentencepiece starlette structlog uvicorn uvloop "
    "hypothesis openai peft ray xdist accelerate"
).split()
BARE = f"""
import os, sys, traceback
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.partition(".")[0] in {NOT_THERE!r}
        return None if absent else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
del os.environ["PYTHONPATH"]
try:
    from tests.gpu import test_cuda
except BaseException:
    traceback.print_exc()
    os._exit(9)
"""
"""sitecustomize.py of a bare machine: Python runs it before a part."""


def test_one_part_runs_through_the_command_where_only_torch_and_transformers_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's parts and the tests of tests/gpu import nothing that a bare machine lacks."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{gpu_check.ROOT}")
    out = tmp_path / "results.json"
    words = ["--device", "cpu", "--tiny", "--parts", "steps", "--repeats", "1", "--out", str(out)]
    status = gpu_check.main(words)
    told = capsys.readouterr().out
    assert status == 0, told[-2000:]
    report = json.loads(told.splitlines()[-1])
    assert report["ok"] and report["parts"][0]["lines"] == 4
    assert json.loads(out.read_text())[-1] == report


def test_a_part_that_nobody_knows_is_refused() -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", "cpu", "--parts", "nothing"])


def test_a_tree_s_paths_lie_within_its_own_rows() -> None:
    case = steps.Case("tree", 3, 6, 20)
    batch = steps.batch_of(case, 256)
    for row in range(batch.num_rows):
        begin = batch.path_start[row]
        path = batch.path_slots[begin : begin + batch.path_len[row]]
        own = np.flatnonzero(batch.seq_ids == batch.seq_ids[row])
        assert np.isin(path, batch.slots[own]).all()
        assert batch.path_len[row] == 0 or path[-1] == batch.slots[row]
    assert steps.blocks_needed(case) == batch.block_tables.size


def test_weights_are_counted_once() -> None:
    module = build(SHAPES["tiny"], CPU, torch.float32)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert weight_bytes(module) == 4 * (2 * layer + 64 + 256 * 64)
