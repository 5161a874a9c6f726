"""Random workloads for the engine, and a driver that checks its state after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from server.engine.draft import DrafterFactory
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.engine.sequence import Sequence
from server.engine.step_times import CostTable
from server.types import (
    Delta,
    Request,
    SamplingParams,
    SpeculationParams,
    StepCounts,
    VocabularyCounts,
    VocabularyMode,
    VocabularyParams,
)
from tests.engine.one_token_loop import Outcome, one_token_loop
from tests.engine.requests import check_idle
from tests.fakes.fake_drafters import (
    FakeDrafter,
    LikelyDrafter,
    OwnLogits,
    broken_drafter,
    liar_drafter,
    oracle_drafter,
    random_drafter,
)
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info
from tests.fakes.token_table import table_of
from tests.waiting import wait_until
from vocab_store.profile import VocabProfile
from vocab_store.slice import RequiredIds, VocabSlice

EOS = (1,)


@dataclass
class Result(Outcome):
    """What the Deltas of one choice add up to."""

    error_code: str | None = None
    counts: list[StepCounts] = field(default_factory=list)
    vocabulary: list[VocabularyCounts] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    rejected: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    num_deltas: int = 0


class Collector:
    """Adds up Deltas and holds each to the rules of a Delta."""

    def __init__(self) -> None:
        self.results: dict[tuple[str, int], Result] = {}

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            result = self.results.setdefault((delta.request_id, delta.choice_id), Result())
            assert result.finish_reason is None, "a Delta after the last one"
            assert delta.token_ids or delta.finish_reason, "an empty Delta"
            if delta.logprobs:
                assert len(delta.logprobs) == len(delta.token_ids)
            if result.num_deltas:
                assert not delta.prompt_logprobs
            else:
                result.prompt_logprobs += delta.prompt_logprobs
            result.num_deltas += 1
            start = len(result.ids)
            result.ids.extend(delta.token_ids)
            result.rejected += [(start + at, name, ids) for at, name, ids in delta.rejected_drafts]
            result.logprobs.extend(delta.logprobs)
            result.finish_reason = delta.finish_reason
            result.stop_reason = delta.stop_reason
            result.error_code = delta.error_code
            result.counts.append(delta.counts)
            if delta.vocabulary is not None:
                result.vocabulary.append(delta.vocabulary)
            result.sources.extend(delta.sources)
            assert len(delta.sources) in (0, len(delta.token_ids))


@dataclass
class Workload:
    """A model, an engine's numbers, and requests with the steps they arrive and are cut at."""

    model: FakeModel
    settings: EngineSettings
    num_blocks: int
    block_size: int
    max_model_len: int
    token_bytes: list[bytes]
    special_ids: tuple[int, ...]
    requests: list[tuple[int, Request, int | None]]  # arrival step, request, abort step
    drafter: str
    cost: CostTable | None
    rng: Random
    grammar_tokenizer: Any = None  # BothTokenizers over token_bytes, for requests with a grammar
    profiles: dict[str, VocabProfile] = field(default_factory=dict)
    models: dict[str, FakeModel] = field(default_factory=dict)  # of adapters, by their names

    def change(self, how: Callable[[Request], Request]) -> None:
        """Put what this makes of each request in its place."""
        self.requests = [(at, how(request), abort) for at, request, abort in self.requests]

    def model_of(self, request: Request) -> FakeModel:
        """That of its adapter."""
        return self.models.get(request.adapter, self.model)

    def slice_ids(self, request: Request) -> set[int] | None:
        """What a request in mode "slice" can draw, written down a second time."""
        if request.vocabulary.mode != "slice":
            return None
        s = request.sampling
        assert request.vocabulary.profile is not None
        ids = set(self.profiles[request.vocabulary.profile].slice.ids.tolist())
        ids |= set(request.prompt_ids) | set(s.allowed_token_ids or ()) | set(s.stop_token_ids)
        return ids | {i for i, bias in s.logit_bias if bias > -100}

    def expected(self) -> dict[tuple[str, int], Outcome]:
        skipped = [b"" if i in self.special_ids else t for i, t in enumerate(self.token_bytes)]
        return {
            (request.request_id, choice): one_token_loop(
                self.model_of(request),
                request,
                choice,
                eos=EOS,
                max_model_len=self.max_model_len,
                token_bytes=skipped if request.sampling.skip_special_tokens else self.token_bytes,
                slice_ids=self.slice_ids(request),
                grammar_tokenizer=self.grammar_tokenizer,
            )
            for _, request, _ in self.requests
            for choice in range(request.num_choices)
        }


