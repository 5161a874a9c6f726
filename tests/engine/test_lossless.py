"""Whatever drafts, schedules, preempts, forks, caches or aborts: the tokens are those of one
token at a time. Hypothesis draws a seed; everything else follows from it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from server.types import SpeculationParams
from tests.engine.scenarios import (
    Result,
    Workload,
    compare,
    drive,
    make_drafter,
    make_engine,
    random_workload,
    run_workload,
    verifying_every,
    with_own_logits,
    with_slices,
)
from tests.profiles import examples

SEEDS = st.integers(0, 2**48)


def _run(work: Workload, *, waits: bool = False) -> dict[tuple[str, int], Result]:
    """waits: whether tokens wait for the full head and may be taken back: counts are no sums."""
    _, results = run_workload(work)
    asked = {r.request_id for _, r, _ in work.requests if r.report_sources}
    for (request_id, _), result in results.items():
        assert len(result.sources) == (len(result.ids) if request_id in asked else 0)
        tells = next(r for _, r, _ in work.requests if r.request_id == request_id).report_rejected
        assert tells or not result.rejected
        for at, _, ids in result.rejected:  # what was drafted there is not what stands there
            assert result.ids[at] != ids[0]
        if not waits and result.sources:
            accepted = sum(c.num_accepted for c in result.counts)
            assert sum(source != "" for source in result.sources) == accepted
        if not waits and result.finish_reason in ("stop", "length"):
            steps = sum(c.num_steps for c in result.counts)
            accepted = sum(c.num_accepted for c in result.counts)
            # Every step emits its accepted tokens and one more, but for a cut in the path.
            assert accepted + steps - len(result.ids) in (0, 1)
            assert all(c.num_accepted <= c.num_drafted for c in result.counts)
            for c in result.counts:
                assert sum(c.accepted_by_depth) == c.num_accepted
                assert sum(d for _, d, _ in c.by_source) == c.num_drafted
                assert sum(a for _, _, a in c.by_source) == c.num_accepted
    return results


@settings(max_examples=examples(1500), deadline=None, print_blob=True)
@given(SEEDS)
def test_any_schedule_gives_the_one_token_loop(seed: int) -> None:
    work = random_workload(Random(seed))
    note(f"{work}")
    _run(work)


@settings(max_examples=examples(500), deadline=None, print_blob=True)
@given(SEEDS, st.integers(1, 6))
def test_unverified_tokens_roll_back_to_the_same_text(seed: int, every: int) -> None:
    rng = Random(seed)
    work = verifying_every(random_workload(rng), rng, every)
    note(f"{work}")
    _run(work, waits=True)


def test_unverified_tokens_are_taken_back() -> None:
    """The test above means something: of its verifications many find a wrong token."""
    num_verifications = num_dropped = 0
    for seed in range(40):
        rng = Random(seed)
        results = _run(verifying_every(random_workload(rng), rng, 1 + seed % 6), waits=True)
        for result in results.values():
            num_verifications += sum(v.num_verifications for v in result.vocabulary)
            num_dropped += sum(v.num_dropped for v in result.vocabulary)
    assert num_verifications > 100 and num_dropped > 20


@settings(max_examples=examples(500), deadline=None, print_blob=True)
@given(SEEDS, st.integers(0, 6))
def test_what_the_model_held_likely_changes_no_text(seed: int, every: int) -> None:
    """`auto` with the rows of every step, slices' too, through preemption, forks and rollbacks."""
    rng = Random(seed)
    work = with_own_logits(random_workload(rng), rng)
    if every > 3:
        work = with_slices(work, rng, ("exact", "slice", "full"))
    elif every:
        work = verifying_every(work, rng, every)
    note(f"{work}")
    _run(work, waits=every > 0)


def test_what_the_model_held_likely_is_drafted_there() -> None:
    accepted = 0
    for seed in range(40):
        rng = Random(seed)
        results = _run(with_own_logits(random_workload(rng), rng))
        for counts in (c for result in results.values() for c in result.counts):
            accepted += sum(kept for source, _, kept in counts.by_source if source == "logits")
    assert accepted > 20


@pytest.mark.parametrize("drafter", ["off", "random", "likely", "oracle", "liar", "broken"])
def test_the_drafter_does_not_show(drafter: str) -> None:
    """The very same requests, six drafters: equal results, and off computes no draft row."""
    speculation = SpeculationParams(drafter, 0 if drafter == "off" else 12)
    num_draft_rows = num_accepted = 0
    for seed in range(12):
        work = random_workload(Random(seed))
        work.drafter = drafter
        work.requests = [
            (at, replace(request, speculation=speculation), None)
            for at, request, _ in work.requests
        ]
        expected = work.expected()
        engine, _ = make_engine(work, make_drafter(work, expected))
        results = drive(work, engine)
        compare(work, expected, results)
        for result in results.values():
            num_draft_rows += sum(c.num_drafted for c in result.counts)
            num_accepted += sum(c.num_accepted for c in result.counts)
    assert (num_draft_rows > 0) == (drafter != "off")
    assert num_accepted > 50 or drafter != "oracle"
