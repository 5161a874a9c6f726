"""Trees: the drafts of all choices of a step as one tree in compressed rows, and the loops over it.

What: whether trees can be verified (`checked`) and which of their nodes stay (`Trees.prune`), how
rows and nodes become the columns of a Batch (`lay`), and how drawn ids are followed through the
trees (`follow`). What not: which nodes are drafted (draft.py), what becomes of the tokens
(commit.py). The loops are compiled (drafters/jit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from drafters.arrays import Float64, Int32, Int32x2, Int64, Int64x2, UInt8
from drafters.jit import compiled, entry
from drafters.tree import DraftTree
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

RUN, NUM_IDS, NUM_ACCEPTED, END, TODO, TOTAL, NUM_FOUND_LINES = range(7)
"""What `follow` finds of a choice: where its run begins among all, how many ids and accepted nodes
of it stand, why it ends (below), what is done for it and is still to be done, and its tokens."""

GOES_ON, END_ID, LENGTH, FAILED = range(4)
"""Why a run ends: the choice goes on; an EOS or stop id, which is the last; the most tokens that it
may have; a draw without an answer, which is left out of the run."""

EMITTED, PUBLISH, TRIM = 1, 2, 4
"""Of TODO: the tokens are in the columns already; full blocks may be published; blocks that only
held drafts are to be given back."""


class DraftError(ValueError):
    """A drafter proposed something that is not a tree over the vocabulary."""


@dataclass
class Trees:
    """The trees of a step's items in their order, in compressed rows, and what finding them took.
    Written by draft.py alone.

    start: int32 [items + 1], the nodes of item i are [start[i], start[i + 1]). nodes: int32
    [3, N]: ids, parents (within the tree; -1: its root is the item's last row; parents come
    first), depths (1 below the root). certain: int32 [items], how many of an item's first nodes a
    grammar forces from the root on. survival: float64 [N], the chance of each as its drafter
    claims it, within [0, 1] and its parent's. source: int64 [N], an index into the names of its
    choice's sources. cell: int32 [N], the drafter's own mark, -1 where it gives none.

    why: of each item "" or why it has no tree, in the words of StepCounts.no_draft_reason. seconds:
    that drafting took. ceiling: the most nodes that could have paid. num_asked: sessions that were
    asked. num_likely: likeliest ids of each row that sessions want to hear of.
    """

    start: Int32
    nodes: Int32x2
    certain: Int32
    survival: Float64
    source: Int64
    cell: Int32
    why: Sequence[str] = ()
    seconds: float = 0.0
    ceiling: int = 0
    num_asked: int = 0
    num_likely: int = 0

    def prune(self, most: Int64, stays: UInt8 | None = None) -> Trees:
        """Of each item the nodes that stay and whose parent does, and of these the `most[item]`
        likeliest (ties: the earlier), in their order. stays: uint8 [N], None: all may."""
        sizes, total = np.diff(self.start), self.nodes.shape[1]
        if stays is None:
            if bool((sizes <= most).all()):
                return self
            stays = np.ones(total, np.uint8)
        num = keep(self.start, self.nodes, self.survival, most, stays)
        if num == 0:
            return no_trees(sizes.shape[0]).told(self.why)
        start, certain = np.zeros_like(self.start), self.certain.copy()
        nodes: Int32x2 = np.empty((3, num), np.int32)
        survival, source = np.empty(num), np.empty(num, np.int64)
        cell: Int32 = np.empty(num, np.int32)
        compress(
            (self.start, self.nodes, self.survival, self.source, self.cell), stays,
            np.empty(total, np.int32), (start, nodes, survival, source, cell), certain,
        )  # fmt: skip
        return Trees(start, nodes, certain, survival, source, cell, self.why)

    def told(self, why: Sequence[str]) -> Trees:
        """The same, with these reasons."""
        columns = self.nodes, self.certain, self.survival, self.source, self.cell
        return Trees(self.start, *columns, why)

    def proposed(
        self, item: int, accepted: list[int], forced: int = -1
    ) -> tuple[DraftTree, list[int]]:
        """An item's tree and its accepted nodes as the session knows them that proposed it. forced:
        the source of nodes that a grammar added: at the root, or where a path ends."""
        at = slice(self.start[item], self.start[item + 1])
        (ids, parents, _), cell = self.nodes[:, at], self.cell[at]
        survival, source = self.survival[at].astype(np.float32), self.source[at].astype(np.uint8)
        if forced >= 0:
            own = source != forced
            places = np.append(np.where(own, np.cumsum(own) - 1, -1), -1).astype(np.int32)
            ids, parents, cell = ids[own], places[parents[own]], cell[own]
            survival, source = survival[own], source[own]
            accepted = [int(places[node]) for node in accepted if own[node]]
        if cell.shape[0] and cell[0] < 0:
            cell = cell[:0]
        return DraftTree(ids, parents, survival, source, cell), accepted

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
        num, num_sources = self.certain.shape[0], int(self.source.max(initial=0)) + 1
        tenths, sources = np.zeros((num, 10), np.int64), np.zeros((num, num_sources), np.int64)
        claims, depths = np.zeros(num), np.zeros(num, np.int64)
        tally(self.start, self.nodes, self.survival, self.source, tenths, sources, claims, depths)
        by_source = sources.tolist()
        return list(zip(tenths.tolist(), by_source, claims.tolist(), depths.tolist(), strict=True))


@cache
def no_trees(num_items: int) -> Trees:
    """Of a step in which nobody has a drafter. Nobody writes to it."""
    start, certain = np.zeros(num_items + 1, np.int32), np.zeros(num_items, np.int32)
    nodes: Int32x2 = np.empty((3, 0), np.int32)
    empty = np.empty(0), np.empty(0, np.int64), np.empty(0, np.int32)
    return Trees(start, nodes, certain, *empty, ("off",) * num_items)


_FAULTS = (
    "token_ids, parents, survival and source differ in length",
    "node {node} holds id {token}, outside the vocabulary",
    "node {node} has parent {parent}",
    "node {node} survives with chance {chance}",
    "node {node} repeats a sibling's token",
    "node {node} is {depth} deep, past {most}",
)


def checked(
    each: Sequence[DraftTree | None], bounds: Int64x2
) -> tuple[Trees, list[tuple[int, Exception]]]:
    """The trees of a step from what sessions propose, and of which items one cannot be verified and
    why (DraftError): these have no nodes. Drafters may be a user's own: nothing is trusted.

    bounds: int64 [items, 2], the bound on an item's ids, and how deep its nodes may lie.
    """
    num, errors = len(each), list[tuple[int, Exception]]()
    start, parts = np.zeros(num + 1, np.int32), list[Any]()
    for i, tree in enumerate(each):
        if tree is None:
            continue
        try:
            size, names, marks = tree.token_ids.shape[0], tree.source, tree.cell
            shapes = {tree.token_ids.shape, tree.parents.shape, tree.survival.shape}
            if shapes != {(size,)} or names.shape not in ((0,), (size,)):
                raise DraftError(_FAULTS[0])
            parts.append(
                (
                    tree.token_ids.astype(np.int64),
                    tree.parents.astype(np.int64),
                    tree.survival.astype(np.float64),
                    names.astype(np.int64) if names.shape[0] else np.zeros(size, np.int64),
                    marks.astype(np.int32)
                    if marks.shape == (size,)
                    else np.full(size, -1, np.int32),
                )
            )
            start[i + 1] = size
        except Exception as error:
            errors.append((i, error))
    np.cumsum(start, out=start)
    if not parts:
        return no_trees(num).told(()), errors
    if len(parts) > 1:
        parts = [map(np.concatenate, zip(*parts, strict=True))]
    ids, parents, survival, source, cell = parts[0]
    nodes: Int32x2 = np.empty((3, ids.shape[0]), np.int32)
    faults: Int32x2 = np.zeros((2, num), np.int32)
    trees = Trees(start, nodes, np.zeros(num, np.int32), survival, source, cell)
    if check(start, ids, parents, survival, bounds, nodes, faults):
        most = np.diff(start).astype(np.int64)
        for i in np.flatnonzero(faults[0]).tolist():
            at, most[i] = start[i] + faults[1, i], 0
            text = _FAULTS[faults[0, i]].format(
                node=faults[1, i], token=ids[at], parent=parents[at], chance=survival[at],
                depth=nodes[2, at], most=bounds[i, 1],
            )  # fmt: skip
            errors.append((i, DraftError(text)))
        trees = trees.prune(most)
    return trees, errors


@entry
@compiled
def check(
    start: Int32, ids: Int64, parents: Int64, survival: Float64, bounds: Int64x2,
    nodes: Int32x2, faults: Int32x2,
) -> int:  # fmt: skip
    """Whether proposed trees can be verified; returns how many cannot. faults: int32 [2, items],
    written where one cannot: what is wrong (1 an id, 2 a parent, 3 a chance, 4 a sibling has its
    id, 5 a depth), and with which node. nodes: of Trees, written. survival: clipped to [0, 1] and
    to the parent's."""
    num_faults = 0
    for item in range(start.shape[0] - 1):
        first, why = start[item], 0
        for at in range(first, start[item + 1]):
            i, token, parent = at - first, ids[at], parents[at]
            if token < 0 or token >= bounds[item, 0]:
                why = 1
            elif parent < -1 or parent >= i:
                why = 2
            elif not survival[at] >= 0.0:
                why = 3
            else:
                for other in range(first + parent + 1, at):
                    if ids[other] == token and parents[other] == parent:
                        why = 4
            if why == 0:
                nodes[0, at], nodes[1, at] = token, parent
                nodes[2, at] = 1 if parent < 0 else nodes[2, first + parent] + 1
                above = 1.0 if parent < 0 else survival[first + parent]
                survival[at] = min(survival[at], above)
                if nodes[2, at] > bounds[item, 1]:
                    why = 5
            if why:
                faults[0, item], faults[1, item] = why, i
                num_faults += 1
                break
    return num_faults


