"""Adapters in the engine: whatever is mixed, evicted, forgotten or drafted, each request gets the
text of its own model; what is in memory is bounded; nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from server.engine.adapters import OTHER_ADAPTERS, Vocabulary
from server.engine.engine import Engine
from server.engine.grammar import GrammarCompiler
from server.types import AdapterOrder, GrammarSpec, Request, VocabularyParams, scope_of
from tests.engine.requests import engine_over, request_of
from tests.engine.scenarios import (
    EOS,
    Collector,
    Workload,
    answers,
    compare,
    drive,
    make_drafter,
    make_engine,
    profile_of,
    random_workload,
    run_requests,
)
from tests.engine.tiny_vocabularies import tokenizer_over
from tests.fakes.fake_runner import FakeModel, FakeRunner
from tests.fakes.token_table import table_of
from tests.profiles import examples
from tests.waiting import wait_until


@dataclass
class Adapters:
    """Adapters of a workload: their models by id, and the bytes of every id there is."""

    models: dict[str, FakeModel]
    token_bytes: list[bytes]

    def order(self, name: str, *, pinned: bool = False) -> AdapterOrder:
        return AdapterOrder(name, name, self.models[name].vocab_size, pinned=pinned)

    def read(self, order: AdapterOrder) -> Vocabulary:
        """What a composition root reads from an adapter's folder."""
        size = order.vocab_size
        return Vocabulary(order.folder, stop_table=table_of(self.token_bytes[:size], (1,)))


def with_adapters(rng: Random, work: Workload) -> Adapters:
    """Give the workload adapters, some with ids of their own, and its requests some of them."""
    base = work.model
    work.models = {
        f"a{i}@{i}": FakeModel(
            base.vocab_size + rng.choice((0, 0, 1, 40)), seed=rng.randrange(1 << 20),
            alphabet=base.alphabet, boost=base.boost, context=base.context,
        )
        for i in range(rng.randint(1, 4))
    }  # fmt: skip
    work.token_bytes += [
        bytes(rng.choice(b"ab") for _ in range(rng.randint(0, 3))) for _ in range(40)
    ]
    work.special_ids = (1,)
    if work.drafter not in ("off", "oracle", "liar"):
        work.drafter = "random"

    def of_one(request: Request) -> Request:
        drafts = replace(request.speculation, drafter=work.drafter)
        return replace(request, adapter=rng.choice(("", *work.models)), speculation=drafts)

    work.change(of_one)
    return Adapters(work.models, work.token_bytes)


def states(engine: Engine) -> list[dict[str, Any]]:
    """What is told of each adapter, the one that was used last behind the others."""
    told: list[dict[str, Any]] = engine.adapters.controls["adapter_states"](None)
    return told


def settle(engine: Engine) -> None:
    """Until the threads have nothing left to read."""
    wait_until(lambda: not any(state["pending"] for state in states(engine)), pause_s=0.001)


@settings(max_examples=examples(300), deadline=None, print_blob=True)
@given(st.integers(0, 2**48))
def test_any_mix_gives_each_request_the_text_of_its_own_model(seed: int) -> None:
    rng = Random(seed)
    work = random_workload(rng)
    own = with_adapters(rng, work)
    most = rng.randint(1, 4)
    work.settings = replace(work.settings, max_adapters=most)
    note(work)
    expected = work.expected()
    engine, runner = make_engine(
        work, lambda _, speculation: make_drafter(work, expected, speculation.adapter)
    )
    engine.adapters.read = own.read
    for name in own.models:
        engine.adapters.register(own.order(name), load=rng.random() < 0.5)
    forget = {rng.randint(0, 6): rng.choice(list(own.models))} if rng.random() < 0.3 else {}

    def each_step(step: int) -> None:
        if step in forget:
            engine.adapters.forget(forget[step])

    results = drive(work, engine, each_step)
    refused = {
        key for key, r in results.items() if r.error_code in ("adapters_full", "model_not_found")
    }
    adapters = {request.request_id: request.adapter for _, request, _ in work.requests}
    for request_id, _ in refused:
        code = results[request_id, 0].error_code
        assert code == "adapters_full" or adapters[request_id] in forget.values()
        assert adapters[request_id]
    if most >= len(own.models):
        assert all(results[key].error_code != "adapters_full" for key in refused)
    kept = {key: want for key, want in expected.items() if key not in refused}
    compare(work, kept, {key: got for key, got in results.items() if key not in refused})
    assert engine.recovery.num_failed_steps == 0 and engine.drafts.num_errors == 0
    assert engine.pool.num_free == work.num_blocks
    assert runner.num_adapters <= most
    for name in own.models:
        engine.adapters.forget(name)

    def is_forgotten() -> bool:
        engine.adapters.poll()  # one may be on its way into memory
        return all(engine.adapters.known.get(name) is None for name in own.models)

    wait_until(is_forgotten, pause_s=0.001)
    assert runner.num_adapters == 0
    engine.close()


