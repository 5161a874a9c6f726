"""Steps that are launched before the one before them is accepted: the same texts, nothing lost."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from drafters.tree import DraftTree
from server.engine.ahead_policy import AheadPolicy
from server.engine.batch import Batch, Float32
from server.engine.draft_record import DraftRecord
from server.engine.engine import Engine
from server.engine.planner import StepShape
from server.engine.settings import EngineSettings
from server.types import AdapterOrder, Request, SamplingParams, SpeculationParams
from tests.engine.scenarios import (
    Result,
    Workload,
    compare,
    drive,
    make_drafter,
    make_engine,
    random_workload,
    run_requests,
    verifying_every,
    with_slices,
    without_drafts,
)
from tests.fakes.fake_drafters import FakeDrafter
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info
from tests.profiles import examples

SEEDS = st.integers(0, 2**48)
MODEL = FakeModel(16, seed=5)


def _run(work: Workload) -> tuple[dict[tuple[str, int], Result], Engine]:
    """The workload with steps ahead, held against the one-token loop."""
    work.settings = replace(work.settings, steps_ahead=1)
    expected = work.expected()
    drafter = make_drafter(work, expected)
    engine, _ = make_engine(work, drafter)
    engine.flights.policy = AheadPolicy(is_always=True)
    results = drive(work, engine)
    compare(work, expected, results)
    assert engine.num_failed_steps == 0, "a broken Batch was hidden by recovery"
    assert engine.num_open == len(engine.flights) == 0
    assert engine.pool.num_free == work.num_blocks, "a block was lost"
    engine.pool.check([])
    assert drafter.num_open == 0
    for result in results.values():
        steps = sum(c.num_steps for c in result.counts)
        accepted = sum(c.num_accepted for c in result.counts)
        if result.finish_reason in ("stop", "length") and not result.vocabulary:
            assert accepted + steps - len(result.ids) in (0, 1), "a thrown-away step was counted"
    return results, engine


@settings(max_examples=examples(1200), deadline=None, print_blob=True)
@given(SEEDS)
def test_steps_ahead_give_the_one_token_loop(seed: int) -> None:
    """Plain workloads: stops, ends, aborts, forks, chunks and preemption around steps ahead."""
    work = without_drafts(random_workload(Random(seed)))
    note(f"{work}")
    _run(work)


@settings(max_examples=examples(600), deadline=None, print_blob=True)
@given(SEEDS, st.integers(0, 5))
def test_steps_ahead_beside_drafts_slices_and_exact(seed: int, kind: int) -> None:
    rng = Random(seed)
    work = random_workload(rng)
    if kind == 1:
        work = verifying_every(work, rng, 1 + seed % 6)
    elif kind > 2:
        work = with_slices(
            without_drafts(work), rng, ("slice", "slice", "full", "exact")[: kind - 1]
        )
    note(f"{work}")
    _run(work)


@settings(max_examples=examples(1200), deadline=None, print_blob=True)
@given(SEEDS, st.sampled_from(["random", "likely", "oracle", "liar", "broken", "auto"]))
def test_steps_behind_trees_give_the_one_token_loop(seed: int, drafter: str) -> None:
    """Drafted and plain ones together: stops and ends within accepted paths, aborts, chunks and
    preemption, sampled and greedy, with trees that were prepared for what may be drawn."""
    work = random_workload(Random(seed))
    work.drafter = drafter
    work.requests = [
        (
            at,
            replace(
                request,
                speculation=SpeculationParams(drafter, 6) if i % 3 else SpeculationParams(),
                sampling=replace(
                    request.sampling,
                    max_tokens=max(9, request.sampling.max_tokens),
                    presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
                ),
            ),
            abort,
        )
        for i, (at, request, abort) in enumerate(work.requests, seed % 3)
    ]  # fmt: skip
    work.num_blocks = max(work.num_blocks, -(-work.max_model_len // work.block_size))
    note(f"{work}")
    _run(work)


def test_many_steps_are_launched_behind_trees() -> None:
    """The test above means something: trees are followed by trees, and KV is moved on the way."""
    num_behind = num_void = num_accepted = 0
    for seed in range(80):
        work = random_workload(Random(seed))
        work.drafter = "oracle" if seed % 2 else "liar"
        work.requests = [
            (at, replace(r, speculation=SpeculationParams(work.drafter, 8)), abort)
            for at, r, abort in work.requests
        ]
        results, engine = _run(work)
        num_behind += engine.flights.num_ahead_trees
        num_void += engine.stats().num_void_rows
        num_accepted += sum(c.num_accepted for r in results.values() for c in r.counts)
        assert engine.stats().num_steps_ahead == engine.flights.num_ahead
    assert num_behind > 80 and num_void > 5 and num_accepted > 200


def test_many_steps_are_launched_ahead() -> None:
    """The tests above mean something: steps do go ahead."""
    num_ahead = num_tokens = 0
    for seed in range(40):
        results, engine = _run(without_drafts(random_workload(Random(seed))))
        num_ahead += engine.flights.num_ahead
        num_tokens += sum(len(result.ids) for result in results.values())
    assert num_ahead > 200 and num_tokens > num_ahead


def _engine(
    runner: dict[str, object] | None = None,
    drafters: dict[str, FakeDrafter] | None = None,
    **settings: int,
) -> tuple[Engine, FakeRunner]:
    numbers = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "steps_ahead": 1} | settings
    info = fake_info(max_model_len=128)
    made = FakeRunner(MODEL, info, **({"max_in_flight": 2} | (runner or {})))  # type: ignore[arg-type]
    return Engine(made, drafters or {}, EngineSettings(**numbers)), made  # type: ignore[arg-type]


def _request(name: str, max_tokens: int = 20, drafter: str = "", **more: object) -> Request:
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        **({"ignore_eos": True} | more),  # type: ignore[arg-type]
    )
    speculation = SpeculationParams(drafter, 4) if drafter else SpeculationParams()
    return Request(name, "task", "fake", (3, 4, ord(name[0]) % 16), sampling, speculation)


def _texts(engine: Engine) -> dict[str, list[int]]:
    results = run_requests(engine, [])
    assert engine.pool.num_free == engine.pool.num_blocks and len(engine.flights) == 0
    return {name: result.ids for (name, _), result in results.items()}


def _alone(*requests: Request) -> dict[str, list[int]]:
    engine, _ = _engine({"max_in_flight": 1}, steps_ahead=0)
    for request in requests:
        engine.submit(replace(request, speculation=SpeculationParams()))
    return _texts(engine)


def test_a_step_is_launched_before_the_one_before_it_comes_back() -> None:
    engine, runner = _engine()
    events: list[str] = []
    launch, wait = runner.launch, runner.wait

    def launched(batch: Batch) -> None:
        events.append("launch")
        launch(batch)

    def waited() -> object:
        events.append("wait")
        return wait()

    runner.launch, runner.wait = launched, waited  # type: ignore[method-assign,assignment]
    engine.submit(_request("a", 4))
    assert len(_texts(engine)["a"]) == 4
    # The last token is known to be the last: no step follows it.
    assert events == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]
    assert engine.flights.num_ahead == 3


def test_an_end_costs_a_row_and_no_token() -> None:
    """A stop id, found when the next step is under way already: its draw is nobody's."""
    text = _alone(_request("a"))["a"]
    stop = next(t for i, t in enumerate(text) if i > 4 and t not in text[:i])
    engine, runner = _engine()
    engine.submit(_request("a", stop_token_ids=(stop,)))
    got = _texts(engine)["a"]
    assert got == text[: text.index(stop) + 1]
    assert runner.num_steps == len(got) + 1  # the prompt's step draws the first


