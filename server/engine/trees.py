"""Trees: the drafts of all choices of a step as one tree in compressed rows, and the loops over it.

What: whether a tree can be verified (`check`), how rows and nodes become the columns of a Batch
(`lay`), and how drawn ids are followed through the trees (`follow`). What not: which nodes are
drafted (step_drafts.py), what becomes of the tokens (commit.py). The loops are compiled
(drafters/jit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from drafters.arrays import Float64, Int32, Int32x2, Int64, Int64x2
from drafters.jit import compiled, entry
from server.engine.table import (
    IS_SIMPLE,
    LAST_ID,
    MAX_OUTPUT,
    NUM_BLOCKS,
    NUM_COMPUTED,
    NUM_PUBLISHED,
    NUM_RELEASED,
    NUM_STEPS,
    NUM_TOKENS,
    NUM_VERIFIED,
    PROMPT_LEN,
)

SEAT, START, NUM, CHOICES, MASK, FIRST_ROW, FIRST_DRAW, NUM_ITEM_LINES = range(8)
"""The lines of an item, int32 [.., items]: rows [START, START + NUM) of SEAT, of which CHOICES draw
from the last (0: nobody does). MASK: the first of its grammar's masks, or -1. FIRST_ROW,
FIRST_DRAW: where its rows and draws begin."""

DRAW, FIRST_NODE, END_NODE, ITEM, NUM_CHOICE_LINES = 1, 2, 3, 4, 5
"""The lines of a choice that draws, int32 [.., choices], after SEAT: its root's draw, its nodes of
the step's trees, and the item that it draws from."""

RUN, NUM_IDS, NUM_ACCEPTED, END, TODO, NUM_FOUND_LINES = range(6)
"""The lines of what `follow` finds of a choice: where its run begins among all, how many ids and
accepted nodes of it stand, why it ends (below), and what is to be done for its blocks."""

GOES_ON, END_ID, LENGTH, FAILED = range(4)
"""Why a run ends: the choice goes on; an EOS or stop id, which is the last; the most tokens that it
may have; a draw without an answer, which is left out of the run."""

EMITTED, PUBLISH, TRIM = 1, 2, 4
"""Of TODO: the tokens are in the columns already; full blocks may be published; blocks that only
held drafts are to be given back."""


@dataclass(frozen=True)
class Trees:
    """The trees of a step's items in their order, in compressed rows.

    start: int32 [items + 1], the nodes of item i are [start[i], start[i + 1]). nodes: int32
    [3, N]: ids, parents (within the tree; -1: its root is the item's last row; parents come
    first), depths (1 below the root). certain: int32 [items], how many of an item's first nodes a
    grammar forces from the root on. survival: float64 [N], the chance of each as its drafter
    claims it. source: int64 [N], an index into the names of its choice's sources. each: the trees
    one by one, None for none.
    """

    start: Int32
    nodes: Int32x2
    certain: Int32
    survival: Float64
    source: Int64
    each: Sequence[Any]

    @classmethod
    def of(cls, each: Sequence[Any]) -> Trees:
        """From CheckedTrees."""
        start = np.zeros(len(each) + 1, np.int32)
        np.cumsum([0 if tree is None else len(tree.token_ids) for tree in each], out=start[1:])
        num_nodes = int(start[-1])
        nodes = np.empty((3, num_nodes), np.int32)
        survival, source = np.empty(num_nodes), np.zeros(num_nodes, np.int64)
        certain = np.zeros(len(each), np.int32)
        for i, tree in enumerate(each):
            if tree is not None:
                at = slice(start[i], start[i + 1])
                nodes[:, at] = tree.token_ids, tree.parents, tree.depths
                survival[at] = tree.survival
                certain[i] = tree.num_certain
                if tree.tree.source.shape[0]:
                    source[at] = tree.tree.source
        return cls(start, nodes, certain, survival, source, each)

    @cached_property
    def num_path_slots(self) -> int:
        """Slots that the nodes' paths name."""
        return int(self.nodes[2].sum()) if self.nodes.shape[1] else 0

    @cached_property
    def marks(self) -> tuple[list[int], list[int]]:
        """Of each node the tenth, 0..9, in which its claimed chance lies, and its source."""
        tenths = np.minimum(self.survival * 10.0, 9.0).astype(np.int64)
        return tenths.tolist(), self.source.tolist()

    @cached_property
    def tallies(self) -> list[tuple[list[int], list[int], float, int]]:
        """By item: how many nodes claim a chance in each tenth, and are of each source; the sum of
        all chances; the depth of the deepest node."""
        num, num_sources = len(self.each), int(self.source.max(initial=0)) + 1
        tenths, sources = np.zeros((num, 10), np.int64), np.zeros((num, num_sources), np.int64)
        claims, depths = np.zeros(num), np.zeros(num, np.int64)
        tally(self.start, self.nodes, self.survival, self.source, tenths, sources, claims, depths)
        by_source = sources.tolist()
        return list(zip(tenths.tolist(), by_source, claims.tolist(), depths.tolist(), strict=True))


