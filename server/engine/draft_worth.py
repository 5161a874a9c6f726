"""Whether drafting pays at all: what drafts brought, against everything that they cost.

The draft budget (budget.py) chooses nodes of trees that were proposed. By then most of what drafts
cost on the host is spent: asking each session, telling it what was emitted, the likeliest ids of
rows, the rows of trees. With many choices a step, of a model whose steps are short, that can be
more than the accepted tokens are worth. So the planner asks before it asks any session:

    accepted tokens a step  >=  tokens that plain decoding makes in the seconds that drafts add

Both sides are measured. The left one is of one scope (`DraftWorth`), because it follows from what
the scope's texts say, and of one class of numbers of choices, because fewer nodes are drafted where
more choices decode. The right one is made of times by numbers of choices and rows alone, and
shared. A scope that does not earn what it costs rests for steps that double up to LAST_REST and
then has a short trial, so that it is found out when drafts become better, or steps dearer. What is
clear after a few asks is not asked for longer. Where nothing is known yet, what was brought at
another number of choices counts for a little; and where many choices decode, and rows are so dear
that a node of nearly even chance would not pay, a scope begins with a rest.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.engine.plan import Rows

NUM_CLASSES = 8
"""Of numbers of choices that draw in a step: 1, 2, up to 4, 8, 16, 32, 64, more."""


def class_of(num_draws: int) -> int:
    """The class of a number of choices, 0 .. NUM_CLASSES - 1."""
    return min(max(num_draws - 1, 0).bit_length(), NUM_CLASSES - 1)


class HostTimes:
    """Seconds that a step takes beside the model, without drafts and with, by number of choices.

    Means of logarithms: a step in which something else had the processor counts little.

    ask_s: seconds that drafting takes for each choice that may be asked in a step, prompts or not:
    to open sessions, to propose, to tell them what came. mixed: of the steps in which somebody
    decodes, the share that has rows of prompts as well.
    """

    __slots__ = ("_drafted", "_mix_weight", "_plain", "ask_s", "mixed")

    REFRESH = 0.1  # weight of a step in its own figure
    SCALE_REFRESH = 0.03  # ... in the others: a busy machine slows all of them
    MOST = math.log(2.0)  # a step counts as at most twice as slow or fast as was known
    ASK_REFRESH = 0.25  # weight of a step in `ask_s`
    MIXED_REFRESH = 0.05  # weight of a step in `mixed`, and at first, when few are known
    MIXED_FIRST = 0.12
    PLAIN_SHARE = 0.3  # what a step without drafts takes of one with, while it is not known

    def __init__(self) -> None:
        self.ask_s = self.mixed = 0.0
        self._mix_weight = self.MIXED_FIRST
        self._plain = [0.0] * NUM_CLASSES  # 0: not known
        self._drafted = [0.0] * NUM_CLASSES

    def observe(self, num_draws: int, with_drafts: bool, seconds: float) -> None:
        """A step without prompt rows. with_drafts: whether sessions were asked in it."""
        if seconds <= 0.0:
            return
        own, at = self._drafted if with_drafts else self._plain, class_of(num_draws)
        if own[at] == 0.0:
            own[at] = seconds
            return
        off = self._off(seconds, own[at])
        scale = math.exp(self.SCALE_REFRESH * off)
        for times in (self._plain, self._drafted):
            for i in range(NUM_CLASSES):
                times[i] *= scale
        own[at] *= math.exp((self.REFRESH - self.SCALE_REFRESH) * off)

    def observe_step(self, plan: Rows, has_asked: bool, seconds: float) -> None:
        """A step of an engine took so long beside the model. has_asked: as with_drafts."""
        if plan.num_rows > plan.num_prefill_rows:
            self.observe_mix(plan.num_prefill_rows > 0)
        if not plan.num_prefill_rows:
            self.observe(len(plan.sequences), has_asked, seconds)

    def observe_asking(self, seconds: float, num_choices: int) -> None:
        """So many choices might be asked in a step, and some were, which took so long."""
        each = seconds / num_choices
        if each > 0.0:
            known = self.ask_s or each
            self.ask_s = known * math.exp(self.ASK_REFRESH * self._off(each, known))

    def observe_mix(self, has_prompt: bool) -> None:
        """A step in which somebody decodes."""
        self.mixed += self._mix_weight * (has_prompt - self.mixed)
        self._mix_weight = max(self.MIXED_REFRESH, self._mix_weight / (1.0 + self._mix_weight))

    @classmethod
    def _off(cls, seconds: float, known: float) -> float:
        return min(max(math.log(seconds / known), -cls.MOST), cls.MOST)

    def plain(self, num_draws: int) -> float:
        """Seconds of a step without drafts; 0 where nothing is known."""
        at = class_of(num_draws)
        return self._plain[at] or self._drafted[at] * self._share(at)

    def extra(self, num_draws: int) -> float:
        """Seconds that drafts add to a step; 0 where nothing is known."""
        at = class_of(num_draws)
        drafted = self._drafted[at] or self._plain[at] / self._share(at)
        return max(0.0, drafted - self.plain(num_draws))

    def _share(self, at: int) -> float:
        """Plain over drafted in the nearest class where both are known."""
        known = [i for i in range(NUM_CLASSES) if self._plain[i] and self._drafted[i]]
        if not known:
            return self.PLAIN_SHARE
        near = min(known, key=lambda i: abs(i - at))
        return min(1.0, self._plain[near] / self._drafted[near])


class WorthCell:
    """What asking has brought one scope, at one class of numbers of choices.

    Decayed sums over the times that a session was asked: `num_asks`, `num_nodes` that were
    verified, `num_accepted` of them. Where many choices decode one that sits out by itself counts
    as asked in vain, because a step's drafts cost hardly less.
    """

    __slots__ = (
        "_due_in", "_is_settled", "_is_trial", "_rest", "_turns_left", "num_accepted", "num_asks",
        "num_nodes",
    )  # fmt: skip

    DECAY = 0.995  # a time
    FIRST_ASKS = 32  # before the first judgement
    NEXT_ASKS = 24  # before the next, and of a trial
    FIRST_CHANCE = 0.45  # that a tree's likeliest node is accepted, while nothing is known
    FEW_ASKS = 8  # before a scope that clearly does not pay rests, in a trial and at first
    DOUBT = 0.1  # accepted tokens an ask that are not ruled out by one ask without any
    OLD_SHARE = 0.25  # of the evidence from before a rest that counts in the trial after it
    AGAIN = 1.15  # by so much a trial must be worth more than it costs
    FIRST_REST = 32  # steps
    LAST_REST = 256

    def __init__(self) -> None:
        self.num_asks = self.num_nodes = self.num_accepted = 0.0
        self._due_in = self.FIRST_ASKS
        self._is_trial = False
        self._is_settled = False
        self._rest = 0
        self._turns_left = 0

    @property
    def is_resting(self) -> bool:
        """Whether nobody of the scope is asked now."""
        return self._turns_left > 0

    @property
    def is_new(self) -> bool:
        """Whether it was never asked, never judged, and nothing is known from elsewhere."""
        return not (self.num_asks or self._rest or self._is_trial)

    @property
    def is_due(self) -> bool:
        """Whether there is enough new evidence to judge by."""
        return self._due_in <= 0

    @property
    def is_early(self) -> bool:
        """Whether there is enough evidence to end a trial, or the first asks, if it is clear."""
        first = self.NEXT_ASKS if self._is_trial else self.FIRST_ASKS
        return not self._is_settled and self._due_in <= first - self.FEW_ASKS

    @property
    def goes_on(self) -> bool:
        """Whether its one choice is asked in a step without anything to be judged."""
        return not (self.is_resting or self.is_due or self.is_early)

    @property
    def num_asked(self) -> int:
        """Most of its choices that are asked in a step: all, or as few as a trial needs."""
        return 1 << 30 if self._is_settled else self.FEW_ASKS

    @property
    def margin(self) -> float:
        """What it brings must be so many times what it costs."""
        return self.AGAIN if self._is_trial else 1.0

    @property
    def nodes_per_ask(self) -> float:
        """Draft nodes that were verified each time that a session was asked."""
        return self.num_nodes / self.num_asks if self.num_asks else 0.0

    @property
    def accepted_per_ask(self) -> float:
        """Tokens that were accepted each time that a session was asked."""
        return self.num_accepted / self.num_asks if self.num_asks else 0.0

    @property
    def most_per_ask(self) -> float:
        """So many tokens an ask are hardly more than it brings: a standard error above."""
        mean = self.accepted_per_ask
        return mean + math.sqrt((mean + self.DOUBT) / max(self.num_asks, 1.0))

    def observe(self, num_nodes: int, num_accepted: int) -> None:
        """A session was asked, and so many of its nodes were verified and accepted."""
        self.num_asks = self.DECAY * self.num_asks + 1.0
        self.num_nodes = self.DECAY * self.num_nodes + num_nodes
        self.num_accepted = self.DECAY * self.num_accepted + num_accepted
        self._due_in -= 1

    def steps_left(self, num_turns: int) -> int:
        """How many steps of so many of its choices it rests after which it rests still."""
        return max(0, self._turns_left - 1) // num_turns

    def skip(self, num_turns: int) -> None:
        """So many of its choices were not asked in a step. After the last one a trial begins."""
        self._turns_left -= num_turns
        if self._turns_left <= 0:
            self._is_trial, self._is_settled = True, False
            self._due_in = self.NEXT_ASKS
            self.num_asks *= self.OLD_SHARE
            self.num_nodes *= self.OLD_SHARE
            self.num_accepted *= self.OLD_SHARE

    def begin_from(self, other: WorthCell) -> None:
        """Its first asks are a trial beside what another number of choices has brought."""
        self._is_trial, self._due_in = True, self.NEXT_ASKS
        self.num_asks = self.OLD_SHARE * other.num_asks
        self.num_nodes = self.OLD_SHARE * other.num_nodes
        self.num_accepted = self.OLD_SHARE * other.num_accepted

    def put_off(self, num_turns: int) -> None:
        """Rest before anybody was asked, for longer than after a trial."""
        self._rest = self.FIRST_REST
        self.judge(False, num_turns)

    def judge(self, pays: bool, num_turns: int) -> None:
        """Go on, or rest. num_turns: its choices in a step."""
        self._due_in = self.NEXT_ASKS
        if pays:
            self._is_trial, self._is_settled, self._rest = False, True, 0
            return
        self._rest = min(max(2 * self._rest, self.FIRST_REST), self.LAST_REST)
        self._turns_left = self._rest * num_turns


class DraftWorth:
    """The cells of one scope, in the order of their classes."""

    __slots__ = ("cells",)

    def __init__(self) -> None:
        self.cells = [WorthCell() for _ in range(NUM_CLASSES)]

    def at(self, num_draws: int) -> WorthCell:
        """The cell of steps in which so many choices draw. A new one begins with what is known of
        the nearest."""
        at = class_of(num_draws)
        cell = self.cells[at]
        if not cell.num_asks:
            known = [i for i in range(NUM_CLASSES) if self.cells[i].num_asks]
            if known:
                cell.begin_from(self.cells[min(known, key=lambda i: abs(i - at))])
        return cell

    @property
    def is_resting(self) -> bool:
        """Whether it rests at any number of choices."""
        return any(cell.is_resting for cell in self.cells)


class WorthBook:
    """The DraftWorth of every scope; those used longest ago are forgotten."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._worths: OrderedDict[Hashable, DraftWorth] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._worths

    def of(self, key: Hashable) -> DraftWorth:
        """key: all that tells one scope's drafts from another's."""
        worth = self._worths.get(key)
        if worth is None:
            worth = self._worths[key] = DraftWorth()
            if len(self._worths) > self._capacity:
                self._worths.popitem(last=False)
        else:
            self._worths.move_to_end(key)
        return worth