@entry
@compiled
def keep(start: Int32, nodes: Int32x2, survival: Float64, most: Int64, stays: UInt8) -> int:
    """Write 0 for the nodes that do not stay: see Trees.prune. Returns how many do."""
    total = 0
    for item in range(start.shape[0] - 1):
        first, end, num = start[item], start[item + 1], 0
        if most[item] <= 0:  # maybe a tree that cannot be verified, of which nothing is known
            stays[first:end] = 0
            continue
        for at in range(first, end):
            parent = nodes[1, at]
            if parent >= 0 and not stays[first + parent]:
                stays[at] = 0
            num += stays[at]
        while num > most[item]:
            worst = -1
            for at in range(first, end):
                if stays[at] and (worst < 0 or survival[at] <= survival[worst]):
                    worst = at
            stays[worst] = 0
            num -= 1
        total += num
    return total


Columns = tuple[Int32, Int32x2, Float64, Int64, Int32]
"""start, nodes, survival, source and cell of Trees."""


@entry
@compiled
def compress(
    old: Columns, stays: UInt8, places: Int32, new: Columns, certain: Int32
) -> None:  # fmt: skip
    """Write the nodes that stay, one after the other. places: scratch, int32 [N]. new: written; its
    first start is 0. certain: of Trees, made no more than an item has."""
    start, nodes, survival, source, cell = old
    num = 0
    for item in range(start.shape[0] - 1):
        first = num
        for at in range(start[item], start[item + 1]):
            if stays[at]:
                places[at] = num - first
                parent = nodes[1, at]
                new[1][0, num], new[1][2, num] = nodes[0, at], nodes[2, at]
                new[1][1, num] = -1 if parent < 0 else places[start[item] + parent]
                new[2][num], new[3][num], new[4][num] = survival[at], source[at], cell[at]
                num += 1
        new[0][item + 1] = num
        certain[item] = min(certain[item], num - first)


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
    start: Int32,
    items: Int32x2,
    tree_start: Int32,
    nodes: Int32x2,
    rows: Int32x2,
    path_slots: Int32,
    draws: Int32x2,
    tables: Int32x2,
) -> int:
    """Write the rows of a step and their draws; returns how many keys the rows attend to.

    numbers, blocks: of the Table. size: slots of a block. start: int32 [items], the items' START,
    which is written. rows: int32 [7, R], as Batch has them:
    token_ids (here only of a seat's last token and of nodes), positions, seq_ids, slots,
    prefix_len, path_start, path_len. path_slots: int32 [P]. draws: int32 [5, D]: draw_rows,
    draw_params, draw_parent, draw_positions, draw_mask. tables: int32 [items, blocks], the seats'
    blocks. Item by item: positions ascending, then the tree's nodes in their order; the draws of
    the root's row, one a choice, then one a node.
    """
    row, draw, path, params, keys = 0, 0, 0, 0, 0
    for i in range(items.shape[1]):
        seat, first, num = items[SEAT, i], start[i], items[NUM, i]
        items[START, i] = first
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
    stand, and the draw of each. found: int32 [choices, NUM_FOUND_LINES], written. moves: int32 [2,
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
        found[c, RUN], found[c, NUM_IDS], found[c, NUM_ACCEPTED] = start, at - start, accepted
        found[c, END], found[c, TODO], found[c, TOTAL] = why, 0, numbers[NUM_TOKENS, seat]
        if why != GOES_ON or not numbers[IS_SIMPLE, seat]:
            continue
        num_tokens = numbers[NUM_TOKENS, seat] + at - start
        verified = num_tokens - numbers[PROMPT_LEN, seat]
        numbers[NUM_TOKENS, seat], numbers[LAST_ID, seat] = num_tokens, runs[0, at - 1]
        numbers[NUM_COMPUTED, seat] += accepted
        numbers[NUM_VERIFIED, seat] = numbers[NUM_RELEASED, seat] = verified
        numbers[NUM_STEPS, seat] += 1
        found[c, TODO], found[c, TOTAL] = EMITTED, num_tokens
        if numbers[NUM_COMPUTED, seat] // size > numbers[NUM_PUBLISHED, seat]:
            found[c, TODO] |= PUBLISH
        if numbers[NUM_BLOCKS, seat] > (num_tokens + size - 1) // size:
            found[c, TODO] |= TRIM
    return num_moves