@cache
def no_trees(num_items: int) -> Trees:
    """Of a step without drafts."""
    return Trees.of([None] * num_items)


@entry
@compiled
def check(
    token_ids: Int64, parents: Int64, survival: Float64, depths: Int64, vocab_size: int,
    max_depth: int,
) -> tuple[int, int]:  # fmt: skip
    """Whether a proposed tree can be verified: (0, 0), or what is wrong with which node: 1 its id,
    2 its parent, 3 its chance, 4 a sibling has its id, 5 its depth. depths: written, of each node.
    survival: clipped to [0, 1] and to the parent's."""
    for i in range(token_ids.shape[0]):
        token, parent = token_ids[i], parents[i]
        if token < 0 or token >= vocab_size:
            return 1, i
        if parent < -1 or parent >= i:
            return 2, i
        if not survival[i] >= 0.0:
            return 3, i
        for other in range(parent + 1, i):
            if token_ids[other] == token and parents[other] == parent:
                return 4, i
        depths[i] = 1 if parent < 0 else depths[parent] + 1
        survival[i] = min(survival[i], 1.0 if parent < 0 else survival[parent])
        if depths[i] > max_depth:
            return 5, i
    return 0, 0


@entry
@compiled
def tally(
    start: Int32,
    nodes: Int32x2,
    survival: Float64,
    source: Int64,
    tenths: Int64x2,
    sources: Int64x2,
    claims: Float64,
    depths: Int64,
) -> None:
    """Count the nodes of each item. The last four, zeros, are written: see Trees.tallies."""
    for item in range(start.shape[0] - 1):
        for node in range(start[item], start[item + 1]):
            tenths[item, min(9, int(survival[node] * 10.0))] += 1
            sources[item, source[node]] += 1
            claims[item] += survival[node]
            depths[item] = max(depths[item], nodes[2, node])


@entry
@compiled
def arrange(items: Int32x2, tree_start: Int32, choices: Int32x2) -> None:
    """Write where the rows and draws of each item begin, and where each choice draws. items: its
    other lines are there. choices: all lines but SEAT are written."""
    row, draw, choice = 0, 0, 0
    for i in range(items.shape[1]):
        num_nodes = tree_start[i + 1] - tree_start[i]
        items[FIRST_ROW, i], items[FIRST_DRAW, i] = row, draw
        for _ in range(items[CHOICES, i]):
            choices[DRAW, choice], choices[ITEM, choice] = draw, i
            choices[FIRST_NODE, choice] = tree_start[i]
            choices[END_NODE, choice] = tree_start[i + 1]
            choice += 1
            draw += 1
        row += items[NUM, i] + num_nodes
        draw += num_nodes


