"""Trees: the drafts of all choices of a step as one tree in compressed rows, and the loops over it.

What: whether trees can be verified (`checked`) and which of their nodes stay (`Trees.prune`), how
rows and nodes become the columns of a Batch (`lay`), and how drawn ids are followed through the
trees (`follow`). What not: which nodes are drafted (draft.py), what becomes of the tokens
(commit.py). The loops are compiled (drafters/jit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from drafters.arrays import Float32, Float64, Int32, Int32x2, Int64, Int64x2, UInt8
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


ID, PARENT, DEPTH, SOURCE, CELL, NUM_NODE_LINES = range(6)
"""The lines of a node, int32 [.., nodes]: PARENT within the tree (-1: its root is the item's last
row; parents come first), DEPTH 1 below the root, SOURCE an index into the names of its choice's
sources, CELL the drafter's own mark, -1 where it gives none."""

ALL_STAY = np.empty(0, np.int32)

MAX_DEPTH, FIRST_SOURCE = 10, 11
"""The columns of what `tally` counts, behind the ten tenths."""


@dataclass
class Trees:
    """The trees of a step's items in their order, in compressed rows, and what finding them took.
    Written by draft.py alone.

    start: int32 [items + 1], the nodes of item i are [start[i], start[i + 1]). nodes: int32
    [NUM_NODE_LINES, N]. survival: float64 [N], the chance of each as its drafter claims it, within
    [0, 1] and its parent's. certain: int32 [items], how many of an item's first nodes a grammar
    forces from the root on.

    why: of each item "" or why it has no tree, in the words of StepCounts.no_draft_reason.
    gain_seats: int64 [items], the choices' at Gain. seconds: that drafting took. ceiling: the most
    nodes that could have paid. num_asked, num_opened: sessions that were. num_likely: likeliest ids
    of each row that sessions want to hear of.
    """

    start: Int32
    nodes: Int32x2
    survival: Float64
    certain: Int32
    why: Sequence[str] = ()
    gain_seats: Int64 | None = None
    seconds: float = 0.0
    ceiling: int = 0
    num_asked: int = 0
    num_opened: int = 0
    num_likely: int = 0

    def prune(self, most: Int64, stays: Int32 = ALL_STAY) -> None:
        """Keep of each item the nodes that stay and whose parent does, and of these the
        `most[item]` likeliest (ties: the earlier), in their order. stays: int32 [N], 0 for those
        that may not, used up; empty: all may."""
        total = self.nodes.shape[1]
        if not total:
            return
        num = keep(self.start, self.nodes, self.survival, self.certain, most, stays)
        if num < total:
            self.nodes, self.survival = self.nodes[:, :num].copy(), self.survival[:num]

    def told(self, why: Sequence[str]) -> Trees:
        """The same, with these reasons."""
        return Trees(self.start, self.nodes, self.survival, self.certain, why)

    def proposed(
        self, item: int, accepted: list[int], forced: int = -1
    ) -> tuple[DraftTree, list[int]]:
        """An item's tree and its accepted nodes as the session knows them that proposed it. forced:
        the source of nodes that a grammar added: at the root, or where a path ends."""
        at = slice(self.start[item], self.start[item + 1])
        nodes, survival = self.nodes[:, at], self.survival[at]
        if forced >= 0:
            own = nodes[SOURCE] != forced
            places = np.append(np.where(own, np.cumsum(own) - 1, -1), -1).astype(np.int32)
            accepted = [int(places[node]) for node in accepted if own[node]]
            nodes, survival = nodes[:, own], survival[own]
            nodes[PARENT] = places[nodes[PARENT]]
        cell = nodes[CELL]
        if cell.shape[0] and cell[0] < 0:
            cell = cell[:0]
        source = nodes[SOURCE].astype(np.uint8)
        ids, parents = nodes[ID], nodes[PARENT]
        return DraftTree(ids, parents, survival.astype(np.float32), source, cell), accepted


@cache
def no_trees(num_items: int) -> Trees:
    """Of a step in which nobody has a drafter. Nobody writes to it."""
    start, certain = np.zeros(num_items + 1, np.int32), np.zeros(num_items, np.int32)
    nodes: Int32x2 = np.empty((NUM_NODE_LINES, 0), np.int32)
    return Trees(start, nodes, np.empty(0), certain, ("off",) * num_items)


_LENGTHS = 6
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
    sizes = [0] * num
    for i, tree in enumerate(each):
        try:
            sizes[i] = 0 if tree is None else tree.token_ids.shape[0]
        except Exception as error:
            errors.append((i, error))
    total, at = sum(sizes), 0
    if not total:
        return no_trees(num).told(()), errors
    start, nodes = np.zeros(num + 1, np.int32), np.empty((NUM_NODE_LINES, total), np.int32)
    survival = np.empty(total)
    for i, tree in enumerate(each):
        if tree is not None and sizes[i]:
            place = int(bounds[i, 0]), int(bounds[i, 1]), nodes, survival, at
            try:
                columns = tree.token_ids, tree.parents, tree.survival, tree.source, tree.cell
                try:
                    found = check(*columns, *place)
                except TypeError:  # not the numbers that a DraftTree has: some drafter's own
                    found = check(*_declared(*columns), *place)
                if found:
                    raise _fault(tree, found, int(nodes[DEPTH, at + found % (1 << 32)]), place[1])
                at += sizes[i]
            except Exception as error:
                errors.append((i, error))
        start[i + 1] = at
    if at < total:
        nodes, survival = nodes[:, :at].copy(), survival[:at]
    return Trees(start, nodes, survival, np.zeros(num, np.int32)), errors


