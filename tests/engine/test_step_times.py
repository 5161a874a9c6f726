"""Seconds of a step: the table, what served steps make of it, and the host's part. How far and how
soon a table moves is held by test_gain_constants.py."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.step_times import BESIDE, OPENING, CostTable, HostTimes, row_grid


def _line(first: float, per_row: float, jump: float = 0.0) -> CostTable:
    rows = row_grid(512)
    return CostTable(rows, [first + per_row * (r - 1) + (jump if r > 1 else 0.0) for r in rows])


def test_the_grid_begins_with_every_small_count_and_ends_at_the_last() -> None:
    assert row_grid(1) == [1]
    assert row_grid(512)[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    grid = row_grid(500)
    assert grid[-1] == 500 and all(a < b for a, b in pairwise(grid))
    assert len(grid) < 50


@given(st.floats(0.0, 40.0), st.floats(0.0, 1e5))
def test_a_cost_lies_on_the_line_between_measured_row_counts(rows: float, keys: float) -> None:
    """Where that never falls: what was measured above a larger step was disturbed."""
    table = CostTable([1, 2, 4, 8, 24], [1.0, 3.0, 9.0, 5.0, 8.0], key_s=0.25)
    assert table.curve[1].tolist() == [1.0, 3.0, 5.0, 5.0, 8.0]
    for _ in range(2):
        counts, seconds, *_ = table.curve
        expected = float(np.interp(rows, counts, seconds)) if rows >= 1.0 else 0.0
        expected *= max(1.0, rows / 24.0)
        assert table.cost(rows, keys) == pytest.approx(expected + 0.25 * keys)
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
    assert table.cost(100) < 1.25 * before


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


def test_a_first_row_that_a_busy_machine_made_slow_is_corrected() -> None:
    table = CostTable([1, 2, 4, 8, 16], [1.0, 1e-9, 1e-9, 1e-9, 0.02])
    for _ in range(200):
        table.observe(1, 0.0, 0.005)
        table.observe(16, 0.0, 0.03)
    assert table.cost(1) < 0.02 and table.cost(16) == pytest.approx(0.03, rel=0.5)


def test_the_host_s_seconds_are_told_apart_by_choices_and_asks() -> None:
    times, rng = HostTimes(3e-3), np.random.default_rng(2)
    for i in range(600):
        num, asked = (1, 4, 8)[i % 3], (0, i % 4)[i % 2]
        true_s = 1e-4 + 2e-5 * num + (2e-4 if asked else 0.0) + 1e-4 * asked
        disturbed = 20.0 if i % 50 == 7 else 1.0
        times.observe(num, asked, disturbed * true_s * math.exp(0.2 * rng.standard_normal()))
    assert times.plain(8) == pytest.approx(2.6e-4, rel=0.5)
    assert times.asking(2) == pytest.approx(4e-4, rel=0.6)
    assert times.numbers[BESIDE] == 0.0
    for i in range(200):
        times.observe(1, 0, times.plain(1), 30 * (i % 2))
    assert times.numbers[BESIDE] == pytest.approx(15.0, rel=0.1)
    asking_s = times.asking(2)
    for i in range(200):  # of two that are asked one is new
        true_s = times.plain(1) + asking_s + 2e-3 * (i % 2)
        times.observe(1, 2, true_s * math.exp(0.2 * rng.standard_normal()), num_opened=i % 2)
    assert times.numbers[OPENING] == pytest.approx(2e-3, rel=0.4)
    assert times.asking(2) == pytest.approx(asking_s, rel=0.4)
