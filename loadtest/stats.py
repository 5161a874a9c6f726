"""Percentiles, paired ratios and bootstrap confidence intervals. Numbers in, numbers out.

Servers are measured in alternating rounds, so that a slow minute of the machine hits all of them:
the figure of interest is the ratio *within* a round. Its spread is a percentile bootstrap over
rounds (Efron, "Bootstrap methods: another look at the jackknife", Ann. Statist. 1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of a sample, or of pairwise ratios, with its two-sided 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    num: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Order statistics of a sample; all fields in the sample's own unit."""

    num: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    low: float
    high: float


def summarize(values: Sequence[float]) -> Summary | None:
    """Order statistics of `values`; None when there are none."""
    if not values:
        return None
    sample = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = (float(q) for q in np.percentile(sample, [50, 90, 95, 99]))
    least, most = float(sample.min()), float(sample.max())
    return Summary(len(values), float(sample.mean()), p50, p90, p95, p99, least, most)


def ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Median of numerators[i] / denominators[i] and its 95 % percentile-bootstrap interval.

    Raises ValueError when the lengths differ, there is no pair, or a value is not positive.
    With one pair the interval is the point itself: no spread is known, and num says so.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators, {len(denominators)} denominators")
    if not numerators:
        raise ValueError("no pair to compare")
    a = np.asarray(numerators, dtype=np.float64)
    b = np.asarray(denominators, dtype=np.float64)
    if not (np.all(np.isfinite(a)) and np.all(np.isfinite(b)) and a.min() > 0 and b.min() > 0):
        raise ValueError("ratios need positive, finite figures")
    return Interval(*_bootstrap(a / b, num_resamples, seed), len(a))


def median_interval(
    values: Sequence[float], *, num_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Median of `values` and its 95 % percentile-bootstrap interval. Raises ValueError for none."""
    if not values:
        raise ValueError("no value")
    sample = np.asarray(values, dtype=np.float64)
    return Interval(*_bootstrap(sample, num_resamples, seed), len(values))


def _bootstrap(
    sample: npt.NDArray[np.float64], num_resamples: int, seed: int
) -> tuple[float, float, float]:
    picks = np.random.default_rng(seed).integers(0, len(sample), size=(num_resamples, len(sample)))
    low, high = np.percentile(np.median(sample[picks], axis=1), [2.5, 97.5])
    return float(np.median(sample)), float(low), float(high)
