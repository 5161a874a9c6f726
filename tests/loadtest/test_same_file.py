"""Tailor beside llama.cpp on one GGUF: what is sent, what is told, and how a file is rounded."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest

from loadtest.cells import Ask, Cell, Level
from loadtest.completion import Timing
from loadtest.peer import Peer, PeerFailed
from loadtest.random_gguf import SHAPES, write
from loadtest.requantise import requantise
from loadtest.same_file import (
    LLAMACPP,
    Found,
    Kind,
    figure_of,
    kinds,
    measure,
    rate_together,
    servers,
    summary_of,
)
from loadtest.same_file_quality import best, compare, divergence, llamacpp_tops, spread
from server.model.build import RunnerSpec, build_runner
from server.model.gguf_folder import file_folder
from server.model.gguf_index import GgufIndex
from server.model.scoring import Text, score
from server.types import EngineSizes
from tests.setup.test_gguf_file import write_gguf


def test_a_file_is_rounded_and_keeps_the_rest(tmp_path: Path) -> None:
    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    write_gguf(source)
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
    with pytest.raises(ValueError, match="no form 'q3_k'"):
        requantise(source, out, "q3_k")
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_ratios_are_above_1_where_tailor_is_better() -> None:
    chosen = kinds(8, ["prose", "first-200"])
    found: Found = {
        "prose": {LLAMACPP: [10.0, 10.0], "tailor": [20.0, 20.0]},
        "first-200": {LLAMACPP: [300.0, 300.0], "tailor": [100.0, 100.0]},
    }
    table = summary_of(found, chosen)
    assert table["prose"]["tailor"]["ratio"]["median"] == 2.0
    assert table["first-200"]["tailor"]["ratio"]["median"] == 3.0
    assert table["prose"][LLAMACPP]["ratio"] is None
    with pytest.raises(ValueError, match="no cell 'x'"):
        kinds(8, ["x"])
    streams = {kind.name: len(kind.prompts) for kind in kinds(8, None)}
    assert (streams["8-streams"], streams["32-streams"], streams["prose"]) == (8, 32, 1)


def test_streams_are_counted_while_all_are_being_answered() -> None:
    a = Timing(0.0, chunk_s=[1.0, 2.0, 3.0, 4.0], chunk_tokens=[1, 2, 3, 4], num_tokens=10)
    b = Timing(0.0, chunk_s=[2.0, 3.0, 5.0], chunk_tokens=[1, 1, 1], num_tokens=6)
    assert rate_together([a]) == a.decode_tokens_per_s == 3.0
    assert rate_together([a, b]) == (3 + 4 + 2) / 2.0
    assert rate_together([a, replace(b, chunk_s=[4.0, 5.0, 6.0])]) is None


def test_histories_are_asked_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool | None, int, str]] = []

    async def run(
        _: object, peer: Peer, __: object, ___: int, asks: list[Ask], *, salt: str
    ) -> Cell:
        asked.extend((peer.extra.get("cache_prompt"), a.max_tokens, salt) for a in asks)
        cell = Cell(peer.name, Level(), 0)
        cell.timings = [Timing(0.0, chunk_s=[1.0, 2.0], chunk_tokens=[1, 7], num_tokens=8)]
        return cell

    monkeypatch.setattr("loadtest.same_file.run_cell", run)
    peer = Peer(LLAMACPP, "x", dialect="llamacpp")
    (kind,) = kinds(8, ["history-4000"])
    client: Any = None
    assert asyncio.run(figure_of(client, peer, kind, 0, "s")) == 7.0
    assert asked == [(True, 1, "s-llamacpp"), (True, 8, "s-llamacpp")]
    assert "cache_prompt" not in peer.extra


def test_histories_are_read_once_and_other_prompts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    salts: dict[str, set[str]] = {}

    async def figure(_: object, __: object, kind: Kind, ___: int, salt: str) -> float:
        salts.setdefault(kind.name, set()).add(salt)
        return 1.0

    monkeypatch.setattr("loadtest.same_file.figure_of", figure)
    chosen = kinds(8, ["prose", "8-histories"])
    found = asyncio.run(measure([Peer("a", "x")], chosen, 3, 0.0))
    assert found == {"prose": {"a": [1.0] * 3}, "8-histories": {"a": [1.0] * 3}}
    assert (len(salts["prose"]), len(salts["8-histories"])) == (4, 1)


def test_a_file_of_random_weights_is_served_in_its_own_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written with another file's tokenizer, filled up; read by transformers and by us alike."""
    monkeypatch.setenv("TAILOR_CACHE_DIR", str(tmp_path / "cache"))
    write_gguf(tmp_path / "in.gguf")
    for name, one in SHAPES.items():
        dim = 128 if one.architecture == "qwen3" else 32  # what transformers takes it to be
        small = replace(one, layers=2, hidden=128, inner=96, heads=4, kv_heads=2, head_dim=dim)
        small = replace(small, vocab=400, context=128)
        out = tmp_path / f"{name}.gguf"
        write(tmp_path / "in.gguf", out, small, "q8_0")
        folder = file_folder(str(out))
        sizes = EngineSizes(max_num_seqs=1, max_num_batched_tokens=64, kv_bytes=1 << 21)
        runner = build_runner(RunnerSpec("m", str(folder), sizes=sizes, threads=1))
        try:
            assert runner.info.vocab_size == 400 and runner.info.dtype == "file"
            found = score(runner, [Text(tuple(range(3, 40)), 1)]).logprobs
        finally:
            runner.close()
        assert np.isfinite(found).all() and found.mean() == pytest.approx(-math.log(400), abs=1.5)


