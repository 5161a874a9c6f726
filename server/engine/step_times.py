"""StepTimes: the seconds of a step, of the model by its rows and of the host by its choices.

A table of costs is measured before the first request and may be wrong: on a busy machine by a
factor of two. So every step that is served corrects it. What is believed is a Gaussian in the
logarithms of (served / table) at the measured row counts; one step moves the row counts near its
own most, the others as far as they are wrong together (a Gaussian process over log2 of rows,
Rasmussen and Williams 2006, section 2.2; old steps fade as in Kalman 1960). The host's seconds are
a line in the number of choices that draw and of sessions that were asked, kept in the same way.

This module computes with numbers only: no clock, no runner. What a step's every node asks for is
compiled (drafters/jit.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from drafters.arrays import Float64
from drafters.jit import compiled, entry

Prober = Callable[[int, int], float]
"""(num_rows, kv_len) -> seconds of one decode step with that many rows over kv_len keys each."""

DOUBT = math.log(2.0)
"""Standard deviation of a table's logarithm, as a whole and of what further rows cost: one measured
beside other work is wrong by two."""

NOISE = 0.1
"""Standard deviation of one step's logarithm beside the table's error, on a quiet machine; and the
part of DOUBT that a row count has for itself, and a third of it an octave further: kernels change
their tiles there. Two of it are the most that one step moves: one may take ten times as long."""

DRIFT = 0.04
"""Standard deviation by which the table's error moves from step to step: others come and go, and
half of what they take is known after ten steps."""

MEMORY = 32.0
"""Steps that are remembered of what changes with requests: texts, and whether prompts come."""

HOST = (0.05, 0.01, 0.05, 0.05)
"""What the host takes at first (HostTimes), as shares of the model's step of one row; four times as
much is no surprise."""

HOST_NOISE = 0.5
"""Standard deviation of the host's seconds of one step, as a share of them."""


class Filter:
    """What is believed of the coefficients of a linear model that drift: a Gaussian (Kalman 1960).

    mean: float64 [n]. cov, drift: float64 [n, n], of what is believed and of what a step adds.
    """

    __slots__ = ("_drift", "_most", "cov", "mean")

    def __init__(self, mean: Float64, cov: Float64, drift: Float64) -> None:
        self.mean, self.cov = mean.copy(), cov.copy()
        self._drift, self._most = drift, float(np.trace(cov))

    def observe(self, x: Float64, off: float, noise: float, most: float) -> None:
        """The model at x [n] was measured to lie `off` above what is believed, with this standard
        deviation. What would move it by more than `most` is believed as much less."""
        towards = self.cov @ x
        known = float(x @ towards)
        variance = known + max(noise * noise, known * (abs(off) / most - 1.0))
        self.mean += towards * (off / variance)
        self.cov -= np.outer(towards, towards / variance)
        if float(np.trace(self.cov)) < self._most:
            self.cov += self._drift


@entry
@compiled
def seconds_of(rows: Float64, seconds: Float64, num_rows: float) -> float:
    """Of a step, between measured row counts and past the last one (see CostTable)."""
    if num_rows < 1.0:
        return 0.0
    last = rows.shape[0] - 1
    if num_rows >= rows[last]:
        return float(seconds[last] * num_rows / rows[last])
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        if rows[middle] <= num_rows:
            low = middle
        else:
            high = middle
    share = (num_rows - rows[low]) / (rows[high] - rows[low])
    return float(seconds[low] + share * (seconds[high] - seconds[low]))


def row_grid(max_rows: int) -> list[int]:
    """Row counts worth measuring: every small one, then about six an octave."""
    grid = [r for r in range(1, 9) if r <= max_rows]
    step = 2
    while grid[-1] < max_rows:
        nxt = grid[-1] + step
        if nxt >= 8 * step:
            step *= 2
        grid.append(min(nxt, max_rows))
    return grid


