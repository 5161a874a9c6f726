"""Weights fitted to evidence: as a computation over whole arrays gives them."""

from __future__ import annotations

import numpy as np
import pytest

from drafters.auto.trust import _SHAPE, PRIOR_STRENGTH, Trust


def _fitted(trust: Trust, weights: np.ndarray) -> np.ndarray:
    """Newton's method over whole arrays, axes by axes. weights: the prior's."""
    asked, answered = (part.reshape(_SHAPE) for part in trust.evidence)
    odds = np.log(weights / (1.0 - weights)).reshape(_SHAPE)
    for axes in ((1, 2, 3, 4), (1, 2, 3), (2, 3)):
        total = answered.sum(axis=axes, keepdims=True)
        shift = np.zeros_like(total)
        for _ in range(5):
            chance = 1.0 / (1.0 + np.exp(-(odds + shift)))
            slope = total - (asked * chance).sum(axis=axes, keepdims=True) - shift
            bend = (asked * chance * (1.0 - chance)).sum(axis=axes, keepdims=True) + 1.0
            shift = np.clip(shift + np.clip(slope / bend, -1.0, 1.0), -4.0, 4.0)
        odds = odds + shift
    k = PRIOR_STRENGTH
    prior = (1.0 / (1.0 + np.exp(-odds))).reshape(-1)
    return np.clip((trust.evidence[1] + k * prior) / (trust.evidence[0] + k), 1e-4, 0.9995)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_weights_are_those_of_whole_arrays(share: float) -> None:
    rng, trust = np.random.default_rng(int(100 * share)), Trust()
    prior = trust.weights.copy()
    seen = rng.random(prior.shape[0]) < share
    trust.evidence[0, seen] = rng.exponential(40.0, np.count_nonzero(seen))
    trust.evidence[1] = trust.evidence[0] * rng.random(prior.shape[0]) ** 2
    expected = _fitted(trust, prior)
    trust.update()
    np.testing.assert_allclose(trust.weights, expected, rtol=1e-12)
    if share:
        assert not np.allclose(trust.weights, prior)
    else:
        np.testing.assert_allclose(trust.weights, prior, rtol=1e-12)
