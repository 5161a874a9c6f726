"""Slices on the torch runner: the full head restricted, whatever lies, runs and is copied beside
them; `verify` and `exact`; the embedding and the head in CPU memory.

Everything runs on the CPU.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from server.engine.batch import HeadSlice
from server.model.build import RunnerSpec, _build_torch_runner
from server.model.gpu import lm_head
from server.model.gpu.lm_head import LmHead, TorchSlices, product
from server.model.gpu.runner import TorchRunner
from server.model.gpu.transfers import Beside
from server.types import EngineSizes, SamplingParams
from tests.fakes import reference_sampler as sampling
from tests.model import families
from tests.model.batches import BatchBuilder, Pages, all_logprobs, draw_params, run
from tests.model.slice_cases import (
    assert_equal,
    assert_likely,
    batch_of,
    cached,
    check_restricted,
    check_verify,
    check_where_nothing_is_allowed,
    ids_of,
    make_slices,
    uncached,
)
from tests.model.slice_engines import asking, assert_same, requests_of, serve
from tests.model.tiny_models import save_tiny
from tests.model.torch_runners import body_of, head_of, runner_over

V = families.VOCAB_SIZE
CPU = torch.device("cpu")
PLACES = ["device", "stream", "cpu"]


def make(
    module: PreTrainedModel, place: str = "device", device: torch.device = CPU, **options: Any
) -> TorchRunner:
    """A runner over a module; with the head in CPU memory the module keeps none of its own."""
    module = module.to(device)  # type: ignore[arg-type]
    embed: Any = module.get_input_embeddings()
    head: Any = module.get_output_embeddings()
    tied = embed.weight is head.weight
    tables: dict[str, Any] = {}
    if place != "device":
        tables["head"] = head.weight.detach().cpu()
        head.weight = torch.nn.Parameter(head.weight.to("meta"), requires_grad=False)
    if place != "device" or not tied:
        tables["embedding"] = tables["head"] if tied else embed.weight.detach().cpu()
        embed.weight = torch.nn.Parameter(embed.weight.to("meta"), requires_grad=False)
    tables |= {"device": str(device), "verify_on_cpu": place == "cpu"}
    return runner_over(module, **(tables | options))


@pytest.fixture(
    scope="module",
    params=["llama-device", "gemma3-device", "gemma3-cpu", "gemma2-stream"],
)
def runner(request: pytest.FixtureRequest) -> TorchRunner:
    family, place = str(request.param).split("-")
    return make(families.build(family), place, name=family)


@pytest.fixture(scope="module")
def slices(runner: TorchRunner) -> list[HeadSlice]:
    return make_slices(runner)


# -- draws ---------------------------------------------------------------------------------------


def test_the_likeliest_ids_are_told_beside_the_draws(
    runner: TorchRunner, slices: list[HeadSlice]
) -> None:
    batch = batch_of(8, 1, [0, 1, 2, -1, 2, 1, -1, 0])
    assert_likely(runner, replace(batch, slices=tuple(slices)), 1e-5)
    assert_likely(runner, replace(batch, slices=tuple(uncached(s) for s in slices)), 1e-5)
    assert_likely(runner, replace(batch, draw_slice=None), 1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_a_slice_is_the_full_head_restricted(
    runner: TorchRunner, slices: list[HeadSlice], seed: int
) -> None:
    check_restricted(runner, slices, seed, 2e-4)


def test_slabs_change_nothing() -> None:
    """Draws in any order of rows, several of a row, a few at a time."""
    pages, builder = Pages(64), BatchBuilder()
    rows = builder.add_rows(pages.sequence(9), [5, 6, 7, 8, 9, 10, 11, 12, 13], 0)
    chosen = []
    for i, row in enumerate([8, 2, 2, 5, 0, 8, 8, 1, 2, 7]):
        own = SamplingParams(temperature=1.3 if i % 2 else 0.0, seed=i, num_logprobs=i % 3)
        builder.draw(rows[row], builder.add_params(draw_params(own, choice_id=i)))
        chosen.append(i % 4 - 1)
    for row in (8, 3, 2):
        builder.score(rows[row], 5, 4)
    batch = replace(builder.build(), draw_slice=np.array(chosen, np.int32))
    found = {}
    for way in itertools.product((1 << 29, 30_000, 1), ("device", "stream")):
        made = make(families.build("gemma3"), way[1], head_bytes=way[0])
        found[way] = run(made, replace(batch, slices=tuple(make_slices(made))))
    want = found[1 << 29, "device"]
    for other in found.values():
        assert_equal(other, want, 2e-4)
        np.testing.assert_allclose(other.score_logprobs, want.score_logprobs, atol=2e-4)


def test_where_nothing_of_the_slice_is_allowed_the_full_head_draws(
    runner: TorchRunner, slices: list[HeadSlice]
) -> None:
    check_where_nothing_is_allowed(runner, slices[1], 2e-4)


def test_verify_is_the_full_head_s_draw(runner: TorchRunner, slices: list[HeadSlice]) -> None:
    check, places, got = check_verify(runner, slices, 2, 2e-4)
    assert got.head_s > 0.0
    runner.launch(replace(batch_of(8, 0, [-1] * 8), draw_slice=None))
    with pytest.raises(RuntimeError, match="in flight"):
        runner.verify(check, places)
    runner.wait()
    with pytest.raises(ValueError, match="never kept"):
        runner.verify(check, places + 1000)


# -- the cache -----------------------------------------------------------------------------------


def test_rows_are_replaced_while_sequences_run() -> None:
    """Slices that come and go, rows taken over by other ids, a pool that grows: always the full
    head restricted."""
    runner = make(families.build("llama"), "stream")
    rng = np.random.default_rng(0)
    tables = [ids_of(i, 10 + 60 * i) for i in range(3)]
    for i, ids in enumerate(tables):
        runner.load_table(i, ids)
    for step in range(12):
        given = []
        for i in range(6):
            table = int(rng.integers(3))
            free = np.setdiff1d(np.arange(3, V, dtype=np.int32), tables[table])
            dynamic = rng.choice(free, int(rng.integers(0, 9)), replace=False).astype(np.int32)
            places = (np.arange(dynamic.shape[0]) + 9 * i + 40 * (step // 3)).astype(np.int32)
            given.append(cached(runner, table, tables[table], dynamic, places))
        batch = batch_of(6, step, list(range(6)))
        got = run(runner, replace(batch, slices=tuple(given)))
        other = run(runner, replace(batch, slices=tuple(uncached(s) for s in given)))
        assert_equal(got, other, 2e-4)
    runner.drop_table(2)
    runner.drop_table(2)
    runner.load_table(2, tables[1])
    with pytest.raises(ValueError, match="table 1 is loaded already"):
        runner.load_table(1, tables[1])


def test_where_the_device_has_no_room_it_is_told_in_the_engine_s_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For what is copied or computed, too, not for tables and pool alone; then nothing is there."""
    runner = make(families.build("llama"))

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("the device is full")

    ids, step = np.arange(5, dtype=np.int32), batch_of(1, 0, [-1])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", full)
        for ask in (
            lambda: runner.load_table(0, ids), lambda: runner.load_rows(ids, ids),
            lambda: runner.verify(step, ids[:0]), lambda: run(runner, step),
        ):  # fmt: skip
            with pytest.raises(MemoryError, match="full"):
                ask()
    runner.load_table(0, ids)