MANY = 4
"""Choices in a step from which on a scope may begin with a rest: fewer are tried at once, because
there drafts pay nearly always, and a table measured on a busy machine may say otherwise."""

Cost = Callable[[float], float]
"""Tokens that plain decoding of a step's choices makes in the time that so many nodes add."""


def who_rests(cells: Sequence[WorthCell | None], node_cost: Cost, ask_cost: float) -> list[bool]:
    """For each choice that may be asked in a step, whether it is not, because that does not pay.

    cells: of its scope; None: it is always asked. ask_cost: tokens that plain decoding makes in the
    time that asking one choice adds on the host. Called once a step: rests become shorter by it.
    Of many choices whose scope is on trial a few are asked: the others would tell nothing more.
    """
    turns = Counter(cell for cell in cells if cell is not None)
    new = [cell for cell in turns if cell.is_new]
    if new and turns.total() >= MANY:
        # With dear rows a few steps of trial cost more than they bring: where a node that is
        # accepted nearly every other time would not pay, the scope begins with a rest.
        first_price = ask_cost + node_cost(float(turns.total())) / turns.total()
        for cell in new:
            if first_price > cell.FIRST_CHANCE:
                cell.put_off(turns[cell])
    asked = [cell for cell in turns if not cell.is_resting]
    judged = [cell for cell in asked if cell.is_due or cell.is_early]
    if judged:
        num_nodes = sum(turns[cell] * cell.nodes_per_ask for cell in asked)
        per_node = node_cost(num_nodes) / num_nodes if num_nodes else 0.0
        for cell in judged:
            price = ask_cost + per_node * cell.nodes_per_ask
            if cell.is_due:
                cell.judge(cell.accepted_per_ask >= cell.margin * price, turns[cell])
            elif cell.most_per_ask * (1.0 - per_node) < ask_cost:
                # Even if its trees had held no other nodes, as they may once it is calibrated.
                cell.judge(False, turns[cell])
    resting = {cell for cell in turns if cell.is_resting}
    for cell in resting:
        cell.skip(turns[cell])
    left = {cell: cell.num_asked for cell in turns if cell not in resting}
    rests: list[bool] = []
    for own in cells:
        rests.append(own is not None and not left.get(own, 0))
        if own is not None and not rests[-1]:
            left[own] -= 1
    return rests


def rest_left(cells: Sequence[WorthCell | None]) -> int:
    """How many steps of these choices all of them rest after which they rest still."""
    distinct = set(cells)
    if None in distinct:
        return 0
    return min(cell.steps_left(cells.count(cell)) for cell in distinct if cell is not None)


def rested(cells: Sequence[WorthCell | None], num_steps: int) -> None:
    """So many steps were taken in which nobody was asked, at most rest_left(cells)."""
    for cell in set(cells):
        if cell is not None:
            cell.skip(num_steps * cells.count(cell))
