"""Trust: how far each kind of context is trusted, and how that is learned and kept.

grow_tree blends the next-token shares of all contexts; the weight of a context is the trust of
its cell (source, match length, occurrences, agreement, situation). What the blend then claims is
corrected by how often such claims came true: a factor per cell of (leading source, its match
length and situation, claimed chance), the calibration table of `auto`. Evidence decays, so
that the table follows a task that changes. It is saved atomically and survives a restart.

The defaults were fitted on the train splits of twenty task data sets (loadtest/replay.py).
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from drafters.arrays import Float64, Float64x2, Int32x2
from drafters.auto.blend import LearnedFields
from drafters.auto.cells import (
    NUM_AGREEMENTS,
    NUM_BINS,
    NUM_BUCKETS,
    NUM_CELLS,
    NUM_FACTORS,
    NUM_OCCURRENCES,
    NUM_SHARES,
    NUM_SITUATIONS,
    NUM_SOURCES,
    SOURCES,
)
from drafters.auto.corpus_fit import CorpusFit
from drafters.auto.views import Trusts
from drafters.calibration import CalibrationError, read_table, write_table
from drafters.jit import compiled, entry, inlined
from drafters.json_text import parsed
from drafters.shared_counts import Counts

_SHAPE = (NUM_SOURCES, NUM_BUCKETS, NUM_OCCURRENCES, NUM_AGREEMENTS, NUM_SITUATIONS)
_SOURCE, _BUCKET, _, _, _SITUATION = np.indices(_SHAPE, np.int32).reshape(5, NUM_CELLS)
_GROUPS = np.stack(
    (
        _SOURCE,
        _SOURCE * NUM_SITUATIONS + _SITUATION,
        (_SOURCE * NUM_BUCKETS + _BUCKET) * NUM_SITUATIONS + _SITUATION,
    )
)
"""Whose log odds are shifted together: of a source, of its situation, of its match length too."""

_MIN_SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
UPDATE_EVERY = 256.0
"""Asks of which the evidence is folded in at once (Trust.update)."""
PRIOR_STRENGTH, FACTOR_STRENGTH = 16.0, 2.0
"""Asks, and expected hits, that the defaults count for."""
KIND = "drafter trust"
VERSION = 2  # 1 held what a corpus says, too

DEFAULT_TRUST = Path(__file__).with_name("default_trust.json")
"""What trust is before any evidence: package data, written by loadtest/replay.py."""


@functools.cache
def _defaults() -> tuple[Float64, Float64, Float64]:
    """(weights within bounds, their log odds, factors) of the package; never written to. Each scope
    has a trust of its own, which is made while its first request waits."""
    body = parsed(DEFAULT_TRUST.read_text(encoding="utf-8"))
    weights = np.asarray(body["weights_per_mille"], np.float64).reshape(NUM_CELLS) / 1000.0
    factors = np.asarray(body["factors_per_cent"], np.float64).reshape(NUM_FACTORS) / 100.0
    weights = _bounded(weights)
    return weights, _odds(weights), factors


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
    """Write the weights that evidence and prior give, from coarse to fine. It runs between two
    steps of an engine, so it must be short: most cells have no evidence, and only those that have
    some are gone through again and again.

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


