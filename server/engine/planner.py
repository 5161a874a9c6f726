"""DraftPlanner: the draft policy. It decides which choices draft how many nodes in a step.

The step loop and the forecast of `tailor tasks tune` call the same planner, so the forecast follows
the policy that is served. In order, for the choices that draw and have a draft session (an `Ask`
each):

0. worth       a scope whose drafts bring less than all that they cost rests (draft_worth.py)
1. allowance   a choice whose drafts keep missing or keep costing too much sits out (DraftRecord)
2. ceiling     the most nodes that could pay if all of them were accepted; none: nobody is asked
3. asking      each session proposes a tree; a grammar adds and drops nodes, a slice of the LM head
               drops nodes; the tree is checked, and an error is handed back
4. choice      of all trees together the nodes that make the most tokens a second (DraftBudget)
5. credit      what was taken is weighed against what asking cost, for the next allowance

The planner knows no engine, no sequence and no block: the caller gives blocks to what was chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drafters.base import DraftSession
from server.engine import draft_worth
from server.engine.budget import DraftBudget
from server.engine.draft_record import DraftRecord
from server.engine.draft_worth import WorthCell
from server.engine.drafting import CheckedTree, check_tree
from server.engine.grammar import GrammarState, constrain

Allowed = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.bool_]]
"""Token ids -> whether each may be drafted."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step without its drafts: choices that draw, rows, and mean keys that a draw attends to.

    num_waiting: choices that wait for their first token and have a seat, or would get one now.
    """

    num_draws: int
    num_rows: int
    mean_len: float
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A choice that draws in this step and may draft.

    max_nodes: most nodes its request allows. max_depth: most nodes on a path, at least 1. grammar:
    at the root; it is moved and put back. forced_source: the index of the source that forced tokens
    are counted under. allowed: the drafted ids that its LM-head slice allows, or None for all.
    vocab_size: bound on its ids, 0 = the planner's. rests: its scope does (who_rests): only what
    its grammar forces is drafted.
    """

    session: DraftSession
    record: DraftRecord
    max_nodes: int
    max_depth: int
    grammar: GrammarState | None = None
    forced_source: int = 0
    allowed: Allowed | None = None
    vocab_size: int = 0
    rests: bool = False


@dataclass(slots=True)
class DraftPlan:
    """What the planner decided, in the order of the asks.

    trees: what to verify, or None. reasons: "" or why there is no tree, in the words of
    StepCounts.no_draft_reason. errors: (index of the ask, what its session raised). ceiling: the
    most nodes that could pay.
    """

    trees: list[CheckedTree | None]
    reasons: list[str]
    errors: list[tuple[int, Exception]] = field(default_factory=list)
    ceiling: int = 0


@dataclass(slots=True)
class _Turn:
    """An ask that is considered in this step. own_nodes: nodes its drafter may propose; 0 while it
    sits out, and then only what its grammar forces is drafted."""

    index: int
    ask: Ask
    own_nodes: int
    max_nodes: int


