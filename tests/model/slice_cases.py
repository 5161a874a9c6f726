"""Batches and slices that the tests of both runners share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from server.engine.batch import NO_TOKEN_LEFT, Batch, Drawn, HeadSlice, Runner
from server.types import SamplingParams
from tests.fakes import reference_sampler as sampling
from tests.model import families, slice_engines
from tests.model.batches import BatchBuilder, Pages, all_logprobs, draw_params, run

V = families.VOCAB_SIZE
Ids = npt.NDArray[np.int32]

SAMPLINGS = [
    SamplingParams(temperature=0.0),
    *(replace(own, seed=i) for i, own in enumerate(slice_engines.SAMPLINGS)),
    SamplingParams(temperature=0.0, num_logprobs=0, logprob_token_ids=(2, 9, 60, V - 1)),
]


def ids_of(seed: int, num: int) -> Ids:
    """Random ascending ids, EOS (2) among them."""
    found = np.random.default_rng(seed).choice(np.arange(3, V), num - 1, replace=False)
    return np.sort(np.append(found, 2)).astype(np.int32)


def cached(runner: Any, table: int, static: Ids, dynamic: Ids, places: Ids) -> HeadSlice:
    """A slice of T and some dynamic rows, loaded at these places of the pool. runner: or what holds
    a runner's slices."""
    runner.load_rows(dynamic, places)
    ids = np.concatenate([static, dynamic])
    columns = np.concatenate([np.arange(static.shape[0]), static.shape[0] + places])
    order = np.argsort(ids)
    return HeadSlice(
        ids[order].astype(np.int32), columns[order].astype(np.int32), table, static.shape[0]
    )


def uncached(slice_: HeadSlice) -> HeadSlice:
    return HeadSlice(slice_.ids, np.empty(0, np.int32), -1, 0)


def batch_of(num_rows: int, seed: int, chosen: list[int]) -> Batch:
    """Prompts of random length, one draw each at the last row; chosen[i]: slice of draw i."""
    rng = np.random.default_rng(seed)
    pages, builder = Pages(64, seed=seed), BatchBuilder()
    for i in range(num_rows):
        ids = rng.integers(3, V, int(rng.integers(1, 9))).tolist()
        row = builder.add_rows(pages.sequence(len(ids)), ids, 0)[-1]
        own = SAMPLINGS[(i + seed) % len(SAMPLINGS)]
        params = draw_params(
            own,
            choice_id=i,
            banned_until=[2, 9, 44] if own.min_tokens else [],
            counts={3: (1, 0), 50: (2, 1), 120: (0, 1)} if own.has_penalties else None,
        )
        builder.draw(row, builder.add_params(params))
    batch = builder.build()
    return replace(batch, draw_slice=np.array(chosen, np.int32))


def verification(parts: list[Batch]) -> Batch:
    """What `verify` is given for all draws of these batches, one after the other."""
    params = tuple(p.params[int(i)] for p in parts for i in p.draw_params)
    rows = np.arange(len(params), dtype=np.int32)
    return replace(
        parts[0],
        draw_slice=None,
        token_ids=np.zeros(len(params), np.int32),
        draw_rows=rows,
        draw_params=rows,
        draw_parent=rows * 0 - 1,
        draw_positions=np.concatenate([p.draw_positions for p in parts]),
        draw_mask=rows * 0 - 1,
        params=params,
    )


def assert_equal(got: Drawn, want: Drawn, atol: float = 0.0) -> None:
    """The same ids, told alike; logprobs to `atol`."""
    assert got.token_ids.tolist() == want.token_ids.tolist()
    np.testing.assert_allclose(got.logprobs, want.logprobs, 0, atol)
    assert got.ranks.tolist() == want.ranks.tolist()
    for mine, other in zip(got.top, want.top, strict=True):
        assert [i for i, _ in mine] == [i for i, _ in other]
        np.testing.assert_allclose([x for _, x in mine], [x for _, x in other], 0, atol)


def assert_likely(runner: Runner, batch: Batch, atol: float) -> None:
    """The likeliest ids of every draw are those that its logprobs name, over its slice or all ids,
    whatever it is drawn by; and asking for them changes nothing else."""
    asked = tuple(
        replace(p, sampling=SamplingParams(temperature=0.0, num_logprobs=5)) for p in batch.params
    )
    want = run(runner, replace(batch, params=asked))
    got = run(runner, replace(batch, num_likely=5))
    assert_equal(got, run(runner, batch))
    assert got.likely is not None and run(runner, batch).likely is None
    for ids, chances, top in zip(got.likely.ids, got.likely.chances, want.top, strict=True):
        assert ids.tolist() == [i for i, _ in top]
        np.testing.assert_allclose(chances, np.exp([value for _, value in top]), atol=atol)


def make_slices(runner: Runner) -> list[HeadSlice]:
    """Slices over two tables, with dynamic rows that are shared, scattered and far apart."""
    first, second = ids_of(1, 20), ids_of(2, 70)
    runner.load_table(0, first.copy())
    runner.load_table(1, second.copy())
    extra = np.setdiff1d(np.arange(3, V, dtype=np.int32), np.union1d(first, second))
    return [
        cached(runner, 0, first, extra[:3], np.array([5, 0, 66], np.int32)),
        cached(runner, 0, first, extra[:0], np.empty(0, np.int32)),
        cached(runner, 1, second, extra[[0, 9, 4]], np.array([5, 200, 3], np.int32)),
    ]


