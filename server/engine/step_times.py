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
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from drafters.arrays import Float64, Float64x2
from drafters.jit import compiled, entry, inlined

Prober = Callable[[int, int], float]
"""(num_rows, kv_len) -> seconds of one decode step with that many rows over kv_len keys each."""

DOUBT = math.log(2.0)
"""Standard deviation of a table's logarithm, as a whole and of what further rows cost: one measured
beside other work is wrong by two."""

NOISE = 0.1
"""Standard deviation of one step's logarithm beside the table's error, on a quiet machine; and the
part of DOUBT that a row count has for itself, and a third of it an octave further: kernels change
their tiles there. Two of it are the most that one step moves: one may take ten times as long. Less
of a first row than this no further row takes for sure."""

DRIFT = 0.04
"""Standard deviation by which the table's error moves from step to step: others come and go, and
half of what they take is known after ten steps."""

MEMORY = 32.0
"""Steps that are remembered of what changes with requests: texts, and whether prompts come."""

HOST = (0.05, 0.01, 0.05, 0.05, 0.2)
"""What the host takes at first (HostTimes), as shares of the model's step of one row; four times as
much is no surprise."""

HOST_NOISE = 0.5
"""Standard deviation of the host's seconds of one step, as a share of them."""


OPENING, BESIDE = 4, 5
"""Of HostTimes.numbers: what opening a session takes, and rows of prompts."""


Belief = tuple[Float64, Float64x2, Float64x2, Float64x2]
"""A Gaussian of the coefficients of a linear model that drift (Kalman 1960): mean float64 [n];
covariance, what a step adds to it, and space for two vectors, float64 [n, n], [n, n], [2, n]."""


def belief(mean: Float64, cov: Float64, drift: Float64) -> Belief:
    """Of n coefficients. cov, drift: float64 [n, n]."""
    return mean.copy(), cov.copy(), drift, np.zeros((2, mean.shape[0]))


@inlined
def believe(fit: Belief, off: float, noise: float, limit: float, most: float) -> None:
    """The model at x, the first vector of its space, was measured to lie `off` above what is
    believed, with the standard deviation `noise`. What would move it by more than `limit` is
    believed as much less. most: of the covariance's trace, above which nothing drifts."""
    mean, cov, drift, (x, towards) = fit[0], fit[1], fit[2], (fit[3][0], fit[3][1])
    num, known, trace = mean.shape[0], 0.0, 0.0
    for i in range(num):
        towards[i] = 0.0
        for j in range(num):
            towards[i] += cov[i, j] * x[j]
    for i in range(num):
        known += x[i] * towards[i]
    variance = known + max(noise * noise, known * (abs(off) / limit - 1.0))
    for i in range(num):
        mean[i] += towards[i] * (off / variance)
        for j in range(num):
            cov[i, j] -= towards[i] * (towards[j] / variance)
        trace += cov[i, i]
    if trace < most:
        for i in range(num):
            for j in range(num):
                cov[i, j] += drift[i, j]


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


@inlined
def settle(raw: Float64, mean: Float64, seconds: Float64) -> None:
    """Write the corrected seconds: they never fall as rows grow."""
    least = math.inf
    for i in range(raw.shape[0] - 1, -1, -1):
        least = min(least, raw[i] * math.exp(mean[i]))
        seconds[i] = least


@entry
@compiled
def correct(
    rows: Float64, raw: Float64, seconds: Float64, fit: Belief, most: float, num_rows: float,
    step_s: float, keys_s: float,
) -> None:  # fmt: skip
    """Correct a CostTable by a step. seconds: written. keys_s: of attention, by the table."""
    last, x = rows.shape[0] - 1, fit[3][0]
    # What attention to keys takes is only known from the table: half at least is the rows'.
    off = math.log(max(step_s - keys_s, 0.5 * step_s) / seconds_of(rows, seconds, num_rows))
    at = 0
    while at < last and rows[at + 1] <= num_rows:
        at += 1
    for i in range(last + 1):
        x[i] = 0.0
    high = min(at + 1, last)
    if high > at:
        x[high] = min(1.0, (num_rows - rows[at]) / (rows[high] - rows[at]))
    x[at] += 1.0 - x[high]
    believe(fit, off, NOISE, 2.0 * NOISE, most)
    settle(raw, fit[0], seconds)


@entry
@compiled
def note_host(
    numbers: Float64, fit: Belief, most: float, num_draws: float, num_asked: float,
    num_opened: float, step_s: float, prompt_rows: int, num_steps: int,
) -> None:  # fmt: skip
    """See HostTimes.observe."""
    share = 1.0 - (1.0 - 1.0 / MEMORY) ** num_steps
    numbers[BESIDE] += (prompt_rows - numbers[BESIDE]) * share
    if prompt_rows:
        return
    x, known = fit[3][0], 0.0
    x[0], x[1], x[2], x[3] = 1.0, num_draws, min(1.0, num_asked), num_asked
    x[OPENING] = num_opened
    for i in range(BESIDE):
        known += x[i] * fit[0][i]
    known = max(known, 1e-6)
    believe(fit, step_s - known, HOST_NOISE * known, HOST_NOISE * known, most)


@inlined
def plain_host_s(host: Float64, num_draws: float) -> float:
    """Seconds of the host in a step without drafts. host: see HostTimes.numbers."""
    return max(0.0, float(host[0] + host[1] * num_draws))


@inlined
def asking_s(host: Float64, num_asked: float) -> float:
    """Seconds that asking so many sessions adds to a step, none of which is opened for it. host:
    see HostTimes.numbers."""
    return max(0.0, float(host[2] + host[3] * num_asked))


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


