"""Ratios are paired, their interval covers the truth as often as it says, order does not matter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.figures import median_interval, ratio, summarize

positive = st.floats(0.01, 1e4)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=20))
def test_interval_holds_the_median_and_lies_within_the_ratios(
    pairs: list[tuple[float, float]],
) -> None:
    found = ratio([a for a, _ in pairs], [b for _, b in pairs])
    ratios = [a / b for a, b in pairs]
    assert min(ratios) <= found["low"] <= found["high"] <= max(ratios)
    assert found["median"] == pytest.approx(float(np.median(ratios)))


def test_interval_covers_the_true_ratio_about_95_times_in_100() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        noise = np.exp(rng.normal(0, 0.1, size=30))
        found = ratio((1.5 * noise).tolist(), [1.0] * 30)
        covered += found["low"] <= 1.5 <= found["high"]
    # Binomial(200, 0.95): below 175 or at 200 has a chance under 1e-5 and 1e-4; a percentile
    # bootstrap of the median at n = 30 is near nominal.
    assert 175 <= covered < 200


def test_summary_of_nothing_is_none_and_percentiles_are_right() -> None:
    assert summarize([]) is None
    found = summarize([float(value) for value in range(1, 102)])
    assert found is not None
    assert found == {"p50": 51, "p95": 96, "p99": 100}


def test_the_interval_of_a_median_is_in_the_samples_unit_and_shrinks_with_more_of_it() -> None:
    rng = np.random.default_rng(1)
    few, many = (median_interval(rng.normal(50.0, 5.0, size=n).tolist()) for n in (5, 100))
    assert few["num"] == 5 and few["low"] < few["median"] < few["high"]
    assert many["low"] < 50.5 and many["high"] > 49.5
    assert many["high"] - many["low"] < few["high"] - few["low"]
    with pytest.raises(ValueError, match="no value"):
        ratio([], [])
    with pytest.raises(ValueError):
        ratio([1.0], [])
