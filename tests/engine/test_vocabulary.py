"""Slices in the engine, looked at closely: what is loaded, verified, taken back and told.

test_lossless.py holds that `slice` is the full head restricted and `exact` the full head, in any
schedule: beside neighbours with other slices, wherever a wrong token or an end falls among those
that wait, and whoever leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from server.engine.batch import Batch, Drawn, Int32
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.engine.slices import NO_PROFILE, ExactControl
from server.types import Delta, Request, SpeculationParams, VocabularyParams
from server.wiring.engine import _warm_up as warm_up
from tests.engine.one_token_loop import one_token_loop
from tests.engine.requests import engine_over, finish, ids_of, request_of
from tests.engine.scenarios import EOS, answers, profile_of
from tests.fakes.fake_drafters import FakeDrafter, chain, oracle_drafter
from tests.fakes.fake_runner import FakeModel, FakeRunner
from vocab_store.profile import VocabProfile


def _engine(
    model: FakeModel,
    profile: VocabProfile | Mapping[str, VocabProfile],
    *,
    kind: type[FakeRunner] = FakeRunner,
    drafters: Mapping[str, FakeDrafter] | None = None,
) -> tuple[Engine, FakeRunner]:
    """profile: of every name, or by name, as the mapping has it at the time."""
    return engine_over(
        model, drafters, kind=kind, max_model_len=256, max_num_seqs=4,
        profiles=lambda name: profile if isinstance(profile, VocabProfile) else profile[name],
    )  # fmt: skip


def _request(
    prompt: tuple[int, ...], mode: Any, every: int, *, request_id: str = "r", **sampling: Any
) -> Request:
    vocabulary = VocabularyParams(mode, "p", every)
    return request_of(request_id, prompt, vocabulary=vocabulary, **{"max_tokens": 40, **sampling})


def _drain(engine: Engine, *requests: Request) -> list[Delta]:
    """Submit them, and step until all is done."""
    return [delta for told in finish(engine, *requests).values() for delta in told]


def _num_missed(deltas: list[Delta]) -> int:
    return sum(delta.vocabulary.num_missed for delta in deltas if delta.vocabulary)


def _truth(model: FakeModel, request: Request) -> list[int]:
    return one_token_loop(model, request, 0, eos=EOS, max_model_len=256, token_bytes=[]).ids


def test_a_missed_id_joins_the_slice_and_is_not_missed_again() -> None:
    model = FakeModel(24, seed=4, alphabet=3)  # ids 0, 1, 2 come again and again
    request = _request((3, 5), "exact", 4)
    engine, _ = _engine(model, profile_of(set(range(6, 24)), 24))
    deltas = _drain(engine, request)
    assert ids_of(deltas) == _truth(model, request)
    counts = [d.vocabulary for d in deltas if d.vocabulary]
    missed = {t for d in deltas for t in d.token_ids} - set(range(6, 24)) - {1, 3, 5}
    assert _num_missed(deltas) <= len(missed)
    assert counts[-1].num_ids == 19 + 2 + len(missed)
    again = _drain(engine, replace(request, request_id="again"))
    assert _num_missed(again) == 0, "the next request of the profile begins with them"


def test_one_verification_takes_every_sequence() -> None:
    model = FakeModel(24, seed=2)
    engine, runner = _engine(model, profile_of(set(range(24)), 24))
    sizes: list[int] = []

    def note_size(batch: Batch) -> None:
        if batch.draw_slice is None and batch.block_tables.shape == (1, 1):
            sizes.append(batch.num_draws)

    runner.fail = note_size
    for i in range(3):
        engine.submit(_request((3 + i, 5), "exact", 4, request_id=f"r{i}", max_tokens=13))
    _drain(engine)
    assert sizes == [12, 12, 12]


def test_beside_a_full_head_exact_draws_from_it_once_nothing_waits() -> None:
    model = FakeModel(24, seed=2)
    engine, _ = _engine(model, profile_of(set(range(24)), 24))
    engine.submit(_request((3, 5), "exact", 4, max_tokens=16))
    deltas = engine.step() + engine.step()  # the first token, one waiting
    deltas += _drain(engine, _request((7, 5), "full", 0, request_id="full", max_tokens=30))
    counts = [d.vocabulary for d in deltas if d.vocabulary]
    assert sum(v.num_verifications for v in counts) == 1
    assert sum(v.num_slice_steps for v in counts) == 4
    assert sum(v.num_full_steps for v in counts) == 12
    got = [t for d in deltas if d.request_id == "r" for t in d.token_ids]
    assert got == _truth(model, _request((3, 5), "exact", 4, max_tokens=16))


def test_text_is_released_and_published_at_verification_only() -> None:
    """The first token at once, then N tokens at a time, then what is left at the end; no block of
    the prefix cache holds a token that still may be taken back."""
    engine, _ = _engine(FakeModel(24, seed=2), profile_of(set(range(24)), 24))
    engine.submit(_request(tuple(range(2, 10)), "exact", 5, max_tokens=14))
    released: list[int] = []
    while engine.has_work:
        released += [len(delta.token_ids) for delta in engine.step()]
        assert engine.pool.num_cached <= (8 + sum(released)) // engine.info.block_size
    assert released == [1, 5, 5, 3] and engine.pool.num_cached == 5


def _loads_of(runner: FakeRunner) -> list[int]:
    """The tables that are loaded from now on, in order."""
    loads: list[int] = []
    load = runner.load_table

    def load_table(table: int, token_ids: Int32) -> None:
        loads.append(table)
        load(table, token_ids)

    runner.load_table = load_table  # type: ignore[method-assign]
    return loads


def test_a_profile_s_t_is_copied_once_and_forgotten_with_its_version() -> None:
    model = FakeModel(40, seed=3)
    profiles = {"p": profile_of({2, 3, 4}, 40), "q": profile_of({2, 3}, 40)}
    engine, runner = _engine(model, profiles)
    left = _request((5, 6), "slice", 0, request_id="left")
    engine.submit(replace(left, vocabulary=VocabularyParams("slice", "q", 0)))
    engine.abort("left")  # of its profile there is no T: p's old ones are forgotten all the same
    engine.take_deltas()
    loads = _loads_of(runner)
    for i in range(3):
        engine.submit(_request((5, 6), "slice", 0, request_id=str(i), max_tokens=4))
    _drain(engine)
    assert loads == [0] and engine.slices.index.num_loads == 4 + 2  # T once, the prompt's rows once
    assert engine.slices.index.num_hits == 4
    engine.submit(_request((5, 6), "slice", 0, request_id="old", max_tokens=9))
    engine.step()
    profiles["p"] = profile_of({2, 3, 9}, 40)
    got = _drain(engine, _request((5, 6), "slice", 0, request_id="new", max_tokens=9))
    profiles["p"] = profile_of({2, 3, 11}, 40)
    engine.submit(_request((5, 6), "slice", 0, request_id="waiting", max_tokens=9))
    profiles["p"] = profile_of({2, 3, 12}, 40)
    late = _drain(engine, _request((5, 6), "slice", 0, request_id="newest", max_tokens=9))
    assert all(set(d.token_ids) <= {1, 2, 3, 11, 5, 6} for d in late if d.request_id == "waiting")
    assert all(set(d.token_ids) <= {1, 2, 3, 12, 5, 6} for d in late if d.request_id == "newest")
    assert loads == [0, 1, 2, 3] and engine.slices.index.num_static_rows == 4
    assert all(set(d.token_ids) <= {1, 2, 3, 4, 5, 6} for d in got if d.request_id == "old")
    assert all(set(d.token_ids) <= {1, 2, 3, 9, 5, 6} for d in got if d.request_id == "new")


def test_scopes_of_which_misses_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.engine.slices._MAX_SCOPES", 2)
    engine, _ = _engine(FakeModel(24, seed=4, alphabet=3), profile_of(set(range(6, 24)), 24))
    request = _request((3, 5), "exact", 4)
    has_missed = [
        _num_missed(_drain(engine, replace(request, cache_salt=salt))) > 0 for salt in "abcba"
    ]
    assert has_missed == [True, True, True, False, True]


def test_each_mode_of_a_profile_keeps_its_t() -> None:
    engine, runner = _engine(FakeModel(40, seed=3), profile_of({2, 3, 4}, 40))
    loads = _loads_of(runner)
    for mode in ("slice", "exact", "slice", "exact"):
        _drain(engine, _request((5, 6), mode, 4, max_tokens=4))
    assert loads == [0, 1], "no request drives out what the other mode's come back to"


def test_blocks_of_drafts_that_missed_go_back_while_tokens_wait() -> None:
    wrong = FakeDrafter(lambda _, budget, depth: chain([23] * min(budget, depth)))
    profile = profile_of(set(range(24)), 24)
    engine, _ = _engine(FakeModel(24, seed=2), profile, drafters={"wrong": wrong})
    drafts, size = SpeculationParams("wrong", 20), engine.info.block_size
    engine.submit(_request((3, 5), "exact", 8, speculation=drafts))
    num_drafted = 0
    while engine.has_work:
        num_drafted += sum(delta.counts.num_drafted for delta in engine.step())
        for sequence in engine.scheduler.running:
            assert sequence.num_blocks == -(-sequence.num_tokens // size)
    assert num_drafted > 2 * size


def test_rows_are_copied_before_the_prompt_and_never_while_decoding() -> None:
    """A request's rows come in one copy, however many chunks its prompt has; decode steps of
    `slice` copy nothing, those of `exact` the missed rows only."""
    model = FakeModel(60, seed=5)
    engine, runner = _engine(model, profile_of({2, 3, 4}, 60))
    events: list[str] = []
    load, launch = runner.load_rows, runner.launch

    def load_rows(token_ids: Int32, places: Int32) -> None:
        events.append(f"load {token_ids.shape[0]}")
        load(token_ids, places)

    def launched(batch: Batch) -> None:
        events.append("prompt" if batch.positions[-1] < len(prompt) else "decode")
        launch(batch)

    runner.load_rows, runner.launch = load_rows, launched  # type: ignore[method-assign]
    prompt = tuple(Random(2).choices(range(2, 40), k=150))  # three chunks of 64 rows at most
    num_rows = len(set(prompt) - {2, 3, 4})
    _drain(engine, _request(prompt, "slice", 0, max_tokens=8))
    assert events[:4] == [f"load {num_rows}", "prompt", "prompt", "prompt"]
    assert set(events[4:]) == {"decode"}
    events.clear()
    exact = _request(prompt, "exact", 4, request_id="e", max_tokens=20)
    missed = _num_missed(_drain(engine, exact))
    assert events[0] == "prompt", "the rows are there still, nothing is copied again"
    loads = [event for event in events if event.startswith("load")]
    assert 0 < len(loads) <= missed + 1 and set(loads) == {"load 1"}


def test_ids_above_any_bound_of_a_smaller_vocabulary_are_drawn() -> None:
    """The paper's code drops ids from 128,000 on."""
    vocab = 150_000
    model = FakeModel(vocab, seed=5)
    high = {127_999, 128_000, 131_072, vocab - 1}
    engine, _ = _engine(model, profile_of(high, vocab))
    prompt = (140_000, 5)
    got = ids_of(
        _drain(engine, _request(prompt, "slice", 0, max_tokens=30, temperature=1.0, seed=1))
    )
    assert set(got) <= high | set(prompt) | set(EOS)
    assert {128_000, 131_072, vocab - 1, 140_000} <= set(got)


