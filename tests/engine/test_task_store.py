"""What engines keep of tasks: learned outputs, calibration; many requests, and restarts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import pytest

from drafters import make_drafter
from drafters.auto.trust import Trust
from drafters.corpus import build_corpus
from drafters.learned import FORMAT, LearnedOutputs
from server.engine import task_store
from server.engine.calibrations import MAX_SEEN
from server.engine.engine import Engine
from server.engine.task_store import TaskStore
from server.types import Delta, Request, SpeculationParams, adapter_of, scope_of
from server.wiring.drafter import make_task_drafter
from tests.api.unharmed import resident_mib
from tests.engine.requests import engine_over, finish, ids_of, request_of, settled
from tests.engine.scenarios import EOS, open_choices
from tests.fakes.fake_runner import FakeModel

VOCAB = 64
MODEL = FakeModel(VOCAB, seed=11, context=1, boost=9.0)
LEARN_TOKENS = 1000
NEVER = 60  # the first id of prompts whose requests are aborted

Start = Callable[..., Engine]


def _engine(folder: Path | None, **memory: Any) -> Engine:
    """An Engine with the drafters as they are composed, over the FakeRunner."""
    numbers: dict[str, Any] = {"build_share": 1e9, "save_every_s": 3600.0, **memory}
    kept = TaskStore(folder, fingerprint="f", **numbers)
    drafters = {
        name: partial(make_task_drafter, name, "f", EOS, memory=kept)
        for name in ("auto", "mix", "suffix", "trie")
    }
    return engine_over(
        MODEL, drafters, num_blocks=512, max_model_len=64, max_num_seqs=32,
        max_num_batched_tokens=400, memory=kept,
    )[0]  # fmt: skip


LEARN = SpeculationParams("auto", 5, learn_tokens=LEARN_TOKENS, persists=True)


def _request(name: str, prompt: Sequence[int], **fields: Any) -> Request:
    return request_of(name, prompt, **{"max_tokens": 10, "speculation": LEARN, **fields})


def _wave(name: str, num: int, **fields: Any) -> list[Request]:
    """Requests for so many prompts, always the same."""
    return [_request(f"{name}{i}", [2, 3 + i], **fields) for i in range(num)]


def _tokens_per_step(told: dict[str, list[Delta]]) -> float:
    deltas = [delta for some in told.values() for delta in some]
    return sum(len(d.token_ids) for d in deltas) / sum(d.counts.num_steps for d in deltas)


def _kept(folder: Path) -> list[tuple[list[int], list[int]]]:
    """All examples in the files of a folder; whose they are is not asked."""
    found = []
    for path in sorted(folder.glob("learned-*.bin")):
        read = FORMAT.read(path, fingerprint="f")
        held = LearnedOutputs(1 << 20)
        held.restore(path, fingerprint="f", scope=str(read.meta["scope"]))
        found += [(p.tolist(), o.tolist()) for p, o in held.examples()]
    return found


def _memory(engine: Engine) -> TaskStore:
    """What the engine keeps of tasks."""
    assert engine.memory is not None
    return engine.memory


def _report(engine: Engine) -> dict[str, Any]:
    """What the engine tells of the task."""
    payload = {"task": "task", "drafter": "auto", "options": (), "corpus": None}
    told: dict[str, Any] = engine.controls["task_report"](payload)()
    return told


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes engines and closes them in the end."""
    made: list[Engine] = []

    def make(folder: Path | None, **memory: Any) -> Engine:
        made.append(_engine(folder, **memory))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def store() -> Iterator[TaskStore]:
    """One that keeps nothing on disk and builds layers at once."""
    made = TaskStore(None, fingerprint="f", build_share=1e9)
    yield made
    made.close()


