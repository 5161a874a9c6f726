"""What the engine promises beyond the tokens: order, sharing, bounds, failures, nothing lost."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from drafters.tree import DraftTree
from server.engine.batch import Batch
from server.engine.draft import DrafterRegistry
from server.engine.engine import Engine
from server.engine.sequence import MAX_PRIORITY, Sequence
from server.engine.step_times import CostTable
from server.types import Delta, Request, SpeculationParams, VocabularyParams
from tests.engine.requests import engine_over, finish, ids_of, in_the_table_s_time, request_of
from tests.fakes.fake_drafters import FakeDrafter, chain, oracle_drafter, random_drafter, tree_of
from tests.fakes.fake_runner import FakeModel, FakeRunner

MODEL = FakeModel(16, seed=5)


def _engine(model: FakeModel = MODEL, **given: Any) -> tuple[Engine, FakeRunner]:
    return engine_over(model, **{"max_model_len": 64, **given})


def _alone(request: Request, **engine: Any) -> list[int]:
    made, _ = _engine(**engine)
    plain = replace(request, speculation=SpeculationParams())
    return ids_of(finish(made, plain)[request.request_id])


# -- prefix cache, forks ----------------------------------------------------------------------


def test_a_shared_prefix_is_read_from_the_cache_and_one_token_is_always_recomputed() -> None:
    engine, runner = _engine()
    prompt = tuple(range(2, 14))  # three full blocks
    first = finish(engine, request_of("a", prompt))["a"]
    assert first[0].num_cached_tokens == 0
    rows = runner.num_rows
    second = finish(engine, request_of("b", prompt, max_tokens=1))["b"]
    assert second[0].num_cached_tokens == 11
    assert runner.num_rows - rows == 1
    assert ids_of(second) == ids_of(first)[:1]
    other = finish(engine, request_of("c", prompt, cache_salt="other", max_tokens=1))["c"]
    assert other[0].num_cached_tokens == 0
    without, _ = _engine(prefix_cache=False)
    for name in "ab":
        told = finish(without, request_of(name, prompt, max_tokens=1))[name]
        assert told[0].num_cached_tokens == without.pool.num_cached == 0


@pytest.mark.parametrize(("num_same", "num_cached"), [(3, 3), (4, 4), (6, 6), (8, 8), (11, 11)])
def test_a_prompt_that_parts_from_another_within_a_block_computes_the_rest(
    num_same: int, num_cached: int
) -> None:
    """The other's block is copied, and neither's text changes, while both are under way."""
    engine, runner = _engine()
    first = request_of("a", tuple(range(2, 14)), max_tokens=20)
    prompt = (*range(2, 2 + num_same), 1, *range(3 + num_same, 15))
    second = request_of("b", prompt, max_tokens=6)
    engine.submit(first)
    for _ in range(3):
        engine.step()
    rows = runner.num_rows
    engine.submit(second)
    early = [delta for delta in engine.step() if delta.request_id == "b"]
    assert runner.num_rows - rows == 1 + len(prompt) - num_cached
    assert early[0].num_cached_tokens == num_cached
    results = finish(engine)
    assert ids_of(results["a"])[-10:] == _alone(first)[-10:]
    assert ids_of([*early, *results["b"]]) == _alone(second)
    again = finish(engine, request_of("c", prompt, cache_salt="other", max_tokens=6))["c"]
    assert again[0].num_cached_tokens == 0 and ids_of(again) == _alone(second)


def test_a_request_that_needs_every_block_takes_that_of_which_it_could_copy() -> None:
    engine, _ = _engine(num_blocks=4)
    finish(engine, request_of("a", (2, 3, 4, 5), max_tokens=2))
    wanted = request_of("b", (2, 3, *[9] * 11), max_tokens=3)  # 16 positions
    assert ids_of(finish(engine, wanted)["b"]) == _alone(wanted)


def test_the_cache_holds_output_too_and_echo_requests_write_but_do_not_read() -> None:
    engine, _ = _engine()
    prompt = tuple(range(2, 7))
    first = finish(engine, request_of("a", prompt, echo_logprobs=0, max_tokens=7))["a"]
    text = (*prompt, *ids_of(first), 3)
    second = finish(engine, request_of("b", text, max_tokens=1))["b"]
    assert second[0].num_cached_tokens == 8  # 11 computed positions: two blocks
    delta = finish(engine, request_of("c", text, echo_logprobs=1, max_tokens=1))["c"][0]
    assert delta.num_cached_tokens == 0 and len(delta.prompt_logprobs) == len(text)


def test_a_prompt_that_is_scored_in_part_is_told_no_logprobs() -> None:
    """They would be taken for those of the whole."""
    engine, _ = _engine(chunked_prefill_rows=4, max_num_batched_tokens=8)
    engine.submit(request_of("a", tuple(range(2, 14)), echo_logprobs=0))
    assert engine.step() == []
    engine.abort("a")
    (delta,) = engine.take_deltas()
    assert (delta.finish_reason, delta.prompt_logprobs) == ("abort", ())


def test_choices_share_the_full_blocks_and_copy_the_tail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = _engine(block_size=4)
    copied: list[tuple[list[int], list[int]]] = []
    copy_blocks = runner.copy_blocks

    def record_copies(src: Any, dst: Any) -> None:
        copied.append((src.tolist(), dst.tolist()))
        copy_blocks(src, dst)

    monkeypatch.setattr(runner, "copy_blocks", record_copies)
    prompt = tuple(range(2, 12))  # two full blocks and half a one
    engine.submit(request_of("a", prompt, num_choices=3, temperature=1.0, seed=1))
    engine.step()
    engine.check()
    assert engine.pool.num_free == 64 - 3
    engine.step()
    assert engine.pool.num_free == 64 - 5  # the last owner keeps the tail, the others copy it
    assert len(copied) == 1 and len(set(copied[0][0])) == 1 and len(set(copied[0][1])) == 2
    finish(engine)
    assert engine.pool.num_free == 64


def test_choices_of_one_prompt_draft_from_the_step_after_it_and_tell_what_the_cache_had() -> None:
    """The prompt's last row is drawn from once a choice, so no node hangs off it."""
    prompt = tuple(range(2, 12))
    request = request_of("a", prompt, num_choices=2, speculation=SpeculationParams("d", 8))
    text = [*prompt, *_alone(replace(request, num_choices=1))]
    engine, _ = _engine(drafters={"d": oracle_drafter([text])})
    finish(engine, request_of("before", prompt, max_tokens=1))
    engine.submit(request)
    first = engine.step()
    engine.check()
    assert [delta.num_cached_tokens for delta in first] == [8, 8]
    assert [delta.counts.no_draft_reason for delta in first] == ["prefill"] * 2
    for delta in finish(engine)["a"]:
        assert delta.num_cached_tokens == 0 and delta.counts.num_accepted == 6
    # Nor has either a second seat where each step looks at them.
    looked_at = replace(request.sampling, presence_penalty=0.5)
    told = finish(engine, replace(request, request_id="b", sampling=looked_at, arrival_s=1e-3))["b"]
    assert all(delta.queue_s > 0.0 for delta in told[:2])