def test_both_servers_get_the_same_file_and_their_own_default_cache(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    theirs, off, on = servers(file, tmp_path / "llama-server", {LLAMACPP: "-t 1", "tailor": ""})
    assert theirs.env["LLAMACPP_MODEL"] == off.env["TAILOR_MODEL"] == str(file)
    assert theirs.env["LLAMACPP_ARGS"].endswith("f16 -t 1")
    assert on.is_alias and not on.extra and off.extra["speculation"]["drafter"] == "off"


def test_divergence_is_that_of_the_distributions() -> None:
    p = {1: math.log(0.5), 2: math.log(0.3), 3: math.log(0.2)}
    q = {1: math.log(0.25), 2: math.log(0.5), 3: math.log(0.25)}
    want = 0.5 * math.log(2) + 0.3 * math.log(0.6) + 0.2 * math.log(0.8)
    assert divergence(p, q) == pytest.approx(want, abs=1e-6)
    assert divergence(p, p) == pytest.approx(0.0, abs=1e-6)
    part = {1: math.log(0.5), 2: math.log(0.3)}  # the rest of both: 0.2 and 0.25
    assert divergence(part, q) == pytest.approx(want, abs=1e-6)
    assert best(q) == 2
    assert best({5: -1.0, 4: -1.0}) == 4
    assert compare([p, q], [p, p])["greedy_agree"] == 0.5


def test_llamacpp_is_asked_after_each_gold_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = httpx.Response(200, content=request.content).json()
        asked.append(body["prompt"])
        if len(body["prompt"]) > 4:
            return httpx.Response(500, text="full")
        told = {"id": 7, "logprob": -0.5, "top_logprobs": [{"id": 7, "logprob": -0.5}]}
        return httpx.Response(200, json={"completion_probabilities": [told]})

    def client(**_: object) -> httpx.AsyncClient:
        return real(transport=httpx.MockTransport(answer))

    real = httpx.AsyncClient
    monkeypatch.setattr("loadtest.same_file_quality.httpx.AsyncClient", client)
    peer = Peer("llamacpp", "x", url="http://127.0.0.1:1")
    tops = asyncio.run(llamacpp_tops(peer, [Text((1, 2, 3, 4), 2)], 1))
    assert asked == [[1, 2], [1, 2, 3]]
    assert tops == [{7: -0.5}, {7: -0.5}]
    asked.clear()
    texts = [Text((1, 2, 3, 4), 2), Text((5, 6, 7, 8), 1)]
    assert spread(5, None) == [0, 1, 2, 3, 4] == spread(5, 9) and spread(5, 2) == [0, 2]
    assert len(asyncio.run(llamacpp_tops(peer, texts, 1, spread(5, 2)))) == 2
    assert asked == [[1, 2], [5]]
    with pytest.raises(PeerFailed, match="full"):
        asyncio.run(llamacpp_tops(peer, [Text((1, 2, 3, 4, 5, 6), 5)], 1))