def test_all_choices_of_a_request_have_the_profile_that_was_there_when_it_came() -> None:
    class Vanishing(dict[str, VocabProfile]):
        """A file that is deleted behind the first look at it."""

        def __getitem__(self, name: str) -> VocabProfile:
            return self.pop(name)

    engine, _ = _engine(FakeModel(40, seed=3), Vanishing(p=profile_of({2, 3, 4}, 40)))
    got = _drain(engine, _request((5, 6), "slice", 0, max_tokens=4, num_choices=2))
    assert {d.choice_id for d in got} == {0, 1} and not any(d.error for d in got)
    assert all(set(d.token_ids) <= {1, 2, 3, 4, 5, 6} for d in got)


class Gone(dict[str, VocabProfile]):
    """Profiles whose other files are gone."""

    def __missing__(self, name: str) -> VocabProfile:
        raise FileNotFoundError(2, "No such file", f"/srv/tasks/{name}.vocab")


def test_an_engine_starts_again_without_a_profile_that_is_gone() -> None:
    engine, _ = _engine(FakeModel(80, seed=3), Gone(p=profile_of({2, 3, 4}, 80)))
    warm_up(engine, (), (("slice", "gone"), ("slice", "p")))
    assert _drain(engine, _request((5, 6), "slice", 0, max_tokens=4))[-1].finish_reason == "length"


