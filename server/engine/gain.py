"""Gain: whether choices draft now, and how many nodes. The one estimate of what drafts bring.

    ask      which choices' sessions are asked in a step, and for how many nodes at most
    choose   of all that they proposed the nodes that make the most tokens a second

Two things are known, and nothing else decides. *Costs*, of everybody: seconds of a step by its rows
and of the host by the sessions that are asked (step_times.py). *Evidence*, of one scope alone: how
many nodes of which claimed survival an ask brings (the supply), and how often such nodes came true
(the calibration). With both, an ask is worth, in tokens of plain decoding,

    V = sum over claims of supply * max(0, chance * worth - price of a node) - price of asking

at any number of choices and any load, because neither supply nor calibration depends on them. What
asking anybody takes of a step is shared by those that are asked. A scope is asked where V is above
0 by a standard deviation of its evidence, and where it may be and its account can bear what an ask
may lose: SHARE of all plain decoding comes in, and what nodes earn; out goes what nodes lose, and
what asking takes. Opening a choice's session for its first ask is paid from the account, however
sure it is. So a scope never loses much more than SHARE of its time to find out, beginning with its
first request (conservative bandits: Wu et al., ICML 2016). What an ask may bring beyond V
is at most that all nodes of its tree come: where a row takes nearly as long as a token, as with
eight choices on many CPUs, nobody is asked to find out what could not pay.

A scope that is not asked is *watched* meanwhile: of each token that comes it is seen whether it
repeats what followed the same two ids before, in its prompt or answer. That costs microseconds.
Each that does promises REPEAT nodes that come, and its account gets what these save beyond their
price: a text that has begun to repeat is asked at once, and one that never does is hardly ever. All
evidence fades, by asks and by plain tokens, so that a scope is asked again once it is unsure what
would come of it.

A node is taken for what it adds to tokens a second: S nodes of all choices together maximise

    sum of chances  -  mu * (seconds with the nodes - seconds without)

where mu is the best rate that a step of these choices alone can reach (Dinkelbach's fixed point
for a ratio). mu leaves rows of prompts out, so a step that is slow because of them does not make
nodes look cheap. A request that waits for its first token counts in mu as one more choice: a longer
step makes it wait, and it gains nothing from drafts.

This module computes with numbers only: no clock, no runner, no session. Its loops over seats,
parts of claims and nodes are compiled (drafters/jit.py).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from drafters.arrays import Float64, Float64x2, Int32, Int64
from drafters.jit import compiled, entry, inlined
from server.engine.step_times import (
    BESIDE,
    MEMORY,
    NO_CURVE,
    OPENING,
    CostTable,
    Curve,
    HostTimes,
    asking_s,
    plain_host_s,
    seconds_of,
)

SHARE = 0.0075
"""Of a scope's plain decoding, what it may lose to find out whether drafts pay: less than the one
hundredth that a first request of 24 tokens may be slower."""

MOST = 3.2
"""Plain tokens that an account saves up: an unlucky streak of a scope that pays takes less."""

LEAST = 0.2
"""Plain tokens that an account may owe: whoever claims much and is wrong stops after the first
nodes, and a scope that pays goes on after some tens of tokens."""

EDGES = (0.15, 0.35, 0.6, 0.85)
"""Of claimed survivals: each part is calibrated for itself, because high claims are wrong in other
ways than low ones."""

PRIOR = 3.0
"""Claimed tokens of a part, and of an answer's own drafts, that are believed to come before any are
known: a few real ones tell more."""

IDLE = 256.0
"""Plain tokens after which as much of asks is forgotten: a scope that rests is asked again once it
is unsure what would come of it, after some hundreds."""

DOUBT = 0.2
"""Accepted tokens an ask that one ask without any does not rule out."""

REPEAT = 0.5
"""Accepted nodes that are believed to come for each token that repeats what stood before: a text
that does that once goes on to."""

REST = 4
"""Of steps in which nobody is asked, one in so many, or as many as there are choices, is looked at
(draft.py) and learned from (figures.py): they are alike, and a look takes as long as a plain step's
host."""

_NUM_PRICED = 16  # nodes of a tree that have a price of their own
_NO_CHANCES, _NO_ORDER = np.empty(0), np.empty(0, np.int64)
_BOUNDS = (0.0, *EDGES, 1.0)
_PARTS = len(EDGES) + 1
_MIDDLES = tuple(0.5 * (low + high) for low, high in pairwise(_BOUNDS))


class StepShape(NamedTuple):
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


# Columns of a scope: its account in plain tokens, whether it was asked last, and its seats; of
# plain tokens that were watched those that repeated what stood before. Of asks: how many, and of
# each part of claims the nodes offered, tokens claimed by nodes that were verified, tokens that
# came.
_ACCOUNT, _IS_ASKED, _SEATS, _REPEATED, _ASKS, _OFFERED = range(6)
_CLAIMED, _CAME, _NUM_COLUMNS = (_OFFERED + i * _PARTS for i in (1, 2, 3))
# Columns of a seat: its scope's row; ids that it was watched for; tokens that its own drafts were
# expected to bring, and brought; whether it has a session.
_SCOPE, _WATCHED, _OWN_CLAIMED, _OWN_CAME, _IS_OPEN, _NUM_SEAT_COLUMNS = range(6)


@inlined
def _part(claim: float) -> int:
    """The part of claims that a claim lies in."""
    part = 0
    for edge in EDGES:
        part += claim > edge
    return part


@inlined
def _trust(scopes: Float64x2, row: int, part: int) -> float:
    """Tokens that come for a claimed one."""
    came = scopes[row, _CAME + part] + PRIOR
    return float(min(came / (scopes[row, _CLAIMED + part] + PRIOR), 1.0 / _MIDDLES[part]))


@inlined
def _own_trust(seats: Float64x2, seat: int) -> float:
    """Of an answer's own drafts, beside its scope's: below 1 where more miss than by chance."""
    came = seats[seat, _OWN_CAME] + PRIOR
    return float(min(1.0, (came + math.sqrt(came)) / (seats[seat, _OWN_CLAIMED] + PRIOR)))


@inlined
def _num_came(scopes: Float64x2, row: int) -> float:
    """Tokens of a scope's asks that came of nodes."""
    came = 0.0
    for part in range(_PARTS):
        came += scopes[row, _CAME + part]
    return came