class CostTable:
    """cost(rows, keys): seconds of one step on one runner.

    rows: number of rows. keys: KV entries attended to, summed over the rows. Between measured row
    counts the cost is interpolated; past the last one it grows in proportion. It never falls as
    rows grow: a measurement above one of more rows was disturbed, and the lower one stands.

    likely_s: seconds that the likeliest ids of one drawn row take, which drafters ask for
    (Batch.num_likely); `cost` is without them.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seconds: Sequence[float],
        key_s: float = 0.0,
        likely_s: float = 0.0,
    ) -> None:
        if len(rows) != len(seconds) or not rows or rows[0] != 1:
            raise ValueError("rows and seconds must be of equal length and begin at 1 row")
        if any(b <= a for a, b in pairwise(rows)):
            raise ValueError("rows must ascend")
        if min(seconds) <= 0.0 or not np.isfinite(seconds).all() or min(key_s, likely_s) < 0.0:
            raise ValueError("costs must be positive and finite")
        self._rows = np.asarray(rows, np.float64)
        self._raw = np.asarray(seconds, np.float64)
        self._key_s = key_s
        self.likely_s = likely_s
        self._row_list: list[float] = self._rows.tolist()
        octaves = np.log2(self._rows)
        near = np.exp(-np.abs(octaves[:, None] - octaves))
        # Of a step, what is not its first row: nothing where a busy machine made that one slower.
        further = np.maximum(0.0, 1.0 - self._raw[0] / self._raw)
        wrong = 1.0 + np.outer(further, further) + NOISE**2 * near
        self._off = Filter(np.zeros(len(rows)), DOUBT**2 * wrong, DRIFT**2 * wrong)
        self._settle()

    def _settle(self) -> None:
        """Take the corrected seconds over: it never falls as rows grow."""
        seconds = self._raw * np.exp(self._off.mean)
        self._seconds = np.ascontiguousarray(np.minimum.accumulate(seconds[::-1])[::-1])

    @property
    def curve(self) -> tuple[Float64, Float64]:
        """float64 [n], [n]: the row counts and their seconds, as seconds_of takes them."""
        return self._rows, self._seconds

    @property
    def key_s(self) -> float:
        """Seconds for one row to attend to one more key."""
        return self._key_s

    @property
    def max_rows(self) -> int:
        """Rows of the largest step that was measured."""
        return int(self._rows[-1])

    def node_s(self, mean_len: float) -> float:
        """Seconds of a draft node beside its row: what it attends to, its likeliest ids."""
        return self._key_s * mean_len + self.likely_s

    @staticmethod
    def measure(
        prober: Prober,
        max_rows: int,
        *,
        short_len: int = 64,
        long_len: int = 512,
        repeats: int = 3,
        limit_s: float = 0.25,
    ) -> CostTable:
        """Measure on the real runner, in `repeats` passes over the row counts.

        Each row count's shortest step counts, because other users of the machine only add time. The
        passes are spread over time, so that one disturbance does not hit all of them. Past 16 rows
        there is one pass (start-up must be short, and observe() refines the figures). Past 8 rows,
        the first row count whose step takes longer than limit_s is the last one: without a figure
        for 8 rows a slow or busy machine would never draft, and so never measure again. The KV term
        is the slope between short_len and long_len keys at 8 rows (0 where long_len is not above
        short_len).
        """
        prober(1, short_len)  # the first step pays for allocations and compilation
        least: dict[int, float] = {}
        for num in row_grid(max_rows):
            least[num] = max(prober(num, short_len), 1e-9)
            if num >= 8 and least[num] > limit_s:
                least[num] = min(least[num], max(prober(num, short_len), 1e-9))
                if least[num] > limit_s:
                    break
        for _ in range(repeats - 1):
            for num in least:
                if num <= 16:
                    least[num] = max(min(least[num], prober(num, short_len)), 1e-9)
        rows, seconds = list(least), list(least.values())
        key_s = 0.0
        num = min(8, rows[-1])
        if long_len > short_len:
            near = min(prober(num, short_len) for _ in range(repeats))
            far = min(prober(num, long_len) for _ in range(repeats))
            key_s = max(0.0, far - near) / (num * (long_len - short_len))
        base = [max(s - key_s * r * short_len, 1e-9) for r, s in zip(rows, seconds, strict=True)]
        return CostTable(rows, base, key_s)

    def cost(self, num_rows: float, keys: float = 0.0) -> float:
        """Seconds of a step."""
        return seconds_of(self._rows, self._seconds, num_rows) + self._key_s * keys

    def rows_within(self, seconds: float) -> int:
        """The most rows whose step takes at most `seconds` (without the KV term); at least 1."""
        last = float(self._rows[-1])
        if seconds >= float(self._seconds[-1]):
            return max(1, int(last * seconds / float(self._seconds[-1])))
        at = int(np.searchsorted(self._seconds, seconds, side="right"))
        if at == 0:
            return 1
        low, high = float(self._seconds[at - 1]), float(self._seconds[at])
        share = (seconds - low) / (high - low)
        return max(1, int(self._rows[at - 1] + share * (self._rows[at] - self._rows[at - 1])))

    def observe(self, num_rows: int, keys: float, seconds: float) -> None:
        """Correct the table by one real step."""
        expected = self.cost(num_rows)
        if seconds <= 0.0:
            return
        # What attention to keys takes is only known from the table: half at least is the rows'.
        off = math.log(max(seconds - self._key_s * keys, 0.5 * seconds) / expected)
        x = np.zeros(self._rows.shape[0])
        at = min(max(bisect_right(self._row_list, num_rows) - 1, 0), x.shape[0] - 1)
        high = min(at + 1, x.shape[0] - 1)
        span = self._row_list[high] - self._row_list[at]
        x[high] = min(1.0, (num_rows - self._row_list[at]) / span) if span else 0.0
        x[at] += 1.0 - x[high]
        self._off.observe(x, off, NOISE, 2.0 * NOISE)
        self._settle()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a cache file (keyed by device, model, dtype and threads elsewhere)."""
        return {
            "rows": [int(r) for r in self._rows],
            "seconds": self._seconds.tolist(),
            "key_s": self._key_s,
            "likely_s": self.likely_s,
        }

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> CostTable:
        """The inverse of as_dict. Raises ValueError or KeyError on a damaged one."""
        own = float(plain["key_s"]), float(plain.get("likely_s", 0.0))
        return CostTable(plain["rows"], plain["seconds"], *own)