def check_restricted(runner: Runner, slices: list[HeadSlice], seed: int, atol: float) -> None:
    """Draws of the full head and of cached slices, side by side, are those of the reference sampler
    on the full head's logits with -inf outside the slice, and of the same slices when their rows
    are not cached; what is told of each is the reference's, or nothing."""
    chosen = [0, 1, 2, -1, 2, 1, -1]
    batch = batch_of(7, seed, chosen)
    got = run(runner, replace(batch, slices=tuple(slices)))
    assert_equal(got, run(runner, replace(batch, slices=tuple(uncached(s) for s in slices))), atol)
    scored = replace(
        batch,
        draw_slice=None,
        score_rows=batch.draw_rows,
        score_targets=np.full(7, 3, np.int32),
        score_top=np.full(7, V, np.int32),
    )
    full = all_logprobs(run(runner, scored), V)
    every = HeadSlice(np.arange(V, dtype=np.int32), np.empty(0, np.int32), -1, 0)
    for d, token in enumerate(got.token_ids.tolist()):
        ids = [*slices, every][chosen[d]].ids
        logits = np.full(V, -np.inf, np.float32)
        logits[ids] = full[d][ids]
        params = batch.params[int(batch.draw_params[d])]
        own = params.sampling
        assert token in ids
        # Adding a constant to a row changes no draw: logprobs stand in for logits where the
        # penalties do not look at their sign.
        if own.repetition_penalty == 1.0:
            assert token == sampling.draw(logits, params, int(batch.draw_positions[d]), [])
        if own.num_logprobs is not None:
            want = sampling.token_logprob(logits, token, own.num_logprobs, own.logprob_token_ids)
            np.testing.assert_allclose(got.logprobs[d], want.logprob, 0, 2e-4)
            assert got.ranks[d] == want.rank
            assert [i for i, _ in got.top[d]] == [i for i, _ in want.top]
        else:
            assert np.isnan(got.logprobs[d]) and (got.ranks[d], got.top[d]) == (0, ())


def check_verify(
    runner: Runner, slices: list[HeadSlice], num_steps: int, atol: float
) -> tuple[Batch, Ids, Drawn]:
    """Draws that steps kept at scattered places are verified to be the full head's; a kept draw
    gives no logprobs. What `verify` was given and gave."""
    parts = [batch_of(8, seed, [0, 1, 2, 0, 1, 2, 0, 1]) for seed in range(num_steps)]
    num = 8 * num_steps
    places = np.random.default_rng(3).permutation(3 * num)[:num].astype(np.int32)
    want = []
    for batch, keep in zip(parts, np.split(places, num_steps), strict=True):
        want.append(run(runner, replace(batch, draw_slice=None)))
        kept = run(runner, replace(batch, slices=tuple(slices), draw_keep=keep))
        assert np.isnan(kept.logprobs).all() and not kept.ranks.any()
    check = verification(parts)
    got = runner.verify(check, places)
    assert np.array_equal(got.token_ids, np.concatenate([w.token_ids for w in want]))
    np.testing.assert_allclose(got.logprobs, np.concatenate([w.logprobs for w in want]), 0, atol)
    return check, places, got


def check_where_nothing_is_allowed(runner: Runner, slice_: HeadSlice, atol: float) -> None:
    """There the full head draws; logprobs are its own to `atol`."""
    outside = sorted(set(range(3, V)) - set(slice_.ids.tolist()))[:5]
    pages, builder = Pages(64), BatchBuilder()
    plain = builder.add_params(draw_params(SamplingParams(temperature=0.0, num_logprobs=2)))
    mask = builder.add_mask(outside, V)
    rows = [builder.add_rows(pages.sequence(3), [5, 6, i + 9], 0)[-1] for i in range(3)]
    for row in rows:
        builder.draw(row, plain)
        builder.draw(row, plain, mask=mask)
    batch = builder.build()
    want = run(runner, batch)
    got = run(runner, replace(batch, draw_slice=np.zeros(6, np.int32), slices=(slice_,)))
    assert np.array_equal(got.token_ids[1::2], want.token_ids[1::2])
    np.testing.assert_allclose(got.logprobs[1::2], want.logprobs[1::2], 0, atol)
    assert set(got.token_ids[1::2].tolist()) <= set(outside)
    assert set(got.token_ids[0::2].tolist()) <= set(slice_.ids.tolist())
    builder.draw(rows[0], plain, mask=builder.add_mask([], V))
    banned = tuple((int(i), -100.0) for i in slice_.ids)
    all_banned = builder.add_params(draw_params(SamplingParams(temperature=0.0, logit_bias=banned)))
    builder.draw(rows[0], all_banned)
    drawn = run(
        runner, replace(builder.build(), draw_slice=np.zeros(8, np.int32), slices=(slice_,))
    )
    assert drawn.problems == {6: NO_TOKEN_LEFT} and drawn.token_ids[6] == -1
    assert np.array_equal(drawn.token_ids[:6], got.token_ids)
    assert drawn.token_ids[7] not in slice_.ids