@inlined
def _may_take(scopes: Float64x2, row: int, repeated: float) -> float:
    """Most nodes of a tree of this scope: what was claimed of more is not known to be true.
    repeated: tokens that might have come of nodes."""
    came = _num_came(scopes, row) + repeated
    return 1.0 + came * came


@inlined
def _fade(scopes: Float64x2, row: int, share: float, first: int) -> None:
    """Keep this share of what asks have told, and from the column `first` on what was watched."""
    for column in range(first, _NUM_COLUMNS):
        scopes[row, column] *= share


@inlined
def _worth(curve: Curve, host: Float64, shape: StepShape, token_s: float) -> float:
    """What an accepted token saves, in tokens of plain decoding, 0..1.

    Rows of prompts are computed whatever is drafted: of two steps that become one, it has the
    prompts of both. Where these are long, a step is little more than its rows, and so is what a
    token saves.
    """
    rows, seconds, key_s, _ = curve
    num, beside = float(shape.num_draws), float(host[BESIDE])
    saved_s = 2.0 * seconds_of(rows, seconds, num + beside)
    saved_s -= seconds_of(rows, seconds, num + 2.0 * beside)
    row_s = seconds_of(rows, seconds, num + 1.0) - seconds_of(rows, seconds, num)
    saved_s = max(row_s, (saved_s + plain_host_s(host, num)) / num) + key_s * shape.mean_len
    return float(min(1.0, saved_s / token_s))


@inlined
def _ask_s(curve: Curve, host: Float64, num_draws: int, num_asked: int) -> float:
    """Seconds that asking takes of each that is asked. Of every drawn row the likeliest
    ids are told, whoever wants them."""
    return max((asking_s(host, float(num_asked)) + curve[3] * num_draws) / num_asked, 1e-9)


@inlined
def _opening(seats: Float64x2, seat: int, host: Float64, token_s: float) -> float:
    """Plain tokens that opening a choice's session takes, no more than half of what an account can
    hold: the rest is for asks. 0 where it has one."""
    if seats[seat, _IS_OPEN]:
        return 0.0
    return float(min(max(0.0, host[OPENING]) / token_s, 0.5 * MOST))


