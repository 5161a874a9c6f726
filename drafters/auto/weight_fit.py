"""Fitting trust to its evidence, from coarse to fine, in one compiled call.

It runs between two steps of an engine whenever enough evidence has come, so it must be short. Most
cells have no evidence: only those that have some are gone through again and again.
"""

from __future__ import annotations

import math

import numpy as np

from drafters.arrays import Float64, Float64x2, Int32x2
from drafters.jit import compiled, entry, inlined

_NEWTON_STEPS = 5
_MOST_STEP, _MOST_SHIFT = 1.0, 4.0  # of log odds


@inlined
def _chance(odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-odds))


@inlined
def _within(value: float, most: float) -> float:
    return min(max(value, -most), most)


@entry
@compiled
def fit_weights(
    evidence: Float64x2, prior_odds: Float64, groups: Int32x2, strength: float, weights: Float64
) -> None:
    """Write the weights that evidence and prior give.

    A task has little evidence for most cells at first, but soon enough to show, for example, that
    copies from its prompts are right more often than elsewhere. So the prior log odds are shifted
    by whole groups of cells, each shift fitted with a normal prior of width 1. Then each cell is
    fitted by its own evidence.

    evidence: float64 [2, C]: times asked, times answered. prior_odds: float64 [C]. groups: int32
    [levels, C], the coarsest level first: the group of each cell, 0 and up. strength: asks that the
    shifted prior counts for. weights: float64 [C].
    """
    odds = prior_odds.copy()
    seen = np.empty(odds.shape[0], np.int64)
    num_seen = 0
    for cell in range(odds.shape[0]):
        if evidence[0, cell] + evidence[1, cell] != 0.0:
            seen[num_seen] = cell
            num_seen += 1
    for level in range(groups.shape[0]):
        group = groups[level]
        num = 0
        for cell in range(odds.shape[0]):
            num = max(num, int(group[cell]) + 1)
        shift, total = np.zeros(num), np.zeros(num)
        for cell in seen[:num_seen]:
            total[group[cell]] += evidence[1, cell]
        for _ in range(_NEWTON_STEPS):  # the objective is concave
            slope, bend = total - shift, np.ones(num)
            for cell in seen[:num_seen]:
                at, asked = group[cell], evidence[0, cell]
                chance = _chance(odds[cell] + shift[at])
                slope[at] -= asked * chance
                bend[at] += asked * chance * (1.0 - chance)
            for at in range(num):
                shift[at] = _within(
                    shift[at] + _within(slope[at] / bend[at], _MOST_STEP), _MOST_SHIFT
                )
        for i in range(odds.shape[0]):
            odds[i] += shift[group[i]]
    for i in range(odds.shape[0]):
        asked, answered = evidence[0, i], evidence[1, i]
        weight = (answered + strength * _chance(odds[i])) / (asked + strength)
        weights[i] = min(max(weight, 1e-4), 0.9995)
