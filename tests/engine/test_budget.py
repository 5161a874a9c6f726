"""The draft budget: the cost table, what is chosen, trust and cool-down."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.budget import NEAR_BEST, CostTable, DraftBudget, row_grid
from server.engine.draft_record import DraftRecord


def _line(first: float, per_row: float, jump: float = 0.0) -> CostTable:
    rows = row_grid(512)
    return CostTable(rows, [first + per_row * (r - 1) + (jump if r > 1 else 0.0) for r in rows])


def test_the_grid_begins_with_every_small_count_and_ends_at_the_last() -> None:
    assert row_grid(1) == [1]
    assert row_grid(512)[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    grid = row_grid(500)
    assert grid[-1] == 500 and all(a < b for a, b in pairwise(grid))
    assert len(grid) < 50


def test_cost_interpolates_keeps_the_jump_never_falls_and_extrapolates() -> None:
    table = CostTable([1, 2, 4, 8], [1.0, 3.0, 9.0, 5.0], key_s=0.1)
    assert table.cost(1) == 1.0 and table.cost(2) == 3.0
    assert table.cost(3) == 4.0
    assert table.cost(4) == 5.0  # measured above a larger step: disturbed
    assert table.cost(16) == pytest.approx(10.0)
    assert table.cost(1, keys=10) == pytest.approx(2.0)


@given(st.floats(0.0, 40.0), st.floats(0.0, 1e5))
def test_one_row_count_costs_what_an_array_of_them_says(rows: float, keys: float) -> None:
    table = CostTable([1, 2, 4, 8, 24], [1.0, 3.0, 9.0, 5.0, 8.0], key_s=0.25)
    for _ in range(2):
        expected = float(table.costs(np.array([rows]))[0]) + 0.25 * keys
        assert table.cost(rows, keys) == pytest.approx(expected)
        table.observe(6, 0.0, 7.0)


def test_rows_within_is_the_inverse_of_cost() -> None:
    table = _line(0.01, 0.001)
    for rows in (1, 2, 5, 40, 300, 900):
        assert abs(table.rows_within(table.cost(rows) + 1e-9) - rows) <= 1
    assert table.rows_within(0.0) == 1


def test_observed_steps_move_the_table_and_outliers_only_a_little() -> None:
    table = _line(0.01, 0.001)
    for _ in range(300):
        table.observe(3, 0, 0.02)
    assert table.cost(3) == pytest.approx(0.02, rel=0.05)
    assert 0.01 < table.cost(1) <= table.cost(3) <= table.cost(4)
    before = table.cost(100)
    table.observe(100, 0, 50.0)
    assert table.cost(100) < 1.2 * before


def test_measure_finds_the_slope_over_keys_and_stops_at_slow_steps() -> None:
    calls: list[int] = []

    def prober(rows: int, kv_len: int) -> float:
        calls.append(rows)
        return 0.01 + 0.001 * rows + 1e-6 * rows * kv_len

    table = CostTable.measure(prober, 512, limit_s=0.1)
    assert table.key_s == pytest.approx(1e-6)
    assert table.cost(5, 5 * 300) == pytest.approx(prober(5, 300))
    assert max(calls) < 130
    assert CostTable.from_dict(table.as_dict()).cost(77) == table.cost(77)


def test_measure_is_not_misled_by_a_neighbour_for_a_while() -> None:
    calls = 0

    def prober(rows: int, kv_len: int) -> float:
        nonlocal calls
        calls += 1
        return (0.3 if 3 <= calls < 10 else 0.0) + 0.01 + 0.0005 * rows

    table = CostTable.measure(prober, 64)
    for rows in (1, 2, 4, 8, 16):
        assert table.cost(rows) == pytest.approx(0.01 + 0.0005 * rows)


def test_measure_goes_to_8_rows_however_slow_the_machine() -> None:
    table = CostTable.measure(lambda rows, kv_len: 2.0 + 0.1 * rows, 128)
    assert table.cost(8) == pytest.approx(2.8)  # and not 8 times what 1 row costs
    assert table.cost(16) == pytest.approx(5.6)


@pytest.mark.parametrize(
    ("rows", "seconds"), [([1, 2], [1.0]), ([2], [1.0]), ([1, 1], [1.0, 1.0]), ([1], [0.0])]
)
def test_a_damaged_table_is_refused(rows: list[int], seconds: list[float]) -> None:
    with pytest.raises(ValueError):
        CostTable(rows, seconds)


def _brute_force(
    survivals: list[list[float]], num_draws: int, cost: CostTable, host_s: float
) -> float:
    """The best tokens per second over every way to keep a prefix of each ranked tree."""
    best = 0.0
    for sizes in product(*(range(len(s) + 1) for s in survivals)):
        gain = sum(sum(s[:n]) for s, n in zip(survivals, sizes, strict=True))
        best = max(best, (num_draws + gain) / (cost.cost(num_draws + sum(sizes)) + host_s))
    return best


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1, width=32), max_size=4), min_size=1, max_size=3),
    st.floats(0.0, 0.02),
    st.floats(0.0, 0.02),
)
def test_the_choice_is_the_best_rate_of_all_choices(
    trees: list[list[float]], per_row: float, jump: float
) -> None:
    survivals = [sorted(t, reverse=True) for t in trees]
    cost = _line(0.01, per_row, jump)
    budget = DraftBudget(cost, host_s=0.001)
    arrays = [np.asarray(s, np.float64) for s in survivals]
    kept = budget.choose(arrays, len(trees), len(trees), 0.0, 100)
    gain = sum(sum(s[:n]) for s, n in zip(survivals, kept, strict=True))
    rate = (len(trees) + gain) / (cost.cost(len(trees) + sum(kept)) + 0.001)
    near = NEAR_BEST if len(trees) > 1 else 1.0
    assert rate >= near * _brute_force(survivals, len(trees), cost, 0.001) * (1 - 1e-9)


def test_free_rows_are_all_taken_and_dear_rows_none() -> None:
    nodes = [np.full(8, 0.3)]
    assert DraftBudget(_line(0.01, 0.0)).choose(nodes, 1, 1, 0.0, 100) == [8]
    assert DraftBudget(_line(0.01, 0.01)).choose(nodes, 1, 1, 0.0, 100) == [0]
    assert DraftBudget(_line(0.01, 0.011)).ceiling(1, 1, 0.0, 100) == 0
    assert DraftBudget(_line(0.01, 0.0)).ceiling(1, 1, 0.0, 100) == 100
    assert DraftBudget(None).choose(nodes, 1, 1, 0.0, 5) == [5]


def test_long_histories_make_nodes_dearer() -> None:
    rows = row_grid(64)
    cost = CostTable(rows, [0.01] * len(rows), key_s=1e-5)
    nodes = [np.full(16, 0.5)]
    budget = DraftBudget(cost)
    assert budget.choose(nodes, 1, 1, 10.0, 64)[0] > budget.choose(nodes, 1, 1, 5000.0, 64)[0]


def test_a_prefill_in_the_batch_does_not_make_nodes_look_cheap() -> None:
    cost = _line(0.01, 0.004)
    nodes = [np.full(8, 0.35)]
    budget = DraftBudget(cost)
    alone = budget.choose(nodes, 1, 1, 0.0, 100)[0]
    beside_prefill = budget.choose(nodes, 1, 300, 0.0, 100)[0]
    assert alone == 0
    assert beside_prefill == 0  # (1 + 8 * .35) / cost(308) alone would say yes


def test_the_likeliest_nodes_of_all_sequences_win() -> None:
    trees = [np.array([0.9, 0.2]), np.array([0.8, 0.7]), np.array([0.1])]
    assert DraftBudget(None).choose(trees, 3, 3, 0.0, 3) == [1, 2, 0]


def test_load_shrinks_the_budget() -> None:
    """Rows that are nearly free up to 16, then cost: more sequences leave less for drafts."""
    rows = row_grid(256)
    cost = CostTable(rows, [0.02 + 0.002 * max(0, r - 16) for r in rows])
    budget = DraftBudget(cost)
    per_sequence = []
    for num in (1, 4, 16, 64):
        kept = budget.choose([np.array([0.7, 0.5, 0.3, 0.2])] * num, num, num, 0.0, 1000)
        per_sequence.append(sum(kept) / num)
    assert per_sequence == sorted(per_sequence, reverse=True)
    assert per_sequence[0] == 4 and per_sequence[-1] < 2


def test_trust_falls_with_misses_and_old_misses_fade() -> None:
    record = DraftRecord()
    assert record.trust == 1.0
    record.observe(10.0, 0)
    low = record.trust
    assert low < 0.2
    for _ in range(100):
        record.decay()
    assert record.trust > 0.9
    record.observe(1.0, 8)
    assert record.trust == 1.0


def test_cooldown_doubles_probes_and_ends_with_a_hit() -> None:
    record = DraftRecord()
    for _ in range(int(DraftRecord.PATIENCE)):
        assert record.allowance() > 100
        record.observe(1.0, 0)
    pauses = []
    for _ in range(6):
        steps = 0
        while (allowed := record.allowance()) == 0:
            steps += 1
        assert allowed == DraftRecord.PROBE_NODES
        pauses.append(steps)
        record.observe(1.0, 0)
    assert pauses == [4, 8, 16, 32, 64, 64]
    while record.allowance() == 0:
        pass
    record.observe(1.0, 1)
    assert record.allowance() > 100
    assert record.allowance() > 100, "it sits out no more"


def test_drafts_that_claim_little_may_miss_more_often_before_a_sequence_cools_down() -> None:
    record = DraftRecord()
    for _ in range(int(5 * DraftRecord.PATIENCE) - 1):
        assert record.allowance() > 100
        record.observe(0.6, 0, num_nodes=3)  # each node is right one time in five, so they say
    record.observe(0.9 * 10, 0, num_nodes=10)
    assert record.allowance() == 0


def test_a_sequence_whose_proposals_are_not_worth_asking_for_is_asked_rarely() -> None:
    record, num_asked = DraftRecord(), 0
    for _ in range(400):
        if record.allowance():
            num_asked += 1
            record.record_value(0.0, price=0.05)
    assert 400 / (DraftRecord.LAST_REST + 1) - 2 < num_asked < 45
    while not record.allowance():
        pass
    record.record_value(1.0, price=0.05)  # it begins to repeat itself: asked at every step again
    for _ in range(20):
        assert record.allowance() > 0
        record.record_value(0.2, price=0.05)


def test_nobody_rests_where_asking_costs_next_to_nothing() -> None:
    record = DraftRecord()
    for step in range(200):
        assert record.allowance() > 0
        record.record_value(0.3 if step % 16 == 0 else 0.0, price=0.001)


def test_the_price_of_asking_grows_with_the_sequences_that_wait_for_it() -> None:
    budget = DraftBudget(_line(0.015, 0.001))
    assert budget.price(1, 0.0) == 0.0
    for _ in range(500):
        budget.observe_proposing(32 * 60e-6, 32)
    assert budget.price(1, 0.0) == pytest.approx(60e-6 / 0.015, rel=0.01)
    assert budget.price(32, 0.0) == pytest.approx(60e-6 * 32 / 0.046, rel=0.01)
    assert DraftBudget().price(32, 0.0) == 0.0  # costs are not known: nobody rests


def test_a_value_is_what_the_kept_nodes_promise_less_their_rows() -> None:
    budget = DraftBudget(_line(0.015, 0.001))  # 1 row 15 ms, each more 1 ms: a 15th of a token
    trees = [np.array([0.9, 0.1, 0.5]), np.array([0.4]), np.array([0.2])]
    values = budget.values(trees, [2, 1, 0], 1, 1, 0.0)
    assert values == pytest.approx([0.9 + 0.5 - 2 / 15, 0.4 - 1 / 15, 0.0])


def test_of_choices_that_are_worth_the_same_the_one_with_fewest_nodes_is_taken() -> None:
    """A node that never is accepted adds nothing; where its row is free too, it is still a row."""
    free_to_8 = CostTable([1, 8, 16], [0.01, 0.01, 0.1])
    hopeless = [np.zeros(6)]
    for budget in (DraftBudget(free_to_8), DraftBudget(free_to_8, host_s=0.01)):
        assert budget.choose(hopeless, 1, 1, 0.0, 100) == [0]
        assert budget.choose([np.array([0.5, 0.0, 0.0])], 1, 1, 0.0, 100) == [1]
        assert budget.choose(hopeless, 1, 4, 0.0, 100) == [0], "beside a prefill, too"


def test_a_rest_begins_short_again_after_a_worthwhile_proposal() -> None:
    record = DraftRecord()

    def rest() -> int:
        """Steps until it is asked again."""
        steps = 0
        while not record.allowance():
            steps += 1
        return steps

    for _ in range(40):  # worth nothing: rests grow to the longest
        record.record_value(0.0, price=0.1)
        longest = rest()
    assert longest == DraftRecord.LAST_REST
    record.record_value(1.0, price=0.1)
    assert rest() == 0
    steps = 0
    while not (found := rest()):  # and worth nothing again, until it rests
        record.record_value(0.0, price=0.1)
        steps += 1
    assert found == 2 and steps > 1, "what was learned before is forgotten"
