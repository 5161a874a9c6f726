"""Trust: how far each kind of context is believed, and how that is learned.

grow_tree blends the next-token shares of all contexts; the weight of a context is the trust of
its cell (source, match length, occurrences, agreement, coverage). A Trust holds these weights and
the evidence for them. Evidence is decayed, so that a task that changes is followed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drafters.growth import (
    NUM_AGREEMENTS,
    NUM_BUCKETS,
    NUM_CELLS,
    NUM_OCCURRENCES,
    NUM_SOURCES,
)

Float64 = npt.NDArray[np.float64]

_SHAPE = (NUM_SOURCES, NUM_BUCKETS, NUM_OCCURRENCES, NUM_AGREEMENTS, 2)

__all__ = ["Trust", "default_weights"]


def default_weights() -> Float64:
    """float64 [NUM_CELLS]: weights before any evidence, rising with length and agreement."""
    by_length = np.asarray([0.02, 0.30, 0.50, 0.62, 0.70, 0.76, 0.82, 0.87, 0.91, 0.94])
    weights = np.empty((NUM_SOURCES, NUM_BUCKETS, NUM_OCCURRENCES, NUM_AGREEMENTS, 2), np.float64)
    odds = by_length / (1.0 - by_length)
    for occurrences in range(NUM_OCCURRENCES):
        for agreement in range(NUM_AGREEMENTS):
            factor = (0.7 + 0.3 * occurrences) * (0.8, 1.0, 1.6)[agreement]
            value = odds * factor
            weights[:, :, occurrences, agreement, :] = (value / (1.0 + value))[None, :, None]
    return weights.reshape(NUM_CELLS)


class Trust:
    """Weights of the cells with their evidence. One writer: the Drafter that owns it.

    weights: float64 [NUM_CELLS], read by grow_tree. evidence: float64 [2, NUM_CELLS], expected
    times asked and answered. A cell's weight is (answered + k w0) / (asked + k), with w0 the shifted
    default and k = `prior_strength`; evidence is halved once a cell was asked `memory` times.
    """

    def __init__(
        self,
        weights: Float64 | None = None,
        *,
        prior_strength: float = 24.0,
        memory: float = 20_000.0,
    ) -> None:
        self.prior: Float64 = default_weights() if weights is None else weights.copy()
        self.weights: Float64 = self.prior.copy()
        self.evidence: Float64 = np.zeros((2, NUM_CELLS), np.float64)
        self.prior_strength = prior_strength
        self.memory = memory
        self._next_update = 0.0
        clipped = np.clip(self.prior, 1e-4, 0.9999)
        self._prior_odds: Float64 = np.log(clipped / (1.0 - clipped)).reshape(_SHAPE)

    def update_if_due(self, every: float = 64.0) -> None:
        """update(), unless less than `every` tokens' worth of evidence came since the last."""
        if self.evidence[0].sum() >= self._next_update:
            self.update()
            self._next_update = float(self.evidence[0].sum()) + every

    def update(self) -> None:
        """Fold the evidence into the weights, from coarse to fine.

        A task has little evidence for most cells at first, but soon enough to say that, for
        example, copies from its prompts hold better than elsewhere. So the defaults' log odds are
        shifted per source, then per source and match length, each shift fitted with a normal
        prior; only then has each cell its own say.
        """
        old = self.evidence[0] > self.memory
        if old.any():
            self.evidence[:, old] *= 0.5
        asked = self.evidence[0].reshape(_SHAPE)
        answered = self.evidence[1].reshape(_SHAPE)
        odds = self._prior_odds
        for axes in ((1, 2, 3), (2, 3)):
            odds = odds + _shift(odds, asked, answered, axes)
        k = self.prior_strength
        prior = (1.0 / (1.0 + np.exp(-odds))).reshape(NUM_CELLS)
        np.divide(self.evidence[1] + k * prior, self.evidence[0] + k, out=self.weights)
        np.clip(self.weights, 1e-4, 0.9995, out=self.weights)


def _shift(odds: Float64, asked: Float64, answered: Float64, axes: tuple[int, ...]) -> Float64:
    """The shift of the log odds over `axes` that fits best, under a normal prior of width 1."""
    total = answered.sum(axis=axes, keepdims=True)
    shift = np.zeros_like(total)
    for _ in range(5):  # Newton's method; the objective is concave
        chance = 1.0 / (1.0 + np.exp(-(odds + shift)))
        slope = total - (asked * chance).sum(axis=axes, keepdims=True) - shift
        bend = (asked * chance * (1.0 - chance)).sum(axis=axes, keepdims=True) + 1.0
        shift = np.clip(shift + np.clip(slope / bend, -1.0, 1.0), -4.0, 4.0)
    return shift