@inlined
def _is_worth_asking(
    value: float, doubt: float, account: float, ask: float, opening: float
) -> bool:
    """Whether an ask that is worth so much, give or take its doubt, is surely so, or may be and the
    account can bear what it may lose, beside what opening the session takes. All in plain tokens;
    ask: what it takes."""
    may_lose = value > doubt or account - opening >= min(max(-value, 0.0), ask)
    return value + doubt > 0.0 and may_lose and (account >= opening or opening == 0.0)


@inlined
def _prices(
    curve: Curve, host: Float64, shape: StepShape, likely: float
) -> tuple[float, float, float]:
    """Seconds of a plain token and of a node; what an accepted token saves of a plain one, 0..1.
    likely: nodes that come true if all are asked."""
    rows, seconds, key_s, likely_s = curve
    num, nodes = float(shape.num_draws), max(1.0, likely)
    rows_s, node_s = seconds_of(rows, seconds, num), key_s * shape.mean_len
    token_s = (rows_s + plain_host_s(host, num)) / num + node_s
    node_s += likely_s + (seconds_of(rows, seconds, num + nodes) - rows_s) / nodes
    return token_s, node_s, _worth(curve, host, shape, token_s)


@inlined
def _best(
    chances: Float64, order: Int64, size: int, curve: Curve, host: Float64, shape: StepShape,
    num_asked: int,
) -> int:  # fmt: skip
    """The best number of the first `size` nodes in `order`, which has descending chances (none: all
    are certain), in a step that has asked so many."""
    rows, seconds, key_s, likely_s = curve
    num_draws, num_rows, mean_len, num_waiting = shape
    draws = float(num_draws)
    node_s, host_s = key_s * mean_len + likely_s, plain_host_s(host, draws)
    token_s = (seconds_of(rows, seconds, draws) + host_s) / draws + node_s
    host_s += asking_s(host, float(num_asked))
    worth = _worth(curve, host, shape, token_s)
    best, best_rate, gained = 0, 0.0, 0.0
    for num in range(size + 1):
        if num:
            gained += (chances[order[num - 1]] if order.shape[0] else 1.0) * worth
        drawn = draws + num
        rate = (gained + draws) / (seconds_of(rows, seconds, drawn) + node_s * drawn + host_s)
        if rate > best_rate:  # ties: the fewest nodes
            best, best_rate = num, rate
    if num_rows == num_draws and num_waiting == 0:
        return best
    # Who waits for a first token loses as much by a longer step as one that decodes.
    price = best_rate * (num_draws + num_waiting) / draws
    plain_s, most, gained, best = seconds_of(rows, seconds, float(num_rows)), 0.0, 0.0, 0
    for num in range(1, size + 1):
        gained += (chances[order[num - 1]] if order.shape[0] else 1.0) * worth
        more_s = seconds_of(rows, seconds, float(num_rows + num)) + node_s * num - plain_s
        if gained - price * more_s > most:
            best, most = num, gained - price * more_s
    return best


@entry
@compiled
def most_nodes(
    scopes: Float64x2, seats: Float64x2, asked: Int64, curve: Curve, host: Float64,
    shape: StepShape, room: int, none: Float64, no_order: Int64, least: Float64,
) -> int:  # fmt: skip
    """The most nodes that could pay if every one of them were accepted. none, no_order: empty.

    least: float64 [ranks], written: the claim with which the next node of so many could pay, or
    some after it that are claimed as much, at the rate of a step that asks and drafts nothing, of
    whoever is asked and whose claims of that size are trusted most."""
    rows, seconds, key_s, likely_s = curve
    token_s, _, worth = _prices(curve, host, shape, 0.0)
    token_s += asking_s(host, float(asked.shape[0])) / shape.num_draws
    trusts = np.zeros(_PARTS)
    for i in range(asked.shape[0]):
        own = _own_trust(seats, asked[i])
        for part in range(_PARTS):
            trust = _trust(scopes, int(seats[asked[i], _SCOPE]), part) * own
            trusts[part] = max(trusts[part], trust)
    num = least.shape[0]
    step_s = np.empty(2 * num)  # by nodes
    for more in range(2 * num):
        step_s[more] = seconds_of(rows, seconds, float(shape.num_rows + more))
    for rank in range(num):
        node_s = math.inf
        for more in range(1, num + 1):
            node_s = min(node_s, (step_s[rank + more] - step_s[rank]) / more)
        node_s += key_s * shape.mean_len + likely_s
        price, least[rank] = node_s / (max(worth, 1e-3) * token_s), 1.0
        for part in range(_PARTS - 1, -1, -1):
            claim = max(_BOUNDS[part], price / trusts[part])
            if claim <= _BOUNDS[part + 1] and price <= 1.0:
                least[rank] = claim
    return int(_best(none, no_order, room, curve, host, shape, shape.num_draws))


