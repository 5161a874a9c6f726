"""The draft budget: how many tree nodes of which sequences a step verifies.

Every node costs a row. `CostTable` says what rows cost on this runner (measured, a step function
with its 1 -> 2 row jump kept); a node is worth its survival, the chance that its whole path is
accepted, in tokens. `DraftBudget.choose` ranks the candidate nodes of all sequences together and
takes the top S that maximises

    sum of survival  -  mu * (cost of the rows with the nodes - cost of the rows without)

where mu is tokens per second: the best rate that a decode-only step of the same sequences and
nodes can reach (Dinkelbach's fixed point for a ratio). mu leaves the step's prefill rows out, so
a step that is slow because it prefills does not make nodes look cheap, while the cost difference
is taken at the step's real row count, prefill included. A request that waits for its first token
counts in mu as one more sequence: a longer step makes it wait, and it gains nothing from drafts.
Without that, first tokens under load came up to 1.2 times as late with drafts as without.
S = 0 is the plain decode path. This module computes with numbers only: no clock, no runner.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from server.engine.draft_record import DraftRecord
from server.engine.draft_worth import HostTimes, rest_left, rested, who_rests
from server.engine.table_watch import TableWatch

Float64 = npt.NDArray[np.float64]
Prober = Callable[[int, int], float]
"""(num_rows, kv_len) -> seconds of one decode step with that many rows over kv_len keys each."""

_REFRESH = 0.05  # weight of one step in the host's share
_SCALE_REFRESH = 0.04  # ... in the whole table: a busy or throttled machine slows every step alike
_CELL_REFRESH = 0.02  # ... in the cells around the step's row count
NEAR_BEST = 0.99
"""Of choices of nodes whose rates are this near to the best one, the one with the fewest nodes is
taken where several choices decode: claims and prices are not known any better."""

_OUTLIER = 4.0  # an observed step this many times off the table is clipped (a busy machine)


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
    (Batch.num_likely); `cost` is without them. watch: compares the file it is from with steps.
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
        self.watch: TableWatch | None = None
        self._row_list: list[float] = self._rows.tolist()
        self._settle()

    def _settle(self) -> None:
        """Take the measured seconds over: it never falls as rows grow."""
        self._seconds: Float64 = np.minimum.accumulate(self._raw[::-1])[::-1]
        self._second_list: list[float] = self._seconds.tolist()

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
        rows, seconds = self._row_list, self._second_list
        if num_rows < 1:
            return self._key_s * keys
        if num_rows >= rows[-1]:
            return seconds[-1] * num_rows / rows[-1] + self._key_s * keys
        at = bisect_right(rows, num_rows)
        share = (num_rows - rows[at - 1]) / (rows[at] - rows[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1]) + self._key_s * keys

    def costs(self, num_rows: Float64) -> Float64:
        """float64 [n] rows -> float64 [n] seconds, without the KV term. 0 rows cost 0."""
        out: Float64 = np.interp(num_rows, self._rows, self._seconds)
        last = self._rows[-1]
        past = num_rows > last
        if past.any():
            out[past] = self._seconds[-1] * num_rows[past] / last
        out[num_rows < 1] = 0.0
        return out

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
        """Refresh the table from one real step: its scale, and the cells around num_rows."""
        expected = self.cost(num_rows, keys)
        if seconds <= 0.0 or expected <= 0.0:
            return
        ratio = min(max(seconds / expected, 1.0 / _OUTLIER), _OUTLIER)
        at = int(np.searchsorted(self._rows, num_rows))
        if at >= self._rows.shape[0]:
            cells = [(self._rows.shape[0] - 1, 1.0)]
        elif self._rows[at] == num_rows:
            cells = [(at, 1.0)]
        else:
            low, high = float(self._rows[at - 1]), float(self._rows[at])
            share = (num_rows - low) / (high - low)
            cells = [(at - 1, 1.0 - share), (at, share)]
        for cell, weight in cells:
            self._raw[cell] *= 1.0 + _CELL_REFRESH * weight * (ratio - 1.0)
        self._raw *= 1.0 + _SCALE_REFRESH * (ratio - 1.0)
        self._settle()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a cache file (keyed by device, model, dtype and threads elsewhere)."""
        return {
            "rows": [int(r) for r in self._rows],
            "seconds": self._raw.tolist(),
            "key_s": self._key_s,
            "likely_s": self.likely_s,
        }

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> CostTable:
        """The inverse of as_dict. Raises ValueError or KeyError on a damaged one."""
        own = float(plain["key_s"]), float(plain.get("likely_s", 0.0))
        return CostTable(plain["rows"], plain["seconds"], *own)