@pytest.mark.slow
def test_hundreds_of_requests_of_a_task_that_learns(tmp_path: Path, start: Start) -> None:
    """Memory stays bounded, tokens per step rise, aborted requests teach nothing."""
    outputs_alone = replace(LEARN, options=(("auto.logits", 0),))
    engine = start(tmp_path)
    rng = Random(5)
    rates: list[float] = []
    num_aborted = 0
    memory_mib = 0.0
    for batch in range(6):
        wave = [
            _request(
                f"{batch}-{i}",
                [NEVER if i % 10 == 0 else 2, rng.randrange(2, 59)],
                max_tokens=4 + i % 4,
                speculation=outputs_alone,
            )
            for i in range(100)
        ]
        for request in wave:
            engine.submit(request)
        told: dict[str, list[Delta]] = {}
        steps = 0
        while engine.has_work:
            steps += 1
            for request in wave if steps in (2, 4, 6, 8) else ():
                if request.prompt_ids[0] == NEVER:
                    engine.abort(request.request_id)
            for delta in engine.step():
                told.setdefault(delta.request_id, []).append(delta)
        reasons = {name: deltas[-1].finish_reason for name, deltas in told.items()}
        aborted = [r for r in wave if reasons[r.request_id] == "abort"]
        num_aborted += len(aborted)
        rates.append(_tokens_per_step(told))
        if batch % 2 == 0:
            settled(_memory(engine))
        if batch == 2 and Path("/proc/self/statm").exists():
            memory_mib = resident_mib()
    assert memory_mib == 0.0 or resident_mib() - memory_mib < 32
    assert num_aborted > 20 and engine.num_open == 0
    first, last = float(np.mean(rates[:1])), float(np.mean(rates[-3:]))
    assert first < 2.0 and last > 1.5 * first, (first, last)
    ((task, num_held, num_learned),) = _memory(engine).sizes()
    assert task == "task" and num_held <= LEARN_TOKENS
    assert 0.8 * (600 - num_aborted) < num_learned <= 600 - num_aborted
    engine.close()
    examples = _kept(tmp_path)
    assert 0 < sum(len(output) for _, output in examples) <= LEARN_TOKENS
    # Some of these requests end before they are aborted: those are learned, whole.
    unfinished = [o for p, o in examples if p[0] == NEVER and len(o) < 4]
    assert not unfinished
    assert engine.drafts.num_errors == 0


def test_aborted_failed_and_half_aborted_requests_teach_nothing(
    tmp_path: Path, start: Start
) -> None:
    engine = start(tmp_path)
    slow = replace(LEARN, max_draft_tokens=0)  # a token a step
    engine.submit(_request("aborted", [2, 3], speculation=slow))
    engine.submit(_request("half", [4, 5], num_choices=3, speculation=slow))
    engine.submit(_request("done", [6, 7], num_choices=2))
    engine.submit(_request("empty", [8, 9], max_tokens=0))
    never = {"allowed_token_ids": (3,), "logit_bias": ((3, -100.0),)}
    engine.submit(_request("failed", [10, 11], **never))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps == 3:
            engine.abort("aborted")
            half = open_choices(engine, "half")
            half[0].max_output = half[0].num_output + 1
        if len(open_choices(engine, "half")) == 2:
            engine.abort("half")
    assert not engine.tasks._outputs, "what they had said is forgotten"
    engine.close()
    assert [prompt for prompt, _ in _kept(tmp_path)] == [[6, 7]], "both choices said it"