@entry
@compiled
def pays(curve: Curve, host: Float64, shape: StepShape) -> bool:
    """Whether it does to ask every choice for one node that is as likely as not."""
    token_s, node_s, worth = _prices(curve, host, shape, 0.0)
    ask_s = _ask_s(curve, host, shape.num_draws, shape.num_draws)
    return bool(0.5 * worth * token_s > node_s + ask_s)


@entry
@compiled
def weigh(
    scopes: Float64x2,
    seats: Float64x2,
    asked: Int64,
    curve: Curve,
    host: Float64,
    shape: StepShape,
    most: int,
    verdicts: Float64x2,
    in_tokens: Float64,
) -> int:
    """Decide which of these seats are asked, and book it; returns how many are.

    curve, host: of CostTable, of HostTimes. most: nodes that could pay. verdicts: float64 [seats,
    2], written: 1 where a seat is asked and else 0; 1 where it would be, if there is room.
    in_tokens: float64 [2], written: what an accepted token saves and a node takes.
    """
    likely = 0.0
    for i in range(asked.shape[0]):
        row = int(seats[asked[i], _SCOPE])
        likely += _num_came(scopes, row) / max(scopes[row, _ASKS], 1.0)
    token_s, node_s, worth = _prices(curve, host, shape, likely)
    price = node_s / token_s
    in_tokens[0], in_tokens[1] = worth, price
    for i in range(asked.shape[0]):  # all seats, before any of their scopes is changed
        row = int(seats[asked[i], _SCOPE])
        asks = max(scopes[row, _ASKS], 1e-3)
        left = _may_take(scopes, row, 0.0)
        own, drafted, came = _own_trust(seats, asked[i]), 0.0, 0.0
        for part in range(_PARTS - 1, -1, -1):
            supply = min(left, scopes[row, _OFFERED + part] / asks)
            left -= supply
            chance = _trust(scopes, row, part) * _MIDDLES[part] * own
            drafted += supply * max(0.0, chance * worth - price)
            came += supply * chance
        saved, repeated = max(0.0, worth - price), scopes[row, _REPEATED]
        verdicts[i, 0] = (asks * drafted + min(1.0, repeated) * REPEAT * saved) / (asks + 1.0)
        hoped = _may_take(scopes, row, repeated)
        verdicts[i, 1] = min(math.sqrt((came + DOUBT) / asks), hoped) * saved
    ask, num_asked, before = 0.0, asked.shape[0], asked.shape[0] + 1
    while num_asked < before:  # the fewer are asked, the more each of them takes
        before, num_asked = num_asked, 0
        ask = _ask_s(curve, host, shape.num_draws, max(before, 1)) / token_s
        for i in range(asked.shape[0]):
            account = min(scopes[int(seats[asked[i], _SCOPE]), _ACCOUNT] + SHARE, MOST)
            opening = _opening(seats, asked[i], host, token_s)
            net, doubt = verdicts[i, 0] - ask, verdicts[i, 1]
            num_asked += _is_worth_asking(net, doubt, account, ask, opening)
    num_asked = 0
    for i in range(asked.shape[0]):
        row = int(seats[asked[i], _SCOPE])
        account = min(scopes[row, _ACCOUNT] + SHARE, MOST)
        opening = _opening(seats, asked[i], host, token_s)
        net, doubt = verdicts[i, 0] - ask, verdicts[i, 1]
        would_be = _is_worth_asking(net, doubt, account, ask, opening)
        is_asked = most > 0 and would_be
        if is_asked:
            account -= ask + opening
            num_asked += 1
        memory = (MEMORY if is_asked else IDLE) * scopes[row, _SEATS]
        _fade(scopes, row, 1.0 - 1.0 / memory, _REPEATED if is_asked else _ASKS)
        scopes[row, _ACCOUNT], scopes[row, _IS_ASKED] = account, would_be
        verdicts[i, 0], verdicts[i, 1] = is_asked, would_be
    return num_asked


