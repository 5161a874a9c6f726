"""Blends the contexts' next-token shares into chances, and learns from emitted tokens.

The shares are blended from the shortest context to the longest: with q the shares at a level,
p = w q + (1 - w) p. This is deleted interpolation (Jelinek and Mercer 1980); w is the trust in
such a level, kept per cell of (source, match length, occurrences, agreement, whether the match
covers the whole output) and learned by expectation maximisation from the tokens that came
(`learn_token`).
"""

from __future__ import annotations

import numpy as np

from drafters.arrays import Float64, Int32
from drafters.auto.cells import (
    BASE_CHANCE,
    NUM_SITUATIONS,
    factor_cell,
)
from drafters.auto.gather import NUM, Gathered, gather
from drafters.auto.views import Context
from drafters.jit import inlined

EvidenceFields = tuple[Float64, Float64]
"""asks, outcomes: the arrays `evidence` and `outcomes` of drafters.auto.trust.Trust."""


@inlined
def blend(weights: Float64, num_levels: int, found: Gathered) -> None:
    """Write found.chances from the longest context down: each level gets its trust's part of what
    the longer ones left."""
    num = found.state[NUM]
    chances = found.chances
    left = np.float32(1.0)
    for row in range(num):
        chances[row] = 0.0
    for i in range(num_levels):
        level = found.levels[i]
        w = np.float32(weights[found.cells[i]])
        scale = left * w / found.totals[level]
        for row in range(num):
            chances[row] += scale * found.counts[level, row]
        left *= np.float32(1.0) - w
        if left < 0.004:
            break
    for row in range(num):
        chances[row] += left * np.float32(BASE_CHANCE)


@inlined
def leader(row: int, num_levels: int, found: Gathered) -> int:
    """Index in found.levels of the longest context that proposes a candidate."""
    for i in range(num_levels):
        if found.counts[found.levels[i], row] > 0.0:
            return i
    return 0


@inlined
def is_end(token: int, ends: Int32) -> bool:
    """Whether the token is an EOS id."""
    found = False  # not any(): numba compiles no generators
    for k in range(ends.shape[0]):
        found = found or ends[k] == token
    return found


@inlined
def _share(row: int, level: int, found: Gathered) -> float:
    """Share of a level's occurrences that candidate `row` followed; 0 for -1."""
    if row < 0:
        return 0.0
    return float(found.counts[level, row] / found.totals[level])


@inlined
def _learn_trusts(
    row: int, num_levels: int, weights: Float64, asks: Float64, found: Gathered
) -> float:
    """Add the expected asks and answers of every level, given that `row` came; returns its
    chance."""
    # Upward: the blend below each level; then downward: how likely the level was reached.
    below = found.below
    chance = BASE_CHANCE
    for i in range(num_levels - 1, -1, -1):
        below[i] = chance
        w = weights[found.cells[i]]
        chance = (1.0 - w) * chance + w * _share(row, found.levels[i], found)
    reach = 1.0
    for i in range(num_levels):
        cell = found.cells[i]
        w = weights[cell]
        here = w * _share(row, found.levels[i], found)
        answered = here / (here + (1.0 - w) * below[i])
        asks[0, cell] += reach
        asks[1, cell] += reach * answered
        reach *= 1.0 - answered
        if reach < 1e-4:
            break
    return chance


@inlined
def _learn_claims(
    row: int, num_levels: int, context: Context, outcomes: Float64, found: Gathered
) -> None:
    """Compare what was claimed for every candidate with whether it came."""
    for i in range(found.state[NUM]):
        # Ends are never drafted, and would make their neighbours look right.
        claimed = found.chances[i]
        if claimed > 0.002 and not is_end(found.tokens[i], context.ends):
            first = leader(i, num_levels, found)
            situation = found.cells[first] % NUM_SITUATIONS
            at_start = context.num_output == 0
            cell = factor_cell(found.levels[first], situation, at_start, claimed)
            outcomes[0, cell] += claimed
            outcomes[2, cell] += 1.0
            if i == row:
                outcomes[1, cell] += 1.0


@inlined
def learn_token(
    token: int, context: Context, weights: Float64, evidence: EvidenceFields, found: Gathered
) -> float:
    """One step of expectation maximisation for the trusts, *before* `token` is appended.

    Returns the chance that was given to `token`.
    """
    asks, outcomes = evidence
    num_levels = gather(
        context, context.corpus.state, context.corpus.length, context.cursor, 0, found
    )
    row = -1
    for i in range(found.state[NUM]):
        if found.tokens[i] == token:
            row = i
    chance = _learn_trusts(row, num_levels, weights, asks, found)
    blend(weights, num_levels, found)
    _learn_claims(row, num_levels, context, outcomes, found)
    return chance
