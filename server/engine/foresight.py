"""Foresight: draft trees for a step whose root is not known yet.

While a step with trees is computed, each choice's session is asked how the text goes on behind
every leaf of its tree: it takes the leaf's path as if it were accepted, proposes, and goes back.
The first token of such a proposal is a guess at what the model draws behind the leaf, and what
hangs off it is the next step's tree if the guess is right: an `Option`. All else that may happen (a
path that ends inside the tree, another token behind a leaf) was proposed by nobody: then the next
step has no tree.

To the planner a choice's options are one tree whose i-th node has the chance that an i-th node will
be accepted, whichever option is met: so it gives the step as many rows as pay.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from drafters.base import DraftSession
from drafters.tree import DraftTree
from server.engine.ahead import Ahead
from server.engine.drafting import CheckedTree, check_tree
from server.engine.plan import Scheduled

_MAX_LEAVES = 4
"""Leaves behind which a session is asked, the likeliest ones."""

_MORE_NODES = 4
"""Nodes asked for beside those of the next tree: first tokens behind a leaf."""


@dataclass(frozen=True, slots=True)
class Option:
    """A tree for the case that the accepted path ends at node `end` (-1: at the root), `num_path`
    nodes deep, and `token` is drawn there."""

    end: int
    num_path: int
    token: int
    tree: CheckedTree


@dataclass(slots=True)
class Foreseen:
    """What was prepared for a step, by its items. trees: those of the step before. options: of each
    item. reasons: why an item has no tree, whatever is drawn; "" where it depends."""

    trees: SequenceOf[CheckedTree | None]
    options: list[list[Option]]
    reasons: list[str] = field(default_factory=list)

    def arrays(self, items: SequenceOf[Scheduled]) -> Ahead:
        """The same for the runner. items: of the step; their token_from is the root's draw."""
        trees = [([], []) if t is None else (t.token_ids, t.parents) for t in self.trees]
        options = [option for of_item in self.options for option in of_item]
        nodes = [(option.tree.token_ids, option.tree.parents) for option in options]
        return Ahead(
            root_draws=np.array([item.token_from for item in items], np.int32),
            tree_start=_starts([len(tokens) for tokens, _ in trees]),
            tree_tokens=_flat([tokens for tokens, _ in trees]),
            tree_parents=_flat([parents for _, parents in trees]),
            option_start=_starts([len(of_item) for of_item in self.options]),
            option_end=np.array([option.end for option in options], np.int32),
            option_token=np.array([option.token for option in options], np.int32),
            node_start=_starts([len(tokens) for tokens, _ in nodes]),
            node_tokens=_flat([tokens for tokens, _ in nodes]),
            node_parents=_flat([parents for _, parents in nodes]),
        )


class Foresight:
    """Asks one session behind the leaves of its tree in flight. To the planner it is a session.

    num_left: tokens that the choice may still emit, from the tree's root on. `options`: what it
    found, after `propose`.
    """

    def __init__(
        self, session: DraftSession, tree: CheckedTree | None, num_left: int, vocab_size: int
    ) -> None:
        self.options: list[Option] = []
        self._session = session
        self._tree = tree
        self._num_left = num_left
        self._vocab_size = vocab_size

    def propose(self, budget: int, max_depth: int) -> DraftTree:
        """The chances of 1, 2, ... accepted nodes, as a chain; see the top of this file. Raises
        what the session raises, which may then stand anywhere."""
        sums = np.zeros(budget)
        for end, path, chance in _leaves(self._tree):
            for option, likely in self._behind(end, path, chance, budget):
                self.options.append(option)
                own = np.sort(option.tree.survival)[::-1][:budget] * likely
                sums[: own.shape[0]] += own
        sums = np.minimum(sums[sums > 0.0], 1.0)
        return DraftTree.chain([0] * sums.shape[0], sums.tolist())

    def _behind(
        self, end: int, path: list[int], chance: float, budget: int
    ) -> list[tuple[Option, float]]:
        """The options behind one leaf, and how likely each is to be met."""
        depth = self._num_left - len(path) - 1
        if depth < 2:  # the token behind the leaf is the last one or the one before it
            return []
        session = self._session
        mark = session.checkpoint()
        if path:
            try:
                session.rollback(mark)
            except NotImplementedError:  # it only ever goes on
                return []
            session.extend(path)
        tree = session.propose(budget + _MORE_NODES, depth)
        if path:
            session.rollback(mark)
        checked = check_tree(tree, self._vocab_size, depth)
        found: list[tuple[Option, float]] = []
        for node, parent in enumerate(checked.parents):
            below = checked.below(node) if parent < 0 else None
            if below is not None:
                option = Option(end, len(path), checked.token_ids[node], below.prune(budget))
                found.append((option, chance * float(checked.survival[node])))
        return found


def _leaves(tree: CheckedTree | None) -> list[tuple[int, list[int], float]]:
    """(node, tokens on the path, chance) of the likeliest leaves; the root without a tree."""
    if tree is None:
        return [(-1, [], 1.0)]
    inner = set(tree.parents)
    leaves = [node for node in range(len(tree.parents)) if node not in inner]
    leaves.sort(key=lambda node: -tree.survival[node])
    found: list[tuple[int, list[int], float]] = []
    for leaf in leaves[:_MAX_LEAVES]:
        path: list[int] = []
        node = leaf
        while node >= 0:
            path.append(tree.token_ids[node])
            node = tree.parents[node]
        found.append((leaf, path[::-1], float(tree.survival[leaf])))
    return found


def _starts(lengths: SequenceOf[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _flat(parts: SequenceOf[SequenceOf[int]]) -> np.ndarray:
    return np.array([value for part in parts for value in part], np.int32)