def test_an_aborted_request_s_row_in_flight_is_nobody_s() -> None:
    """Its blocks go to another one, whose text is its own."""
    requests = [_request("a"), _request("b", 30), _request("c", 25)]
    want = _alone(*requests[1:])
    engine, _ = _engine(max_num_seqs=2)
    for request in requests[:2]:
        engine.submit(request)
    ids = [i for _ in range(5) for d in engine.step() if d.request_id == "b" for i in d.token_ids]
    assert len(engine.flights) == 1 and len(ids) == 5
    engine.abort("a")
    engine.check()
    engine.submit(requests[2])
    got = _texts(engine)
    assert got == {"a": [], "b": want["b"][5:], "c": want["c"]}


def test_who_comes_waits_for_one_step_at_most() -> None:
    """While it has no seat the others' steps go ahead, and it can still expire."""
    engine, _ = _engine(max_num_seqs=1)
    engine.submit(_request("a", 40))
    for _ in range(4):
        engine.step()
    late = replace(_request("l"), queue_timeout_s=1e-9)
    engine.submit(late)
    engine.submit(_request("b"))
    before = engine.flights.num_ahead
    ended = [delta for _ in range(3) for delta in engine.step() if delta.finish_reason]
    assert [(d.request_id, d.error_code) for d in ended] == [("l", "queue_timeout")]
    assert engine.flights.num_ahead == before + 3

    engine, _ = _engine()
    engine.submit(_request("a", 40))
    for _ in range(4):
        engine.step()
    engine.submit(_request("b"))
    engine.step()  # of a step that was launched before
    assert len(engine.flights) == 0
    assert {delta.request_id for delta in engine.step()} == {"a", "b"}