@entry
@compiled
def rest(scopes: Float64x2, seats: Float64x2, resting: Int64, num_steps: int) -> None:
    """Book steps that these seats rested."""
    for i in range(resting.shape[0]):
        row = int(seats[resting[i], _SCOPE])
        share = (1.0 - 1.0 / (IDLE * scopes[row, _SEATS])) ** num_steps
        scopes[row, _ACCOUNT] = min(scopes[row, _ACCOUNT] + num_steps * SHARE, MOST)
        _fade(scopes, row, share, _ASKS)


@entry
@compiled
def choose_nodes(
    scopes: Float64x2, seats: Float64x2, heard: Int64, start: Int32, certain: Int32,
    claims: Float64, curve: Curve, host: Float64, shape: StepShape, room: int, num_asked: int,
    taken: Int64,
) -> None:  # fmt: skip
    """Take the nodes that pay, of those that their scopes may have (_may_take) beside the certain
    ones; with an empty curve all that fit.

    heard: the seat of each tree. taken: int64 [trees], zeros, written. The others: see Gain.choose.
    """
    total, num = claims.shape[0], 0
    chances, owners = np.empty(total), np.empty(total, np.int64)
    most = np.empty(heard.shape[0])
    for tree in range(heard.shape[0]):
        row, own = int(seats[heard[tree], _SCOPE]), _own_trust(seats, heard[tree])
        most[tree] = _may_take(scopes, row, 0.0) + certain[tree]
        for node in range(start[tree], start[tree + 1]):
            claim = claims[node]
            chances[node] = min(1.0, claim * _trust(scopes, row, _part(claim)) * own)
            if node - start[tree] < certain[tree]:
                chances[node] = 1.0
            owners[node] = tree
    order = np.argsort(-chances, kind="mergesort")
    is_priced = curve[0].shape[0] > 0
    for i in range(total):
        tree = owners[order[i]]
        if num < room and (taken[tree] + 1.0 <= most[tree] or not is_priced):
            order[num] = order[i]
            taken[tree] += 1
            num += 1
    if is_priced:
        taken[:] = 0
        for i in range(_best(chances, order, num, curve, host, shape, num_asked)):
            taken[owners[order[i]]] += 1


@entry
@compiled
def note_asks(
    scopes: Float64x2,
    seats: Float64x2,
    asked: Int64,
    start: Int32,
    certain: Int32,
    claims: Float64,
) -> int:
    """See Gain.observe_asks."""
    num_asked = 0
    for tree in range(asked.shape[0]):
        if asked[tree] >= 0:
            num_asked += 1
            row = int(seats[asked[tree], _SCOPE])
            scopes[row, _ASKS] += 1.0
            for node in range(start[tree] + certain[tree], start[tree + 1]):
                scopes[row, _OFFERED + _part(claims[node])] += 1.0
    return num_asked


@entry
@compiled
def note_drafts(
    scopes: Float64x2,
    seats: Float64x2,
    drafted: Int64,
    start: Int32,
    certain: Int32,
    claims: Float64,
    came: Int32,
    in_tokens: Float64,
) -> None:
    """See Gain.observe_drafts. in_tokens: what an accepted token saves and a node takes."""
    for tree in range(drafted.shape[0]):
        first, end, seat = start[tree] + certain[tree], start[tree + 1], drafted[tree]
        if first >= end or seat < 0 or came[first] < 0:
            continue
        row, num_came, expected = int(seats[seat, _SCOPE]), 0, 0.0
        for node in range(first, end):
            part = _part(claims[node])
            scopes[row, _CLAIMED + part] += claims[node]
            scopes[row, _CAME + part] += came[node]
            num_came += came[node]
        for node in range(first, end):
            expected += claims[node] * _trust(scopes, row, _part(claims[node]))
        share = 1.0 - 1.0 / MEMORY
        seats[seat, _OWN_CLAIMED] = seats[seat, _OWN_CLAIMED] * share + expected
        seats[seat, _OWN_CAME] = seats[seat, _OWN_CAME] * share + num_came
        account = scopes[row, _ACCOUNT] + in_tokens[0] * num_came - in_tokens[1] * (end - first)
        scopes[row, _ACCOUNT] = min(max(account, -LEAST), MOST)