def test_refusals() -> None:
    model = FakeModel(40)
    engine, runner = _engine(model, profile_of({2, 3}, 40))
    engine.submit(replace(_request((5,), "slice", 0), vocabulary=VocabularyParams("slice")))
    (delta,) = engine.take_deltas()
    assert delta.error_code == "invalid_value" and "the task has none" in str(delta.error)

    without, _ = _engine(model, Gone())
    without.submit(_request((5,), "exact", 0))
    (delta,) = without.take_deltas()
    assert delta.error_code == NO_PROFILE  # no code of a request's: the server is at fault
    assert delta.error is not None and "/srv" not in delta.error

    refusing = Engine(runner, {}, EngineSettings())
    refusing.submit(_request((5,), "exact", 0))
    (delta,) = refusing.take_deltas()
    assert delta.error_code == "unsupported_parameter"


def test_a_verification_that_fails_is_done_again() -> None:
    """Beside a prompt under way; smaller steps would not help it."""
    model = FakeModel(24, seed=2)
    engine, runner = _engine(model, profile_of({2, 3, 4, 5}, 24))
    left = [1]

    def fail(batch: Batch) -> None:
        if batch.block_tables.shape != (1, 1):
            return
        if runner.num_verifies == 0 and left[0]:
            left[0] -= 1
            raise MemoryError("no room")
        if any(params.sampling.seed == 13 for params in batch.params):
            raise RuntimeError("of one request always")

    runner.fail = fail
    requests = [_request((3 + i, 5), "exact", 2, request_id=f"r{i}") for i in range(2)]
    always = _request((9, 5) * 75, "exact", 2, request_id="bad", seed=13)
    results = answers(engine, *requests, always)
    assert left == [0] and engine.scheduler.max_num_batched_tokens == 64
    for request in requests:
        assert results[request.request_id, 0].ids == _truth(model, request)
    assert results["bad", 0].error_code == "engine_error", "it alone"