def random_workload(rng: Random) -> Workload:
    """Small numbers everywhere, so that every edge is hit often."""
    vocab = rng.choice((6, 9, 16, 33))
    model = FakeModel(
        vocab,
        seed=rng.randrange(1 << 20),
        alphabet=rng.choice((0, 0, 2, 3)),
        boost=rng.choice((2.0, 6.0)),
        context=rng.choice((0, 0, 1)),
    )
    block_size = rng.choice((1, 2, 3, 4, 4, 8, 16))
    max_model_len = rng.choice((17, 32, 48))
    letters = [bytes(rng.choice(b"ab") for _ in range(rng.randint(0, 3))) for _ in range(vocab)]
    base = [rng.randrange(vocab) for _ in range(20)]
    drafter = rng.choice(("off", "random", "likely", "oracle", "oracle", "liar", "liar", "broken"))
    requests: list[tuple[int, Request, int | None]] = []
    num_requests = rng.randint(1, 6)
    longest = 1
    for i in range(num_requests):
        shared = rng.randint(0, 14)
        prompt = (base[:shared] + [rng.randrange(vocab) for _ in range(rng.randint(1, 5))])[
            : max_model_len - 1
        ]
        echo = rng.choice((None, None, None, 0, 2))
        penalties = rng.random() < 0.3
        stops = rng.random() < 0.3
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 0.0, 0.7, 1.0, 1.5)),
            top_p=rng.choice((1.0, 1.0, 0.8)),
            top_k=rng.choice((0, 0, 3)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            presence_penalty=rng.choice((0.0, 0.7)) if penalties else 0.0,
            frequency_penalty=rng.choice((0.0, -0.5, 0.9)) if penalties else 0.0,
            repetition_penalty=rng.choice((1.0, 1.3)) if penalties else 1.0,
            logit_bias=rng.choice(((), (), ((0, 5.0), (2, -100.0)))),
            allowed_token_ids=rng.choice((None, None, None, (0, 1, 3, 4), (1,))),
            max_tokens=rng.choice((0, 1, 2, 5, 9, 14, 40)),
            min_tokens=rng.choice((0, 0, 0, 3, 6)),
            stop_token_ids=rng.choice(((), (), (3,), (2, 4))),
            stop=tuple(
                {bytes(rng.choice(b"ab") for _ in range(rng.randint(1, 5))): 0 for _ in range(2)}
            )
            if stops
            else (),
            ignore_eos=rng.random() < 0.5,
            skip_special_tokens=rng.random() < 0.5,
            seed=rng.randrange(1 << 40),
            num_logprobs=rng.choice((None, None, 0, 3)),
            logprob_token_ids=rng.choice(((), (), (0, 2, 4))),
        )
        request = Request(
            f"r{i}",
            "task",
            "fake",
            tuple(prompt),
            sampling,
            SpeculationParams(drafter, rng.choice((1, 3, 8, 20)) if drafter != "off" else 0),
            num_choices=rng.choice((1, 1, 1, 2, 3)),
            echo_logprobs=echo,
            cache_salt=rng.choice(("", "", "x")),
            priority=rng.choice((0, 0, 0, 1, -1)),
            report_sources=i % 2 == 0,
            report_rejected=i % 3 == 0,
        )
        arrival = rng.choice((0, 0, 1, 3, 8))
        abort = arrival + rng.randint(0, 8) if rng.random() < 0.2 else None
        requests.append((arrival, request, abort))
        longest = max(longest, min(len(prompt) + sampling.max_tokens, max_model_len))
    at_least = -(-longest // block_size)
    max_num_seqs = rng.choice((1, 2, 4, 6, 8))
    settings = EngineSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice((0, 1, 5, 20, 60)),
        chunked_prefill_rows=rng.choice((1, 2, 5, 16)),
        prefix_cache=rng.random() < 0.7,
        max_draft_rows=rng.choice((2, 10, 100)),
    )
    cost = None
    if rng.random() < 0.5:
        step = rng.random() * 0.01 + 1e-4
        cost = CostTable(
            [1, 2, 4, 8, 16],
            [step * (1 + rng.random() * i) for i in range(5)],
            rng.choice((0.0, 1e-6)),
        )
    return Workload(
        model=model,
        settings=settings,
        num_blocks=at_least + rng.choice((0, 0, 1, 2, 3, 10, 100)),
        block_size=block_size,
        max_model_len=max_model_len,
        token_bytes=letters,
        special_ids=(1, vocab - 1),
        requests=requests,
        drafter=drafter,
        cost=cost,
        rng=rng,
    )


def profile_of(ids: set[int], vocab: int) -> VocabProfile:
    """One with these ids and the end, and none to fill it with."""
    made = VocabSlice.make(sorted(ids | set(EOS)), RequiredIds.of(vocab, eos_ids=EOS))
    return VocabProfile(made, np.empty(0, np.int32), np.empty(0, np.float32))


