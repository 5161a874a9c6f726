"""Steps that are launched before the one before them is accepted: the same texts, nothing lost."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from drafters.tree import DraftTree
from server.engine.batch import Batch
from server.engine.engine import Engine
from server.engine.settings import EngineSettings
from server.types import AdapterOrder, Request, SamplingParams, SpeculationParams
from tests.engine.scenarios import (
    Collector,
    Result,
    Workload,
    compare,
    drive,
    make_drafter,
    make_engine,
    random_workload,
    verifying_every,
    with_slices,
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


def _plain(work: Workload) -> Workload:
    """The workload without what keeps a step from being launched ahead: drafts, penalties."""
    work.drafter = "off"
    work.requests = [
        (
            at,
            replace(
                request,
                speculation=SpeculationParams("off", 0),
                sampling=replace(
                    request.sampling,
                    presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
                ),
            ),
            abort,
        )
        for at, request, abort in work.requests
    ]  # fmt: skip
    return work


@settings(max_examples=examples(1200), deadline=None, print_blob=True)
@given(SEEDS)
def test_steps_ahead_give_the_one_token_loop(seed: int) -> None:
    """Plain workloads: stops, ends, aborts, forks, chunks and preemption around steps ahead."""
    work = _plain(random_workload(Random(seed)))
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
        work = with_slices(_plain(work), rng, ("slice", "slice", "full", "exact")[: kind - 1])
    note(f"{work}")
    _run(work)


def test_many_steps_are_launched_ahead() -> None:
    """The tests above mean something: steps do go ahead."""
    num_ahead = num_tokens = 0
    for seed in range(40):
        results, engine = _run(_plain(random_workload(Random(seed))))
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
    collector = Collector()
    while engine.has_work:
        collector.take(engine.step())
        engine.check()
    collector.take(engine.take_deltas())
    assert engine.pool.num_free == engine.pool.num_blocks and len(engine.flights) == 0
    return {name: result.ids for (name, _), result in collector.results.items()}


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