Small = Callable[..., tuple[Engine, FakeRunner, Adapters]]


@pytest.fixture
def small() -> Iterator[Small]:
    """Makes engines with `num` adapters a0@, a1@, ..., each with an id of its own, of which at most
    `most` are in memory. The first `known` are registered, by default all."""
    engines: list[Engine] = []

    def make(
        num: int, most: int, known: int | None = None, **parts: Any
    ) -> tuple[Engine, FakeRunner, Adapters]:
        pieces = [b"%d " % i for i in range(17)]
        own = Adapters({f"a{i}@": FakeModel(17, seed=i + 2) for i in range(num)}, pieces)
        base = FakeModel(16, seed=1)
        engine, runner = engine_over(base, num_blocks=256, max_adapters=most, **parts)
        runner.models = own.models
        engines.append(engine)
        engine.adapters.read = own.read
        for name in list(own.models)[:known]:
            engine.adapters.register(own.order(name), load=False)
        return engine, runner, own

    yield make
    for engine in engines:
        engine.close()


def ask(name: str, adapter: str, **sampling: Any) -> Request:
    return request_of(name, (3, 4, 5, 6, 7), adapter=adapter, **{"max_tokens": 5, **sampling})


def test_many_are_known_and_few_in_memory_and_the_pinned_stay(small: Small) -> None:
    engine, runner, own = small(50, 4, 0)
    engine.adapters.register(own.order("a0@", pinned=True))
    for name in list(own.models)[1:]:
        engine.adapters.register(own.order(name), load=False)
    settle(engine)
    assert runner.num_adapters == 1
    for i in range(50):
        assert answers(engine, ask(f"r{i}", f"a{i}@"))[f"r{i}", 0].finish_reason == "length"
        assert runner.num_adapters <= 4
    told = states(engine)
    assert len({s["id"] for s in told}) == 50
    assert [s["id"] for s in told if s["in_memory"]] == ["a0@", "a47@", "a48@", "a49@"]
    figures = engine.adapters.figures
    assert len(figures) == 50 and {f["num_requests"] for f in figures.values()} == {1}
    assert sum(f["num_loads"] for f in figures.values()) == 50
    assert sum(f["num_evictions"] for f in figures.values()) == 46
    assert figures["a49"]["num_bytes"] == told[-1]["num_bytes"] > 0 == figures["a1"]["num_bytes"]


def test_the_adapter_that_was_used_longest_ago_leaves_memory(small: Small) -> None:
    engine, _, _ = small(3, 2)
    for i, name in enumerate(("a0@", "a1@", "a0@", "a2@")):
        answers(engine, ask(f"r{i}", name))
    assert {s["id"] for s in states(engine) if s["in_memory"]} == {"a0@", "a2@"}


def test_one_that_is_known_is_pinned_and_read_elsewhere_once_it_is_registered_so(
    small: Small,
) -> None:
    engine, runner, _ = small(2, 1)
    settle(engine)
    assert runner.num_adapters == 0
    runner.models["moved"] = runner.models.pop("a0@")
    engine.adapters.register(AdapterOrder("a0@", "moved", 17, pinned=True))
    settle(engine)
    assert runner.num_adapters == 1
    assert answers(engine, ask("r", "a1@"))["r", 0].error_code == "adapters_full"