def with_slices(
    work: Workload,
    rng: Random,
    modes: tuple[VocabularyMode, ...],
    shares: tuple[float, ...] = (0.2, 0.6, 0.9),
) -> Workload:
    """The workload with random profiles, and a random mode and verify_every for every request.

    shares: of the vocabulary that may be in a profile; one is drawn per id."""
    vocab = work.model.vocab_size
    for name in ("a", "b"):
        ids = {*EOS, *(i for i in range(vocab) if rng.random() < rng.choice(shares))}
        fill = np.asarray(sorted(set(range(vocab)) - ids), np.int32)
        made = profile_of(ids, vocab).slice
        work.profiles[name] = VocabProfile(made, fill, np.zeros(fill.shape[0], np.float32))

    def sliced(request: Request) -> Request:
        mode, name, every = rng.choice(modes), rng.choice("ab"), rng.choice((0, 1, 2, 3, 5, 9))
        return replace(request, vocabulary=VocabularyParams(mode, name, every))

    work.change(sliced)
    work.settings = replace(
        work.settings,
        slice_cache_rows=rng.choice((0, 2, 5, 100)),
        max_verify_every=rng.choice((1, 4, 64)),
    )
    return work


def without_drafts(work: Workload) -> Workload:
    """The workload without drafts and penalties: many of its steps are like the one before."""
    work.drafter = "off"

    def plain(request: Request) -> Request:
        sampling = replace(
            request.sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0
        )
        return replace(request, speculation=SpeculationParams("off", 0), sampling=sampling)

    work.change(plain)
    return work


def verifying_every(work: Workload, rng: Random, every: int) -> Workload:
    """The workload in mode "exact", its tokens waiting `every` at a time for the full head, with
    slices so small that many are wrong: the sequences roll back at random places."""
    work = with_slices(work, rng, ("exact",), shares=(0.0, 0.1, 0.3))
    work.change(lambda r: replace(r, vocabulary=replace(r.vocabulary, verify_every=every)))
    work.settings = replace(work.settings, may_use_full_head=False)
    return work


def with_own_logits(work: Workload, rng: Random) -> Workload:
    """The workload drafted by `auto`, from its own text and from what the model held likely."""
    work.drafter = "auto"
    work.change(
        lambda r: replace(r, speculation=SpeculationParams("auto", rng.choice((1, 3, 8, 20))))
    )
    return work


def make_drafter(
    work: Workload, expected: dict[tuple[str, int], Outcome], adapter: str = ""
) -> FakeDrafter | OwnLogits:
    """The drafter the workload names, for an adapter's requests; oracle and liar know each text."""
    vocab = work.models.get(adapter, work.model).vocab_size
    texts: list[list[int]] = []
    for _, request, _ in work.requests if work.drafter in ("oracle", "liar") else ():
        if request.adapter != adapter:
            continue
        # How the text would go on past its end, so that accepted paths are cut too.
        endless = replace(
            request.sampling, ignore_eos=True, stop=(), stop_token_ids=(), min_tokens=0
        )
        for choice in range(request.num_choices):
            start = expected[request.request_id, choice]
            more: list[int] = []
            if start.finish_reason != "length":  # else nothing would come behind it
                more = one_token_loop(
                    work.model_of(request),
                    replace(request, sampling=endless, echo_logprobs=None, grammar=None),
                    choice,
                    eos=EOS,
                    max_model_len=work.max_model_len,
                    token_bytes=work.token_bytes,
                ).ids
            texts.append([*request.prompt_ids, *start.ids, *more[len(start.ids) :]])
    if work.drafter == "oracle":
        return oracle_drafter(texts)
    if work.drafter == "liar":
        return liar_drafter(work.rng.randrange(1 << 30), texts, vocab)
    if work.drafter == "auto":
        return OwnLogits(vocab)
    if work.drafter == "likely":
        return LikelyDrafter(work.model)
    if work.drafter == "broken":
        return broken_drafter(work.rng.randrange(1 << 30), vocab)
    return random_drafter(work.rng.randrange(1 << 30), vocab, work.rng.choice((0, 3)))


def fake_runner(work: Workload) -> FakeRunner:
    """The workload's model, on a device of its sizes."""
    info = fake_info(
        vocab_size=work.model.vocab_size,
        num_blocks=work.num_blocks,
        block_size=work.block_size,
        max_model_len=work.max_model_len,
        max_num_seqs=work.settings.max_num_seqs,
        max_num_batched_tokens=work.settings.max_num_batched_tokens,
        eos_token_ids=EOS,
    )
    runner = FakeRunner(work.model, info)
    runner.models = work.models
    return runner