def test_what_is_evicted_first_is_the_end_of_a_prompt() -> None:
    engine, _ = _engine(num_blocks=8)
    prompt = tuple(range(2, 14))
    finish(engine, request_of("a", prompt, max_tokens=1))
    engine.submit(request_of("other", [3] * 25, max_tokens=1))  # 7 of 8 blocks
    finish(engine)
    assert finish(engine, request_of("b", prompt, max_tokens=1))["b"][0].num_cached_tokens == 4


# -- scheduling --------------------------------------------------------------------------------


def test_decodes_are_never_held_up_by_prefills() -> None:
    engine, runner = _engine(chunked_prefill_rows=4, max_num_batched_tokens=64)
    engine.submit(request_of("decode", max_tokens=20))
    engine.step()
    engine.submit(request_of("long", [3] * 40, max_tokens=1))
    steps = 0
    while len(engine.scheduler.running) != 1 or steps == 0:
        before = runner.num_rows
        deltas = engine.step()
        steps += 1
        assert "decode" in {d.request_id for d in deltas}
        assert runner.num_rows - before <= 1 + 4
    assert steps == 10  # 40 rows, 4 a step


@pytest.mark.parametrize(
    ("row_s", "settings", "num_decoding", "low", "high"),
    [
        (0.001, {"target_step_s": 0.020}, 1, 9, 29),
        # Where a step is slow, a multiple of what decoding takes: the target alone would leave a
        # prompt 2 rows a step.
        (0.004, {"prefill_ratio": 15.0}, 1, 12, 18),
        (0.004, {"prefill_ratio": 15.0}, 3, 40, 52),
        (0.004, {"prefill_ratio": 15.0, "chunked_prefill_rows": 20}, 3, 20, 20),
    ],
)
def test_the_chunk_follows_the_latency_target_and_what_decoding_takes(
    row_s: float, settings: dict[str, Any], num_decoding: int, low: int, high: int
) -> None:
    cost = CostTable([1, 2, 64], [row_s, 2 * row_s, 64 * row_s])
    most = {"target_step_s": 0.001, "min_chunked_prefill_rows": 2, "chunked_prefill_rows": 256}
    engine, runner = _engine(cost=cost, **{**most, **settings})
    for i in range(num_decoding):
        engine.submit(request_of(f"decode {i}", max_tokens=30))
    engine.step()
    engine.submit(request_of("long", [3] * 60))
    before = runner.num_rows
    deltas = engine.step()
    assert {d.request_id for d in deltas} == {f"decode {i}" for i in range(num_decoding)}
    assert low <= runner.num_rows - before - num_decoding <= high


