"""Draft trees as tests write and read them."""

from __future__ import annotations

from drafters.tree import DraftTree
from tests.fakes import fake_drafters


def tree_of(*nodes: tuple[int, int, float]) -> DraftTree:
    """Of (token, parent, survival)."""
    tokens, parents, survival = zip(*nodes, strict=True)
    return fake_drafters.tree_of(tokens, parents, survival)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens that lead to each node, its own last."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def likeliest(tree: DraftTree) -> list[int]:
    """The path of first children."""
    path, node = [], -1
    for child, parent in enumerate(tree.parents.tolist()):
        if parent == node:
            path.append(int(tree.token_ids[child]))
            node = child
    return path