class Trust:
    """Weights and factors of the cells with their evidence. One writer: the drafter that owns it.

    weights: float64 [NUM_CELLS], factors: float64 [NUM_FACTORS]: read by grow_tree. Replaced, never
        written to: scopes share those that no evidence has changed, and those that are given.
    evidence: float64 [2, NUM_CELLS]: expected times a level was asked, and answered.
    outcomes: float64 [3, NUM_FACTORS]: sum of claimed chances, times right, times claimed.

    num_news: asks that came and are not folded in yet; counted by who learns.
    memory: a cell's evidence is halved once it holds more than this.
    """

    def __init__(
        self,
        weights: Float64 | None = None,
        factors: Float64 | None = None,
        *,
        memory: float = 20_000.0,
    ) -> None:
        start, odds, usual = _defaults()
        factors = usual if factors is None else factors
        if weights is not None:
            start = _bounded(weights)
            odds = _odds(start)
        if start.shape != (NUM_CELLS,) or factors.shape != (NUM_FACTORS,):
            raise ValueError(f"trust needs {NUM_CELLS} weights and {NUM_FACTORS} factors")
        self._prior_odds: Float64 = odds  # replaced, never written to
        self._prior_factors: Float64 = factors  # likewise
        self.weights: Float64 = start
        self.factors: Float64 = factors
        self.evidence: Float64 = np.zeros((2, NUM_CELLS), np.float64)
        self.outcomes: Float64 = np.zeros((3, NUM_FACTORS), np.float64)
        self._show()
        self.memory = memory
        self.num_news = 0.0
        self.fit = CorpusFit()
        self._without: Trust | None = None

    @property
    def without(self) -> Trust:
        """The trust of the same texts drafted without the corpus; a separate one, never saved."""
        if self._without is None:
            self._without = Trust()
        return self._without

    def start_from(self, evidence: Float64, outcomes: Float64) -> None:
        """Take the evidence of a task's held-out examples as the prior of later evidence.

        It counts for no more than any prior: held-out examples outnumber the tokens that a task
        sees live by far, and where the model does not answer as they do, thousands of their asks
        would outweigh every answer. Raises CalibrationError as restore_arrays does.
        """
        self.restore_arrays(evidence, outcomes)
        self._prior_odds = _odds(self.weights)
        self._prior_factors = self.factors
        self.evidence[:] = 0.0
        self.outcomes[:] = 0.0

    def update(self) -> None:
        """Fold the evidence into weights (`fit_weights`) and factors."""
        self.num_news = 0.0
        old = self.evidence[0] > self.memory
        self.evidence[:, old] *= 0.5
        old = self.outcomes[2] > self.memory
        self.outcomes[:, old] *= 0.5
        self.weights = np.empty(NUM_CELLS)
        fit_weights(self.evidence, self._prior_odds, _GROUPS, PRIOR_STRENGTH, self.weights)
        k = FACTOR_STRENGTH
        self.factors = (self.outcomes[1] + k * self._prior_factors) / (self.outcomes[0] + k)
        self._show()

    def _show(self) -> None:
        """Say anew what compiled code reads, and what it learns into, which stays the same."""
        self.fields = Trusts(self.weights, self.factors)
        self.learned_fields: LearnedFields = (self.weights, self.evidence, self.outcomes)

    def table(self) -> list[dict[str, Any]]:
        """The calibration table, for people to read, the most used first: (source, match length,
        claimed share).

        min_match_length 0 is the start of an output. chance = (accepted + 1) / (offered + 2);
        mean_claim is the mean blended chance before its correction.
        """
        shape = (3, NUM_SOURCES, NUM_BINS, NUM_SITUATIONS, NUM_SHARES)
        claimed, accepted, offered = self.outcomes.reshape(shape).sum(axis=3)
        rows: list[dict[str, Any]] = []
        for at in map(tuple, np.argwhere(offered > 0.0).tolist()):
            source, length, share = at
            rows.append(
                {
                    "source": SOURCES[source],
                    "min_match_length": length,
                    "min_share": _MIN_SHARES[share],
                    "offered": round(float(offered[at]), 1),
                    "accepted": round(float(accepted[at]), 1),
                    "mean_claim": round(float(claimed[at] / offered[at]), 4),
                    "chance": round(float((accepted[at] + 1) / (offered[at] + 2)), 4),
                }
            )
        return sorted(rows, key=lambda row: -float(row["offered"]))

    def counts(self) -> Counts:
        """For drafters.shared_counts: copies of evidence and outcomes."""
        return {"evidence": self.evidence.copy(), "outcomes": self.outcomes.copy()}

    def set_counts(self, counts: Counts) -> None:
        """Take counts in place of what there is. Raises CalibrationError as restore_arrays does,
        KeyError when a part is missing."""
        self.restore_arrays(counts["evidence"], counts["outcomes"])

    def save(self, path: Path | str) -> None:
        """Write the evidence; see drafters.calibration.write_table."""
        body = {
            "sources": list(SOURCES),
            "evidence": self.evidence.round(4).tolist(),
            "outcomes": self.outcomes.round(4).tolist(),
        }
        write_table(path, KIND, VERSION, body)

    def restore(self, path: Path | str) -> None:
        """Replace the evidence by a saved one.

        Raises CalibrationError when the file is not a trust of this version and shape.
        """
        sources, arrays = read_table(path, KIND, VERSION, ("evidence", "outcomes"))
        if sources != list(SOURCES[: len(sources)]):
            raise CalibrationError(f"{path} is not a version {VERSION} {KIND}")
        self.restore_arrays(*arrays)

    def restore_arrays(self, evidence: Float64, outcomes: Float64) -> None:
        """Replace the evidence by these arrays. Raises CalibrationError for other shapes or
        impossible counts."""
        evidence = _widened(evidence, NUM_CELLS)
        outcomes = _widened(outcomes, NUM_FACTORS)
        if evidence.shape != self.evidence.shape or outcomes.shape != self.outcomes.shape:
            raise CalibrationError("the saved trust has other cells")
        counts = np.concatenate([evidence.ravel(), outcomes.ravel()])
        if not (np.isfinite(counts).all() and (counts >= 0).all()):
            raise CalibrationError("the saved trust holds impossible counts")
        self.evidence[:] = evidence
        self.outcomes[:] = outcomes
        self.update()


def is_evidence(evidence: Float64, outcomes: Float64) -> bool:
    """Whether arrays may be a Trust's, or are without columns: of nothing held out."""
    sizes = _widened(evidence, NUM_CELLS).shape, _widened(outcomes, NUM_FACTORS).shape
    return sizes == ((2, NUM_CELLS), (3, NUM_FACTORS))


def _widened(counts: Float64, num_cells: int) -> Float64:
    """Counts [., cells] of the first few sources, widened with zeros for the sources added since.
    Counts of another shape are returned as they are."""
    missing = num_cells - counts.shape[-1]
    if counts.ndim != 2 or missing < 0 or missing % (num_cells // NUM_SOURCES):
        return counts
    return np.pad(counts, ((0, 0), (0, missing)))


def _bounded(weights: Float64) -> Float64:
    return np.clip(weights, 1e-4, 0.9995)


def _odds(weights: Float64) -> Float64:
    """Log odds of weights between 0 and 1."""
    odds: Float64 = np.log(weights / (1.0 - weights))
    return odds
