"""loadtest.same_file: what both servers get, files of other forms and shapes, steps, starts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from loadtest import same_file
from loadtest.same_file import (
    LLAMACPP,
    SHAPES,
    make_file,
    requantise,
    servers,
    write_nothing,
    write_random,
)
from server.model.build import RunnerSpec, build_runner
from server.model.catalog import model_folder
from server.model.gguf_index import GgufIndex
from server.model.scoring import Text, score
from server.types import EngineSizes
from tests.loadtest.conftest import Ended
from tests.model.gguf_models import BLOCKS, write_llama


def test_a_file_is_rounded_and_keeps_the_rest(tmp_path: Path) -> None:
    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    write_llama(source, *BLOCKS)
    requantise(source, out, "q8_0")
    before, after = GgufIndex(source), GgufIndex(out)
    assert set(before.tensors) == set(after.tensors)
    for name, tensor in after.tensors.items():
        old = before.tensors[name]
        assert tensor.shape == old.shape
        if len(tensor.shape) == 1:
            assert np.array_equal(tensor.data, old.data)
            continue
        assert tensor.form == "q8_0"
        kind = gguf.GGMLQuantizationType[old.form.upper()]
        values = gguf.quants.dequantize(old.data, kind)
        rounded = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType.Q8_0)
        assert np.abs(values - rounded).max() <= np.abs(values).max() / 240
    tokens = [
        gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"].contents() for file in (source, out)
    ]
    assert tokens[0] == tokens[1]
    for form, message in (("q3_k", "no form 'q3_k'"), ("big:q8_0", "no shape 'big'")):
        with pytest.raises(ValueError, match=message):
            make_file(source, form, out)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_a_file_of_random_weights_is_served_in_its_own_shape(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written with another file's tokenizer, filled up; read by transformers and by us alike."""
    monkeypatch.setattr("loadtest.same_file._POOL", 1 << 12)
    write_llama(tmp_path / "in.gguf", *BLOCKS)
    for name, one in SHAPES.items():
        dim = 128 if one.architecture == "qwen3" else 32  # what transformers takes it to be
        small = replace(one, layers=2, hidden=128, inner=96, heads=4, kv_heads=2, head_dim=dim)
        small = replace(small, vocab=400, context=128)
        out = tmp_path / f"{name}.gguf"
        write_random(tmp_path / "in.gguf", out, small, "q8_0")
        folder = model_folder(str(out), "file")
        sizes = EngineSizes(max_num_seqs=1, max_num_batched_tokens=64, kv_bytes=1 << 21)
        runner = build_runner(RunnerSpec("m", str(folder), sizes=sizes, threads=1))
        try:
            assert runner.info.vocab_size == 400 and runner.info.dtype == "file"
            found = score(runner, [Text(tuple(range(3, 40)), 1)]).logprobs
        finally:
            runner.close()
        assert np.isfinite(found).all() and found.mean() == pytest.approx(-math.log(400), abs=1.5)


def test_nothing_is_a_model_of_a_few_kilobytes(tmp_path: Path) -> None:
    file = tmp_path / "nothing.gguf"
    write_nothing(file)
    assert file.stat().st_size < 60_000
    index = GgufIndex(file)
    assert index.fields["general.architecture"] == "llama"
    assert "blk.0.attn_q.weight" in index.tensors


def test_both_servers_get_the_same_file_and_their_own_default_cache(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    theirs, off, on = servers(file, tmp_path / "llama-server", {LLAMACPP: "-t 1", "tailor": ""})
    assert theirs.env["LLAMACPP_MODEL"] == off.env["TAILOR_MODEL"] == str(file)
    assert theirs.env["LLAMACPP_ARGS"].endswith("f16 -t 1")
    assert on.is_alias and not on.extra and off.extra["speculation"]["drafter"] == "off"


def test_a_step_is_timed_in_every_form(folder: Path, ended: Ended) -> None:
    words = ["steps", "--model", folder, "--forms", "int8", "--rows", "1,4", "--keys", 16]
    words += ["--rounds", 3, "--threads", 1, "--max-load", "1e9"]
    found = ended(same_file.main, *words)["steps"]
    assert set(found) == {"float32", "int8"} and set(found["int8"]) == {"1", "4"}
    four = found["int8"]["4"]
    assert four["of_reading"] > 0 < four["read_gb_s"] and four["best_ms"] <= four["ms"]
    assert found["float32"]["4"]["speed"]["median"] == 1.0 and four["speed"]["num"] == 3
    assert same_file.main(["steps", "--rows", "0"]) == 2


def test_the_hosts_part_is_what_the_model_does_not_take(
    folder: Path, own_cache: Path, ended: Ended
) -> None:
    words = ["host", "--model", folder, "--forms", "float32", "--sequences", "1,2"]
    words += ["--drafters", "off", "--tokens", 12, "--rounds", 1, "--threads", 1]
    found = ended(same_file.main, *words, "--max-load", "1e9")["steps"]
    assert list(found) == ["float32, 1 x off", "float32, 2 x off"]
    for row in found.values():
        assert row["tokens_per_step"] == 1.0 and 8 <= row["num_steps"] <= 11
        assert 0 < row["model_ms"] < row["step_ms"] and row["host_ms"] > 0


def test_memory_is_a_share_of_file_and_kv() -> None:
    nothing = {"model": "nothing", "ready_s": 1.0, "first_s": 3.0, "median_s": 2.0,
               "resident": 200.0, "anonymous": 100.0, "with_schema": 205.0,
               "schema_first_s": 0.5, "schema_next_s": 0.1}  # fmt: skip
    row = nothing | {"model": "m", "resident": 300.0, "with_schema": 325.0, "file_and_kv": 100.0}
    shown = same_file.table([row], nothing)
    assert row["above"] == pytest.approx(1.0) and row["above_with_schema"] == pytest.approx(1.25)
    assert shown.row_count == 2
