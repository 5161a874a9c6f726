"""Whether drafting pays as a whole: what is measured, who rests, and that rests change no text."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from server.engine.budget import CostTable, DraftBudget
from server.engine.draft_record import DraftRecord
from server.engine.draft_worth import (
    NUM_CLASSES,
    DraftWorth,
    HostTimes,
    WorthBook,
    WorthCell,
    class_of,
    who_rests,
)
from server.engine.forecast import ServedBy, forecast
from server.engine.host_cost import HostCost, HostCosts
from server.engine.settings import EngineSettings
from server.types import Request, SamplingParams, SpeculationParams, StepCounts
from tests.engine.scenarios import (
    compare,
    drive,
    make_drafter,
    make_engine,
    random_workload,
    verifying_every,
    with_own_logits,
    with_slices,
)
from tests.engine.test_forecast import RECORDINGS, TEXTS
from tests.fakes.fake_drafters import oracle_drafter
from tests.profiles import examples

PLAIN = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def test_numbers_of_choices_have_classes() -> None:
    assert [class_of(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 33)] == [0, 1, 2, 2, 3, 3, 4, 4, 6]
    assert class_of(10_000) == NUM_CLASSES - 1


def test_host_times_follow_steps_and_outliers_count_little() -> None:
    times = HostTimes()
    assert times.extra(8) == times.plain(8) == 0.0
    times.observe(8, True, 1e-3)
    assert times.extra(8) == pytest.approx(0.7e-3)  # what a plain step takes is not known yet
    times.observe(8, False, 0.4e-3)
    assert times.extra(8) == pytest.approx(0.6e-3, rel=0.2)
    for _ in range(200):
        times.observe(8, True, 1.2e-3)
        times.observe(8, False, 0.4e-3)
    assert times.extra(8) == pytest.approx(0.8e-3, rel=0.05)
    assert times.extra(3) == 0.0, "nothing is known of three choices"
    times.observe(3, False, 0.2e-3)  # ... but drafts cost three times as much elsewhere
    assert times.extra(3) == pytest.approx(0.4e-3, rel=0.1)
    before = times.extra(8)
    times.observe(8, True, 5.0)
    assert times.extra(8) < 1.3 * before
    times.observe(8, True, 0.0)  # a clock that stood still says nothing


def _asks(cell: WorthCell, num: int, accepted: float, rng: Random) -> None:
    for _ in range(num):
        cell.observe(1, int(rng.random() < accepted))


def _steps(cell: WorthCell, num: int, accepted: float, rng: Random) -> list[bool]:
    """Whether eight choices rested, in each of so many steps. Asking one costs 0.2 tokens."""
    rested = []
    for _ in range(num):
        rests = who_rests([cell] * 8, lambda nodes: 0.05 * nodes, 0.15)
        assert len(set(rests)) == 1
        rested.append(rests[0])
        if not rests[0]:
            _asks(cell, 8, accepted, rng)
    return rested


def test_a_scope_that_earns_less_than_it_costs_rests_and_is_tried_rarely() -> None:
    rested = _steps(WorthCell(), 1000, 0.05, Random(1))
    first = rested.index(True)
    assert 1 <= first <= 4 and all(rested[first : first + WorthCell.FIRST_REST])
    assert sum(not r for r in rested) < 24, "what is clear is asked once in a trial"
    assert not all(rested[-(WorthCell.LAST_REST + 8) :]), "it must be tried now and then"


def test_a_scope_begins_with_a_rest_where_a_node_of_even_chance_would_not_pay() -> None:
    for per_node, begins in ((0.3, True), (0.6, False)):
        cell = WorthCell()
        rests = [who_rests([cell] * 8, lambda n, c=per_node: c * n, 0.1)[0] for _ in range(100)]
        assert rests[0] is not begins
        if not begins:
            assert rests.index(False) == 2 * WorthCell.FIRST_REST, "then it is tried"
    assert who_rests([WorthCell()], lambda _: 1.0, 1.0) == [False], "a choice alone is tried"
    assert who_rests([], lambda _: 1.0, 1.0) == []


def test_a_new_number_of_choices_begins_with_what_the_nearest_brought() -> None:
    worth, rng = DraftWorth(), Random(11)
    assert worth.at(8).is_new and worth.at(8) is worth.cells[3]
    _asks(worth.at(8), 100, 0.02, rng)
    near = worth.at(3)
    assert not near.is_new and 0 < near.num_asks < 0.3 * worth.at(8).num_asks
    assert near.accepted_per_ask == pytest.approx(worth.at(8).accepted_per_ask)
    asked = 0
    while not who_rests([near] * 3, lambda nodes: 0.1 * nodes, 0.2)[0]:
        _asks(near, 3, 0.02, rng)
        asked += 3
    assert WorthCell.FEW_ASKS <= asked < 2 * WorthCell.FEW_ASKS


def test_a_scope_that_earns_more_is_always_asked() -> None:
    assert not any(_steps(WorthCell(), 1000, 0.5, Random(1)))


def test_what_becomes_better_is_found_out_and_what_becomes_worse_too() -> None:
    cell, rng = WorthCell(), Random(3)
    _steps(cell, 300, 0.02, rng)
    rested = _steps(cell, 700, 0.6, rng)
    assert not any(rested[WorthCell.LAST_REST + 16 :])
    rested = _steps(cell, 300, 0.02, rng)
    assert sum(rested) > 180


def test_nobody_s_drafts_depend_on_what_another_scope_s_have_brought() -> None:
    good, bad, rng = WorthCell(), WorthCell(), Random(5)
    seen = set()
    for _ in range(200):
        rests = who_rests([good, bad, None, bad], lambda nodes: 0.05 * nodes, 0.15)
        assert not rests[0] and not rests[2] and rests[1] == rests[3]
        seen.add(rests[1])
        _asks(good, 1, 0.7, rng)
        if not rests[1]:
            _asks(bad, 2, 0.05, rng)
    assert seen == {False, True}


def test_a_rest_holds_at_its_number_of_choices() -> None:
    """Eight choices of short steps: drafts do not pay. One: they do, by the same record."""
    budget = DraftBudget(CostTable([1, 2, 8, 16], [4e-3, 4.1e-3, 5e-3, 7e-3]))
    worth, rng = DraftWorth(), Random(7)
    records = [DraftRecord(worth) for _ in range(8)]
    assert budget.who_rests(records[:1], 1, 0.0) == [False]
    for num in (8, 1):
        for _ in range(50):
            rests = budget.who_rests(records[:num], num, 0.0)
            budget.host.observe(num, not all(rests), 0.2e-3 if all(rests) else 0.3e-3 + num * 1e-4)
            for record, is_resting in zip(records, rests, strict=False):
                if not is_resting:
                    record.observe(0.3, int(rng.random() < 0.2), 1)
    assert [cell.is_resting for cell in worth.cells[:4]] == [False, False, False, True]
    assert DraftRecord(worth).rests_at(8) and not DraftRecord(worth).rests_at(1)
    assert DraftBudget().who_rests(records, 8, 0.0) == [False] * 8  # costs are not known


def test_the_book_forgets_the_scope_used_longest_ago() -> None:
    book = WorthBook(2)
    first, second = book.of("a"), book.of("b")
    assert book.of("a") is first
    book.of("c")
    assert book.of("a") is first and book.of("b") is not second


@pytest.mark.parametrize("extra_s", [0.0, 60.0])
def test_the_forecast_rests_as_the_engine_does(extra_s: float) -> None:
    """A host that takes too long for drafts to pay, though every node is accepted: the forecast
    does not fall far below 1."""
    recordings = RECORDINGS * 12
    host = HostCosts(HostCost(1.0, 0.1, 0.0), HostCost(1.0 + extra_s, 0.1 + 40 * extra_s, 0.0))
    rows = [1, 2, 4, 8, 16, 32]
    served_by = ServedBy(CostTable(rows, [100.0 + r for r in rows]), host=host)
    found = forecast(
        oracle_drafter(TEXTS), recordings, served_by, max_draft_tokens=1, num_streams=8
    )
    if extra_s:
        assert found.tokens_per_step < 1.6, "they still draft"
    else:
        assert found.speedup > 1.5


@settings(max_examples=examples(400), deadline=None, print_blob=True)
@given(st.integers(0, 2**48), st.integers(0, 5))
def test_rests_change_no_text_and_sessions_are_told_what_they_missed(seed: int, kind: int) -> None:
    """Choices rest and are asked again at random, beside slices, rollbacks, forks, preemption."""
    rng = Random(seed)
    work = random_workload(rng)
    if kind == 1:
        work = with_own_logits(work, rng)
    elif kind == 2:
        work = verifying_every(work, rng, 1 + seed % 6)
    elif kind == 3:
        work = with_slices(work, rng, ("exact", "slice", "full"))
    note(f"{work}")
    expected = work.expected()
    drafter = make_drafter(work, expected)
    engine, _ = make_engine(work, drafter)
    engine.planner.who_rests = lambda records, _: [  # type: ignore[method-assign]
        rng.random() < 0.6 for _ in records
    ]
    num_missed = 0

    def each_step(_: int) -> None:
        nonlocal num_missed
        for sequence in engine.scheduler.running:
            if sequence.session is None:
                continue
            known = sequence.num_output if not sequence.is_resting else sequence.num_told
            num_missed += sequence.num_output - sequence.num_told
            assert sequence.session.checkpoint() == sequence.num_told == known

    compare(work, expected, drive(work, engine, each_step))
    assert engine.num_failed_steps == 0 and engine.num_open == 0
    assert drafter.num_open == 0
    if work.drafter != "broken":
        assert engine.num_drafter_errors == 0


def test_of_many_choices_on_trial_few_are_asked_and_all_once_it_pays() -> None:
    cell = WorthCell()
    asked = []
    for _ in range(6):
        rests = who_rests([cell] * 32, lambda nodes: 0.05 * nodes, 0.1)
        asked.append(rests.count(False))
        for _ in range(asked[-1]):
            cell.observe(1, 1)
    assert asked == [WorthCell.FEW_ASKS] * 4 + [32] * 2
    other = WorthCell()
    rests = who_rests([None, *[other] * 20, cell], lambda nodes: 0.05 * nodes, 0.1)
    assert not rests[0] and not rests[-1], "of each scope as many as it needs"
    assert rests.count(False) == 2 + WorthCell.FEW_ASKS


def test_a_trial_goes_on_where_better_trees_might_pay_and_ends_where_none_could() -> None:
    """Trees with useless nodes: what is accepted does not pay for them, and would without them."""
    for ask_cost, goes_on in ((0.1, True), (0.6, False)):
        cell = WorthCell()
        who_rests([cell] * 8, lambda nodes: 0.25 * nodes, ask_cost)
        for i in range(8):
            cell.observe(3, i % 2)
        assert who_rests([cell] * 8, lambda nodes: 0.25 * nodes, ask_cost)[0] is not goes_on


def test_a_token_saves_little_where_prompts_come_all_the_time() -> None:
    """The steps are taken for the prompts: a token less to decode saves its row."""
    table = CostTable([1, 2, 8, 16, 32], [4e-3, 4.1e-3, 5e-3, 7e-3, 11e-3])
    chances = [np.array([0.9, 0.5, 0.45])] * 4
    quiet, busy = DraftBudget(table), DraftBudget(table)
    for _ in range(100):
        quiet.host.observe_mix(False)
        busy.host.observe_mix(True)
    assert quiet.host.mixed == 0.0 and busy.host.mixed > 0.98
    assert sum(quiet.choose(chances, 4, 4, 0.0, 99)) > sum(busy.choose(chances, 4, 4, 0.0, 99))
    quiet.observe_proposing(1e-3, 4)
    busy.observe_proposing(1e-3, 4)
    assert busy.price(4, 0.0) > 2 * quiet.price(4, 0.0) > 0


def test_likely_ids_are_a_part_of_what_drafts_cost() -> None:
    rows, seconds = [1, 2, 8, 16, 32], [4e-3, 4.1e-3, 5e-3, 7e-3, 11e-3]
    free = DraftBudget(CostTable(rows, seconds))
    dear = DraftBudget(CostTable(rows, seconds, likely_s=1e-3))
    chances = [np.array([0.9, 0.4, 0.2])] * 8
    assert sum(free.choose(chances, 8, 8, 0.0, 99)) > sum(dear.choose(chances, 8, 8, 0.0, 99))
    assert dear.price(8, 0.0) > free.price(8, 0.0) == 0.0
    plain = dear.cost.as_dict() if dear.cost else {}
    assert CostTable.from_dict(plain).likely_s == 1e-3
    del plain["likely_s"]
    assert CostTable.from_dict(plain).likely_s == 0.0


def _eight_choices(dear: bool) -> tuple[list[StepCounts], int, dict[str, list[int]]]:
    """Eight equal answers of 40 tokens, drafts of a scope that begins with a rest: the counts of
    every Delta, how often it was asked who rests, and the texts."""
    work = random_workload(Random(0))
    work.num_blocks, work.max_model_len, work.drafter = 400, 96, "oracle"
    spec = SpeculationParams("oracle", 4)
    work.requests = [
        (0, Request(str(i), "task", "fake", (3 + i, 4, 5), PLAIN, spec), None) for i in range(8)
    ]
    work.cost = CostTable([1, 8, 16], [1.0, 8.0, 16.0]) if dear else CostTable([1, 16], [1.0, 1.0])
    work.settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=64, max_draft_rows=64)
    engine, _ = make_engine(work, make_drafter(work, work.expected()))
    asked, who = 0, engine.planner.who_rests

    def counted(*arguments: Any) -> list[bool]:
        nonlocal asked
        asked += 1
        return who(*arguments)

    engine.planner.who_rests = counted  # type: ignore[method-assign]
    for _, request, _ in work.requests:
        engine.submit(request)
    counts: list[StepCounts] = []
    texts: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            counts.append(delta.counts)
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
    return counts, asked, texts


def test_who_rests_is_not_looked_at_in_every_step() -> None:
    counts, asked, texts = _eight_choices(dear=True)
    assert sum(c.num_steps for c in counts) == 8 * 40, "nobody drafted"
    assert asked <= 6, "one look for each rest, not one for each step"
    reasons = Counter(c.no_draft_reason for c in counts)
    assert reasons["length"] == 8 and reasons["budget"] >= 8 * 38
    cheap, _, same = _eight_choices(dear=False)
    assert same == texts and sum(c.num_accepted for c in cheap) > 100
