"""Ahead: what a step that was launched ahead takes from the draws of the step before it.

Behind a step with trees nobody knows yet where the text will be: how many nodes are accepted, and
which token is drawn after them. So the Batch of the next step has one row a sequence, and says with
an `Ahead` what becomes of it: the trees whose draws decide, and the trees that were prepared for
what may come. The runner walks the trees as soon as the ids are drawn, moves the KV of accepted
nodes to their positions, and computes the Batch that `resolve` gives. The engine resolves it, too,
when it has the ids.

    resolve(step behind, ids drawn in the step before) -> the step as it is computed

Only integers are looked at, as in any step (docs/DESIGN.md 1.1). Where the drawn token was not
foreseen there is no tree: the sequence has its one row, of a token that is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from server.engine.batch import Batch

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ahead:
    """The trees of the step before, and what was prepared for their outcomes. All int32.

    root_draws [S]: of each sequence of the Batch the draw of its root in the Batch before; that of
      node i of its tree is i + 1 behind it.
    tree_start [S + 1], tree_tokens, tree_parents [N]: those trees, flat (parent -1: the root).
    option_start [S + 1], option_end, option_token [O]: what was prepared for each sequence: the
      path ends at node option_end (-1: at the root), where option_token is drawn. A pair stands
      once.
    node_start [O + 1], node_tokens, node_parents [M]: the tree of each option under the drawn
      token's row (parent -1).

    resolved: what `resolve` made of it, with the ids that it was made from: the runner and the
      engine both ask. Written by `resolve` alone.
    """

    root_draws: Int32
    tree_start: Int32
    tree_tokens: Int32
    tree_parents: Int32
    option_start: Int32
    option_end: Int32
    option_token: Int32
    node_start: Int32
    node_tokens: Int32
    node_parents: Int32
    resolved: list[tuple[Int32, Resolved]] = field(default_factory=list, init=False)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a step that was launched ahead computes.

    batch: without `ahead`. src, dst: int32 slots, each once among the dst: KV of accepted nodes,
    to be copied all at once before anything is computed. num_accepted: nodes accepted in the step
    before, of each sequence. options: the option that was met, or -1.
    """

    batch: Batch
    src: Int32
    dst: Int32
    num_accepted: list[int]
    options: list[int]


def follow(
    root_drawn: int,
    token_ids: Sequence[int],
    parents: Sequence[int],
    drawn: Sequence[int],
) -> list[int]:
    """Indexes of the accepted nodes, in path order.

    root_drawn: the id drawn at the root's row. drawn[i]: the id drawn at node i's row. The node
    under the current one whose token is the drawn id is accepted, until there is none.
    """
    path: list[int] = []
    current, wanted = -1, root_drawn
    for i, parent in enumerate(parents):  # parents come first: one pass finds the whole path
        if parent == current and token_ids[i] == wanted:
            path.append(i)
            current, wanted = i, drawn[i]
    return path


def resolve(batch: Batch, drawn_ids: Int32, block_size: int) -> Resolved:
    """The step as it is computed, from what the step before drew (-1: a draw without an answer,
    behind which nothing is right: its row has id 0 and its draws are nobody's).

    batch: one row and one draw a sequence, as if no node were accepted; with `ahead`. Raises
    IndexError when drawn_ids lacks a draw.
    """
    assert batch.ahead is not None
    for known, resolved in batch.ahead.resolved[:1]:
        if known is drawn_ids:
            return resolved
    made = _Made(batch, drawn_ids, block_size)
    for s in range(batch.num_rows):
        made.add(s)
    resolved = made.resolved()
    batch.ahead.resolved[:] = [(drawn_ids, resolved)]
    return resolved


