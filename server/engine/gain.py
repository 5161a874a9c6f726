"""Gain: whether choices draft now, and how many nodes. The one estimate of what drafts bring.

    ask      which choices' sessions are asked in a step, and for how many nodes at most
    choose   of all that they proposed the nodes that make the most tokens a second

Two things are known, and nothing else decides. *Costs*, of everybody: seconds of a step by its rows
and of the host by the sessions that are asked (step_times.py). *Evidence*, of one scope alone: how
many nodes of which claimed survival an ask brings (the supply), and how often such nodes came true
(the calibration). With both, an ask is worth, in tokens of plain decoding,

    V = sum over claims of supply * max(0, chance * worth - price of a node) - price of asking

at any number of choices and any load, because neither supply nor calibration depends on them. A
scope is asked where V is above 0 by a standard deviation of its evidence, and where it may be and
its account can bear what an ask may lose: SHARE of all plain decoding comes in, and what nodes
earn; out goes what nodes lose, and what an ask may lose that does not surely pay. So a scope never
loses much more than SHARE of its time to find out, beginning with its first request (conservative
bandits: Wu et al., ICML 2016).

A scope that is not asked is *watched* meanwhile: of each token that comes it is seen whether it
repeats what followed the same two ids before, in its prompt or answer. That costs microseconds, and
says nearly as much as an ask. All evidence fades, by asks and by plain tokens, so that a scope is
asked again once it is unsure what would come of it.

A node is taken for what it adds to tokens a second: S nodes of all choices together maximise

    sum of chances  -  mu * (seconds with the nodes - seconds without)

where mu is the best rate that a step of these choices alone can reach (Dinkelbach's fixed point
for a ratio). mu leaves rows of prompts out, so a step that is slow because of them does not make
nodes look cheap. A request that waits for its first token counts in mu as one more choice: a longer
step makes it wait, and it gains nothing from drafts.

This module computes with numbers only: no clock, no runner, no session.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from server.engine.step_times import CostTable, Float64, HostTimes

Int32 = npt.NDArray[np.int32]

SHARE = 0.0075
"""Of a scope's plain decoding, what it may lose to find out whether drafts pay: less than the one
hundredth that a first request of 24 tokens may be slower."""

MOST = 32.0
"""Asks that an account saves up for: an unlucky streak of a scope that pays is shorter."""

LEAST = 2.0
"""Asks that an account may owe: whoever claims much and is wrong stops after the first nodes, and a
scope that pays goes on after some tens of tokens."""

EDGES = (0.15, 0.35, 0.6, 0.85)
"""Of claimed survivals: each part is calibrated for itself, because high claims are wrong in other
ways than low ones."""

TRUST = 0.9
"""Tokens that come for a claimed one in a new scope: cold claims are too high."""

PRIOR = 3.0
"""Claimed tokens of a part that this counts for, claimed tokens of an answer's own drafts, and asks
that what was watched counts for: a few real ones tell more."""

MEMORY = 32.0
"""Asks of a scope, and tokens watched, that are remembered: texts change with requests."""

IDLE = 256.0
"""Plain tokens after which as much of asks is forgotten: a scope that rests is asked again once it
is unsure what would come of it, after some hundreds."""

DOUBT = 0.2
"""Accepted tokens an ask that one ask without any does not rule out."""

SURE = 0.25
"""Standard deviations by which an ask has to pay not to be charged: what is left undone at the
edge for fear of a loss stays under one twentieth."""

NEAR_BEST = 0.99
"""Of numbers of nodes with rates so near to the best one, the fewest are taken where several
choices decode: whoever comes meanwhile waits for the step, and chances are not known any better."""

REST = 4
"""Steps without a look at choices that rest, whose look takes as long as a plain step's host."""

