"""DraftPlanner: from who is asked to the trees of a step.

Gain (gain.py) decides; this module asks the sessions, for the choices that draw and may draft (an
`Ask` each). In order:

1. asking      each session proposes a tree; a grammar adds and drops nodes, a slice of the LM head
               drops nodes; the tree is checked, and an error is handed back
2. choice      of all trees together the nodes that make the most tokens a second (Gain.choose)

The planner knows no engine, no sequence and no block: the caller gives blocks to what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drafters.base import DraftSession
from server.engine.drafting import CheckedTree, check_tree
from server.engine.gain import Gain, StepShape
from server.engine.grammar import GrammarState, constrain
from server.engine.trees import Trees

Allowed = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.bool_]]
"""Token ids -> whether each may be drafted."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A choice that draws in this step and may draft.

    seat: Gain's. max_nodes: most nodes its request allows. max_depth: most nodes on a path, at
    least 1. grammar: at the root; it is moved and put back. forced_source: the index of the source
    that forced tokens are counted under. allowed: the drafted ids that its LM-head slice allows, or
    None for all. vocab_size: bound on its ids, 0 = the planner's. why_not: "" or why Gain does not
    ask it: only what its grammar forces is drafted, which is certain.
    """

    session: DraftSession
    seat: int
    max_nodes: int
    max_depth: int
    grammar: GrammarState | None = None
    forced_source: int = 0
    allowed: Allowed | None = None
    vocab_size: int = 0
    why_not: str = ""


@dataclass(slots=True)
class DraftPlan:
    """What the planner decided, in the order of the asks.

    trees: what to verify, or None. reasons: "" or why there is no tree, in the words of
    StepCounts.no_draft_reason. errors: (index of the ask, what its session raised).
    """

    trees: list[CheckedTree | None]
    reasons: list[str]
    errors: list[tuple[int, Exception]] = field(default_factory=list)


class DraftPlanner:
    """Asks the sessions of one engine or replay. It tells Gain what they proposed."""

    def __init__(self, gain: Gain, vocab_size: int) -> None:
        """vocab_size: bound on the ids of trees."""
        self.gain = gain
        self.vocab_size = vocab_size

    def plan(self, asks: Sequence[Ask], shape: StepShape, most: int, room: int) -> DraftPlan:
        """The trees of a step. most: nodes that could pay. room: nodes that fit, over all asks.

        It does not raise what a session raises: see DraftPlan.errors.
        """
        plan = DraftPlan([None] * len(asks), [ask.why_not or "no_match" for ask in asks])
        if room <= 0:
            return plan
        for at, ask in enumerate(asks):
            nodes = min(ask.max_nodes, room if ask.why_not else most)
            if ask.grammar is None:
                tree = self._propose(at, ask, nodes, ask.max_depth, plan)
            else:
                tree = self._propose_constrained(at, ask, ask.grammar, nodes, plan)
            plan.trees[at] = tree
        trees = Trees.of(plan.trees)
        columns = trees.start, trees.certain, trees.survival
        asked = np.array([-1 if ask.why_not else ask.seat for ask in asks], np.int64)
        self.gain.observe_asks(asked, *columns)
        seats, num_asked = np.array([ask.seat for ask in asks], np.int64), int((asked >= 0).sum())
        taken = self.gain.choose(seats, *columns, shape, room, num_asked).tolist()
        for at, (tree, num) in enumerate(zip(plan.trees, taken, strict=True)):
            if tree is not None:
                plan.trees[at] = tree.prune(num) if num else None
                plan.reasons[at] = "" if num else "budget"
        return plan

    def _propose(
        self, at: int, ask: Ask, nodes: int, depth: int, plan: DraftPlan
    ) -> CheckedTree | None:
        """What the session proposes, checked; None for nothing, and for an error."""
        try:
            tree = ask.session.propose(nodes, depth)
            if len(tree) == 0:
                return None
            checked = check_tree(tree, ask.vocab_size or self.vocab_size, depth).prune(nodes)
            return checked if ask.allowed is None else checked.within(ask.allowed)
        except Exception as error:
            plan.errors.append((at, error))
            return None

    def _propose_constrained(
        self, at: int, ask: Ask, state: GrammarState, nodes: int, plan: DraftPlan
    ) -> CheckedTree | None:
        """What the grammar forces, then the drafter's own nodes that it permits."""
        session, depth = ask.session, ask.max_depth
        forced = state.forced()[: min(nodes, depth)]
        proposed: CheckedTree | None = None
        left = 0 if ask.why_not else nodes - len(forced)
        if left > 0 and len(forced) < depth:
            num_errors = len(plan.errors)
            try:
                if forced:  # the drafter proposes what follows them
                    mark = session.checkpoint()
                    session.extend(forced)
                    proposed = self._propose(at, ask, left, depth - len(forced), plan)
                    if len(plan.errors) == num_errors:
                        session.rollback(mark)
                else:
                    proposed = self._propose(at, ask, left, depth, plan)
            except Exception as error:
                plan.errors.append((at, error))
                return None
        return constrain(
            state,
            forced,
            proposed,
            max_nodes=nodes,
            max_depth=depth,
            source=ask.forced_source,
        )