class DraftBudget:
    """Chooses the node set of a step. Without a cost table every node that fits is taken."""

    def __init__(self, cost: CostTable | None = None, *, host_s: float = 0.0) -> None:
        """host_s: seconds a step spends outside the runner (refreshed with observe_host)."""
        self.cost = cost
        self.host = HostTimes()
        self._host_s = host_s
        self._ask_s = 0.0

    def observe_host(self, seconds: float) -> None:
        """Refresh the host's share of a step."""
        self._host_s += _REFRESH * (seconds - self._host_s)

    def who_rests(
        self, records: Sequence[DraftRecord], num_draws: int, mean_len: float
    ) -> list[bool]:
        """Whether each of these choices is not to be asked in a step, because drafts do not pay for
        its scope as a whole (draft_worth.py). Called once a step."""
        cells = [record.cell_at(num_draws) for record in records]
        cost = self.cost
        if cost is None or not any(cells):
            return [False] * len(records)
        if rest_left(cells):  # nothing to weigh, as in most steps of many choices
            rested(cells, 1)
            rests = [True] * len(cells)
        elif len(cells) == 1 and cells[0] is not None and cells[0].goes_on:
            rests = [False]  # nor here, as in most steps of one choice
        else:
            rate = self._plain_rate(num_draws, mean_len) / self._token_worth(num_draws, mean_len)

            def node_cost(num_nodes: float) -> float:
                extra_s = cost.cost(num_draws + num_nodes) - cost.cost(num_draws)
                return (extra_s + cost.node_s(mean_len) * num_nodes) * rate

            rests = who_rests(cells, node_cost, self._seconds_of_asking(num_draws) * rate)
        for record, cell, is_resting in zip(records, cells, rests, strict=True):
            record.note_in(None if is_resting else cell)
        return rests

    def observe_proposing(self, seconds: float, num_asked: int) -> None:
        """Refresh what a proposal costs: num_asked of them took `seconds` of CPU time."""
        self._ask_s += _REFRESH * (seconds / num_asked - self._ask_s)

    def price(self, num_draws: int, mean_len: float) -> float:
        """Tokens that plain decoding of these sequences makes in the time that one proposal
        takes, and all that it adds to a step beside."""
        worth = self._token_worth(num_draws, mean_len)
        return self._seconds_of_asking(num_draws) * self._plain_rate(num_draws, mean_len) / worth

    def _seconds_of_asking(self, num_draws: int) -> float:
        """That one choice's drafts add to a step beside its nodes."""
        likely_s = 0.0 if self.cost is None else self.cost.likely_s
        ask_s = max(self._ask_s, self.host.ask_s, self.host.extra(num_draws) / num_draws)
        return ask_s + likely_s

    def _token_worth(self, num_draws: int, mean_len: float) -> float:
        """What an accepted token saves, in tokens of plain decoding, 0..1.

        Where prompts come all the time, steps are taken for their sake: a token less to decode
        saves its row there, and no step.
        """
        if self.cost is None:
            return 1.0
        row_s = self.cost.cost(num_draws + 1) - self.cost.cost(num_draws)
        row_s += self.cost.key_s * mean_len
        row = min(1.0, row_s * self._plain_rate(num_draws, mean_len))
        return 1.0 - self.host.mixed * (1.0 - row)

    def values(
        self,
        survivals: Sequence[Float64],
        kept: Sequence[int],
        num_draws: int,
        base_rows: int,
        mean_len: float,
    ) -> list[float]:
        """What `choose` took of each tree, in tokens: its survivals less what its rows cost."""
        total = sum(kept)
        node = 0.0
        if total and self.cost is not None:
            after, before = self.cost.cost(base_rows + total), self.cost.cost(base_rows)
            extra_s = (after - before) / total + self.cost.node_s(mean_len)
            node = extra_s * self._plain_rate(num_draws, mean_len)
        return [
            float(np.sort(s)[s.shape[0] - num :].sum()) - node * num if num else 0.0
            for s, num in zip(survivals, kept, strict=True)
        ]

    def _plain_rate(self, num_draws: int, mean_len: float) -> float:
        """Tokens per second without drafts; 0 without a cost table."""
        if self.cost is None:
            return 0.0
        host_s = self.host.plain(num_draws) or self._host_s
        return num_draws / (self.cost.cost(num_draws, num_draws * mean_len) + host_s)

    def ceiling(
        self,
        num_draws: int,
        base_rows: int,
        mean_len: float,
        max_nodes: int,
        num_waiting: int = 0,
    ) -> int:
        """The most nodes that could pay if every one of them were accepted; 0: nobody need propose.

        num_draws: sequences that draw this step. base_rows: rows without drafts. mean_len: keys a
        node attends to. max_nodes: that fit. num_waiting: sequences that wait for their first
        token.
        """
        if self.cost is None or max_nodes <= 0:
            return max(0, max_nodes)
        return self._best(np.ones(max_nodes), num_draws, base_rows, mean_len, num_waiting)

    def choose(
        self,
        survivals: Sequence[Float64],
        num_draws: int,
        base_rows: int,
        mean_len: float,
        max_nodes: int,
        num_waiting: int = 0,
    ) -> list[int]:
        """How many nodes of each tree to verify: its most likely ones (DraftTree.prune).

        survivals: per tree float64 [num_nodes], already scaled by trust, each within [0, 1].
        """
        sizes = [s.shape[0] for s in survivals]
        total = sum(sizes)
        if total == 0 or max_nodes <= 0:
            return [0] * len(sizes)
        if self.cost is None and total <= max_nodes:
            return sizes
        flat = np.concatenate(survivals) if len(survivals) > 1 else survivals[0]
        order = np.argsort(-flat, kind="stable")[:max_nodes]
        num = order.shape[0]
        if self.cost is not None:
            num = self._best(flat[order], num_draws, base_rows, mean_len, num_waiting)
        if len(sizes) == 1:
            return [num]
        owner = np.repeat(np.arange(len(sizes)), sizes)
        kept = np.bincount(owner[order[:num]], minlength=len(sizes))
        return [int(k) for k in kept]

    def _best(
        self, ranked: Float64, num_draws: int, base_rows: int, mean_len: float, num_waiting: int
    ) -> int:
        """The best S for survivals in descending order."""
        cost = self.cost
        assert cost is not None
        num = ranked.shape[0]
        gain = np.empty(num + 1)
        gain[0] = 0.0
        np.cumsum(ranked, out=gain[1:])
        nodes = np.arange(num + 1, dtype=np.float64)
        node_s = cost.node_s(mean_len)
        decode_s = cost.costs(nodes + num_draws) + node_s * (nodes + num_draws) + self._host_s
        gain *= self._token_worth(num_draws, mean_len)
        rates = (gain + num_draws) / decode_s
        best = int(np.argmax(rates))  # ties: the fewest nodes
        if num_draws > 1:  # whoever comes meanwhile waits for the step: a short one is better
            best = int(np.argmax(rates >= NEAR_BEST * rates[best]))
        if base_rows == num_draws and num_waiting == 0:
            return best
        # A sequence that waits for its first token loses as much by a longer step as one that
        # decodes, and gains nothing by drafts.
        price = rates[best] * (num_draws + num_waiting) / num_draws
        step_s = cost.costs(nodes + base_rows) + node_s * nodes
        return int(np.argmax(gain - price * (step_s - step_s[0])))