class _Made:
    """The resolved rows and draws as they are added, sequence by sequence."""

    def __init__(self, batch: Batch, drawn_ids: Int32, block_size: int) -> None:
        assert batch.ahead is not None
        self._batch, self._ahead = batch, batch.ahead
        self._drawn, self._size = drawn_ids, block_size
        self._rows: list[tuple[int, ...]] = []  # in the order of _COLUMNS
        self._path_slots: list[int] = []
        self._parents: list[int] = []
        self._src: list[int] = []
        self._dst: list[int] = []
        self._num_accepted: list[int] = []
        self._options: list[int] = []

    def add(self, s: int) -> None:
        """Walk a sequence's tree; add the row of the token drawn after it, and what was prepared
        for that token."""
        ahead = self._ahead
        first = int(self._batch.positions[s])
        nodes = slice(int(ahead.tree_start[s]), int(ahead.tree_start[s + 1]))
        tokens = ahead.tree_tokens[nodes].tolist()
        at = int(ahead.root_draws[s])
        if not 0 <= at <= at + len(tokens) < self._drawn.shape[0]:
            raise IndexError("the step before has fewer draws")
        drawn = self._drawn[at : at + 1 + len(tokens)].tolist()
        path = follow(drawn[0], tokens, ahead.tree_parents[nodes].tolist(), drawn[1:])
        for i, node in enumerate(path):
            if node != i:
                self._src.append(self._slot(s, first + node))
                self._dst.append(self._slot(s, first + i))
        end = path[-1] if path else -1
        token, root = drawn[1 + end], first + len(path)
        self._num_accepted.append(len(path))
        self._options.append(self._option(s, end, token))
        self._rows.append((max(token, 0), root, s, self._slot(s, root), root + 1, 0, 0))
        self._parents.append(-1)
        if self._options[-1] >= 0:
            self._add_nodes(s, self._options[-1], root)

    def _slot(self, s: int, position: int) -> int:
        size = self._size
        return int(self._batch.block_tables[s, position // size]) * size + position % size

    def _option(self, s: int, end: int, token: int) -> int:
        ahead = self._ahead
        for option in range(int(ahead.option_start[s]), int(ahead.option_start[s + 1])):
            if ahead.option_end[option] == end and ahead.option_token[option] == token:
                return option
        return -1

    def _add_nodes(self, s: int, option: int, root: int) -> None:
        ahead, root_row = self._ahead, len(self._rows) - 1
        nodes = slice(int(ahead.node_start[option]), int(ahead.node_start[option + 1]))
        paths: list[list[int]] = []
        for i, (token, parent) in enumerate(
            zip(ahead.node_tokens[nodes].tolist(), ahead.node_parents[nodes].tolist(), strict=True)
        ):
            slot = self._slot(s, root + 1 + i)
            path = [*paths[parent], slot] if parent >= 0 else [slot]
            paths.append(path)
            start, depth = len(self._path_slots), len(path)
            self._rows.append((token, root + depth, s, slot, root + 1, start, depth))
            self._path_slots.extend(path)
            self._parents.append(root_row + 1 + parent)

    def resolved(self) -> Resolved:
        """All of it as a Batch whose rows each have one draw."""
        batch = self._batch
        table = np.array(self._rows, np.int32)
        columns = dict(zip(_COLUMNS, np.ascontiguousarray(table.T), strict=True))
        of = columns["seq_ids"]
        made = replace(
            batch,
            **columns,
            token_from=np.full(len(self._rows), -1, np.int32),
            path_slots=np.array(self._path_slots, np.int32),
            draw_rows=np.arange(len(self._rows), dtype=np.int32),
            draw_params=batch.draw_params[of],
            draw_parent=np.array(self._parents, np.int32),
            draw_positions=columns["positions"] + np.int32(1),
            draw_mask=np.full(len(self._rows), -1, np.int32),
            num_draft_rows=len(self._rows) - batch.num_rows,
            ahead=None,
        )
        src, dst = np.array(self._src, np.int32), np.array(self._dst, np.int32)
        return Resolved(made, src, dst, self._num_accepted, self._options)


_COLUMNS = ("token_ids", "positions", "seq_ids", "slots", "prefix_len", "path_start", "path_len")
