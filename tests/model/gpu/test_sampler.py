"""The torch sampler against the numpy reference, alone and in trees. That this draws from the
softmax is a test of the CPU's sampler, which equals it, too."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.batch import Batch, Int32
from server.model.cpu.records import FAILED
from server.model.gpu import sampler
from server.model.gpu.sampler import plan_draws, token_logprobs
from server.types import SamplingParams
from tests.fakes import reference_sampler as sampling
from tests.model.batches import BatchBuilder, Pages, draw_params
from tests.model.cpu import test_sampler as cpu_sampler
from tests.model.sampler_cases import Case, Logits, V, cases
from tests.model.torch_runners import reference
from tests.profiles import examples


def draw_all(batch: Batch, logits: Logits, ids: Int32 | None = None) -> list[int]:
    """Columns of all draws of a batch; logits [R, columns], whose ids are those of a slice."""
    plan = plan_draws(batch, np.arange(batch.num_draws), batch.draw_rows, logits.shape[1], ids)
    arrays = {name: torch.from_numpy(a.copy()) for name, a in plan.arrays.items()}
    own = None if ids is None else torch.from_numpy(ids)
    return sampler.draw(torch.from_numpy(logits.copy()), plan, arrays, own).tolist()


@settings(max_examples=examples(600), deadline=None)
@given(cases(), st.integers(1, V))
def test_both_samplers_draw_the_same_ids_as_the_reference(case: Case, num: int) -> None:
    """Of all ids, and of those of a slice of so many."""
    batch, logits = case
    before, want = logits.copy(), reference(batch, logits)
    assert draw_all(batch, logits) == want
    np.testing.assert_array_equal(logits, before)
    assert cpu_sampler.drawn(batch, logits) == [max(token, FAILED) for token in want]
    ids = np.sort(np.random.default_rng(num).permutation(V)[:num]).astype(np.int32)
    restricted = np.full_like(logits, -np.inf)
    restricted[:, ids] = logits[:, ids]
    found = draw_all(batch, logits[:, ids], ids)
    assert [int(ids[i]) if i >= 0 else i for i in found] == reference(batch, restricted)


def test_counted_ids_are_never_a_list() -> None:
    """As lists those of 64 choices took a step longer than a small model does."""
    builder = BatchBuilder()
    [row] = builder.add_rows(Pages(1).sequence(1), (0,), 0)
    counted = draw_params(
        SamplingParams(repetition_penalty=1.1), counts=dict.fromkeys(range(20_000), (1, 1))
    )
    for _ in range(8):
        builder.draw(row, builder.add_params(counted))
    batch, took = builder.build(), list[tuple[float, ...]]()
    for _ in range(5):
        began_s = time.thread_time()
        plan = plan_draws(batch, np.arange(8), np.arange(8), 1 << 15)
        planned_s = time.thread_time()
        assert sum(np.array(array.tolist()).size for array in plan.arrays.values()) > 640_000
        took.append((planned_s - began_s, time.thread_time() - planned_s))
    planning_s, listing_s = map(min, zip(*took, strict=True))
    assert planning_s < listing_s


def test_only_rows_with_top_k_or_top_p_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = BatchBuilder()
    rows = builder.add_rows(Pages(1).sequence(9), [0] * 9, 0)
    for i, row in enumerate(rows):
        asked = SamplingParams(temperature=0.8, seed=i, top_p=0.9 if i in (2, 7) else 1.0)
        builder.draw(row, builder.add_params(draw_params(asked)))
    batch = builder.build()
    logits = np.random.default_rng(4).standard_normal((9, V)).astype(np.float32)
    shapes = []
    nucleus = sampler.keep_nucleus

    def noted(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape[0])
        return nucleus(x, *given)

    monkeypatch.setattr(sampler, "keep_nucleus", noted)
    assert draw_all(batch, logits) == reference(batch, logits) and shapes == [2]


def test_logprobs_ranks_and_top_are_the_reference_s() -> None:
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((40, V)) * 5).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # ties
    logits[5, :] = np.where(logits[5] == 0, np.float32(-0.0), logits[5])
    logits[7, V - 30 :] = -np.inf
    ids = rng.integers(0, V - 30, 40).astype(np.int32)
    got = token_logprobs(torch.from_numpy(logits), torch.from_numpy(ids), 20)
    for i in range(40):
        want = sampling.token_logprob(logits[i], int(ids[i]), 20)
        assert got.rank[i] == want.rank
        assert got.top_ids[i].tolist() == [t for t, _ in want.top]
        np.testing.assert_allclose(got.logprob[i], want.logprob, atol=2e-5)
        np.testing.assert_allclose(got.top_logprobs[i], [p for _, p in want.top], atol=2e-5)
