"""Slices on a CPU: bit for bit the full head restricted, whatever lies and runs beside them; and
`verify`, bit for bit the full head's own draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from server.engine.batch import HeadSlice
from server.model.cpu.draws import words_of
from server.model.cpu.head import SlicedHead, float_head, padded
from server.model.cpu.kernels import argmax, gather_logits
from server.model.cpu.linear import new_work, packed
from server.model.cpu.records import PANEL
from server.model.cpu.runner import VERIFY_ROWS, CpuRunner
from server.types import SamplingParams
from tests.model import families
from tests.model.batches import BatchBuilder, Pages, draw_params, run
from tests.model.cpu_models import cpu_runner
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

V = families.VOCAB_SIZE


@pytest.fixture(
    scope="module",
    params=[
        "llama", "gemma3", "bfloat16", "int8", "int8-blocks", "int4", "gemma3 in its file",
        "int4 in its file",
    ],
)  # fmt: skip
def runner(request: pytest.FixtureRequest) -> Iterator[CpuRunner]:
    made = _runner(*str(request.param).split(maxsplit=1))
    yield made
    made.close()


def _runner(name: str, where: str = "") -> CpuRunner:
    """Of a family, or of Gemma 3 in a form. where: "in its file" of its head."""
    is_family = name in families.FAMILIES
    return cpu_runner(
        families.build(name if is_family else "gemma3"), dtype="float32" if is_family else name,
        head_in_file=bool(where),
    )  # fmt: skip


@pytest.mark.parametrize("form", ["llama", "gemma3", "bfloat16", "int8", "int4"])
def test_a_head_in_its_file_gives_the_same_bits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.model.cpu.head._PIECE", 2 * PANEL)
    held, read = _runner(form), _runner(form, "in its file")
    try:
        assert read.weight_bytes < held.weight_bytes
        batch = batch_of(8, 1, [-1] * 8)
        assert_equal(run(read, batch), run(held, batch))
        greedy = replace(draw_params(), sampling=SamplingParams(temperature=0.0))
        plain = replace(batch, params=(greedy,) * len(batch.params))
        assert_likely(read, plain, 1.2e-4)
        assert_equal(run(read, plain), run(held, plain))
    finally:
        held.close()
        read.close()


@pytest.fixture(scope="module")
def slices(runner: CpuRunner) -> list[HeadSlice]:
    return make_slices(runner)


def test_the_likeliest_ids_are_told_beside_the_draws(
    runner: CpuRunner, slices: list[HeadSlice]
) -> None:
    batch = batch_of(8, 1, [0, 1, 2, -1, 2, 1, -1, 0])
    assert_likely(runner, replace(batch, slices=tuple(slices)), 1.2e-4)
    assert_likely(runner, replace(batch, slices=tuple(uncached(s) for s in slices)), 1.2e-4)
    assert_likely(runner, replace(batch, draw_slice=None), 1.2e-4)


def test_a_step_that_draws_itself_tells_the_same_likeliest_ids(runner: CpuRunner) -> None:
    """Greedy steps draw, and find the likeliest ids, within their one call of compiled code."""
    batch = batch_of(9, 4, [-1] * 9)
    greedy = replace(draw_params(), sampling=SamplingParams(temperature=0.0))
    plain = replace(
        batch, draw_slice=None, slices=(), masks=np.empty((0, 0), np.uint32),
        draw_mask=np.full(9, -1, np.int32), params=(greedy,) * len(batch.params), num_likely=4,
    )  # fmt: skip
    one = np.zeros(1, np.int32)
    other = replace(plain, score_rows=plain.draw_rows[:1], score_targets=one, score_top=one)
    num_ids = runner.info.vocab_size
    assert words_of(plain, num_ids) is not None and words_of(other, num_ids) is None
    got, want = run(runner, plain), run(runner, other)
    assert got.likely is not None and want.likely is not None
    assert got.token_ids.tolist() == want.token_ids.tolist() == got.likely.ids[:, 0].tolist()
    assert got.likely.ids.tobytes() == want.likely.ids.tobytes()
    assert got.likely.chances.tobytes() == want.likely.chances.tobytes()


def test_a_step_refuses_arrays_of_other_types(runner: CpuRunner) -> None:
    """Compiled code reads them as int32 wherever they come from."""
    batch = batch_of(3, 4, [-1] * 3)
    with pytest.raises(TypeError):
        run(runner, replace(batch, positions=batch.positions.astype(np.int64)))
    assert run(runner, batch).token_ids.shape == (3,)


@pytest.mark.parametrize("seed", range(2))
def test_a_slice_is_the_full_head_restricted(
    runner: CpuRunner, slices: list[HeadSlice], seed: int
) -> None:
    check_restricted(runner, slices, seed, 0.0)


def test_where_nothing_of_the_slice_is_allowed_the_full_head_draws(
    runner: CpuRunner, slices: list[HeadSlice]
) -> None:
    check_where_nothing_is_allowed(runner, slices[1], 0.0)


def test_verify_is_the_full_head_s_draw(runner: CpuRunner, slices: list[HeadSlice]) -> None:
    """More rows than one product of `verify` takes."""
    check_verify(runner, slices, VERIFY_ROWS // 8 + 1, 0.0)


def test_a_table_is_dropped_and_its_number_is_free(runner: CpuRunner) -> None:
    held = runner._slices
    before = held.num_bytes
    runner.load_table(9, ids_of(5, 30))
    assert held.num_bytes > before
    with pytest.raises(ValueError, match="table 9 is loaded already"):
        runner.load_table(9, ids_of(6, 30))
    runner.drop_table(9)
    runner.drop_table(9)
    assert held.num_bytes == before


@pytest.mark.parametrize("num", [1, 15, 16, 17, PANEL - 1, PANEL, PANEL + 1, 3 * PANEL + 5])
def test_pads_never_win_when_every_logit_is_negative(num: int) -> None:
    """The paper's code fills pads with zeros; a zero wins against negative logits."""
    width, rows = 32, 5 * PANEL
    rng = np.random.default_rng(num)
    weight = -rng.random((rows, width), np.float32) - np.float32(0.5)
    sliced = SlicedHead(float_head(packed(weight)), new_work(2))
    ids = np.sort(rng.choice(rows, num, replace=False)).astype(np.int32)
    static, dynamic = ids[: num // 2 + 1], ids[num // 2 + 1 :]
    sliced.load_table(0, static)
    places = np.arange(dynamic.shape[0], dtype=np.int32)[::-1].copy()
    slice_ = cached(sliced, 0, static, dynamic, places)
    states = rng.random((1, width), np.float32) + np.float32(0.1)
    out = np.zeros(padded(num), np.float32)
    builder = BatchBuilder()
    row = builder.add_rows(Pages(1).sequence(1), [5], 0)[0]
    builder.draw(row, builder.add_params(draw_params()))
    batch = replace(builder.build(), draw_slice=np.zeros(1, np.int32), slices=(slice_,))
    gather_logits(*sliced.logits_of(batch, states)[0], slice_.columns, slice_.num_static, out)
    best, best_id = np.float32(-np.inf), -1
    for i in ids.tolist():
        want = np.float32(0)
        for k in range(width):
            want = np.float32(
                np.float64(states[0, k]) * np.float64(weight[i, k]) + np.float64(want)
            )
        if want > best:
            best, best_id = want, i
    assert (out[:num] < 0).all() and (out[num:] == -np.inf).all()
    assert ids[argmax(out)] == best_id


def test_ties_go_to_the_lowest_id_wherever_its_row_lies() -> None:
    """The paper's code leaves its ids unsorted. Here every row of the head is the same, so that
    every id ties: the lowest one wins from T, from the pool, and from the full head."""
    module = families.build("llama")
    with torch.no_grad():
        module.lm_head.weight[:] = module.lm_head.weight[7].clone()
    runner = cpu_runner(module)
    try:
        static = np.array([2, 60, 150], np.int32)
        runner.load_table(0, static.copy())
        none = np.empty(0, np.int32)
        slices = (
            cached(runner, 0, static, none, none),
            cached(runner, 0, static, np.array([1, 40], np.int32), np.array([9, 0], np.int32)),
            cached(runner, 0, static, np.array([100, 198], np.int32), np.array([3, 70], np.int32)),
        )
        pages, builder = Pages(64), BatchBuilder()
        row = builder.add_rows(pages.sequence(4), [5, 6, 7, 8], 0)[-1]
        for sampling in (SamplingParams(temperature=0.0), SamplingParams(top_k=1, seed=3)):
            for _ in range(4):
                builder.draw(row, builder.add_params(draw_params(sampling)))
        chosen = np.array([0, 1, 2, -1] * 2, np.int32)
        got = run(runner, replace(builder.build(), draw_slice=chosen, slices=slices))
        assert got.token_ids.tolist() == [2, 1, 2, 0] * 2
    finally:
        runner.close()