def test_what_waits_for_blocks_is_not_looked_for_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt of which the cache has most costs others a look when the cache has changed."""
    engine, _ = _engine(num_blocks=10, block_size=16, max_model_len=160)
    first = [3 + i % 9 for i in range(64)]
    finish(engine, request_of("first", first, max_tokens=1))
    waits = request_of("waits", [*first, *(4 + i % 7 for i in range(60))], max_tokens=2)
    looks, nearest = [0], engine.pool.nearest

    def counted(parent: bytes, ids: bytes) -> tuple[int, int]:
        looks[0] += 1
        return nearest(parent, ids)

    monkeypatch.setattr(engine.pool, "nearest", counted)
    results = finish(engine, request_of("runs", [5] * 40, max_tokens=20), waits)
    assert results["waits"][0].num_cached_tokens == 64
    assert ids_of(results["waits"]) == _alone(waits, block_size=16, max_model_len=160)
    assert looks[0] < 40, "five at each of 20 steps"


def test_priorities_age_so_that_no_flood_of_others_starves_a_request() -> None:
    """The order is priority, then arrival."""
    engine, _ = _engine(max_num_seqs=1)
    for name, priority, arrival_s in (
        ("low", 2, 100.0), ("soon", 0, 104.0), ("next", 0, 104.0), ("first", -1, 104.0),
        ("just", 0, 109.9), ("late", 0, 110.1), ("after", 0, 421.0),
        ("top", -(2**31), 500.0), ("bottom", 2**31 - 1, 100.0),
    ):  # fmt: skip
        engine.submit(request_of(name, priority=priority, arrival_s=arrival_s, max_tokens=2))
    ended = list(finish(engine))
    assert ended[:6] == ["first", "soon", "next", "just", "low", "late"]
    assert ended[6:] == ["top", "bottom", "after"]
    for i in range(300):
        engine.submit(request_of(f"{i}", priority=i))
    places = {sequence.place for sequence in engine.scheduler.waiting}
    assert len(places) == MAX_PRIORITY + 1, "each step looks at one of each"
    engine.abort_all()


def test_the_latest_of_the_lowest_priority_is_preempted_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [
        request_of("low", [3] * 9, priority=1, max_tokens=20),
        request_of("a", [4] * 9, max_tokens=20),
        request_of("b", [5] * 9, max_tokens=20),
    ]
    engine, _ = _engine(num_blocks=15, prefix_cache=False)
    preempted: list[str] = []
    preempt = engine.scheduler.preempt

    def record_preemption(sequence: Sequence) -> None:
        preempted.append(sequence.request.request_id)
        preempt(sequence)

    monkeypatch.setattr(engine.scheduler, "preempt", record_preemption)
    results = finish(engine, *requests)
    assert preempted[0] == "low" and "a" not in preempted
    for request in requests:
        assert ids_of(results[request.request_id]) == _alone(request)


def test_what_a_prompt_finds_of_its_own_after_a_preemption_is_not_told_as_cached() -> None:
    """Usage and the counter tell what was there when it came."""
    engine, _ = _engine(num_blocks=11, chunked_prefill_rows=2)
    engine.submit(request_of("a", [4] * 9, max_tokens=20))
    engine.step()
    told = finish(engine, request_of("b", list(range(2, 16)) * 2, max_tokens=2))
    assert engine.scheduler.num_preemptions > 0
    assert sum(d.num_cached_tokens for d in told["b"]) == engine.scheduler.prefix_hits == 0


def test_deadlines_of_requests_that_have_left_do_not_pile_up() -> None:
    engine, _ = _engine()
    for i in range(1500):
        engine.submit(request_of(f"{i}", queue_timeout_s=3600.0))
        engine.abort(f"{i}")
        engine.tend()
    assert len(engine.admission.expiries) < 1100


def test_drafts_take_free_blocks_only() -> None:
    drafter = random_drafter(1, 16, 2)
    engine, _ = _engine(drafters={"d": drafter}, num_blocks=12, prefix_cache=False)
    speculation = SpeculationParams("d", 30)
    for i in range(2):
        engine.submit(request_of(f"r{i}", [3] * 8, speculation=speculation, max_tokens=16))
    finish(engine)
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (request_of("x", []), "invalid_value"),
        (request_of("x", [16]), "invalid_value"),
        (request_of("x", [-1]), "invalid_value"),
        (request_of("x", [3] * 64), "context_length_exceeded"),
        (request_of("x", num_choices=0), "invalid_value"),
        (request_of("x", speculation=SpeculationParams("nobody", 4)), "invalid_value"),
        (request_of("x", logit_bias=((3, 1.0), (16, 1.0))), "invalid_value"),
        (request_of("x", allowed_token_ids=(-1, 3)), "invalid_value"),
        (request_of("x", stop_token_ids=(16,)), "invalid_value"),
        (request_of("x", stop=(b"a",)), "unsupported_parameter"),
        (request_of("x", vocabulary=VocabularyParams("slice")), "unsupported_parameter"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_code(request_: Request, code: str) -> None:
    engine, _ = _engine()
    engine.submit(request_)
    (delta,) = engine.take_deltas()
    assert (delta.finish_reason, delta.error_code) == ("error", code)
    assert not engine.has_work


@pytest.mark.parametrize("num", [1, 2])
def test_a_sequence_that_cannot_fit_alone_fails_alone(num: int) -> None:
    """With the other choices of its request: none is computed once its blocks are given back."""
    engine, _ = _engine(num_blocks=4)
    grows = request_of("grows", [3] * 9, max_tokens=30, num_choices=num)
    results = finish(engine, grows, request_of("fits", [4] * 5, max_tokens=4))
    for choice in range(num):
        told = [delta for delta in results["grows"] if delta.choice_id == choice]
        assert (told[-1].finish_reason, told[-1].error_code) == ("error", "kv_exhausted")
    first = [delta for delta in results["grows"] if delta.choice_id == 0]
    assert ids_of(first) == _alone(request_of("g", [3] * 9, max_tokens=8))
    assert results["fits"][-1].finish_reason == "length"
    assert engine.recovery.num_failed_steps == 0


def test_labels_are_scored_at_the_prompt_s_end_and_read_the_prefix_cache() -> None:
    def score(request: Request, engine: Engine) -> Delta:
        (delta,) = finish(engine, request)[request.request_id]
        assert (delta.finish_reason, delta.token_ids) == ("length", ())
        return delta

    prompt, labels = [2, 5, 3, 4, 9, 6, 7, 3, 11, 4], (3, 12, 0, 3)
    engine, runner = _engine(chunked_prefill_rows=4)
    first = score(request_of("a", prompt, label_ids=labels, max_tokens=0), engine)
    # Echoing the prompt with one label appended tells the same logprob, id by id.
    for label, logprob in zip(labels, first.label_logprobs, strict=True):
        echo = score(request_of("e", [*prompt, label], echo_logprobs=0, max_tokens=0), _engine()[0])
        assert echo.prompt_logprobs[-1] is not None
        assert logprob == echo.prompt_logprobs[-1].logprob
    rows = runner.num_rows
    again = score(request_of("b", prompt, label_ids=labels, max_tokens=0), engine)
    assert again.label_logprobs == first.label_logprobs
    assert again.num_cached_tokens == 8 and runner.num_rows == rows + 2
    for wrong in ({"label_ids": (99,), "max_tokens": 0}, {"label_ids": (1,)}):
        engine.submit(request_of("c", prompt, **wrong))
        (refused,) = engine.take_deltas()
        assert refused.error_code == "invalid_value"


# -- speculation -------------------------------------------------------------------------------


def test_a_short_answer_finishes_in_the_prefill_step() -> None:
    request = request_of("a", speculation=SpeculationParams("d", 16))
    want = _alone(request)
    engine, runner = _engine(drafters={"d": oracle_drafter([[*request.prompt_ids, *want]])})
    engine.submit(request)
    (delta,) = engine.step()
    assert list(delta.token_ids) == want and delta.finish_reason == "length"
    assert runner.num_steps == 1 and runner.num_rows == 3 + 7
    assert delta.counts.num_accepted == 7 and delta.counts.offered_by_depth == (1,) * 7


def test_off_adds_no_rows_and_calls_no_drafter() -> None:
    class Never:
        name = "never"

        def open(self, prompt_ids: SequenceOf[int], **_: Any) -> Any:
            raise AssertionError("a drafter was opened")

    for speculation in (SpeculationParams("never", 0), SpeculationParams("off", 8)):
        engine, runner = _engine(drafters={"never": Never()})
        deltas = finish(engine, request_of("a", speculation=speculation))["a"]
        assert runner.num_rows == 3 + 7
        assert {d.counts.no_draft_reason for d in deltas} == {"off"}
        assert engine.drafts.num_errors == 0


def test_dear_rows_mean_no_drafts_and_no_proposals() -> None:
    calls = 0

    def propose(tokens: list[int], budget: int, depth: int) -> DraftTree:
        nonlocal calls
        calls += 1
        return chain([1])

    cost = CostTable([1, 2, 64], [0.01, 0.03, 1.0])
    engine, runner = _engine(drafters={"d": FakeDrafter(propose)}, cost=cost)
    deltas = finish(engine, request_of("a", [3], speculation=SpeculationParams("d", 8)))["a"]
    assert calls == 0 and runner.num_rows == 8
    reasons = {d.counts.no_draft_reason for d in deltas}
    assert reasons == {"cooldown", "length"}


def test_a_lone_request_drafts_beside_its_prompt() -> None:
    """It waits for its own first token, which this step draws: nobody else is kept waiting."""
    request = request_of("a", speculation=SpeculationParams("d", 8))
    drafter = oracle_drafter([[*request.prompt_ids, *_alone(request)]])
    cost = CostTable([1, 16, 64], [5e-3, 15.5e-3, 40e-3])
    engine, _ = _engine(drafters={"d": drafter}, cost=cost)
    first, *_ = finish(engine, request)["a"]
    assert first.counts.num_accepted > 0 and first.counts.no_draft_reason == ""
    short = replace(request.sampling, max_tokens=1)
    (only,) = finish(engine, replace(request, sampling=short))["a"]
    assert only.counts.no_draft_reason == "length", "no token comes behind it"


def test_an_asked_choice_whose_nodes_do_not_pay_says_budget() -> None:
    """A node that comes true in one of ten steps takes two tenths of a step."""
    drafter = FakeDrafter(lambda tokens, budget, depth: chain([1], [0.1]))
    cost = CostTable([1, 2, 64], [0.010, 0.012, 0.5])
    engine, runner = _engine(drafters={"d": drafter}, cost=cost)
    in_the_table_s_time(engine)
    asked = request_of("a", [3], speculation=SpeculationParams("d", 8))
    counts = [d.counts for d in finish(engine, asked)["a"]]
    assert not any(c.num_drafted for c in counts) and runner.num_rows == 8
    assert {c.no_draft_reason for c in counts} == {"budget", "length"}


def test_a_drafter_that_always_misses_is_asked_less_and_less() -> None:
    wrong = FakeDrafter(lambda t, b, d: chain([14] * min(b, d), [0.99] * min(b, d)))
    engine, _ = _engine(
        drafters={"d": wrong},
        num_blocks=200,
        model=FakeModel(16, seed=5, alphabet=4, boost=50.0),
        max_model_len=512,
        cost=CostTable([1, 64], [1e-3, 20e-3]),
    )
    in_the_table_s_time(engine)
    asked = request_of("a", speculation=SpeculationParams("d", 8), max_tokens=300)
    results = finish(engine, asked)["a"]
    drafted = sum(d.counts.num_drafted for d in results)
    assert len(ids_of(results)) == 300
    assert drafted < 60
    reasons = Counter(d.counts.no_draft_reason for d in results)
    assert reasons["cooldown"] > 140


def test_a_broken_drafter_costs_the_request_nothing_else() -> None:
    def explode(tokens: list[int], budget: int, depth: int) -> DraftTree:
        raise RuntimeError("boom")

    request = request_of("a", speculation=SpeculationParams("d", 8))
    drafter = FakeDrafter(explode)
    engine, _ = _engine(drafters={"d": drafter})
    asked: list[int] = []
    engine.gain.observe_asks = lambda seats, *_: asked.extend(seats) or 0  # type: ignore[method-assign,func-returns-value]
    assert ids_of(finish(engine, request)["a"]) == _alone(request)
    assert engine.drafts.num_errors == 1 and drafter.num_open == 0
    assert asked == [-1], "its seat at Gain is another's by now"


def test_factories_are_called_with_options_and_kept_by_them() -> None:
    made: list[tuple[str, SpeculationParams]] = []

    def factory(task: str, speculation: SpeculationParams) -> FakeDrafter:
        made.append((task, speculation))
        if ("n", -1) in speculation.options:
            raise ValueError("n must be positive")
        return random_drafter(0, 16)

    registry = DrafterRegistry({"d": factory}, max_made=2)
    one = SpeculationParams("d", 4, (("n", 1),))
    assert registry.resolve("t", one) is registry.resolve("t", replace(one, max_draft_tokens=9))
    other = registry.resolve("t", replace(one, options=(("n", 2),)))
    assert other is not registry.resolve("t", one)
    assert len(made) == 2
    registry.resolve("u", one)
    registry.resolve("t", replace(one, options=(("n", 2),)))  # had been dropped
    assert len(made) == 4
    registry.forget("u")
    registry.resolve("u", one)
    assert len(made) == 5
    assert registry.resolve("t", SpeculationParams("d", 0)) is None
    engine, _ = _engine(drafters={"d": factory})
    engine.submit(request_of("a", speculation=replace(one, options=(("n", -1),))))
    (delta,) = engine.take_deltas()
    assert delta.error == "n must be positive"


def test_what_a_scope_has_learned_makes_only_those_drafters_anew_that_draft_from_it() -> None:
    """Not those of other scopes and tasks, nor its own that do not learn."""
    registry = DrafterRegistry({"d": lambda task, speculation: random_drafter(0, 16)})
    places = [(t, s, n) for t in ("task", "other") for s in ("s\0", "r\0") for n in (0, 9)]

    def resolved() -> list[object]:
        return [
            registry.resolve(task, SpeculationParams("d", 4, scope=scope, learn_tokens=num))
            for task, scope, num in places
        ]

    before = resolved()
    registry.forget("task", "s\0")
    now = [new is old for new, old in zip(resolved(), before, strict=True)]
    assert [place for place, same in zip(places, now, strict=True) if not same] == [
        ("task", "s\0", 9)
    ]


# -- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "drafts"), [(40, 0), (3, 15)])
def test_steps_that_do_not_fit_get_smaller_and_nobody_fails(prompt: int, drafts: int) -> None:
    """A device with memory for 20 rows under an engine that may make 64, of long prompts or of
    drafts."""
    sizes: list[int] = []

    def fail(batch: Batch) -> None:
        sizes.append(batch.num_rows)
        if batch.num_rows > 20:
            raise MemoryError("out of memory")

    spec = SpeculationParams("d" if drafts else "off", drafts)
    requests = [
        request_of(
            f"r{i}", [3 + (i + j) % 9 for j in range(prompt)], speculation=spec, max_tokens=40
        )
        for i in range(4)
    ]
    knows = oracle_drafter([[*request.prompt_ids, *_alone(request)] for request in requests])
    engine, _ = _engine(fail=fail, drafters={"d": knows})
    results = finish(engine, *requests)
    for request in requests:
        assert ids_of(results[request.request_id]) == _alone(request)
    assert engine.recovery.num_failed_steps == sum(n > 20 for n in sizes) == 2, sizes
    assert engine.pool.num_free == 64
    for most in (16, 32, 64):  # there may be memory again, some time later
        assert engine.scheduler.max_num_batched_tokens == most
        for _ in range(2000):
            engine.scheduler.plan()


@pytest.mark.parametrize("most", [1, 9])
def test_choices_whose_steps_with_drafts_fail_again_draft_no_more(most: int) -> None:
    """Else each step with drafts fails, and all is computed again at each. One that fails once, for
    whatever reason, costs nobody its drafts."""
    num_drafted = 0

    def fail(batch: Batch) -> None:
        nonlocal num_drafted
        num_drafted += batch.num_draft_rows > 0
        if batch.num_draft_rows and num_drafted <= most:
            raise RuntimeError("a kernel of trees")

    spec = SpeculationParams("d", 4)
    requests = [request_of(f"r{i}", [3 + i] * 9, speculation=spec) for i in range(3)]
    knows = oracle_drafter([[*request.prompt_ids, *_alone(request)] for request in requests])
    engine, _ = _engine(fail=fail, drafters={"d": knows})
    results = finish(engine, *requests)
    for request in requests:
        assert ids_of(results[request.request_id]) == _alone(request)
    assert engine.recovery.num_failed_steps == min(most, 2)
    assert (num_drafted > 2) == (most == 1)


@pytest.mark.parametrize("num", [1, 3])
def test_a_passing_failure_costs_no_request(num: int) -> None:
    remaining = [2]

    def fail(batch: Batch) -> None:
        if batch.num_rows == num and remaining[0]:
            remaining[0] -= 1
            raise RuntimeError("a hiccup")

    engine, _ = _engine(fail=fail)
    requests = [request_of(f"r{i}", [3 + i, 4, 5]) for i in range(num)]
    results = finish(engine, *requests)
    assert engine.recovery.num_failed_steps == 2
    for request in requests:
        assert ids_of(results[request.request_id]) == _alone(request)


def test_a_prompt_whose_last_chunk_always_fails_fails_alone() -> None:
    """A chunk without a draw clears nobody: else all would be computed again for ever."""

    def fail(batch: Batch) -> None:
        if 13 in batch.token_ids:
            raise RuntimeError("boom")

    engine, _ = _engine(fail=fail, max_num_batched_tokens=8)
    good = [request_of(f"r{i}", [3 + i, 4], logit_bias=((13, -100.0),)) for i in range(3)]
    results = finish(engine, *good, request_of("bad", [5] * 18 + [13, 6]))
    assert (results["bad"][-1].finish_reason, results["bad"][-1].error_code) == (
        "error", "engine_error",
    )  # fmt: skip
    for request in good:
        assert ids_of(results[request.request_id]) == _alone(request)
    assert engine.recovery.num_failed_steps == 2


def test_a_failed_move_forgets_the_cache_and_recomputes() -> None:
    request = request_of("a", max_tokens=12, speculation=SpeculationParams("d", 6))
    want = _alone(request)
    text = [*request.prompt_ids, *want]

    def sideways(tokens: list[int], budget: int, depth: int) -> DraftTree:
        right = text[len(tokens)]
        return tree_of([(right + 1) % 16, right], [-1, -1], 0.9)

    engine, runner = _engine(drafters={"d": FakeDrafter(sideways)})
    move_slots, failures = runner.move_slots, [1]

    def flaky(src: Any, dst: Any) -> None:
        if failures and runner.num_steps == 3:
            failures.pop()
            raise RuntimeError("a copy failed")
        move_slots(src, dst)

    runner.move_slots = flaky  # type: ignore[method-assign]
    results = finish(engine, request, request_of("b", [7, 7]))
    assert not failures
    assert ids_of(results["a"]) == want


# -- nothing is lost ---------------------------------------------------------------------------


@pytest.mark.slow
def test_200_short_requests_a_third_aborted_leave_nothing_behind() -> None:
    rng = Random(1)
    drafter_made: list[FakeDrafter] = []

    def factory(task: str, speculation: SpeculationParams) -> FakeDrafter:
        drafter_made.append(random_drafter(3, 16, 3))
        return drafter_made[-1]

    engine, _ = _engine(drafters={"d": factory}, num_blocks=40)

    def serve(num: int, name: str) -> int:
        finished = 0
        for i in range(num):
            request = request_of(
                f"{name}{i}",
                [rng.randrange(16) for _ in range(rng.randint(1, 12))],
                num_choices=rng.choice((1, 1, 2)),
                speculation=SpeculationParams("d", rng.choice((0, 4))),
                max_tokens=rng.randint(1, 6),
                temperature=0.8,
                seed=i,
            )
            engine.submit(request)
            finished += sum(d.finish_reason is not None for d in engine.step())
            if i % 3 == 0:
                engine.abort(request.request_id)
        while engine.has_work:
            finished += sum(d.finish_reason is not None for d in engine.step())
        finished += sum(d.finish_reason is not None for d in engine.take_deltas())
        engine.tend()
        for drafter in drafter_made:
            assert drafter.num_open == 0
            drafter.sessions.clear()
        return finished

    tracemalloc.start()  # before: numpy keeps the memory of small arrays for the next ones
    serve(200, "warm")
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    assert serve(200, "r") >= 200
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert engine.num_open == 0 and engine.pool.num_free == 40
    engine.check()
    assert grown < 20_000, f"{grown} bytes stayed"
