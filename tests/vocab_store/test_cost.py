"""The cost model against brute force and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from vocab_store.cost import (
    HeadCosts,
    best_fill,
    best_verify_every,
    exact_cost_s,
    full_cost_s,
)

seconds = st.floats(1e-4, 1.0)


def by_enumeration(miss: float, every: int) -> float:
    """Sum over where the first miss falls."""
    total = every * (1 - miss) ** every
    for j in range(every):
        total += (j + 1) * (1 - miss) ** j * miss
    return total


@pytest.mark.parametrize(("early_end", "seed"), [(0.0, 5), (0.2, 6)])
def test_exact_cost_is_what_a_simulation_of_verifications_spends(
    early_end: float, seed: int
) -> None:
    """early_end: the chance that the end of another choice brings a verification forward."""
    rng = np.random.default_rng(seed)
    costs = HeadCosts(
        0.018, 0.020, 1000, slice_fixed_s=0.001, verify_s=0.025, verify_row_s=0.0005,
        early_end=early_end,
    )  # fmt: skip
    miss, every, num_ids = 0.03, 24, 100
    ends = rng.geometric(early_end, 40_000) if early_end else np.full(40_000, every)
    runs = np.minimum(every, ends)
    spent = runs * (0.018 + 0.001 + 0.020 * num_ids / 1000 + 0.0005) + 0.025
    tokens = np.minimum(runs, rng.geometric(miss, 40_000))
    found = exact_cost_s(costs, num_ids, miss, every)
    assert found == pytest.approx(spent.sum() / tokens.sum(), rel=0.008)
    best, cost = best_verify_every(costs, num_ids, miss)
    assert cost == pytest.approx(exact_cost_s(costs, num_ids, miss, best), rel=1e-9)
    plain = HeadCosts(0.018, 0.020, 1000, verify_s=0.025)
    assert cost > best_verify_every(plain, num_ids, miss)[1]


@settings(max_examples=examples(300))
@given(seconds, seconds, st.floats(0, 1), st.integers(0, 1000), st.integers(1, 30))
@example(0.018, 0.020, 0.0, 10, 64)  # without misses the largest
@example(0.018, 0.020, 1.0, 10, 64)
def test_best_verify_every_is_the_cheapest_of_all(
    body_s: float, full_s: float, miss: float, num_ids: int, max_verify_every: int
) -> None:
    costs = HeadCosts(body_s, full_s, 1000)
    every, cost = best_verify_every(costs, num_ids, miss, max_verify_every)
    prices = [
        (enumerated_cost_s(costs, num_ids, miss, n), n) for n in range(1, max_verify_every + 1)
    ]
    assert 1 <= every <= max_verify_every
    assert cost == pytest.approx(min(prices)[0], rel=1e-9)
    assert cost == pytest.approx(exact_cost_s(costs, num_ids, miss, every), rel=1e-9)


@settings(max_examples=examples(300))
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 64))
def test_every_pair_of_chances_has_a_cost(miss: float, early_end: float, every: int) -> None:
    """No rounding carries the two out of 0..1 together: an engine would stop over it."""
    costs = HeadCosts(0.018, 0.020, 1000, early_end=early_end)
    cost = exact_cost_s(costs, 100, miss, every)
    assert full_cost_s(costs) * 0.4 < cost < math.inf
    assert best_verify_every(costs, 100, miss, every)[1] <= cost * (1 + 1e-12)


def enumerated_cost_s(costs: HeadCosts, num_ids: float, miss: float, every: int) -> float:
    """The cost from its definition alone."""
    step = costs.body_s + costs.full_s * num_ids / costs.vocab_size
    return (every * step + costs.full_s) / by_enumeration(miss, every)


@settings(max_examples=examples(300))
@given(
    st.lists(st.floats(0, 0.05), max_size=25),
    st.floats(0, 0.4),
    seconds,
    seconds,
    st.integers(1, 12),
)
@example([0.0, 0.0, 0.049], 0.05, 0.018, 0.020, 12)  # the useful one comes last
def test_best_fill_is_the_cheapest_prefix(
    gains: list[float], miss: float, body_s: float, full_s: float, max_verify_every: int
) -> None:
    costs = HeadCosts(body_s, full_s, 200)
    num_fill, cost_s = best_fill(
        costs, 20, miss, gains, num_dynamic=3.5, max_verify_every=max_verify_every
    )
    prices = []
    for count in range(len(gains) + 1):
        left = min(1.0, max(0.0, miss - sum(gains[:count])))
        for every in range(1, max_verify_every + 1):
            prices.append(enumerated_cost_s(costs, 20 + 3.5 + count, left, every))
    assert cost_s == pytest.approx(min(prices), rel=1e-7)
    assert full_cost_s(costs) == pytest.approx(body_s + full_s)
    left = min(1.0, max(0.0, miss - sum(gains[:num_fill])))
    _, again = best_verify_every(costs, 20 + num_fill + 3.5, left, max_verify_every)
    assert cost_s == pytest.approx(again, rel=1e-9)
