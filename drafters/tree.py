"""DraftTree: candidate continuations as flat arrays, and pure functions on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from drafters.arrays import Float32, Int32, Int64, UInt8


def _empty_i32() -> Int32:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of drafted tokens hanging off the last verified token.

    token_ids: int32 [num_nodes]. parents: int32 [num_nodes], -1 = the last verified token, else
    the index of an earlier node (parents[i] < i). survival: float32 [num_nodes], the estimated
    chance that the whole path to the node is accepted, never above its parent's. source: uint8
    [num_nodes], an index into the drafter's `sources`. cell: int32 [num_nodes] or empty, the
    drafter's own mark of what kind of evidence stands behind the node (its calibration reads it
    back in feedback). Siblings have distinct tokens.
    """

    token_ids: Int32
    parents: Int32
    survival: Float32
    source: UInt8 = field(default_factory=lambda: np.empty(0, np.uint8))
    cell: Int32 = field(default_factory=_empty_i32)

    @staticmethod
    def empty() -> DraftTree:
        """The tree without nodes: the plain decode path."""
        return DraftTree(_empty_i32(), _empty_i32(), np.empty(0, np.float32), np.empty(0, np.uint8))

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    def depths(self) -> Int32:
        """int32 [num_nodes]: 1 for a child of the root."""
        depths = np.zeros(len(self), np.int32)
        for i, parent in enumerate(self.parents.tolist()):
            depths[i] = 1 if parent < 0 else depths[parent] + 1
        return depths

    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> node."""
        pairs = zip(self.parents.tolist(), self.token_ids.tolist(), strict=True)
        return {pair: node for node, pair in enumerate(pairs)}

    def preorder(self) -> DraftTree:
        """The same tree depth-first, siblings by survival: the likeliest path comes first."""
        num = len(self)
        children: list[list[int]] = [[] for _ in range(num + 1)]
        for node, parent in enumerate(self.parents.tolist()):
            children[parent].append(node)
        rank = self.survival.tolist()
        for siblings in children:
            siblings.sort(key=lambda node: -rank[node])
        order: list[int] = []
        stack = children[-1][::-1]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(children[node][::-1])
        return self._of(np.asarray(order, np.int64))

    def prune(self, num_nodes: int) -> DraftTree:
        """The `num_nodes` nodes of highest survival (ties: the earlier), closed under parents.

        Because survival never rises along a path and parents come first, the top nodes by
        (survival descending, index ascending) are closed already.
        """
        if num_nodes >= len(self):
            return self
        order = np.argsort(-self.survival, kind="stable")[:num_nodes]
        order.sort()
        return self._of(order)

    def _of(self, order: Int64) -> DraftTree:
        """The tree of these nodes in this order, which names each node's parent before it."""
        renumber = np.full(len(self) + 1, -1, np.int32)
        renumber[order] = np.arange(order.shape[0], dtype=np.int32)
        return DraftTree(
            self.token_ids[order],
            renumber[self.parents[order]],
            self.survival[order],
            self.source[order] if self.source.shape[0] else self.source,
            self.cell[order] if self.cell.shape[0] else self.cell,
        )


def followed(children: Mapping[tuple[int, int], int], token_ids: Sequence[int]) -> list[int]:
    """The nodes of the longest path from the root that these tokens follow. children: of
    DraftTree.children."""
    path: list[int] = []
    node = -1
    for token in token_ids:
        node = children.get((node, int(token)), -1)
        if node < 0:
            break
        path.append(node)
    return path