@pytest.mark.parametrize("nth", [3, 4, 5])
@pytest.mark.parametrize("error", [RuntimeError("lost"), MemoryError("full")])
def test_a_failed_step_takes_the_one_behind_it_along(nth: int, error: Exception) -> None:
    requests = [_request("a"), _request("b", 12)]
    want = _alone(*requests)
    seen = 0

    def fail(_: Batch) -> None:
        nonlocal seen
        seen += 1
        if seen == nth:
            raise error

    engine, _ = _engine({"fail": fail})
    for request in requests:
        engine.submit(request)
    assert _texts(engine) == want
    assert engine.num_failed_steps == 1 and engine.flights.num_ahead > 10


def test_a_launch_that_raises_fails_its_own_step() -> None:
    requests = [_request("a"), _request("b", 12)]
    want = _alone(*requests)
    engine, runner = _engine()
    launch = runner.launch
    num_launches = 0

    def launched(batch: Batch) -> None:
        nonlocal num_launches
        num_launches += 1
        if num_launches == 4:
            raise RuntimeError("the runner takes nothing")
        launch(batch)

    runner.launch = launched  # type: ignore[method-assign]
    for request in requests:
        engine.submit(request)
    assert _texts(engine) == want
    assert engine.num_failed_steps == 1


def _endless(tokens: list[int], budget: int, max_depth: int) -> DraftTree:
    """How the model's own text goes on, known for certain."""
    text = list(tokens)
    for _ in range(min(budget, max_depth)):
        text.append(int(np.argmax(MODEL.logits(int(MODEL.hashes(text)[-1])))))
    return DraftTree.chain(text[len(tokens) :])


def test_a_tree_follows_a_tree() -> None:
    """A drafter that knows the text: every step but the last ones goes ahead with a whole tree, so
    there are as few steps as with trees that wait for one another."""
    want = _alone(_request("a", 60))
    num_steps = []
    for steps_ahead in (0, 1):
        engine, runner = _engine(
            {"max_in_flight": 2, "follows_trees": True},
            {"fake": FakeDrafter(_endless)},
            steps_ahead=steps_ahead,
        )
        engine.flights.policy = AheadPolicy(is_always=True)
        engine.submit(_request("a", 60, "fake"))
        assert _texts(engine) == want
        num_steps.append(runner.num_steps)
    assert engine.flights.num_ahead_trees >= num_steps[1] - 2
    assert num_steps[0] <= num_steps[1] <= num_steps[0] + 1  # one launched in vain


def test_a_step_is_judged_once_where_nothing_is_foreseen() -> None:
    """Trees of one node have nothing to prepare behind them: each step is planned twice, first to
    be launched ahead, and who rests counts it once."""
    engine, runner = _engine(
        {"follows_trees": True}, {"fake": FakeDrafter(lambda t, _, d: _endless(t, 1, d))}
    )
    engine.flights.policy = AheadPolicy(is_always=True)
    planner, num_judged = engine.planner, 0
    who_rests = planner.who_rests

    def counted(records: Sequence[DraftRecord], shape: StepShape) -> list[bool]:
        nonlocal num_judged
        num_judged += 1
        return who_rests(records, shape)

    planner.who_rests = counted  # type: ignore[method-assign]
    engine.submit(_request("a", 20, "fake"))
    assert _texts(engine) == _alone(_request("a", 20))
    assert engine.flights.num_ahead_trees <= 1 and runner.num_steps > 8
    assert num_judged <= runner.num_steps + 1  # one that the end of the text made needless


def test_a_cool_down_takes_its_steps_where_nothing_is_foreseen() -> None:
    """Steps that are planned twice, because of a choice that drafts, end nobody's cool-down in half
    the time."""
    engine, _ = _engine(
        {"follows_trees": True}, {"fake": FakeDrafter(lambda t, _, d: _endless(t, 1, d))}
    )
    engine.flights.policy = AheadPolicy(is_always=True)
    for name in "ab":
        engine.submit(_request(name, 60, "fake"))
    while engine._open["b"][0].num_output < 4:
        engine.step()
    cooling = engine._open["b"][0]
    cooling.draft_record._left, began = 12, cooling.num_output
    while cooling.draft_record.is_resting:
        engine.step()
    assert cooling.num_output - began >= 11


