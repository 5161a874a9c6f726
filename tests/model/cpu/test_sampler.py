"""The CPU sampler: draws from the softmax, and logprobs close to the reference sampler's. That its
ids equal the reference's is a test of gpu/test_sampler.py, for both samplers."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.batch import Batch
from server.model.cpu import kernels as cpu_sampler
from server.model.cpu.draws import Draws
from server.model.cpu.head import FullLogits
from server.model.cpu.kernels.sampling import DrawSettings
from server.model.cpu.records import ALL_IDS, FAILED
from server.model.draws import allowed_words, noise_key, undrawn
from server.types import DRAW_NUMBERS, SamplingParams
from tests.fakes import reference_sampler as sampling
from tests.model.batches import BatchBuilder, Pages, draw_params
from tests.model.sampler_cases import Logits, V
from tests.profiles import examples

PADDED = 144  # whole vectors


def _row(rng: np.random.Generator, ties: bool) -> np.ndarray:
    logits = rng.normal(0, 4, V).astype(np.float32)
    if ties:
        logits = np.round(logits)
    return logits


def _padded(logits: Logits) -> Logits:
    """Rows of logits in whole vectors."""
    behind = [(0, 0)] * (logits.ndim - 1) + [(0, PADDED - V)]
    return np.pad(logits, behind, constant_values=-np.inf)


def drawn(batch: Batch, logits: Logits) -> list[int]:
    """The ids that Draws gives; logits [R, V]. A row with a NaN had a state with one."""
    states = np.zeros((logits.shape[0], 16), np.float32)
    states[np.isnan(logits).any(axis=1)] = np.nan
    answers = undrawn(batch)
    full, rows = FullLogits(_padded(logits), states, {}), batch.draw_rows.tolist()
    Draws(lambda _: V).draw_full(batch, range(batch.num_draws), rows, full, answers)
    return answers.token_ids.tolist()


def test_the_kernel_s_numbers_are_those_of_a_request_in_their_order() -> None:
    assert DrawSettings._fields == DRAW_NUMBERS


def test_each_seed_choice_and_position_has_noise_of_its_own() -> None:
    """The reference sampler has the same key, so that it would not tell."""
    of = list(product((0, 1, 1 << 32, (1 << 64) - 1), range(3), range(3)))
    assert len({noise_key(*one) for one in of}) == len(of)


def test_pruned_noise_draws_from_the_softmax() -> None:
    """Chi-square over 30,000 draws with distinct positions; false alarm once in 10,000 runs of
    distinct seeds (the seed is fixed, so it either always passes or never does)."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1.5, V).astype(np.float32)
    num = 30_000
    positions = np.arange(num, dtype=np.int32)
    zeros = positions * 0
    batch = Batch(
        token_ids=zeros, positions=positions, seq_ids=zeros, slots=positions, prefix_len=positions,
        path_start=zeros, path_len=zeros, block_tables=zeros[None], draw_rows=zeros,
        draw_params=zeros, draw_parent=zeros - 1, draw_positions=positions, draw_mask=zeros - 1,
        params=(draw_params(SamplingParams(temperature=1.0, seed=42)),),
    )  # fmt: skip
    counts = np.bincount(drawn(batch, logits[None]), minlength=V)
    p = np.exp(logits.astype(np.float64))
    expected = num * p / p.sum()
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    df = V - 1
    # Wilson-Hilferty: z = 3.72 is the 1 - 1e-4 quantile.
    limit = df * (1 - 2 / (9 * df) + 3.72 * math.sqrt(2 / (9 * df))) ** 3
    assert chi2 < limit


@settings(max_examples=examples(1500), deadline=None)
@given(
    row_seed=st.integers(0, 2**32 - 1),
    ties=st.booleans(),
    num_top=st.integers(0, 20),
    token=st.integers(0, V - 1),
)
def test_logprobs_ranks_and_top_equal_the_reference(
    row_seed: int, ties: bool, num_top: int, token: int
) -> None:
    logits = _row(np.random.default_rng(row_seed), ties)
    padded = _padded(logits)
    top_ids, top_logprobs = np.zeros(32, np.int64), np.zeros(32, np.float32)
    value, rank = cpu_sampler.logprob(padded, V, token, num_top, top_ids, top_logprobs)
    want = sampling.token_logprob(logits, token, num_top)
    assert abs(value - want.logprob) < 2e-5
    assert rank == want.rank
    assert top_ids[:num_top].tolist() == [i for i, _ in want.top]
    assert np.allclose(top_logprobs[:num_top], [lp for _, lp in want.top], atol=2e-5)
    # Ids that are named have the same bits as among the likeliest; what is not there is -inf.
    named = np.append(top_ids[:num_top], -1).astype(np.int32)
    values = np.zeros(num_top + 1, np.float32)
    cpu_sampler.logprobs_at(padded, named, values)
    assert values.tolist() == [*top_logprobs[:num_top].tolist(), float("-inf")]


def test_greedy_is_the_lowest_id_of_the_largest() -> None:
    every = [_row(np.random.default_rng(seed), ties=seed % 2 == 0) for seed in range(200)]
    rows = _padded(np.stack(every))
    out = np.zeros(200, np.int32)
    cpu_sampler.greedy(np.arange(200), ALL_IDS, 0, rows, np.zeros((200, 8), np.float32), out)
    assert out.tolist() == rows.argmax(axis=1).tolist()


def test_a_row_with_nan_fails_alone() -> None:
    hidden = np.zeros((2, 20), np.float32)
    hidden[1, 19] = np.nan
    logits = np.zeros((2, PADDED), np.float32)
    out = np.zeros(2, np.int32)
    cpu_sampler.greedy(np.array([0, 1]), ALL_IDS, 0, logits, hidden, out)
    assert out.tolist() == [0, FAILED]


def test_a_long_list_of_allowed_ids_is_read_once_for_all_draws() -> None:
    """Else all choices of each step wait for it."""

    class Ids:
        num_read = 0

        def __array__(self, *_: Any, **__: Any) -> Any:
            self.num_read += 1
            return np.array([7, 40])

    ids, builder = Ids(), BatchBuilder()
    [row] = builder.add_rows(Pages(1).sequence(1), (0,), 0)
    allowed = SamplingParams(allowed_token_ids=cast("tuple[int, ...]", ids))
    builder.draw(row, builder.add_params(draw_params(allowed)))
    for _ in range(3):
        words = allowed_words(builder.build(), 0, (), 64)
        assert words is not None and words.tolist() == [1 << 7, 1 << 8]
    assert ids.num_read == 1
