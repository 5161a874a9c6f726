"""Two trees for one step, and what came of each: whether a corpus is worth its nodes.

At some steps `auto` grows its tree twice, with the corpus and without. One is verified. What the
other would have brought needs no model: both are followed by the tokens that come, each with as
many of its likeliest nodes as the step had room for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafters.auto.trust import CorpusFit
from drafters.tree import DraftTree


class Rivals:
    """The trees of one step. accepted: nodes that were followed so far, of each."""

    __slots__ = ("_alive", "_children", "_nodes", "accepted")

    def __init__(self, trees: Sequence[DraftTree], num_nodes: int) -> None:
        """num_nodes: of each tree at most, its likeliest."""
        self._children = [_children(tree, num_nodes) for tree in trees]
        self._nodes = [-1] * len(trees)
        self._alive = [True] * len(trees)
        self.accepted = [0] * len(trees)

    def follow(self, token: int) -> bool:
        """Go on by a token that came; whether any tree still holds the text."""
        for i, children in enumerate(self._children):
            if not self._alive[i]:
                continue
            node = children.get((self._nodes[i], token), -1)
            if node < 0:
                self._alive[i] = False
            else:
                self._nodes[i] = node
                self.accepted[i] += 1
        return any(self._alive)


def follow_all(
    compared: Sequence[Rivals], token_ids: Sequence[int], fit: CorpusFit
) -> list[Rivals]:
    """What the trees of compared steps make of the tokens that came: those that still hold the
    text; of the others `fit` is told."""
    alive: list[Rivals] = []
    for rivals in compared:
        if all(rivals.follow(token) for token in token_ids):
            alive.append(rivals)
        else:
            fit.compare_steps(*rivals.accepted)
    return alive


def _children(tree: DraftTree, num_nodes: int) -> dict[tuple[int, int], int]:
    """(parent, token) -> node of the likeliest nodes; a parent is never less likely."""
    kept = range(len(tree))
    if len(tree) > num_nodes:
        kept = np.argsort(-tree.survival, kind="stable")[:num_nodes].tolist()
    parents, tokens = tree.parents.tolist(), tree.token_ids.tolist()
    return {(parents[node], tokens[node]): node for node in kept}