def test_a_draw_without_an_answer_behind_an_accepted_node() -> None:
    """Its step is followed by one whose row is nobody's; the tokens before it stand."""
    text = _alone(_request("a"))["a"]
    bad = int(MODEL.hashes([3, 4, 1, *text[:7]])[-1])

    class Broken(FakeModel):
        def logits(self, row_hash: int, recent: Sequence[int] = ()) -> Float32:
            out = super().logits(row_hash, recent)
            return out * np.float32("nan") if row_hash == bad else out

    engine, runner = _engine({"follows_trees": True}, {"fake": FakeDrafter(_endless)})
    runner.model = Broken(16, seed=5)
    engine.flights.policy = AheadPolicy(is_always=True)
    requests = (_request("a", 20, "fake"), _request("b", 30, "fake"))
    results = run_requests(engine, [(0, request) for request in requests])
    failed, other = results["a", 0], results["b", 0]
    assert failed.finish_reason == "error" and failed.ids == text[:7]
    assert other.ids == _alone(_request("b", 30))["b"]
    assert engine.flights.num_ahead_trees > 2 and engine.num_failed_steps == 0
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_failed_step_behind_a_tree_is_computed_again() -> None:
    requests = [_request("a", 40, "fake"), _request("b", 30, "fake")]
    want = _alone(*requests)
    for nth in (2, 3, 4):
        seen = 0

        def fail(_: Batch, nth: int = nth) -> None:
            nonlocal seen
            seen += 1
            if seen == nth:
                raise RuntimeError("lost")

        engine, _ = _engine({"follows_trees": True, "fail": fail}, {"fake": FakeDrafter(_endless)})
        engine.flights.policy = AheadPolicy(is_always=True)
        for request in requests:
            engine.submit(request)
        assert _texts(engine) == want
        assert engine.num_failed_steps == 1 and engine.flights.num_ahead_trees > 2


def test_the_better_way_is_taken_and_the_other_one_tried_now_and_then() -> None:
    for ahead_s, waiting_s in ((0.5, 1.0), (1.0, 0.5)):
        policy = AheadPolicy()
        taken = []
        for _ in range(2000):
            is_ahead = policy.pays()
            taken.append(is_ahead)
            seconds = ahead_s if is_ahead else waiting_s
            policy.observe(is_ahead=is_ahead, num_tokens=4, num_choices=2, seconds=seconds)
        share = sum(taken[100:]) / len(taken[100:])
        assert share > 0.95 if ahead_s < waiting_s else share < 0.05
        assert 0.0 < share < 1.0


def test_an_adapter_is_not_taken_into_memory_while_a_step_is_in_flight() -> None:
    """Registered, read and asked for between two steps, of which one was launched ahead before."""
    engine, runner = _engine()
    runner.models["f"] = FakeModel(16, seed=6)
    engine.submit(_request("a"))
    for _ in range(4):
        engine.step()
    assert len(engine.flights) == 1
    engine.adapters.register(AdapterOrder("a@", "f", 16))
    for adapter in engine.adapters._known.values():
        wait([future for future in (adapter.reading, adapter.packed) if future is not None])
    state = engine.controls["adapter_states"](None)
    assert state[0]["pending"] and runner.num_adapters == 0
    _texts(engine)
    assert engine.controls["adapter_states"](None)[0]["in_memory"] and runner.num_adapters == 1
    engine.close()


def test_no_step_goes_ahead_where_adapters_come_and_go() -> None:
    engine, _ = _engine()
    engine.adapters.register(AdapterOrder("a@", "a", 16), load=False)
    engine.submit(_request("a"))
    assert _texts(engine) == _alone(_request("a"))
    assert engine.flights.num_ahead == 0
    engine.close()


def test_who_rests_from_drafting_goes_ahead_and_is_asked_as_often() -> None:
    """A drafter that is mostly wrong: its pauses are steps ahead, as long as they are without."""
    asked = []
    num_asked = 0

    def propose(tokens: list[int], budget: int, max_depth: int) -> DraftTree:
        nonlocal num_asked
        num_asked += 1
        return DraftTree.chain([(7 * num_asked) % 16], [0.5])

    for steps_ahead in (0, 1):
        num_asked = 0
        engine, _ = _engine(drafters={"fake": FakeDrafter(propose)}, steps_ahead=steps_ahead)
        engine.submit(_request("a", 100, "fake"))
        assert _texts(engine) == _alone(_request("a", 100))
        assert (engine.flights.num_ahead > 20) == (steps_ahead > 0)
        asked.append(num_asked)
    assert 5 < asked[0] == asked[1]