# -- exact's control ---------------------------------------------------------------------------


def _control(body_s: float, full_s: float, slice_s: float, share: float) -> ExactControl:
    control = ExactControl(100_000)
    for _ in range(200):
        control.observe_step(body_s, full_s, 1, 0, 0.0)
        control.observe_step(body_s, slice_s, 0, 1, 100_000 * share)
    control.add("p", int(100_000 * share), 0.01)
    return control


def _feed(control: ExactControl, miss: float, num: int = 6000) -> None:
    rng = Random(1)
    for _ in range(num):
        control.observe_checked("p", 1, rng.random() < miss)


def test_verify_every_follows_the_measured_misses() -> None:
    """Near sqrt(2 head / (miss body)), and the full head where misses make the slice slower."""
    control = _control(0.010, 0.020, 0.0002, 0.01)
    found = []
    for miss in (0.001, 0.01, 0.05):
        _feed(control, miss)
        assert control.plan("p").uses_slice
        found.append(control.plan("p").verify_every)
    assert found[0] > found[1] > found[2] > 1
    assert abs(found[1] - (2 * 0.020 / (0.01 * 0.0102)) ** 0.5) < 6
    _feed(control, 0.9)
    assert not control.plan("p").uses_slice
    _feed(control, 0.01)
    assert control.plan("p").uses_slice


def test_a_cheap_head_is_not_worth_a_slice() -> None:
    control = _control(0.050, 0.0005, 0.0004, 0.5)
    _feed(control, 0.05)
    assert not control.plan("p").uses_slice


@pytest.mark.parametrize("rows", [(1, 9), (5,)], ids=["some rows", "always as many"])
def test_a_verification_is_priced_by_its_own_seconds(rows: tuple[int, ...]) -> None:
    """It multiplies the whole head, also where a step looks at a part of it."""
    control = _control(0.010, 0.006, 0.0002, 0.01)
    _feed(control, 0.05)
    assert control.plan("p").uses_slice
    for i in range(200):
        num = rows[i % len(rows)]
        control.observe_verify(0.030 + 1e-4 * num, num, 1)
    _feed(control, 0.05)
    assert not control.plan("p").uses_slice
    costs = control.costs()
    assert costs is not None and costs.verify_s == pytest.approx(0.030, rel=0.02)
    if len(rows) > 1:
        assert costs.verify_row_s == pytest.approx(1e-4, rel=0.1)