class HostTimes:
    """Seconds that a step takes beside the model: plain, and more where sessions are asked.

    A line in (1, choices that draw, whether any session is asked, sessions asked). mixed: of the
    steps in which somebody decodes, the share that has rows of prompts as well.
    """

    def __init__(self, row_s: float) -> None:
        """row_s: of the model's step of one row. What the host takes is at first a part of it."""
        first = row_s * np.array(HOST)
        self._fit = Filter(first, np.diag(16.0 * first**2), np.diag((DRIFT * first) ** 2))
        self.mixed = 0.0

    def observe(self, num_draws: int, num_asked: int, seconds: float) -> None:
        """A step without rows of prompts."""
        x = np.array([1.0, num_draws, num_asked > 0, num_asked])
        known = max(float(x @ self._fit.mean), 1e-6)
        self._fit.observe(x, seconds - known, HOST_NOISE * known, HOST_NOISE * known)

    def observe_mix(self, has_prompt: bool) -> None:
        """A step in which somebody decodes."""
        self.mixed += (has_prompt - self.mixed) / MEMORY

    def plain(self, num_draws: int) -> float:
        """Seconds of a step without drafts."""
        mean = self._fit.mean
        return max(0.0, float(mean[0] + mean[1] * num_draws))

    def asking(self, num_asked: int) -> float:
        """Seconds that asking so many sessions adds to a step."""
        mean = self._fit.mean
        return max(0.0, float(mean[2] + mean[3] * num_asked))