def test_rows_are_copied_beside_the_step_and_what_reads_them_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams that tell what waits for what stand in for CUDA's."""
    told: list[str] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = name if isinstance(name, str) else "copies"

        def wait_stream(self, other: Stream) -> None:
            told.append(f"{self.name} wait for {other.name}")

    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        told.append(f"on {stream.name}")
        yield
        told.append("back")

    steps = Stream("steps")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(lm_head, "Beside", lambda device: Beside(torch.device("cuda")))
    slices = TorchSlices(LmHead(torch.randn(90, 8), None), CPU)
    copied = ["copies wait for steps", "on copies", "back"]
    table, dynamic = np.arange(7, dtype=np.int32), np.array([50, 70], np.int32)
    slices.load_table(0, table)
    slices.load_rows(dynamic, np.array([0, 70], np.int32))
    assert told == [*copied, "steps wait for copies", *copied]  # the pool grew
    told.clear()
    ids = np.concatenate([table, dynamic])
    columns = np.array([*range(7), 7, 77], np.int32)
    view = slices.view([HeadSlice(ids=ids, table=0, num_static=7, columns=columns)])
    assert not told
    for _ in range(2):
        slices.logits(torch.randn(1, 8), view)
    assert told == ["steps wait for copies"]
    told.clear()
    slices.load_table(1, table)
    slices.drop_table(1)
    assert told == [*copied, "steps wait for copies"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": 7}, "table 7 is not loaded"),
        ({"columns": np.full(23, 90_000, np.int32)}, "is not the rows of table 0"),
        (
            {"columns": np.arange(90_000, 90_023, dtype=np.int32), "num_static": 0},
            "is not the rows",
        ),
        ({"ids": np.array([V], np.int32)}, "outside the vocabulary"),
    ],
)
def test_a_slice_over_rows_that_are_not_there_is_refused(
    runner: TorchRunner, slices: list[HeadSlice], change: dict[str, Any], message: str
) -> None:
    wrong = replace(slices[0], **change)
    batch = batch_of(2, 1, [0, 1])
    with pytest.raises(ValueError, match=message):
        run(runner, replace(batch, slices=(slices[1], wrong)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("num", [1, 16, 63, 64, 65, 190])
def test_pads_never_win_when_every_logit_is_negative(
    num: int, streamed: bool, dtype: torch.dtype
) -> None:
    """The paper's code fills pads with zeros; a zero wins against negative logits. With a bias."""
    rng = np.random.default_rng(num)
    weight = torch.from_numpy(-rng.random((300, 32), np.float32) - np.float32(0.5)).to(dtype)
    bias = torch.from_numpy(-rng.random(300, np.float32))
    sliced = TorchSlices(LmHead(weight, bias, is_streamed=streamed), CPU)
    ids = np.sort(rng.choice(300, num, replace=False)).astype(np.int32)
    static, dynamic = ids[: num // 2 + 1], ids[num // 2 + 1 :]
    sliced.load_table(0, static)
    places = np.arange(dynamic.shape[0], dtype=np.int32)[::-1].copy()
    slice_ = cached(sliced, 0, static, dynamic, places)
    view = sliced.view([slice_])
    assert sliced.view([slice_]) is view
    states = torch.from_numpy(rng.random((2, 32), np.float32) + np.float32(0.1)).to(dtype)
    logits = sliced.logits(states, view)
    want = (states.float() @ weight.float().t() + bias)[:, ids.tolist()]
    torch.testing.assert_close(logits, want)
    assert (logits < 0).all() and view.seen.all()
    assert view.named(torch.arange(num)).tolist() == ids.tolist()


# -- the full head and the embedding in CPU memory -----------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [1, 7, 100, 150, 1000])
def test_a_streamed_head_is_the_head(
    dtype: torch.dtype, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", chunk_rows * 24 * dtype.itemsize)
    generator = torch.Generator().manual_seed(chunk_rows)
    weight = torch.randn(160, 24, generator=generator).to(dtype)
    bias = torch.randn(160, generator=generator)
    hidden = torch.randn(5, 24, generator=generator).to(dtype)
    want = (product(hidden, weight) + bias)[:, :150]  # float32: rounded ones would make ties
    for is_streamed in (True, False):
        head = LmHead(weight, bias, 150, is_streamed=is_streamed)
        torch.testing.assert_close(head.logits(hidden), want)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("family", "tied"), [("gemma3", True), ("llama-scaled", False)])
def test_runners_from_a_folder(tmp_path: Path, family: str, tied: bool, place: Any) -> None:
    """What a server on CUDA builds, on the CPU: no second copy of a table, and rows that pad the
    vocabulary are neither drawn from nor copied."""
    module = save_tiny(tmp_path, family, vocab_size=144)
    sizes = EngineSizes(max_num_seqs=4, max_num_batched_tokens=64, kv_bytes=1 << 20)
    spec = RunnerSpec("tiny", str(tmp_path), sizes, device="cpu", dtype="float32", full_head=place)
    runner = _build_torch_runner(spec)
    assert isinstance(runner, TorchRunner) and runner.info.vocab_size == 128
    embed: Any = body_of(runner)._body.get_input_embeddings()
    on_device = {t.data_ptr() for t in (embed.weight, head_of(runner).weight) if not t.is_meta}
    # Beside the body: the head where it is or its CPU memory, and an embedding of its own there.
    assert len(on_device) == (2 if place == "device" and not tied else 1)
    assert (body_of(runner).embedding is None) == (place == "device")
    assert (head_of(runner).is_streamed, runner._cpu_head is not None) == (
        place != "device",
        place == "cpu",
    )
    ids = [5, 9, 40, 8, 77]
    builder = BatchBuilder()
    row = builder.add_rows(Pages(8).sequence(5), ids, 0)[-1]
    for seed in range(60):
        own = SamplingParams(temperature=6.0, seed=seed)
        builder.draw(row, builder.add_params(draw_params(own, choice_id=seed)))
    builder.score(row, 0, 128)
    drawn = run(runner, builder.build())
    with torch.no_grad():
        logits = module(torch.tensor([ids])).logits[0, -1, :128]
    for d, params in enumerate(builder.params):
        assert drawn.token_ids[d] == sampling.draw(logits.numpy(), params, 5, [])
    want = torch.log_softmax(logits, 0)  # which, too, knows nothing of padding
    np.testing.assert_allclose(all_logprobs(drawn, 128)[0], want, atol=2e-4)


# -- a real engine -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "place"),
    [("llama", "device"), ("gemma3", "cpu"), ("lfm2", "stream")],
)
def test_exact_is_full_and_a_slice_s_text_is_its_own(family: str, place: str) -> None:
    """Texts and finish reasons, with and without drafts, beside other modes, with too few blocks
    for all (preemption) and too few rows for all slices."""
    want, _ = serve(make(families.build(family)), requests_of(0))
    runner = make(families.build(family), place)
    rng = Random(7)
    missed = preempted = num_sliced = 0
    for blocks, seats, rows, modes in (
        (4, 4, 4096, ("exact", "full", "slice")),
        (48, 8, 8, ("exact",)),
    ):
        asked = asking(requests_of(0), rng, modes)
        got, engine = serve(
            runner, asked, num_blocks=blocks, max_num_seqs=seats, slice_cache_rows=rows
        )
        preempted += engine.scheduler.num_preemptions
        sliced = [r for r in asked if r.vocabulary.mode == "slice"]
        alone, _ = serve(runner, sliced)
        assert_same(got, want | alone, 2e-4)
        num_sliced += len(alone)
        missed += sum(v.num_missed for result in got.values() for v in result.vocabulary)
    assert missed > 10 and preempted > 0 and num_sliced > 1