def test_verifications_that_ends_of_others_bring_forward_do_not_pay() -> None:
    """A busy batch verifies every few steps, whatever N is: that is what a token costs there."""
    control = _control(0.010, 0.008, 0.004, 0.2)
    _feed(control, 0.01)
    assert control.plan("p").uses_slice
    for _ in range(400):
        control.observe_ends(True)
    _feed(control, 0.01)
    assert not control.plan("p").uses_slice
    for _ in range(400):  # measured whichever head is read: the way back is open
        control.observe_ends(False)
    _feed(control, 0.01)
    assert control.plan("p").uses_slice


def test_nothing_measured_means_8() -> None:
    control = ExactControl(1000)
    control.add("p", 10, None)
    assert control.costs() is None
    assert (control.plan("p").verify_every, control.plan("p").uses_slice) == (8, True)


class TimedRunner(FakeRunner):
    """A body that takes 10 ms, and a full head that takes next to nothing more than a slice."""

    head_s = 0.0021

    def wait(self) -> Drawn:
        assert self._launched is not None
        sliced = self._launched.draw_slice is not None
        return replace(super().wait(), model_s=0.010, head_s=0.002 if sliced else self.head_s)


class DearHeadRunner(TimedRunner):
    """The full head takes five times what a slice does."""

    head_s = 0.010


def test_an_exact_slice_is_filled_once_it_is_known_that_this_pays() -> None:
    """With the ids that are missed most, in their order; what is filled in is not missed."""
    model = FakeModel(24, seed=4, alphabet=3)  # ids 0, 1, 2 come again and again
    few = profile_of(set(range(6, 12)), 24)
    fill = np.array([0, 2, 4, 3, 5], np.int32)
    gains = np.array([0.3, 0.3, 0.0, 0.0, 0.0], np.float32)
    report = {"report": {"heldout": {"num_tokens": 10, "num_missed": 6}}}
    profile = VocabProfile(few.slice, fill, gains, report)
    engine, _ = _engine(model, profile, kind=DearHeadRunner)
    found = []
    for name in "abc":
        request = _request((7, 8), "exact", 4, request_id=name)
        request = replace(request, cache_salt=name)  # nothing is known of what others missed
        deltas = _drain(engine, request)
        assert ids_of(deltas) == _truth(model, request)
        first_ids = next(d.vocabulary.num_ids for d in deltas if d.vocabulary)
        found.append((first_ids, _num_missed(deltas)))
    (first, missed), *filled = found
    assert first == few.slice.num_ids and missed >= 2
    assert filled == [(first + 2, 0)] * 2


def test_the_full_head_takes_over_and_the_text_stays() -> None:
    """The head costs nothing: after some verifications every token comes from the full one."""
    model = FakeModel(24, seed=2)
    engine, _ = _engine(model, profile_of({2, 3, 4, 5}, 24), kind=TimedRunner)
    request = _request((3, 5), "exact", 0, max_tokens=120)
    deltas = _drain(engine, request)
    assert ids_of(deltas) == _truth(model, request)
    last = [d.vocabulary for d in deltas if d.vocabulary][-10:]
    assert all(v.num_full_steps == 1 and v.num_slice_steps == 0 for v in last)
    costs = engine.slices.control.costs()
    assert costs is not None and costs.early_end == 0.0
    _drain(engine, replace(request, request_id="next"))
    costs = engine.slices.control.costs()
    assert costs is not None and costs.early_end > 0.0, "the first has left"


def test_a_step_of_several_tokens_is_known_as_one() -> None:
    """So that N tokens are N / tokens-per-step steps where drafts come true."""
    model, drafts = FakeModel(24, seed=2), SpeculationParams("oracle", 4)
    request = _request((3, 5), "exact", 4, speculation=drafts)
    drafter = oracle_drafter([[3, 5, *_truth(model, request)]])
    profile = profile_of(set(range(24)), 24)
    engine, _ = _engine(model, profile, drafters={"oracle": drafter})
    engine.submit(request)
    engine.step()
    (head,) = (sequence.head for sequence in engine.scheduler.running)
    _drain(engine)
    assert head is not None and engine.slices.control.plan(head.key).tokens_per_step > 1.5
