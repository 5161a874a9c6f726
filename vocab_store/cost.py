"""What a slice, a verification and a fill of T cost: pure functions (docs/DESIGN.md section 6).

`exact` proposes with a slice and verifies with the full head every N tokens (`verify_every`): the
model runs up to N steps of `body_s + slice_s` each, then one product with the full head draws all
N positions again.
With an independent miss chance m per token, the tokens kept are those before the first miss and
the corrected token itself:

    E[kept] = sum_{j=0}^{N-1} (1 - m)^j = (1 - (1 - m)^N) / m          (N when m = 0)
    cost per token = (N (body_s + slice_s) + verify_s + N verify_row_s) / E[kept]

Where a sequence of the batch ends, all sequences are verified at once: with a chance c per step
a verification comes after (1 - (1 - c)^N) / c steps instead of N, and E[kept] has (1 - m)(1 - c)
for 1 - m.

For small m N this is about (body + slice)(1 + m N / 2) + verify / N, which is least near
N = sqrt(2 verify / (m (body + slice))): the rule of docs/DESIGN.md. The functions below minimise
the exact expression over whole N.

All times are seconds of one step of *this batch*: the caller passes the body cost of the batch it
runs, so N counts steps of it. Miss chances are per emitted token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
_Number = TypeVar("_Number", float, Float64)


@dataclass(frozen=True, slots=True)
class HeadCosts:
    """Measured seconds of one step of a batch, above 0.

    body_s: everything but the head. full_s: the head over all V rows, for this batch's rows.
    vocab_size: V. slice_fixed_s: what a slice product costs with no rows at all (launch, mask).
    verify_s: one verification with the full head, its fixed part (default: full_s, a read of
    the whole head); verify_row_s: further seconds for each waiting position. early_end: chance per
    step that a verification comes before N tokens wait, because a sequence of the batch ends.
    """

    body_s: float
    full_s: float
    vocab_size: int
    slice_fixed_s: float = 0.0
    verify_s: float | None = None
    verify_row_s: float = 0.0
    early_end: float = 0.0


def slice_head_s(costs: HeadCosts, num_ids: _Number) -> _Number:
    """Seconds of the head over `num_ids` rows: linear in rows, as memory-bound products are."""
    return costs.slice_fixed_s + costs.full_s * num_ids / costs.vocab_size


def full_cost_s(costs: HeadCosts) -> float:
    """Seconds per token in `full` mode."""
    return costs.body_s + costs.full_s


def expected_yield(miss: npt.ArrayLike, verify_every: npt.ArrayLike) -> Float64:
    """Tokens that stand after N = `verify_every` steps, the corrected one included; in [1, N].
    float64, of each miss chance and N."""
    chance = np.asarray(miss, np.float64)
    # expm1/log1p keep the difference exact where 1 - (1 - m)^N would cancel.
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = -np.expm1(verify_every * np.log1p(-chance)) / chance
    return np.where(chance == 0.0, verify_every, kept)


def exact_cost_s(
    costs: HeadCosts, num_ids: _Number, miss: npt.ArrayLike, verify_every: npt.ArrayLike
) -> Float64:
    """Expected seconds per released token in `exact` mode with a slice of `num_ids` rows: float64,
    of each slice, miss chance and N."""
    step_s = costs.body_s + slice_head_s(costs, num_ids)
    run = expected_yield(costs.early_end, verify_every)  # steps until N tokens wait or one ends
    # A miss, or an end before N tokens wait: no further token will stand. Not miss + end - miss *
    # end, which rounding can carry out of 0..1.
    stop = 1.0 - (1.0 - np.asarray(miss)) * (1.0 - costs.early_end)
    kept = expected_yield(stop, verify_every)
    verify_s = costs.full_s if costs.verify_s is None else costs.verify_s
    return (run * (step_s + costs.verify_row_s) + verify_s) / kept


def best_verify_every(
    costs: HeadCosts, num_ids: float, miss: float, max_verify_every: int = 64
) -> tuple[int, float]:
    """(N, seconds per token): the whole N in 1..max_verify_every that costs least, the smaller on
    ties.

    max_verify_every bounds the text that is held back and the hidden states that are kept. Compare
    the cost with full_cost_s: where it is higher, the full head takes over.
    """
    cost_s = exact_cost_s(costs, num_ids, miss, np.arange(1, max_verify_every + 1))
    best = int(np.argmin(cost_s))
    return best + 1, float(cost_s[best])


def best_fill(
    costs: HeadCosts,
    num_ids: int,
    miss: float,
    gains: npt.ArrayLike,
    *,
    num_dynamic: float = 0.0,
    max_verify_every: int = 64,
) -> tuple[int, float]:
    """(candidates to add to T, from the front of the order, seconds per token): what makes `exact`
    cheapest, with its best N.

    num_ids: rows of T now. miss: miss rate with T as it is. gains: float [F], by how much each
    candidate, in order, lowers the miss rate (VocabProfile.fill_gains; descending, but any order
    is handled). num_dynamic: mean dynamic rows a step computes beside T.

    Every prefix of the order is priced, not only until the first that does not help: the cost is
    not convex where gains are not. Ties go to the smaller T. O(F max_verify_every).
    """
    lowered = np.concatenate(([0.0], np.cumsum(np.asarray(gains, np.float64))))
    misses = np.clip(miss - lowered, 0.0, 1.0)
    rows = num_ids + num_dynamic + np.arange(misses.shape[0], dtype=np.float64)
    cost = np.full(rows.shape, np.inf)
    for n in range(1, max_verify_every + 1):
        cost = np.minimum(cost, exact_cost_s(costs, rows, misses, n))
    best = int(np.argmin(cost))
    return best, float(cost[best])