class DraftPlanner:
    """The draft policy of one engine or forecast. It writes the asks' records and the budget."""

    def __init__(self, budget: DraftBudget, vocab_size: int) -> None:
        """vocab_size: bound on the ids of trees."""
        self.budget = budget
        self.vocab_size = vocab_size

    def who_rests(self, records: Sequence[DraftRecord], shape: StepShape) -> list[bool]:
        """Which of the choices that may draft rest with their scope in a step. Called once a step,
        before `plan`."""
        return self.budget.who_rests(records, shape.num_draws, shape.mean_len)

    def rest_left(self, records: Sequence[DraftRecord]) -> int:
        """How many more steps in which these choices and no others draw all of them rest; 0 where
        one does not. Called after who_rests."""
        return draft_worth.rest_left(self._cells(records))

    def rested(self, records: Sequence[DraftRecord], num_steps: int) -> None:
        """So many such steps, at most rest_left, were taken without who_rests."""
        draft_worth.rested(self._cells(records), num_steps)

    @staticmethod
    def _cells(records: Sequence[DraftRecord]) -> list[WorthCell | None]:
        return [record.cell_at(len(records)) for record in records]

    def plan(
        self, asks: Sequence[Ask], shape: StepShape, room: int, *, is_judged: bool = True
    ) -> DraftPlan:
        """The trees of a step. room: most nodes, over all asks. is_judged, once a step: whether the
        sessions are judged by what they propose, and by the time that it takes, and cool-downs
        become a step shorter.

        It does not raise what a session raises: see DraftPlan.errors.
        """
        plan = DraftPlan([None] * len(asks), ["cooldown"] * len(asks))
        turns = _turns(asks, is_judged)
        if not turns:
            return plan
        room = min(room, sum(turn.max_nodes for turn in turns))
        plan.ceiling = max(
            0,
            self.budget.ceiling(
                shape.num_draws, shape.num_rows, shape.mean_len, room, shape.num_waiting
            ),
        )
        for turn in turns:
            plan.reasons[turn.index] = "budget"
        if plan.ceiling == 0:
            return plan
        price = self.budget.price(shape.num_draws, shape.mean_len)
        began = time.thread_time()  # of the thread: a busy machine does not make drafts dear
        proposed = self._ask_all(turns, plan)
        if is_judged:
            self.budget.observe_proposing(time.thread_time() - began, len(turns))
        for turn in turns:
            if turn.index not in proposed:
                plan.reasons[turn.index] = "no_match" if turn.own_nodes else "cooldown"
                if turn.own_nodes and is_judged:
                    turn.ask.record.record_value(0.0, price)
                    turn.ask.record.asked_in_vain()
        heard = [turn for turn in turns if turn.index in proposed]
        chances = [proposed[turn.index].chances(turn.ask.record.trust) for turn in heard]
        taken = self.budget.choose(
            chances, shape.num_draws, shape.num_rows, shape.mean_len, room, shape.num_waiting
        )
        for turn, num in zip(heard, taken, strict=True):
            if num:
                plan.trees[turn.index] = proposed[turn.index].prune(num)
                plan.reasons[turn.index] = ""
        if is_judged:
            self._credit(heard, chances, taken, shape, price)
        return plan

    def _credit(
        self,
        turns: Sequence[_Turn],
        chances: Sequence[npt.NDArray[np.float64]],
        taken: Sequence[int],
        shape: StepShape,
        price: float,
    ) -> None:
        """Weigh the nodes taken of each turn's tree against what asking cost. chances: of all its
        nodes."""
        values = self.budget.values(chances, taken, shape.num_draws, shape.num_rows, shape.mean_len)
        for turn, num, value in zip(turns, taken, values, strict=True):
            # Where nothing is taken because others wait, that is no evidence about the drafter.
            if turn.own_nodes and (num or not shape.num_waiting):
                turn.ask.record.record_value(value, price)
                if not num:
                    turn.ask.record.asked_in_vain()
            if not num:
                turn.ask.record.decay()

    # -- asking -----------------------------------------------------------------------------

    def _ask_all(self, turns: Sequence[_Turn], plan: DraftPlan) -> dict[int, CheckedTree]:
        """The trees that were proposed, by the index of their ask."""
        proposed: dict[int, CheckedTree] = {}
        for turn in turns:
            nodes = min(turn.max_nodes, plan.ceiling)
            if turn.ask.grammar is None:
                tree = self._propose(turn, nodes, turn.ask.max_depth, plan)
            else:
                tree = self._propose_constrained(turn, turn.ask.grammar, nodes, plan)
            if tree is not None:
                proposed[turn.index] = tree
        return proposed

    def _propose(self, turn: _Turn, nodes: int, depth: int, plan: DraftPlan) -> CheckedTree | None:
        """What the session proposes, checked; None for nothing, and for an error."""
        try:
            tree = turn.ask.session.propose(nodes, depth)
            if len(tree) == 0:
                return None
            checked = check_tree(tree, turn.ask.vocab_size or self.vocab_size, depth).prune(nodes)
            return checked if turn.ask.allowed is None else checked.within(turn.ask.allowed)
        except Exception as error:
            plan.errors.append((turn.index, error))
            return None

    def _propose_constrained(
        self, turn: _Turn, state: GrammarState, nodes: int, plan: DraftPlan
    ) -> CheckedTree | None:
        """What the grammar forces, then the drafter's own nodes that it permits."""
        session, depth = turn.ask.session, turn.ask.max_depth
        forced = state.forced()[: min(nodes, depth)]
        proposed: CheckedTree | None = None
        left = min(turn.own_nodes, nodes - len(forced))
        if left > 0 and len(forced) < depth:
            num_errors = len(plan.errors)
            try:
                if forced:  # the drafter proposes what follows them
                    mark = session.checkpoint()
                    session.extend(forced)
                    proposed = self._propose(turn, left, depth - len(forced), plan)
                    if len(plan.errors) == num_errors:
                        session.rollback(mark)
                else:
                    proposed = self._propose(turn, left, depth, plan)
            except Exception as error:
                plan.errors.append((turn.index, error))
                return None
        return constrain(
            state,
            forced,
            proposed,
            max_nodes=nodes,
            max_depth=depth,
            source=turn.ask.forced_source,
        )


def _turns(asks: Sequence[Ask], counts: bool) -> list[_Turn]:
    """The asks that are considered. Tokens that a grammar forces are certain, so they are drafted
    even for a choice that sits out. counts: see DraftRecord.allowance."""
    turns: list[_Turn] = []
    for index, ask in enumerate(asks):
        own = 0 if ask.rests else ask.record.allowance(counts=counts)
        if ask.grammar is not None:
            turns.append(_Turn(index, ask, own, ask.max_nodes))
        elif own:
            turns.append(_Turn(index, ask, own, min(own, ask.max_nodes)))
    return turns