Curve = tuple[Float64, Float64, float, float]
NO_CURVE: Curve = (np.empty(0), np.empty(0), 0.0, 0.0)


class CostTable:
    """cost(rows, keys): seconds of one step on one runner.

    rows: number of rows. keys: KV entries attended to, summed over the rows. Between measured row
    counts the cost is interpolated; past the last one it grows in proportion. It never falls as
    rows grow: a measurement above one of more rows was disturbed, and the lower one stands.

    key_s: seconds for one row to attend to one more key.
    likely_s: seconds that the likeliest ids of one drawn row take, which drafters ask for
    (Batch.num_likely); `cost` is without them. curve: the row counts and their seconds, float64
    [n], as seconds_of takes them; seconds of a key and of a row's likeliest ids.
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
        self.key_s = key_s
        self.likely_s = likely_s
        octaves = np.log2(self._rows)
        near = np.exp(-np.abs(octaves[:, None] - octaves))
        # Of a step, what is not its first row. Where a busy machine made that one slower it looks
        # like nothing: a further row takes at least NOISE of the first.
        least = NOISE * (self._rows - 1.0)
        further = np.maximum(1.0 - self._raw[0] / self._raw, least / (1.0 + least))
        wrong = 1.0 + np.outer(further, further) + NOISE**2 * near
        self._off = belief(np.zeros(len(rows)), DOUBT**2 * wrong, DRIFT**2 * wrong)
        self._most = float(np.trace(self._off[1]))
        self._seconds = np.empty(len(rows))
        settle(self._raw, self._off[0], self._seconds)
        self.curve: Curve = (self._rows, self._seconds, key_s, likely_s)

    @staticmethod
    def measure(
        prober: Prober,
        max_rows: int,
        *,
        short_len: int = 64,
        long_len: int = 512,
        repeats: int = 3,
        limit_s: float = 0.25,
        body: Prober | None = None,
    ) -> CostTable:
        """Measure on the real runner, in `repeats` passes over the row counts.

        Each row count's shortest step counts, because other users of the machine only add time. The
        passes are spread over time, so that one disturbance does not hit all of them. Past 16 rows
        there is one pass (start-up must be short, and observe() refines the figures). Past 8 rows,
        the first row count whose step takes longer than limit_s is the last one: without a figure
        for 8 rows a slow or busy machine would never draft, and so never measure again. The KV term
        is the slope between short_len and long_len keys at 8 rows (0 where long_len is not above
        short_len). body: the prober of that, where there is one without the LM head.
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
            alone = body or prober
            near = min(alone(num, short_len) for _ in range(repeats))
            far = min(alone(num, long_len) for _ in range(repeats))
            key_s = max(0.0, far - near) / (num * (long_len - short_len))
        base = [max(s - key_s * r * short_len, 1e-9) for r, s in zip(rows, seconds, strict=True)]
        return CostTable(rows, base, key_s)

    def cost(self, num_rows: float, keys: float = 0.0) -> float:
        """Seconds of a step."""
        return seconds_of(self._rows, self._seconds, num_rows) + self.key_s * keys

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
        if seconds > 0.0:
            correct(
                self._rows, self._raw, self._seconds, self._off, self._most, float(num_rows),
                seconds, self.key_s * keys,
            )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a cache file (keyed by device, model, dtype and threads elsewhere)."""
        return {
            "rows": [int(r) for r in self._rows],
            "seconds": self._seconds.tolist(),
            "key_s": self.key_s,
            "likely_s": self.likely_s,
        }

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> CostTable:
        """The inverse of as_dict. Raises ValueError or KeyError on a damaged one."""
        own = float(plain["key_s"]), float(plain.get("likely_s", 0.0))
        return CostTable(plain["rows"], plain["seconds"], *own)


class HostTimes:
    """Seconds that a step takes beside the model: plain, and more where sessions are asked.

    numbers: float64 [6], a line in (1, choices that draw, whether any session is asked, sessions
    asked, sessions opened); and the rows of prompts in a step in which somebody decodes.
    """

    def __init__(self, row_s: float) -> None:
        """row_s: of the model's step of one row. What the host takes is at first a part of it."""
        first = row_s * np.array(HOST)
        fit = belief(first, np.diag(16.0 * first**2), np.diag((DRIFT * first) ** 2))
        self.numbers: Float64 = np.array([*first, 0.0])
        self._fit: Belief = (self.numbers[:BESIDE], *fit[1:])
        self._most = float(np.trace(self._fit[1]))

    def observe(
        self,
        num_draws: int,
        num_asked: int,
        seconds: float,
        prompt_rows: int = 0,
        num_steps: int = 1,
        num_opened: int = 0,
    ) -> None:
        """So many steps in which somebody decodes, beside so many rows of prompts: only those
        without any tell what the host takes."""
        note_host(
            self.numbers, self._fit, self._most, float(num_draws), float(num_asked),
            float(num_opened), seconds, prompt_rows, num_steps,
        )  # fmt: skip

    def plain(self, num_draws: int) -> float:
        """Seconds of a step without drafts."""
        return plain_host_s(self.numbers, float(num_draws))

    def asking(self, num_asked: int) -> float:
        """Seconds that asking so many sessions adds to a step."""
        return asking_s(self.numbers, float(num_asked))

    @property
    def opening(self) -> float:
        """Seconds that opening a session adds to a step."""
        return max(0.0, float(self.numbers[OPENING]))