def make_engine(
    work: Workload, drafter: FakeDrafter | OwnLogits | DrafterFactory
) -> tuple[Engine, FakeRunner]:
    grammars = None
    if work.grammar_tokenizer is not None:
        grammars = work.grammar_tokenizer.compiler
        for _, request, _ in work.requests:  # so that arrivals stay at their steps
            if request.grammar is not None:
                grammars.compile(request.grammar, request.scope).exception()
    runner = fake_runner(work)
    engine = Engine(
        runner,
        {work.drafter: drafter},
        work.settings,
        stop_table=table_of(work.token_bytes[: work.model.vocab_size], work.special_ids),
        cost=work.cost,
        profiles=work.profiles.__getitem__ if work.profiles else None,
        grammars=grammars,
    )
    return engine, runner


def open_choices(engine: Engine, request_id: str) -> list[Sequence]:
    """The choices of a request that have not ended."""
    return list(engine._open.get(request_id, ()))


def run_requests(
    engine: Engine,
    arrivals: Iterable[tuple[int, Request]] = (),
    aborts: Iterable[tuple[int, str]] = (),
    each_step: Callable[[int], None] = lambda _: None,
) -> dict[tuple[str, int], Result]:
    """Submit, abort and step until all is done: a request arrives and leaves before the step that
    its number names. Checks the engine's state after every step."""
    collector = Collector()
    waiting = sorted(arrivals, key=lambda item: item[0])
    aborts = list(aborts)
    step = 0
    while waiting or engine.num_open:
        while waiting and waiting[0][0] <= step:
            engine.submit(waiting.pop(0)[1])
        for at, request_id in aborts:
            if at == step:
                engine.abort(request_id)
        each_step(step)
        collector.take(engine.step())
        engine.check()
        if engine.num_open and not (waiting or engine.has_work):  # a grammar or adapter is read
            wait_until(lambda: engine.has_work)
        step += 1
        assert step < 3000, "the engine makes no progress"
    collector.take(engine.take_deltas())
    check_idle(engine)
    return collector.results


def answers(engine: Engine, *requests: Request) -> dict[tuple[str, int], Result]:
    """What comes of these requests, and of those that are there already, until all are done."""
    return run_requests(engine, [(0, request) for request in requests])


def drive(
    work: Workload,
    engine: Engine,
    each_step: Callable[[int], None] = lambda _: None,
) -> dict[tuple[str, int], Result]:
    """A workload's requests, until all are done."""
    arrivals = [(at, request) for at, request, _ in work.requests]
    aborts = [(at, request.request_id) for _, request, at in work.requests if at is not None]
    return run_requests(engine, arrivals, aborts, each_step)


def compare(
    work: Workload,
    expected: dict[tuple[str, int], Outcome],
    results: dict[tuple[str, int], Result],
) -> None:
    """Every choice gave what the one-token loop gives; a cut one gave a beginning of it."""
    # A request with a choice that can draw nothing fails as a whole.
    doomed = {k[0] for k, outcome in expected.items() if outcome.finish_reason == "error"}
    assert set(results) == set(expected)
    for key, want in expected.items():
        got = results[key]
        assert got.finish_reason is not None
        if got.finish_reason == "abort" or key[0] in doomed:
            assert got.finish_reason in ("abort", "error", want.finish_reason)
            assert got.ids == want.ids[: len(got.ids)]
            assert got.logprobs == want.logprobs[: len(got.ids)]
            continue
        assert got.ids == want.ids
        assert got.finish_reason == want.finish_reason
        assert got.stop_reason == want.stop_reason
        assert got.logprobs == want.logprobs
        assert got.prompt_logprobs == want.prompt_logprobs


def run_workload(
    work: Workload,
    prepare: Callable[[Engine, FakeRunner], Callable[[int], None] | None] | None = None,
) -> tuple[Engine, dict[tuple[str, int], Result]]:
    """Every choice gives what the one-token loop gives, and nothing is left behind. prepare: is
    given the engine, and may give back what is called before each step."""
    expected = work.expected()
    drafter = make_drafter(work, expected)
    engine, runner = make_engine(work, drafter)
    each_step = None if prepare is None else prepare(engine, runner)
    results = drive(work, engine, each_step or (lambda _: None))
    compare(work, expected, results)
    assert engine.recovery.num_failed_steps == 0, "a broken Batch was hidden by recovery"
    assert engine.num_open == 0
    assert engine.pool.num_free == work.num_blocks, "a block was lost"
    engine.pool.check([])
    assert drafter.num_open == 0, "a draft session was never closed"
    if work.drafter != "broken":
        assert engine.drafts.num_errors == 0
    return engine, results
