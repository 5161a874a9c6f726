"""Whatever drafts, schedules, preempts, forks, caches, aborts, slices or constrains: the tokens are
those of one token at a time. Hypothesis draws a seed; everything else follows from it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from random import Random

from hypothesis import given, note, settings
from hypothesis import strategies as st

from server.engine.engine import Engine
from server.types import GrammarSpec, Request, VocabularyMode
from tests.engine.scenarios import (
    EOS,
    Result,
    Workload,
    random_workload,
    run_workload,
    verifying_every,
    with_own_logits,
    with_slices,
    without_drafts,
)
from tests.engine.tiny_vocabularies import BothTokenizers, tokenizer_over
from tests.fakes.fake_runner import FakeRunner
from tests.profiles import examples

MODES: dict[str, tuple[VocabularyMode, ...]] = {
    "slices": ("slice", "slice", "full"),
    "exact": ("exact",),
    "all": ("exact", "slice", "full"),
}
GRAMMARS = (
    GrammarSpec("regex", "[ab]{1,6}"),
    GrammarSpec("regex", "(ab)*"),
    GrammarSpec("regex", "a*b"),
    GrammarSpec("regex", "(aab|abb)+a"),
    GrammarSpec("regex", "[ab]*aaaa"),
    GrammarSpec("lark", 'start: "a" start "b" | "b"'),
    GrammarSpec("lark", 'start: "abab" | "abba" | "aa" | "b"'),
    GrammarSpec("lark", 'start: "aabbaabb" x "abab"\nx: /[ab]?/'),
)


@functools.cache
def _vocabulary(size: int, number: int, special_ids: tuple[int, ...]) -> BothTokenizers:
    """Tokenizers over that vocabulary. Only of bytes that grammars know: an id without bytes is in
    no mask. Three numbers of each size are asked for: their grammars are compiled once."""
    rng = Random(number)
    pieces = [bytes(rng.choice(b"ab") for _ in range(rng.randint(0, 3))) for _ in range(size)]
    pieces[2:4] = [b"a", b"b"]
    return tokenizer_over(pieces, special_ids, EOS)


def _constrained(work: Workload, rng: Random) -> Workload:
    """The workload with grammars, some of which cannot be satisfied."""
    known = _vocabulary(work.model.vocab_size, rng.randrange(3), work.special_ids)
    work.token_bytes, work.grammar_tokenizer = list(known.pieces), known
    grammars = rng.sample(GRAMMARS, 2)

    def constrained(request: Request) -> Request:
        if rng.random() >= 0.8:
            return request
        sampling = replace(request.sampling, ignore_eos=False)
        if rng.random() < 0.7:  # else some of them cannot be satisfied
            sampling = replace(sampling, allowed_token_ids=None, logit_bias=(), min_tokens=0)
        return replace(request, sampling=sampling, grammar=rng.choice(grammars))

    work.change(constrained)
    return work


def _rest_at_random(engine: Engine, rng: Random) -> Callable[[int], None]:
    """Choices rest and are asked again as it falls. Before each step every session must have been
    told what it missed."""
    engine.gain.ask = lambda seats, shape, room: (  # type: ignore[method-assign]
        ["cooldown" if rng.random() < 0.6 or room <= 0 else "" for _ in seats],
        max(0, room),
    )

    def each_step(_: int) -> None:
        for sequence in engine.scheduler.running:
            assert all(at >= sequence.num_released for at, *_ in sequence.rejected_drafts), "told"
            if sequence.session is not None:
                known = sequence.num_output if not sequence.is_resting else sequence.num_told
                assert sequence.session.checkpoint() == sequence.num_told == known

    return each_step


def _run(
    work: Workload, *, waits: bool = False, load_failures: float = 0.0, rests: bool = False
) -> dict[tuple[str, int], Result]:
    """waits: whether tokens wait for the full head and may be taken back: counts are no sums.
    load_failures: share of copies of head rows for which the device has no room."""
    rng = Random(len(work.requests))

    def prepare(engine: Engine, runner: FakeRunner) -> Callable[[int], None] | None:
        runner.load_fails = lambda: rng.random() < load_failures
        return _rest_at_random(engine, rng) if rests else None

    engine, results = run_workload(work, prepare)
    assert len(engine.slices.index.num_users) == 0, "a head row was never unpinned"
    asked = {r.request_id for _, r, _ in work.requests if r.report_sources}
    for (request_id, _), result in results.items():
        assert result.error_code in (None, "constraint_unsatisfiable")
        assert len(result.sources) == (len(result.ids) if request_id in asked else 0)
        request = next(r for _, r, _ in work.requests if r.request_id == request_id)
        assert request.report_rejected or not result.rejected
        for at, _, ids in result.rejected:  # what was drafted there is not what stands there
            assert result.ids[at] != ids[0]
        for v in result.vocabulary:
            assert v.num_missed <= v.num_verifications <= v.num_checked
            assert v.num_dropped >= v.num_missed
            assert request.vocabulary.mode == "exact" or not v.num_full_steps
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


@settings(max_examples=examples(6000), deadline=None, print_blob=True)
@given(
    has_grammars=st.sampled_from((False, False, False, True, True)),
    seed=st.integers(0, 2**48),
    drafts=st.sampled_from(("any", "any", "off", "rests", "likely", "likely, rests")),
    heads=st.sampled_from(("full", "full", "unverified", *MODES)),
    load_failures=st.sampled_from((0.0, 0.0, 0.1, 0.5, 1.0)),
)
def test_any_schedule_gives_the_one_token_loop(
    has_grammars: bool, seed: int, drafts: str, heads: str, load_failures: float
) -> None:
    """drafts: by any drafter; likely: by `auto` with the rows of every step, slices' too; rests:
    choices are asked now and then; off: by none, from the full head, where most steps are like the
    one before. heads: whose; unverified: tokens wait for the full head and are taken back. All of
    it through stops, aborts, preemption and forks, with grammars or without."""
    rng = Random(seed)
    work = random_workload(rng)
    if drafts == "off":
        work, has_grammars, heads = without_drafts(work), False, "full"
    if has_grammars:
        work = _constrained(work, rng)
    if drafts.startswith("likely"):
        work = with_own_logits(work, rng)
    if heads == "unverified":
        work = verifying_every(work, rng, rng.randint(1, 6))
    elif heads != "full":
        work = with_slices(work, rng, MODES[heads])
    note(work)
    rests = drafts.endswith("rests")
    _run(work, waits=heads != "full", load_failures=load_failures, rests=rests)


def test_unverified_tokens_are_taken_back() -> None:
    """The test above means something: of its verifications many find a wrong token."""
    num_verifications = num_dropped = seed = 0
    while num_verifications <= 50 or num_dropped <= 10:
        assert seed < 40, (num_verifications, num_dropped)
        rng = Random(seed)
        results = _run(verifying_every(random_workload(rng), rng, 1 + seed % 6), waits=True)
        for v in (v for result in results.values() for v in result.vocabulary):
            num_verifications += v.num_verifications
            num_dropped += v.num_dropped
        seed += 1


def test_what_the_model_held_likely_is_drafted_there() -> None:
    accepted = seed = 0
    while accepted <= 20:
        assert seed < 40, accepted
        rng = Random(seed)
        results = _run(with_own_logits(random_workload(rng), rng))
        for counts in (c for result in results.values() for c in result.counts):
            accepted += sum(kept for source, _, kept in counts.by_source if source == "logits")
        seed += 1