@inlined
def num_repeats(ids: Int32, start: int) -> int:
    """How many of ids[start:] followed the two ids before them when these last stood before: what a
    lookup would have drafted."""
    num = 0
    for at in range(start, ids.shape[0]):
        for before in range(at - 3, -1, -1):
            if ids[before] == ids[at - 2] and ids[before + 1] == ids[at - 1]:
                num += ids[before + 2] == ids[at]
                break
    return num


@entry
@compiled
def watch_ids(
    scopes: Float64x2, seats: Float64x2, seat: int, ids: Int32, start: int, in_tokens: Float64
) -> bool:
    """See Gain.watch. in_tokens: what an accepted token saves and a node takes."""
    row, start = int(seats[seat, _SCOPE]), max(start, int(seats[seat, _WATCHED]))
    seats[seat, _WATCHED] = ids.shape[0]
    num, num_seen = num_repeats(ids, start), max(0, ids.shape[0] - start)
    before = scopes[row, _REPEATED] * max(0.0, 1.0 - num_seen / MEMORY)
    scopes[row, _REPEATED] = before + num
    won = REPEAT * max(0.0, in_tokens[0] - in_tokens[1])
    scopes[row, _ACCOUNT] = min(scopes[row, _ACCOUNT] + num * won, MOST)
    return num > 0 and before < 1.0


