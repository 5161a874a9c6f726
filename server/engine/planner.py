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

_NONE = np.empty(0)

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
        heard: list[int] = []
        for at, ask in enumerate(asks):
            nodes = min(ask.max_nodes, room if ask.why_not else most)
            if ask.grammar is None:
                tree = self._propose(at, ask, nodes, ask.max_depth, plan)
            else:
                tree = self._propose_constrained(at, ask, ask.grammar, nodes, plan)
            if tree is not None:
                heard.append(at)
            plan.trees[at] = tree
            if not ask.why_not:
                claims = _NONE if tree is None else tree.survival[tree.num_certain :]
                self.gain.observe_ask(ask.seat, claims)
        trees = [tree for tree in plan.trees if tree is not None]
        taken = self.gain.choose(
            [asks[at].seat for at in heard],
            [tree.survival for tree in trees],
            [tree.num_certain for tree in trees],
            shape,
            room,
        )
        for at, tree, num in zip(heard, trees, taken, strict=True):
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