_PARTS = len(EDGES) + 1
_DEPTH = 3  # nodes of a path that is watched
_MIDDLES = np.convolve((0.0, *EDGES, 1.0), (0.5, 0.5), "valid")


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step without its drafts: choices that draw, rows, and mean keys that a draw attends to.

    num_waiting: choices that wait for their first token and have a seat, or would get one now.
    """

    num_draws: int
    num_rows: int
    mean_len: float
    num_waiting: int = 0


class _Rows:
    """Columns of float64 that grow together. Column i of a row begins as 0."""

    __slots__ = ("free", "table")

    def __init__(self, num_columns: int) -> None:
        self.table = np.zeros((16, num_columns))
        self.free = list(range(15, -1, -1))

    def take(self) -> int:
        """A row of zeros."""
        if not self.free:
            num = self.table.shape[0]
            self.table = np.concatenate((self.table, np.zeros_like(self.table)))
            self.free = list(range(2 * num - 1, num - 1, -1))
        row = self.free.pop()
        self.table[row] = 0.0
        return row


# Columns of a scope: its account in asks, and whether it was asked last. Of plain tokens that were
# watched: how many, those that stood behind two ids that were known, and with how many of them
# that token, the two and the three from there on were repeated. Of asks: how many, and of each part
# of claims the nodes offered, tokens claimed by nodes that were verified, tokens that came of them.
_ACCOUNT, _IS_ASKED, _SEEN, _KNOWN = 0, 1, 2, 3
_REPEATED = slice(4, 4 + _DEPTH)
_PLAIN = slice(_SEEN, _REPEATED.stop)
_ASKS = _REPEATED.stop
_EVIDENCE = slice(_ASKS, None)
_OFFERED, _CLAIMED, _CAME = (
    slice(_ASKS + 1 + i * _PARTS, _ASKS + 1 + (i + 1) * _PARTS) for i in range(3)
)
# Columns of a seat: its scope's row; ids that it was watched for; tokens that its own drafts were
# expected to bring, and brought.
_SCOPE, _WATCHED, _OWN_CLAIMED, _OWN_CAME = 0, 1, 2, 3


def repeats(ids: Int32, start: int) -> npt.NDArray[np.int8]:
    """Of each of ids[start:], 1 where it followed the two ids before it when they last stood
    before, 0 where another id did, -1 where they are new: what a lookup would have drafted."""
    at = np.arange(max(start, 2), ids.shape[0])
    hits = np.full(max(0, ids.shape[0] - start), -1, np.int8)
    if not at.shape[0] or ids.shape[0] < 4:
        return hits
    first, second, third = ids[:-2], ids[1:-1], ids[2:]
    found = (first == ids[at - 2, None]) & (second == ids[at - 1, None])
    found &= np.arange(first.shape[0]) < at[:, None] - 2
    last = first.shape[0] - 1 - np.argmax(found[:, ::-1], axis=1)
    hits[-at.shape[0] :] = np.where(found.any(axis=1), third[last] == ids[at], -1)
    return hits


class Gain:
    """The estimate of one engine.

    cost: None takes every node that fits, and asks everybody. host: seconds beside the model.
    """

    def __init__(self, cost: CostTable | None = None, *, capacity: int = 4096) -> None:
        """capacity: scopes that are remembered after their last choice has ended."""
        self.cost = cost
        self.host = HostTimes(0.0 if cost is None else cost.cost(1))
        self._capacity = capacity
        self._in_asks = 0.0, 0.0  # what a token saves and a node takes, at the last step
        self._scopes = _Rows(_CAME.stop)
        self._seats = _Rows(4)
        self._known: OrderedDict[Hashable, int] = OrderedDict()
        self._num_seats: dict[int, int] = {}  # by scope's row

    # -- who is known -----------------------------------------------------------------------

    def knows(self, key: Hashable) -> bool:
        """Whether a scope has had a choice."""
        return key in self._known

    def seat(self, key: Hashable, *, knows: bool = False) -> int:
        """A choice's seat. key: all that tells one scope's drafts from another's. knows: whether
        its drafter knows more than the prompt from the start (a corpus, a prediction): a new scope
        is then asked at once."""
        row = self._known.get(key)
        if row is None:
            row = self._known[key] = self._scopes.take()
            self._num_seats[row] = 1
            self._scopes.table[row, [_ACCOUNT, _IS_ASKED]] = MOST * knows, knows
            if len(self._known) > self._capacity:
                self._forget_one()
        else:
            self._known.move_to_end(key)
            self._num_seats[row] += 1
        seat = self._seats.take()
        self._seats.table[seat, _SCOPE] = row
        return seat

    def leave(self, seat: int) -> None:
        """The choice has ended."""
        self._num_seats[int(self._seats.table[seat, _SCOPE])] -= 1
        self._seats.free.append(seat)

    def _forget_one(self) -> None:
        """Of the scopes without a choice, the one that was used longest ago."""
        for key, row in self._known.items():
            if not self._num_seats[row]:
                del self._known[key], self._num_seats[row]
                self._scopes.free.append(row)
                return

    # -- before a step ----------------------------------------------------------------------

    def ask(self, seats: Sequence[int], shape: StepShape, room: int) -> tuple[list[str], int]:
        """Of each choice that may draft "" where it is to be asked in this step, else why not, in
        the words of StepCounts.no_draft_reason; and the most nodes that could pay if all of them
        were accepted (0 where nobody is asked). room: nodes that fit. Called once a step."""
        if self.cost is None:
            return ["" if room > 0 else "budget"] * len(seats), max(0, room)
        own = self._seats.table[seats]
        rows = own[:, _SCOPE].astype(np.intp)
        scopes = self._scopes.table[rows]
        token_s, ask_s, node_s, worth = self._prices(shape, scopes)
        trust = self._own_trust(own)
        price = node_s / token_s
        self._in_asks = token_s / ask_s * worth, node_s / ask_s
        asks = np.maximum(scopes[:, _ASKS], 1e-3)
        # No more than may be taken (`choose`): what was claimed of more is not known to be true.
        offered = scopes[:, _OFFERED].sum(axis=1) / asks
        limits = 1.0 + scopes[:, _CAME].sum(axis=1)
        supply = scopes[:, _OFFERED] * (np.minimum(1.0, limits / offered.clip(1.0)) / asks)[:, None]
        chances = self._trusts(scopes) * _MIDDLES * trust[:, None]
        drafted = (supply * np.maximum(0.0, chances * worth - price)).sum(axis=1)
        known = np.maximum(scopes[:, _KNOWN], 1e-3)[:, None]
        repeated = np.maximum(0.0, scopes[:, _REPEATED] / known * worth - price).sum(axis=1)
        repeated *= scopes[:, _KNOWN] / np.maximum(scopes[:, _SEEN], 1.0)
        value = (asks * drafted + repeated) / (asks + 1.0) - ask_s / token_s
        came = (supply * chances).sum(axis=1)
        doubt = np.sqrt((came + DOUBT) / asks)
        sure = SURE * np.sqrt((came + repeated + DOUBT) / (asks + scopes[:, _SEEN]))
        may_pay, pays = value + doubt > 0.0, value > doubt
        most = self.most(shape, room) if may_pay.any() else 0
        # In asks: what one may lose at most, if its nodes are worth their rows, and what comes in.
        losses = np.clip((sure - value) * (token_s / ask_s), 0.0, 1.0).tolist()
        income = SHARE * token_s / ask_s
        why: list[str] = []
        for at, row in enumerate(rows.tolist()):
            scope = self._scopes.table[row]
            account = min(scope[_ACCOUNT] + income, MOST)
            would_be = bool(may_pay[at] and (pays[at] or account >= losses[at]))
            if most and would_be:
                account -= losses[at]
                why.append("")
            else:
                scope[_EVIDENCE] *= 1.0 - 1.0 / IDLE
                why.append("cooldown")
            scope[_ACCOUNT], scope[_IS_ASKED] = account, would_be
        return why, most if "" in why else 0

    def is_asked(self, seat: int) -> bool:
        """Whether a choice of this scope would be asked, if there is room, as last weighed."""
        return self.cost is None or bool(self._scope_of(seat)[_IS_ASKED])

    def rested(self, seats: Sequence[int], shape: StepShape, num_steps: int) -> None:
        """So many steps of these choices were taken without `ask`, and without drafts."""
        if self.cost is None or not num_steps:
            return
        token_s, ask_s, _, _ = self._prices(shape, self._scopes.table[:0])
        for seat in seats:
            scope = self._scope_of(seat)
            scope[_ACCOUNT] = min(scope[_ACCOUNT] + num_steps * SHARE * token_s / ask_s, MOST)
            scope[_EVIDENCE] *= (1.0 - 1.0 / IDLE) ** num_steps

    def choose(
        self,
        seats: Sequence[int],
        claims: Sequence[Float64],
        certain: Sequence[int],
        shape: StepShape,
        room: int,
    ) -> list[int]:
        """How many nodes of each tree to verify: its likeliest ones.

        claims: per tree float64 [nodes], the survivals that its drafter claims, each within [0, 1].
        certain: how many of its first nodes a grammar forces.
        """
        sizes = [own.shape[0] for own in claims]
        total = sum(sizes)
        if total == 0 or room <= 0:
            return [0] * len(sizes)
        if self.cost is None and total <= room:
            return sizes
        own = self._seats.table[seats]
        scopes = self._scopes.table[own[:, _SCOPE].astype(np.intp)]
        trusts = self._trusts(scopes) * self._own_trust(own)[:, None]
        owner = np.repeat(np.arange(len(sizes)), sizes)
        flat = np.concatenate(claims)
        flat = np.minimum(1.0, flat * trusts[owner, np.searchsorted(EDGES, flat)])
        if any(certain):
            place = np.arange(total) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            flat[place < np.asarray(certain)[owner]] = 1.0
        if self.cost is not None:
            # A scope of which little came true yet has few nodes: 1, and one for each that did.
            limits = 1.0 + scopes[:, _CAME].sum(axis=1) + np.asarray(certain)
            for at in np.flatnonzero(limits < sizes).tolist():
                start = sum(sizes[:at])
                part = flat[start : start + sizes[at]]
                part[np.argsort(-part, kind="stable")[int(limits[at]) :]] = 0.0
        order = np.argsort(-flat, kind="stable")[:room]
        num = order.shape[0]
        if self.cost is not None:
            num = self._best(flat[order], shape)
        kept: list[int] = np.bincount(owner[order[:num]], minlength=len(sizes)).tolist()
        return kept

    # -- after a step -----------------------------------------------------------------------

    def observe_ask(self, seat: int, claims: Float64) -> None:
        """A choice was asked and proposed nodes with these claims, maybe none."""
        scope = self._scope_of(seat)
        scope[_EVIDENCE] *= 1.0 - 1.0 / MEMORY
        scope[_ASKS] += 1.0
        if claims.shape[0]:
            parts = np.searchsorted(EDGES, claims)
            scope[_OFFERED] += np.bincount(parts, minlength=_PARTS)

    def observe_drafts(self, seat: int, claims: Float64, accepted: Sequence[int]) -> None:
        """The nodes with these claims were verified. accepted: indexes of those that came true."""
        scope, own = self._scope_of(seat), self._seats.table[seat]
        parts = np.searchsorted(EDGES, claims)
        scope[_CLAIMED] += np.bincount(parts, claims, _PARTS)
        if len(accepted):
            scope[_CAME] += np.bincount(parts[list(accepted)], minlength=_PARTS)
        expected = float((claims * self._trusts(scope[None])[0, parts]).sum())
        own[_OWN_CLAIMED:] *= 1.0 - 1.0 / MEMORY
        own[_OWN_CLAIMED] += expected
        own[_OWN_CAME] += len(accepted)
        token, node = self._in_asks
        earned = token * len(accepted) - node * claims.shape[0]
        scope[_ACCOUNT] = min(max(scope[_ACCOUNT] + earned, -LEAST), MOST)

    def watch(self, seat: int, ids: Int32, start: int) -> None:
        """A choice was not asked for what follows ids[:start], prompt and output. Tokens that it
        was watched for already are left out."""
        if self.cost is None:
            return
        own, scope = self._seats.table[seat], self._scope_of(seat)
        start, own[_WATCHED] = max(start, int(own[_WATCHED])), ids.shape[0]
        hits = repeats(ids, start)
        scope[_PLAIN] *= max(0.0, 1.0 - hits.shape[0] / MEMORY)
        scope[_SEEN] += hits.shape[0]
        scope[_KNOWN] += (hits >= 0).sum()
        runs = hits > 0
        for depth in range(min(_DEPTH, hits.shape[0])):
            scope[_REPEATED.start + depth] += runs.sum()
            runs = runs[:-1] & (hits[depth + 1 :] > 0)

    # -- the estimate -----------------------------------------------------------------------

    def _scope_of(self, seat: int) -> Float64:
        scope: Float64 = self._scopes.table[int(self._seats.table[seat, _SCOPE])]
        return scope

    @staticmethod
    def _trusts(scopes: Float64) -> Float64:
        """[n, parts]: tokens that come for a claimed one."""
        trusts: Float64 = scopes[:, _CAME] + PRIOR * TRUST
        trusts /= scopes[:, _CLAIMED] + PRIOR
        np.minimum(trusts, 1.0 / _MIDDLES, out=trusts)
        return trusts

    @staticmethod
    def _own_trust(own: Float64) -> Float64:
        """[n]: of an answer's own drafts, beside its scope's."""
        trusts: Float64 = own[:, _OWN_CAME] + PRIOR
        trusts /= own[:, _OWN_CLAIMED] + PRIOR
        np.minimum(1.0, trusts, out=trusts)
        return trusts

    def _prices(self, shape: StepShape, scopes: Float64) -> tuple[float, float, float, float]:
        """Seconds of a plain token, of asking one choice and of a node; what an accepted token
        saves of a plain one, 0..1. scopes: of all that may be asked."""
        cost, num = self.cost, shape.num_draws
        assert cost is not None
        plain_s = cost.cost(num, num * shape.mean_len) + self.host.plain(num)
        ask_s = max(self.host.asking(num) / num + cost.likely_s, 1e-9)
        asks = np.maximum(scopes[:, _ASKS], 1.0)
        likely = float((scopes[:, _CAME.start : _CAME.stop].sum(axis=1) / asks).sum())
        nodes = max(1.0, likely)
        row_s = (cost.cost(num + nodes) - cost.cost(num)) / nodes
        node_s = row_s + cost.node_s(shape.mean_len)
        return plain_s / num, ask_s, node_s, self._worth(shape, plain_s / num)

    def _worth(self, shape: StepShape, token_s: float) -> float:
        """What an accepted token saves, in tokens of plain decoding, 0..1.

        Where prompts come all the time, steps are taken for their sake: a token less to decode
        saves its row there, and no step.
        """
        cost, num = self.cost, shape.num_draws
        assert cost is not None
        row_s = cost.cost(num + 1) - cost.cost(num) + cost.key_s * shape.mean_len
        return 1.0 - self.host.mixed * (1.0 - min(1.0, row_s / token_s))

    def most(self, shape: StepShape, room: int) -> int:
        """The most nodes that could pay if every one of them were accepted."""
        return self._best(np.ones(room), shape) if room > 0 else 0

    def _best(self, ranked: Float64, shape: StepShape) -> int:
        """The best number of nodes for chances in descending order."""
        cost, num_draws = self.cost, shape.num_draws
        assert cost is not None
        gain = np.zeros(ranked.shape[0] + 1)
        np.cumsum(ranked, out=gain[1:])
        nodes = np.arange(gain.shape[0], dtype=np.float64)
        node_s = cost.node_s(shape.mean_len)
        step_s = cost.costs(nodes + num_draws) + node_s * (nodes + num_draws)
        step_s += self.host.plain(num_draws)
        gain *= self._worth(shape, float(step_s[0]) / num_draws)
        rates = (gain + num_draws) / step_s
        best = int(np.argmax(rates))  # ties: the fewest nodes
        if num_draws > 1:
            best = int(np.argmax(rates >= NEAR_BEST * rates[best]))
        if shape.num_rows == num_draws and shape.num_waiting == 0:
            return best
        # Who waits for a first token loses as much by a longer step as one that decodes.
        price = rates[best] * (num_draws + shape.num_waiting) / num_draws
        step_s = cost.costs(nodes + shape.num_rows) + node_s * nodes
        return int(np.argmax(gain - price * (step_s - step_s[0])))