@entry
@compiled
def lay(
    numbers: Int32x2,
    blocks: Int32x2,
    size: int,
    items: Int32x2,
    tree_start: Int32,
    nodes: Int32x2,
    rows: Int32x2,
    path_slots: Int32,
    draws: Int32x2,
    tables: Int32x2,
) -> int:
    """Write the rows of a step and their draws; returns how many keys the rows attend to.

    numbers, blocks: of the Table. size: slots of a block. rows: int32 [7, R], as Batch has them:
    token_ids (here only of a seat's last token and of nodes), positions, seq_ids, slots,
    prefix_len, path_start, path_len. path_slots: int32 [P]. draws: int32 [5, D]: draw_rows,
    draw_params, draw_parent, draw_positions, draw_mask. tables: int32 [items, blocks], the seats'
    blocks. Item by item: positions ascending, then the tree's nodes in their order; the draws of
    the root's row, one a choice, then one a node.
    """
    row, draw, path, params, keys = 0, 0, 0, 0, 0
    for i in range(items.shape[1]):
        seat, first, num = items[SEAT, i], items[START, i], items[NUM, i]
        for block in range(tables.shape[1]):
            tables[i, block] = blocks[seat, block]
        for position in range(first, first + num):
            rows[1, row], rows[2, row] = position, i
            rows[3, row] = tables[i, position // size] * size + position % size
            rows[4, row] = position + 1
            rows[5, row], rows[6, row] = 0, 0
            keys += position + 1
            row += 1
        root_row, root = row - 1, first + num - 1
        if root == numbers[NUM_TOKENS, seat] - 1:
            rows[0, root_row] = numbers[LAST_ID, seat]
        mask = items[MASK, i]
        for _ in range(items[CHOICES, i]):
            draws[0, draw], draws[1, draw], draws[2, draw] = root_row, params, -1
            draws[3, draw], draws[4, draw] = root + 1, mask
            draw += 1
            params += 1
        root_draw, first_node_row = draw - 1, row
        for node in range(tree_start[i], tree_start[i + 1]):
            parent, depth = nodes[1, node], nodes[2, node]
            place = node - tree_start[i]
            position = root + 1 + place  # its slot's: nodes lie one after the other
            slot = tables[i, position // size] * size + position % size
            rows[0, row], rows[1, row], rows[2, row] = nodes[0, node], root + depth, i
            rows[3, row], rows[4, row] = slot, root + 1
            rows[5, row], rows[6, row] = path, depth
            above = rows[5, first_node_row + max(parent, 0)]
            for up in range(depth - 1):
                path_slots[path + up] = path_slots[above + up]
            path_slots[path + depth - 1] = slot
            path += depth
            keys += root + 1 + depth
            draws[0, draw], draws[1, draw] = row, params - 1
            draws[2, draw] = root_draw + 1 + parent
            draws[3, draw] = root + depth + 1
            draws[4, draw] = -1 if mask < 0 else mask + 1 + place
            row += 1
            draw += 1
    return keys


@entry
@compiled
def follow(
    numbers: Int32x2,
    blocks: Int32x2,
    ends: Int32x2,
    size: int,
    choices: Int32x2,
    nodes: Int32x2,
    drawn: Int32,
    runs: Int32x2,
    found: Int32x2,
    moves: Int32x2,
    came: Int32,
) -> int:
    """Follow the drawn ids of each choice through its tree, until no node has the drawn id or the
    choice ends; returns how many KV entries have to be moved.

    Only integers are compared (docs/DESIGN.md 1.1). This is where EOS, stop ids and the most tokens
    end a run. A choice that is simple and goes on is emitted here, into its columns.

    numbers, blocks, ends: of the Table, where the rows that the step computed are counted. drawn:
    the step's ids, -1 for a draw without an answer. runs: int32 [3, ids], written: the ids that
    stand, and the draw of each. found: int32 [NUM_FOUND_LINES, choices], written. moves: int32 [2,
    nodes], written: slots (from, to) of accepted nodes that do not lie where their positions are.
    came: int32 [nodes], written: 1 for accepted nodes, -1 where nothing was drawn, else 0.
    """
    at, num_moves = 0, 0
    for c in range(choices.shape[1]):
        seat, root = choices[SEAT, c], choices[DRAW, c]
        first, end = choices[FIRST_NODE, c], choices[END_NODE, c]
        left = numbers[MAX_OUTPUT, seat] - numbers[NUM_TOKENS, seat] + numbers[PROMPT_LEN, seat]
        start, accepted, why = at, 0, GOES_ON
        draw, node, current = root, first, -1
        came[first:end] = 0
        while True:
            token = drawn[draw]
            if token < 0:
                why = FAILED
                break
            runs[0, at], runs[1, at], runs[2, at] = token, draw, -1
            at += 1
            for i in range(ends.shape[1]):
                if ends[seat, i] == token:
                    why = END_ID
            if why == GOES_ON and at - start >= left:
                why = LENGTH
            while node < end and (nodes[1, node] != current or nodes[0, node] != token):
                node += 1  # parents come first: one pass finds the whole path
            if node < end:
                current = node - first
                came[node] = 1
                if current != accepted:
                    for line in range(2):
                        position = numbers[NUM_COMPUTED, seat] + (accepted if line else current)
                        block = blocks[seat, position // size]
                        moves[line, num_moves] = block * size + position % size
                    num_moves += 1
                accepted += 1
                runs[2, at - 1] = current
                draw = root + 1 + current
                node += 1
                if why == GOES_ON:
                    continue
            break
        if why == FAILED and accepted:
            accepted -= 1  # the last token that stands is the next step's root
        if at == start:
            came[first:end] = -1
        found[RUN, c], found[NUM_IDS, c], found[NUM_ACCEPTED, c] = start, at - start, accepted
        found[END, c], found[TODO, c] = why, 0
        if why != GOES_ON or not numbers[IS_SIMPLE, seat]:
            continue
        num_tokens = numbers[NUM_TOKENS, seat] + at - start
        verified = num_tokens - numbers[PROMPT_LEN, seat]
        numbers[NUM_TOKENS, seat], numbers[LAST_ID, seat] = num_tokens, runs[0, at - 1]
        numbers[NUM_COMPUTED, seat] += accepted
        numbers[NUM_VERIFIED, seat] = numbers[NUM_RELEASED, seat] = verified
        numbers[NUM_STEPS, seat] += 1
        found[TODO, c] = EMITTED
        full = min(numbers[NUM_COMPUTED, seat], num_tokens - 1) // size
        if full > numbers[NUM_PUBLISHED, seat]:
            found[TODO, c] |= PUBLISH
        if numbers[NUM_BLOCKS, seat] > (num_tokens + size - 1) // size:
            found[TODO, c] |= TRIM
    return num_moves