def test_learning_changes_no_text(tmp_path: Path, start: Start) -> None:
    learning, plain = start(tmp_path), start(None)
    for turn in range(3):
        wave = [
            _request(
                f"{turn}-{i}",
                [2, 3 + i % 10],
                temperature=0.8 * (i // 10),
                seed=i,
                num_logprobs=1,
                ignore_eos=False,
            )
            for i in range(20)
        ]
        told = finish(learning, *wave)
        off = finish(plain, *(replace(r, speculation=SpeculationParams()) for r in wave))
        for request in wave:
            got, want = told[request.request_id], off[request.request_id]
            assert ids_of(got) == ids_of(want)
            assert [x for d in got for x in d.logprobs] == [x for d in want for x in d.logprobs]
            assert got[-1].finish_reason == want[-1].finish_reason
        settled(_memory(learning))
    assert _memory(learning).sizes() and not _memory(plain).sizes()


def test_a_restart_keeps_what_was_learned_and_the_calibration(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path)
    told_first = finish(first, *_wave("", 40))
    cold = _tokens_per_step(told_first)
    drafter = first.drafters.resolve("task", LEARN)
    evidence = drafter.trust.evidence.copy()  # type: ignore[union-attr]
    assert evidence.sum() > 0
    report = _report(first)
    first.close()
    assert not list(tmp_path.glob(".*")), "no temporary file is left"
    assert all(p.stat().st_mode & 0o077 == 0 for p in tmp_path.glob("*")), "private"

    second = start(tmp_path)
    again = second.drafters.resolve("task", LEARN)
    np.testing.assert_allclose(again.trust.evidence, evidence, atol=1e-3)  # type: ignore[union-attr]
    told = _report(second)
    steps = [delta.counts.num_steps for deltas in told_first.values() for delta in deltas]
    assert told["num_steps"] == report["num_steps"] == sum(steps)
    assert told["num_tokens"] == report["num_tokens"] == 400
    assert len(told["calibration"]) == len(report["calibration"]) > 0
    finish(second, _request("open", [2, 3]))  # what is on disk is read when it is first needed
    settled(_memory(second))
    warm = _tokens_per_step(finish(second, *_wave("w", 40)))
    assert warm > 1.5 * cold
    second.close()

    # A damaged file, and another tokenizer's, are left aside.
    for path in tmp_path.glob("*"):
        path.write_bytes(path.read_bytes()[:50])
    third = start(tmp_path)
    told_third = finish(third, *_wave("t", 40))
    assert _tokens_per_step(told_third) == pytest.approx(cold, rel=0.2)


@pytest.mark.parametrize(("salts", "was_asked"), [(0, False), (0, True), (5, False)])
def test_what_a_key_left_on_disk_is_read_when_it_comes_whoever_came_before(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, salts: int, was_asked: bool
) -> None:
    """Nor do salts that another invents, of too many files, cost it what it learned."""
    monkeypatch.setattr(task_store, "MAX_FILES", 3)
    first = start(tmp_path)
    finish(first, *_wave("a", 3, tenant="a"))
    for i in range(salts):
        finish(first, _request(f"b{i}", [9, 9], tenant="b", cache_salt=f"{i}"))
    first.close()
    assert len(list(tmp_path.glob("learned-*"))) == (3 if salts else 1)
    second = start(tmp_path)
    if was_asked:
        finish(second, _request("other", [5, 6], tenant="b"))
    second.submit(_request("mine", [2, 3], tenant="a"))
    settled(_memory(second))
    assert ("task", scope_of("a", "")) in _memory(second).layers


def test_what_a_full_disk_did_not_take_is_written_once_there_is_room(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(tmp_path, save_every_s=0.0)

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(LearnedOutputs, "save", fails)
        full.setattr(Trust, "save", fails)
        finish(engine, *_wave("", 3))
        for _ in range(3):
            engine.tend()
            settled(_memory(engine))
        assert not _kept(tmp_path)
    engine.close()
    assert len(_kept(tmp_path)) == 3
    assert len(list(tmp_path.glob("calibration-*.json"))) == 1


def test_what_is_learned_in_memory_is_never_on_disk(tmp_path: Path, start: Start) -> None:
    in_memory = replace(LEARN, persists=False)
    first = start(tmp_path)
    cold = _tokens_per_step(finish(first, *_wave("cold", 40, speculation=in_memory)))
    settled(_memory(first))
    warm = _tokens_per_step(finish(first, *_wave("warm", 40, speculation=in_memory)))
    assert warm > 1.5 * cold
    first.close()
    assert list(tmp_path.glob("calibration-*")) and not list(tmp_path.glob("learned-*"))

    # A file that a task wrote while it said `persist` is not read by one that does not.
    written = start(tmp_path)
    finish(written, *_wave("p", 40))
    written.close()
    assert list(tmp_path.glob("learned-*"))
    second = start(tmp_path)
    finish(second, _request("open", [2, 3], speculation=in_memory))
    settled(_memory(second))
    assert {task: held for task, held, _ in _memory(second).sizes()}["task"] <= 16


def test_tenants_and_salts_share_nothing(tmp_path: Path, start: Start) -> None:
    """Neither outputs nor what the model held likely; nor is there anything of requests that do not
    learn."""
    engine = start(tmp_path)
    memory = _memory(engine)

    def rate(name: str, **fields: Any) -> float:
        rates = []
        for turn in range(2):
            rates.append(_tokens_per_step(finish(engine, *_wave(f"{name}-{turn}-", 20, **fields))))
            settled(memory)
        return rates[0]

    cold = rate("a", tenant="a")
    assert rate("a2", tenant="a") > 1.5 * cold
    assert rate("b", tenant="b") < 1.2 * cold
    assert rate("salted", tenant="a", cache_salt="x") < 1.2 * cold
    assert rate("other", tenant="a", task="other") < 1.2 * cold
    rate("forgetful", tenant="d", speculation=SpeculationParams("auto", 5))
    assert rate("learns", tenant="d") < 1.2 * cold
    assert len(memory.sizes()) == 2
    names = [path.name for path in _all_files(engine, tmp_path)]
    assert len([n for n in names if n.startswith("learned-")]) == 5


def test_calibration_is_kept_per_scope_and_told_as_a_sum(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path)
    for tenant, salt, num in (("a", "", 30), ("b", "", 10), ("a", "salt", 5)):
        finish(first, *_wave(f"{tenant}{salt}", num, tenant=tenant, cache_salt=salt))
    asked = [_evidence(first, scope) for scope in ("a\0", "b\0", "a\0salt")]
    assert asked[0] > asked[1] > asked[2] > 0 and _evidence(first, "c\0") == 0

    def offered(engine: Engine) -> float:
        return float(sum(row[3] for row in _report(engine)["calibration"]))

    before = offered(first)
    assert before > 0
    files = [p.name for p in _all_files(first, tmp_path) if p.name.startswith("calibration-")]
    assert len(files) == 2, "one a tenant; what a cache_salt has learned is not written"
    # After a restart the tenants' files are told before anybody asks.
    second = start(tmp_path)
    assert 0 < offered(second) <= before
    assert _evidence(second, "a\0") == pytest.approx(asked[0], rel=1e-3)


def test_a_calibration_in_use_is_kept_however_many_salts_come(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafter is made once, and is not asked for again where nothing is learned."""
    monkeypatch.setattr("server.engine.calibrations.MAX_TABLES", 2)
    first = start(tmp_path, save_every_s=0.0)
    plain = SpeculationParams("auto", 5)
    for i in range(4):
        finish(first, *_wave(f"{i}-", 5, speculation=plain))
        finish(first, _request(f"s{i}", [2, 3], speculation=plain, cache_salt=f"s{i}"))
    evidence = _evidence(first, "\0")
    first.close()
    assert _evidence(start(tmp_path), "\0") == pytest.approx(evidence, rel=1e-3)


def test_a_calibration_that_is_put_away_is_written(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.engine.calibrations.MAX_TABLES", 2)
    first = start(tmp_path)
    plain = SpeculationParams("auto", 5)
    finish(first, *_wave("b", 5, speculation=plain, tenant="b"))
    evidence = _evidence(first, "b\0")
    for tenant in ("c", "d"):
        finish(first, _request(tenant, [2, 3], speculation=plain, tenant=tenant))
    first.close()
    assert _evidence(start(tmp_path), "b\0") == pytest.approx(evidence, rel=1e-3) and evidence > 0


def test_files_of_calibrations_are_bounded_and_the_oldest_go(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each corpus and adapter that was ever served has one a tenant."""
    monkeypatch.setattr("server.engine.calibrations.MAX_TABLE_FILES", 3)
    plain = SpeculationParams("auto", 5)
    for name in ("a", "b", "c", "a", "d", "e"):
        engine = start(tmp_path)
        finish(engine, *_wave(name, 5, speculation=plain, tenant=name))
        engine.close()
    last = start(tmp_path)
    kept = {name for name in "abcde" if _evidence(last, f"{name}\0")}
    assert kept == {"a", "d", "e"} and len(list(tmp_path.glob("calibration-*"))) == 3


def test_old_requests_count_less_in_the_tokens_a_step_that_are_told(start: Start) -> None:
    """A task that drafts better from some day on is soon told to."""
    memory = _memory(start(None))
    memory.calibrate("task", make_drafter("auto"), "", "\0")
    memory.observe("task", "auto", "\0", 15_000, 15_000)
    assert memory.report("task", make_drafter("auto"))()["num_steps"] == 15_000
    for _ in range(50):
        memory.observe("task", "auto", "\0", 1000, 3000)
    told = memory.report("task", make_drafter("auto"))()
    assert told["num_tokens"] > 2.9 * told["num_steps"] and told["num_steps"] <= 20_000


def test_a_task_whose_tokens_were_taken_back_costs_none_its_tally(
    tmp_path: Path, start: Start
) -> None:
    """`exact` takes more steps than tokens where its slice is seldom right."""
    tallies = {"exact": (93, 20), "task": (20, 40)}
    first = start(tmp_path)
    for task, tally in tallies.items():
        _memory(first).calibrate(task, make_drafter("auto"), "", "\0")
        _memory(first).observe(task, "auto", "\0", *tally)
    first.close()
    second = _memory(start(tmp_path))
    for task, tally in tallies.items():
        told = second.report(task, make_drafter("auto"))()
        assert (told["num_steps"], told["num_tokens"]) == tally


def test_what_is_seen_of_scopes_is_bounded(store: TaskStore) -> None:
    first = store.seen("task", "\0first")
    for i in range(MAX_SEEN):
        store.seen("task", f"\0{i}")
    assert store.seen("task", "\0first") is not first
    last = store.seen("task", f"\0{MAX_SEEN - 1}")
    assert store.seen("task", f"\0{MAX_SEEN - 1}") is last


def _evidence(engine: Engine, scope: str) -> float:
    drafter = engine.drafters.resolve("task", SpeculationParams("auto", 5, scope=scope))
    return float(drafter.trust.evidence[0].sum())  # type: ignore[union-attr]


def _all_files(engine: Engine, folder: Path) -> list[Path]:
    engine.close()
    return sorted(folder.iterdir())


def test_scopes_in_memory_are_bounded_and_come_back_from_disk(tmp_path: Path, start: Start) -> None:
    engine = start(tmp_path, max_scopes=3)
    memory = _memory(engine)
    for i in range(8):
        finish(engine, *_wave(f"{i}-", 10, tenant=f"t{i}"))
        settled(memory)
        engine.tend()
        assert memory.report("task", None)()["num_learned_scopes"] <= 3
    cold = _tokens_per_step(finish(engine, _request("new", [2, 3], tenant="new")))
    finish(engine, _request("back", [2, 3], tenant="t0"))
    settled(memory)
    back = _tokens_per_step(finish(engine, _request("back2", [2, 3], tenant="t0")))
    assert back > cold


def test_forgetting_ends_drafts_and_deletes_files(tmp_path: Path, start: Start) -> None:
    engine = start(tmp_path, save_every_s=0.0)
    memory = _memory(engine)
    cold = _tokens_per_step(finish(engine, *_wave("", 20)))
    finish(engine, *(_request(f"kept{i}", [5, 6 + i], task="kept") for i in range(2)))
    settled(memory)
    assert len(list(tmp_path.glob("learned-*"))) == 2
    engine.controls["task_forget"]({"task": "task"})
    assert memory.learned("task", "\0", None, LEARN_TOKENS) is None
    settled(memory)
    assert len(list(tmp_path.glob("learned-*"))) == 1
    assert [name for name, *_ in memory.sizes() if name != "task"] == ["kept"]
    assert {task for task, _ in memory.layers} == {"kept"}, "its layers would be held for ever"
    told = finish(engine, *_wave("n", 20))
    assert _tokens_per_step(told) < 1.2 * cold


def test_a_full_queue_drops_outputs_and_holds_nothing_up(start: Start) -> None:
    engine = start(None, max_queued=0)
    finish(engine, *_wave("", 5))
    memory = _memory(engine)
    settled(memory)
    assert memory.sizes() == (("task", 0, 0),)


def test_a_reload_leaves_running_sequences_their_drafter(tmp_path: Path, start: Start) -> None:
    """A new corpus under the same name: those that run go on with the old one, new ones see it."""
    engine = start(None)
    path = tmp_path / "task.corpus"
    answer = list(range(20, 40))
    build_corpus([([], answer)] * 4, fingerprint="f", p_min=1).save(path)
    spec = SpeculationParams("auto", 8, corpus=str(path))
    engine.submit(_request("old", [2, 3], speculation=spec, max_tokens=40))
    engine.step()
    (sequence,) = open_choices(engine, "old")
    session = sequence.session
    text = ids_of(finish(start(None), _request("w", [2, 3], max_tokens=40))["w"])
    build_corpus([([], text)] * 4, fingerprint="f", p_min=1).save(path)
    engine.controls["drafters_reload"](None)
    engine.submit(_request("new", [2, 3], speculation=spec, max_tokens=40))
    told: dict[str, list[Delta]] = {}
    while engine.has_work:
        for choice in open_choices(engine, "old"):
            assert choice.session is session
        for delta in engine.step():
            told.setdefault(delta.request_id, []).append(delta)
    accepted = {
        name: sum(n for d in deltas for s, _, n in d.counts.by_source if s == "corpus")
        for name, deltas in told.items()
    }
    assert accepted["new"] > 10 > accepted["old"]
    assert ids_of(told["new"]) == text


def test_an_adapter_that_is_unloaded_costs_no_scope_what_it_learned(tmp_path: Path) -> None:
    """Its vocabulary is gone then: layers are built, and files written, of it and of the others,
    also of answers that the worker comes to afterwards."""
    loaded = {"adapter@1": "g", "": "f"}

    def fingerprint_of(scope: str) -> str:
        if adapter_of(scope) not in loaded or current_thread() is not main_thread():
            raise ValueError("the adapter is not loaded")
        return loaded[adapter_of(scope)]

    store = TaskStore(tmp_path, fingerprint=fingerprint_of, build_share=1e9)
    scopes = [scope_of("", "", adapter) for adapter in loaded]
    ids = np.arange(5, dtype=np.int32)

    for scope in scopes:
        for output in (ids, ids + 2):
            store.learn("task", scope, None, LEARN_TOKENS, ids, output, True)
    del loaded["adapter@1"]
    settled(store)
    assert [scope for _, scope in store.poll()] == scopes
    store.learn("task", scopes[0], None, LEARN_TOKENS, ids, ids + 1, True)  # it was still open
    store.refresh()
    settled(store)
    assert [scope for _, scope in store.poll()] == scopes
    store.close()
    assert len(list(tmp_path.glob("learned-*.bin"))) == 2


@pytest.mark.parametrize("rests", [False, True])
def test_layers_that_nobody_drafts_from_are_built_seldom(store: TaskStore, rests: bool) -> None:
    """Once as much again was learned; and at once when drafts pay again. Of one output there is
    none: the next request has it without a layer."""
    built: list[int] = []

    def learn(i: int, rests: bool) -> None:
        prompt, output = np.arange(4, dtype=np.int32) + i, np.arange(5, dtype=np.int32) + i
        store.learn("task", "scope", None, 10_000, prompt, output, rests=rests)
        settled(store)
        if store.poll():
            built.append(i + 1)

    for i in range(64):
        learn(i, rests)
    assert built == ([2, 4, 8, 16, 32, 64] if rests else list(range(2, 65)))
    learn(64, rests)
    assert (built[-1] == 65) is not rests
    learn(65, False)
    assert built[-1] == 66
    store.refresh()
    settled(store)
    assert store.poll() == [("task", "scope")], "a corpus that changed is read, drafts or not"


def test_layers_are_built_when_nobody_waits_for_a_first_token(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_built(scope: str) -> bool:
        settled(store)
        return store.learned("task", scope, None, LEARN_TOKENS) is not None

    def learn(scope: str) -> None:
        ids = np.arange(5, dtype=np.int32)
        for output in (ids, ids + 1):
            store.learn("task", scope, None, LEARN_TOKENS, ids, output)

    monkeypatch.setattr(task_store, "MOST_WAIT_S", 3600.0)
    store.gives_way = True
    learn("scope")
    assert not is_built("scope")
    store.gives_way = False
    assert is_built("scope")
    monkeypatch.setattr(task_store, "MOST_WAIT_S", 0.0)  # not for ever, where somebody always waits
    store.gives_way = True
    learn("other")
    assert is_built("other")