class Gain:
    """The estimate of one engine.

    cost: None takes every node that fits, and asks everybody. host: seconds beside the model.
    """

    def __init__(self, cost: CostTable | None = None, *, capacity: int = 4096) -> None:
        """capacity: scopes that are remembered after their last choice has ended."""
        self.cost = cost
        self.host = HostTimes(0.0 if cost is None else cost.cost(1))
        self._capacity = capacity
        # What an accepted token saves and a node takes, at the last step.
        self._in_tokens = np.array((1.0, 0.0))
        # Of a tree's nodes the claims with which they could be taken, at the last step.
        self.least: Float64 = np.zeros(_NUM_PRICED)
        self._scopes = _Rows(_NUM_COLUMNS)
        self.seats = _Rows(_NUM_SEAT_COLUMNS)
        self._known: OrderedDict[Hashable, int] = OrderedDict()

    # -- who is known -----------------------------------------------------------------------

    def rests(self, key: Hashable) -> bool:
        """Whether a scope has had no choice, or would not be asked, as last weighed."""
        row = self._known.get(key)
        is_weighed = row is not None and self.cost is not None
        return row is None or (is_weighed and not self._scopes.table[row, _IS_ASKED])

    def seat(self, key: Hashable, *, knows: bool = False, foresees: int = 0) -> int:
        """A choice's seat. key: all that tells one scope's drafts from another's. knows: whether
        its drafter knows more than the prompt from the start (a corpus, a prediction): a new scope
        is then asked at once. foresees: where it has the model's prior, how many choices there are,
        with those that wait; it is then asked at once if that pays beside them. 0: it has none."""
        row = self._known.get(key)
        if row is None:
            if foresees and not knows and self.cost is not None:
                shape = StepShape(foresees, foresees, 0.0)
                knows = pays(self.cost.curve, self.host.numbers, shape)
            row = self._known[key] = self._scopes.take()
            self._scopes.table[row, [_ACCOUNT, _IS_ASKED, _SEATS]] = MOST * knows, knows, 1.0
            if len(self._known) > self._capacity:
                self._forget_one()
        else:
            self._known.move_to_end(key)
            self._scopes.table[row, _SEATS] += 1.0
        seat = self.seats.take()
        self.seats.table[seat, _SCOPE] = row
        return seat

    def opened(self, seat: int) -> None:
        """The choice has a session from now on."""
        self.seats.table[seat, _IS_OPEN] = 1.0

    def leave(self, seat: int) -> None:
        """The choice has ended."""
        self.scope_of(seat)[_SEATS] -= 1.0
        self.seats.free.append(seat)

    def _forget_one(self) -> None:
        """Of the scopes without a choice, the one that was used longest ago."""
        for key, row in self._known.items():
            if not self._scopes.table[row, _SEATS]:
                del self._known[key]
                self._scopes.free.append(row)
                return

    # -- before a step ----------------------------------------------------------------------

    def ask(
        self, seats: Sequence[int] | Int64, shape: StepShape, room: int
    ) -> tuple[list[str], int]:
        """Of each choice that may draft "" where it is to be asked in this step, else why not, in
        the words of StepCounts.no_draft_reason; and the most nodes that could pay if all of them
        were accepted (0 where nobody is asked). room: nodes that fit. Called once a step."""
        if room <= 0:
            return ["room"] * len(seats), 0
        if self.cost is None:
            return [""] * len(seats), room
        curve, host, verdicts = self.cost.curve, self.host.numbers, np.empty((len(seats), 2))
        who = self._scopes.table, self.seats.table, np.array(seats, np.int64)
        most = most_nodes(*who, curve, host, shape, room, _NO_CHANCES, _NO_ORDER, self.least)
        num = weigh(*who, curve, host, shape, most, verdicts, self._in_tokens)
        why = ["" if is_asked else "cooldown" for is_asked in verdicts[:, 0].tolist()]
        return why, most if num else 0

    def is_asked(self, seat: int) -> bool:
        """Whether a choice of this scope would be asked, if there is room, as last weighed."""
        return self.cost is None or bool(self.scope_of(seat)[_IS_ASKED])

    def rested(self, seats: Sequence[int], num_steps: int) -> None:
        """So many steps of these choices were taken without `ask`, and without drafts."""
        if self.cost is not None and num_steps:
            rest(self._scopes.table, self.seats.table, np.array(seats, np.int64), num_steps)

    def choose(
        self, seats: Int64, start: Int32, certain: Int32, claims: Float64, shape: StepShape,
        room: int, num_asked: int,
    ) -> Int64:  # fmt: skip
        """int64 [trees]: how many nodes of each tree to verify, its likeliest ones.

        seats: int64 [trees]. start: int32 [trees + 1], the nodes of tree i are [start[i], start[i +
        1]). certain: int32 [trees], how many of its first nodes a grammar forces. claims: float64
        [nodes], the survivals that drafters claim, each within [0, 1]. num_asked: sessions that
        were asked for them, also in vain: the step takes that time whatever is chosen.
        """
        taken = np.zeros(seats.shape[0], np.int64)
        if claims.shape[0] and room > 0:
            choose_nodes(
                self._scopes.table, self.seats.table, seats, start, certain, claims,
                NO_CURVE if self.cost is None else self.cost.curve, self.host.numbers, shape, room,
                num_asked, taken,
            )  # fmt: skip
        return taken

    # -- after a step -----------------------------------------------------------------------

    def observe_asks(self, seats: Int64, start: Int32, certain: Int32, claims: Float64) -> int:
        """Who was asked proposed these nodes, maybe none; returns how many were. seats: -1 for a
        tree of which nobody was asked. The others: see choose."""
        return note_asks(self._scopes.table, self.seats.table, seats, start, certain, claims)

    def observe_drafts(
        self, seats: Int64, start: Int32, certain: Int32, claims: Float64, came: Int32
    ) -> None:
        """These nodes were verified. came: int32 [nodes], 1 for those that came true, -1 of a
        tree of which nothing is known, else 0. seats: -1 where there is none. The others: see
        choose."""
        note_drafts(
            self._scopes.table, self.seats.table, seats, start, certain, claims, came,
            self._in_tokens,
        )  # fmt: skip

    def watch(self, seat: int, ids: Int32, start: int) -> bool:
        """A choice was not asked for what follows ids[:start], prompt and output. Tokens that it
        was watched for already are left out. Returns whether its scope begins to repeat."""
        if self.cost is None:
            return False
        who = self._scopes.table, self.seats.table, seat
        return bool(watch_ids(*who, ids, start, self._in_tokens))

    # -- the estimate -----------------------------------------------------------------------

    def scope_of(self, seat: int) -> Float64:
        """The row of a choice's scope, [_NUM_COLUMNS]; a view."""
        scope: Float64 = self._scopes.table[int(self.seats.table[seat, _SCOPE])]
        return scope
