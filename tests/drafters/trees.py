"""Draft trees as tests read them, sessions that know a text, and what ids are in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafters.auto.copying import Pieces
from drafters.auto.drafter import AutoDrafter, AutoSession
from drafters.tree import DraftTree
from tests.fakes.token_table import table_of


def pieces_of(blobs: Sequence[bytes]) -> Pieces:
    """Whose id i is blobs[i]."""
    table = table_of(blobs)
    return Pieces(table.offsets, table.blob)


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


def opened(
    drafter: AutoDrafter, prompt: Sequence[int], output: Sequence[int] = (), **more: Any
) -> AutoSession:
    """A session that has read its prompt, and what came behind it. more: of `open`."""
    session = drafter.open(prompt, **more)
    session.settle()
    session.extend(output)
    return session