def _declared(
    ids: object, parents: object, survival: object, source: object, cell: object
) -> tuple[Int32, Int32, Float32, UInt8, Int32]:
    """The columns of a tree in the types that a DraftTree declares."""
    limits = np.iinfo(np.int32)
    given = [np.asarray(column) for column in (ids, parents, cell)]
    small = [np.clip(column, limits.min, limits.max).astype(np.int32) for column in given]
    chances, sources = np.asarray(survival, np.float32), np.asarray(source, np.uint8)
    return small[0], small[1], chances.copy(), sources.copy(), small[2]


def _fault(tree: DraftTree, found: int, depth: int, most: int) -> DraftError:
    """What `check` has found. depth: of the node. most: how deep nodes may lie."""
    fault, node = divmod(found, 1 << 32)
    if fault == _LENGTHS:
        return DraftError(_FAULTS[0])
    return DraftError(_FAULTS[fault].format(
        node=node, token=tree.token_ids[node], parent=tree.parents[node],
        chance=tree.survival[node], depth=depth, most=most,
    ))  # fmt: skip


@entry
@compiled
def check(
    ids: Int32, parents: Int32, chances: Float32, source: UInt8, cell: Int32, id_bound: int,
    depth_bound: int, nodes: Int32x2, survival: Float64, first: int,
) -> int:  # fmt: skip
    """Write a proposed tree's nodes from number `first` on; 0, or what is wrong with it (an index
    of _FAULTS, or _LENGTHS) times 2 ** 32, and with which node. nodes, survival: of Trees; chances
    are clipped to [0, 1] and to the parent's."""
    num = ids.shape[0]
    if parents.shape[0] != num or chances.shape[0] != num or source.shape[0] not in (0, num):
        return _LENGTHS << 32
    for i in range(num):
        at, token, parent, why = first + i, ids[i], parents[i], 0
        if token < 0 or token >= id_bound:
            why = 1
        elif parent < -1 or parent >= i:
            why = 2
        elif not chances[i] >= 0.0:
            why = 3
        else:
            for other in range(parent + 1, i):
                if ids[other] == token and parents[other] == parent:
                    why = 4
        if why == 0:
            above, depth = 1.0, 1
            if parent >= 0:
                above, depth = survival[first + parent], nodes[DEPTH, first + parent] + 1
            survival[at] = min(float(chances[i]), above)
            nodes[ID, at], nodes[PARENT, at], nodes[DEPTH, at] = token, parent, depth
            nodes[SOURCE, at] = source[i] if source.shape[0] else 0
            nodes[CELL, at] = cell[i] if cell.shape[0] == num else -1
            if depth > depth_bound:
                why = 5
        if why:
            return why << 32 | i
    return 0


@entry
@compiled
def keep(
    start: Int32, nodes: Int32x2, survival: Float64, certain: Int32, most: Int64, stays: Int32
) -> int:
    """See Trees.prune: the nodes that stay are written one after the other; returns how many they
    are. certain: made no more than an item has."""
    total, end = 0, start[0]
    if not stays.shape[0]:
        stays = np.ones(nodes.shape[1], np.int32)
    for item in range(start.shape[0] - 1):
        first, end, num = end, start[item + 1], 0
        for at in range(first, end):
            parent = nodes[PARENT, at]
            if parent >= 0 and not stays[first + parent]:
                stays[at] = 0
            num += stays[at]
        while num > max(most[item], 0):
            worst = -1
            for at in range(first, end):
                if stays[at] and (worst < 0 or survival[at] <= survival[worst]):
                    worst = at
            stays[worst] = 0
            num -= 1
        new = total
        for at in range(first, end):
            if stays[at]:
                for line in range(NUM_NODE_LINES):
                    nodes[line, total] = nodes[line, at]
                parent = nodes[PARENT, total]
                if parent >= 0:
                    nodes[PARENT, total] = stays[first + parent]
                survival[total] = survival[at]
                stays[at] = total - new  # its place now; read as that by its children alone
                total += 1
        start[item + 1] = total
        certain[item] = min(certain[item], total - new)
    return total


@entry
@compiled
def tally(
    start: Int32, nodes: Int32x2, survival: Float64, item: int, runs: Int32x2, run: int,
    num_accepted: int, counts: Int64x2,
) -> float:  # fmt: skip
    """Count an item's nodes; returns the sum of their chances. runs, run, num_accepted: of
    `follow`, the nodes that stand. counts: int64 [2, FIRST_SOURCE + sources], zeros, written: of
    all nodes and of those that stand how many claim a chance in each tenth, the depth of the
    deepest, and how many are of each source."""
    first, claims, last = start[item], 0.0, counts.shape[1] - FIRST_SOURCE - 1
    for node in range(first, start[item + 1]):
        source = nodes[SOURCE, node]
        counts[0, min(9, int(survival[node] * 10.0))] += 1
        counts[0, FIRST_SOURCE + (source if source <= last else 0)] += 1
        counts[0, MAX_DEPTH] = max(counts[0, MAX_DEPTH], nodes[DEPTH, node])
        claims += survival[node]
    for at in range(run, run + num_accepted):
        node = first + runs[2, at]
        source = nodes[SOURCE, node]
        counts[1, min(9, int(survival[node] * 10.0))] += 1
        counts[1, FIRST_SOURCE + (source if source <= last else 0)] += 1
    return claims


@entry
@compiled
def arrange(items: Int32x2, tree_start: Int32, nodes: Int32x2, choices: Int32x2) -> int:
    """Write where the rows and draws of each item begin, and where each choice draws; returns how
    many slots the nodes' paths take. items: its other lines are there. choices: all lines but SEAT
    are written."""
    row, draw, choice, num_path_slots = 0, 0, 0, 0
    for node in range(nodes.shape[1]):
        num_path_slots += nodes[DEPTH, node]
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
    return num_path_slots


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