def test_figures_are_of_a_bounded_number_of_names(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.engine.adapters.MAX_NAMES", 4)
    engine, _, own = small(9, 2)
    for i, name in enumerate(own.models):
        answers(engine, ask(f"r{i}", name))
    figures = engine.adapters.figures
    assert len(figures) == 4 + 1
    others = figures[OTHER_ADAPTERS]
    assert others["num_requests"] == others["num_loads"] == 5
    num_bytes = sum(f["num_bytes"] for f in figures.values())
    assert num_bytes == sum(s["num_bytes"] for s in states(engine))


def test_a_request_is_refused_when_all_in_memory_are_in_use(small: Small) -> None:
    engine, _, _ = small(3, 2)
    for i in range(3):
        engine.submit(ask(f"r{i}", f"a{i}@"))
    results = answers(engine, ask("base", ""))
    assert results["r2", 0].error_code == "adapters_full"
    assert {results[name, 0].finish_reason for name in ("r0", "r1", "base")} == {"length"}
    assert answers(engine, ask("again", "a2@"))["again", 0].finish_reason == "length"


def test_others_go_on_while_an_adapter_is_read(small: Small) -> None:
    engine, runner, _ = small(1, 2)
    gate = threading.Event()

    def pack_waits(_: str) -> None:
        gate.wait(10)

    runner.pack_waits = pack_waits
    settle(engine)
    engine.submit(ask("waits", "a0@"))
    engine.submit(ask("leaves", "a0@"))
    engine.submit(ask("base", ""))
    collector = Collector()
    while engine.has_work:
        collector.take(engine.step())
    assert collector.results["base", 0].finish_reason == "length"
    assert engine.num_open == 2 and engine.is_preparing
    engine.abort("leaves")
    engine.adapters.forget("a0@")  # what is open ends with it
    engine.submit(ask("late", "a0@"))
    gate.set()
    results = run_requests(engine)
    assert results["waits", 0].finish_reason == "length"
    assert results["late", 0].error_code == "model_not_found"
    assert runner.num_adapters == 0 and engine.adapters.known.get("a0@") is None


def test_the_grammars_of_a_forgotten_adapter_end_with_its_last_request(small: Small) -> None:
    engine, _, own = small(1, 1, 0)
    closed: list[bool] = []

    class Grammars:
        """As much of a GrammarCompiler as has threads."""

        def close(self) -> None:
            closed.append(True)

    engine.adapters.read = lambda order: replace(own.read(order), grammars=Grammars())  # type: ignore[arg-type]
    engine.adapters.register(own.order("a0@"))
    settle(engine)
    engine.submit(ask("r", "a0@"))
    engine.step()
    engine.adapters.forget("a0@")
    assert not closed
    assert run_requests(engine)["r", 0].finish_reason == "length" and closed == [True]


def test_an_adapter_that_cannot_be_read_fails_its_requests_alone(small: Small) -> None:
    engine, runner, own = small(2, 2)
    runner.models = {"a1@": own.models["a1@"]}  # the other's files are gone
    results = answers(engine, ask("bad", "a0@"), ask("good", "a1@"))
    assert results["bad", 0].error_code == "engine_error"
    assert results["good", 0].finish_reason == "length"
    runner.models = own.models  # they are back
    assert answers(engine, ask("bad", "a0@"))["bad", 0].finish_reason == "length"


def test_an_adapter_that_the_device_has_no_room_for_fails_its_requests_alone(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner, own = small(2, 2, 1)

    def hold(place: int, adapter: Any) -> None:
        raise MemoryError("no room on the device")

    with monkeypatch.context() as full:
        full.setattr(runner, "hold_adapter", hold)
        results = answers(engine, ask("bad", "a0@"), ask("good", "", max_tokens=40))
    assert results["bad", 0].error_code == "engine_error"
    assert results["good", 0].finish_reason == "length"
    engine.adapters.register(own.order("a1@"))  # no place is lost
    assert answers(engine, ask("bad", "a0@"))["bad", 0].finish_reason == "length"
    assert runner.num_adapters == 2


def test_its_ids_and_its_head_are_its_own(small: Small) -> None:
    engine, _, own = small(1, 1, 0)
    engine.adapters.register(own.order("a0@"))
    settle(engine)
    engine.submit(ask("own", "a0@", allowed_token_ids=(16,)))
    engine.submit(ask("base", "", allowed_token_ids=(16,)))
    engine.submit(ask("outside", "a0@", allowed_token_ids=(17,)))
    sliced = ask("sliced", "a0@")
    results = answers(engine, replace(sliced, vocabulary=VocabularyParams("slice", "p")))
    assert results["own", 0].ids == [16] * 5
    assert results["base", 0].error_code == results["outside", 0].error_code == "invalid_value"
    assert results["sliced", 0].error_code == "unsupported_parameter"


def test_grammars_that_wait_to_be_compiled_end_with_the_engine(small: Small) -> None:
    gate = threading.Event()

    def load() -> Any:
        gate.wait()
        raise OSError("too late")

    engine, _, own = small(2, 2, 0)
    compilers = {name: GrammarCompiler(load, num_threads=1) for name in own.models}
    engine.adapters.read = lambda order: Vocabulary(order.folder, grammars=compilers[order.folder])
    for name in own.models:
        engine.adapters.register(own.order(name), load=False)
    settle(engine)
    waiting = [one.compile(GrammarSpec("regex", "a")) for one in compilers.values()]
    engine.close()
    gate.set()
    assert [future.cancelled() for future in waiting] == [True, True]


@pytest.mark.parametrize("when", ["read", "unread", "forgotten"])
def test_a_slice_beside_an_adapter_with_its_own_head_is_refused(small: Small, when: str) -> None:
    """Also where that is known only once the adapter is read, after the request came."""
    is_read = when == "read"
    engine, _, own = small(1, 1, 0, profiles=lambda _: profile_of({2, 3}, 16))
    gate = threading.Event()

    def read(order: AdapterOrder) -> Vocabulary:
        gate.wait(10)
        return replace(own.read(order), own_head=True)

    engine.adapters.read = read
    engine.adapters.register(own.order("a0@"))
    if is_read:
        gate.set()
        settle(engine)
    engine.submit(replace(ask("r", "a0@"), vocabulary=VocabularyParams("slice", "p")))
    assert engine.is_preparing is not is_read
    if when == "forgotten":
        engine.adapters.forget("a0@")
    gate.set()
    result = run_requests(engine)["r", 0]
    assert (result.error_code, result.ids) == ("unsupported_parameter", [])
    engine.adapters.register(own.order("a0@"))
    assert answers(engine, ask("full", "a0@"))["full", 0].finish_reason == "length"


def test_a_scope_is_of_one_adapter_whatever_the_salt() -> None:
    scopes = {
        scope_of(tenant, salt, adapter)
        for tenant in ("", "t")
        for salt in ("", "a@1", "a@1\1", "t\0", "\1t\0")
        for adapter in ("", "a@1", "b@1")
    }
    assert len(scopes) == 2 * 5 * 3


def test_masks_of_two_lengths_stand_in_one_batch_and_wait_for_one_verification() -> None:
    """Tokens of `exact` have the masks of their steps, beside an adapter with more ids or alone."""
    pieces = [b"", b"", *[b"a", b"b", b"ab", b"ba"] * 10]
    small, large = (tokenizer_over(pieces[:num], (0,), EOS).compiler for num in (16, 40))
    spec = GrammarSpec("regex", "[ab]{30}")
    exact = request_of(
        "exact", (3, 4), grammar=spec, vocabulary=VocabularyParams("exact", "p", 4),
        max_tokens=12, ignore_eos=False,
    )  # fmt: skip
    beside = request_of("own", (3, 4), grammar=spec, adapter="a0@", max_tokens=1, ignore_eos=False)
    profile = profile_of(set(range(16)), 16)
    engine, runner = engine_over(
        FakeModel(16, seed=1), max_adapters=1, may_use_full_head=False,
        profiles=lambda _: profile, grammars=small,
    )  # fmt: skip
    runner.models = {"a0@": FakeModel(40, seed=2)}
    engine.adapters.read = lambda order: Vocabulary(grammars=large, own_head=True)
    engine.adapters.register(AdapterOrder("a0@", "a0@", 40))
    settle(engine)
    for grammars, request in ((small, exact), (large, beside)):
        assert grammars.compile(spec, request.scope).exception() is None
    want = answers(engine, exact)["exact", 0]
    got = run_requests(engine, [(0, exact), (2, beside)])
    assert engine.recovery.num_failed_steps == 0
    assert (got["exact", 0].ids, got["exact", 0].finish_reason) == (want.ids, "length")
    assert got["own", 0].finish_reason == "length"
    engine.close()
