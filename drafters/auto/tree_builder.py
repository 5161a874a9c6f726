"""Growing one tree from all sources, best-first, by the estimated chance of each node.

At every node the sources' next tokens are gathered (drafters.auto.gather) and blended into a
chance for each (drafters.auto.blend). The product of the chances along a path is the node's
survival, and a max-heap on it with parent closure gives the tree: deep where the context is
certain, broad where it is not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drafters.arrays import Float32, Int32, Int32x2, Int64x2
from drafters.auto.automaton import automaton_step
from drafters.auto.blend import blend, is_end, leader
from drafters.auto.cells import NUM_BUCKETS, NUM_SITUATIONS, factor_cell
from drafters.auto.copying import Cursor, follow
from drafters.auto.gather import NUM, Gathered, gather, new_gathered
from drafters.auto.prior import Prior, PriorScratch, begin, go_on
from drafters.auto.views import Context, Limits, Trusts
from drafters.heap import pop, push
from drafters.jit import borrowing, entry, inlined
from drafters.tree import DraftTree

HEAP_SIZE = 4096


class Nodes(NamedTuple):
    """The grown nodes in the order they were popped, so a parent comes before its children.

    int32 [N] each: token, parent (-1: the root), source of the leading context, depth; state and
    length of the corpus after the node; first_child, next_sibling (-1: none) and place in the final
    order. float32 [N]: survival of the path. cursor: int64 [N, 5], the Cursor after the node.
    """

    token: Int32
    parent: Int32
    source: Int32
    depth: Int32
    state: Int32
    length: Int32
    first_child: Int32
    next_sibling: Int32
    place: Int32
    survival: Float32
    cursor: Int64x2


class Candidates(NamedTuple):
    """What waits in the heap: drafters.heap's keys (survivals) and places, and at each place
    token, parent and source (int32)."""

    keys: Float32
    places: Int32
    token: Int32
    parent: Int32
    source: Int32


class Tree(NamedTuple):
    """The result, in preorder: int32 [3, N] token, parent, source; float32 [N] survival."""

    ints: Int32x2
    survival: Float32


@inlined
def _cursor(nodes: Nodes, node: int) -> Cursor:
    """Of a grown node."""
    row = nodes.cursor
    return Cursor(row[node, 0], row[node, 1], row[node, 2], row[node, 3], row[node, 4])


@inlined
def _offer(
    node: int,
    followed: int,
    context: Context,
    limits: Limits,
    trusts: Trusts,
    nodes: Nodes,
    found: Gathered,
    waiting: Candidates,
    size: int,
) -> int:
    """Put the candidates behind `node` (-1: the root) into the heap; returns its new size.
    followed: of the prior, at the root."""
    depth, survival = 0, np.float32(1.0)
    state, length, cursor = context.corpus.state, context.corpus.length, context.cursor
    if node >= 0:
        depth, survival = nodes.depth[node], nodes.survival[node]
        state, length = nodes.state[node], nodes.length[node]
        cursor = _cursor(nodes, node)
    at = node
    for i in range(depth):
        found.path[i] = nodes.token[at]
        at = nodes.parent[at]
    if node >= 0 and followed >= 0:
        before, token = nodes.parent[node] + 1, nodes.token[node]
        followed = go_on(context.prior, before, token, node + 1, followed + depth - 1)
    num_levels = gather(
        context, 0, trusts.weights, state, length, cursor, depth, followed, node + 1, found
    )
    blend(trusts.weights, num_levels, found)
    at_start = context.num_output + depth == 0
    for row in range(found.state[NUM]):
        chance = found.chances[row]
        if survival * chance < 0.2 * limits.min_survival:
            continue
        first = leader(row, num_levels, found)
        level = found.levels[first]
        cell = factor_cell(level, found.cells[first] % NUM_SITUATIONS, at_start, chance)
        chance = min(chance * np.float32(trusts.factors[cell]), np.float32(0.9999))
        value = survival * chance
        if value < limits.min_survival or size >= waiting.keys.shape[0]:
            continue
        # An EOS is never drafted: the bonus token brings it without a draft, and after it
        # there is none.
        token = found.tokens[row]
        if is_end(token, context.ends):
            continue
        place = push(waiting.keys, waiting.places, size, value)
        size += 1
        waiting.token[place] = token
        waiting.parent[place] = node
        waiting.source[place] = level // NUM_BUCKETS
    return size


@inlined
def _take(
    node: int, survival: float, place: int, context: Context, nodes: Nodes, waiting: Candidates
) -> None:
    """Make the candidate at `place` node number `node`."""
    parent = waiting.parent[place]
    token = waiting.token[place]
    nodes.token[node] = token
    nodes.parent[node] = parent
    nodes.source[node] = waiting.source[place]
    nodes.survival[node] = survival
    nodes.depth[node] = 1 if parent < 0 else nodes.depth[parent] + 1
    corpus = context.corpus
    state, length = corpus.state, corpus.length
    if parent >= 0:
        state, length = nodes.state[parent], nodes.length[parent]
    if corpus.states.shape[0] > 0:
        state, length = automaton_step(corpus.states, corpus.edges, state, length, token)
    nodes.state[node] = state
    nodes.length[node] = length
    before = context.cursor if parent < 0 else _cursor(nodes, parent)
    after = follow(context.copy, before, token)
    nodes.cursor[node, 0], nodes.cursor[node, 1] = after.tail, after.place
    nodes.cursor[node, 2], nodes.cursor[node, 3] = after.off, after.words
    nodes.cursor[node, 4] = after.run


@inlined
def _write_preorder(num: int, nodes: Nodes, tree: Tree) -> None:
    """Siblings by survival: the likeliest path comes first, so that its KV stays put.

    Nodes were popped by survival, so a parent's children lie in that order already; going through
    them backwards and pushing each in front of its parent's list keeps it.
    """
    nodes.first_child[:num] = -1
    first_root = -1
    for i in range(num - 1, -1, -1):
        parent = nodes.parent[i]
        if parent < 0:
            nodes.next_sibling[i] = first_root
            first_root = i
        else:
            nodes.next_sibling[i] = nodes.first_child[parent]
            nodes.first_child[parent] = i
    at = first_root
    place = 0
    while at >= 0:
        parent = nodes.parent[at]
        nodes.place[at] = place
        tree.ints[0, place] = nodes.token[at]
        tree.ints[1, place] = -1 if parent < 0 else nodes.place[parent]
        tree.ints[2, place] = nodes.source[at]
        tree.survival[place] = nodes.survival[at]
        place += 1
        if nodes.first_child[at] >= 0:
            at = nodes.first_child[at]
            continue
        while at >= 0 and nodes.next_sibling[at] < 0:
            at = nodes.parent[at]
        if at >= 0:
            at = nodes.next_sibling[at]


@entry
@borrowing
def grow_tree(
    limits: Limits,
    context: Context,
    trusts: Trusts,
    found: Gathered,
    nodes: Nodes,
    waiting: Candidates,
    tree: Tree,
) -> int:
    """Grow a tree into `tree`; returns its number of nodes. found, nodes, waiting: scratch."""
    size = 0  # of the heap
    num = 0
    node = -1
    depth = 0
    followed = begin(context.prior, context.own.text, context.own.size)
    survival = np.float32(1.0)
    while True:
        least = limits.least[min(num, limits.least.shape[0] - 1)]
        # What follows a node is no likelier than that is.
        if depth < limits.max_depth and num < limits.budget and survival >= least:
            size = _offer(node, followed, context, limits, trusts, nodes, found, waiting, size)
        # The likeliest node is told in any case: whoever knows something is not without a match.
        if num >= limits.budget or size == 0 or (num and waiting.keys[0] < least):
            break
        survival = waiting.keys[0]
        place = pop(waiting.keys, waiting.places, size)
        size -= 1
        node = num
        num += 1
        _take(node, survival, place, context, nodes, waiting)
        depth = nodes.depth[node]
    _write_preorder(num, nodes, tree)
    return num


_NO_CELLS = np.empty(0, np.int32)


class Workspace:
    """Scratch arrays of grow_tree and advance: a third of a megabyte, which all sessions of a
    thread may take turns with: made anew it costs a scope's first draft a tenth of a millisecond.
    """

    def __init__(self) -> None:
        self._prior: PriorScratch | None = None
        self._resize(64, 64)

    def of_prior(self, prior: Prior) -> PriorScratch:
        """The scratch of the model's prior; another one's where that was made anew."""
        if self._prior is None or self._prior.prior is not prior:
            self._prior = PriorScratch(prior)
        return self._prior

    def _resize(self, max_budget: int, max_depth: int) -> None:
        self._max_budget, self._max_depth = max_budget, max_depth
        self.gathered = new_gathered(max_depth)
        ints, survival = np.zeros((9, max_budget), np.int32), np.zeros(max_budget, np.float32)
        self._nodes = Nodes._make((*ints, survival, np.zeros((max_budget, 5), np.int64)))
        keys, places = np.zeros(HEAP_SIZE, np.float32), np.arange(HEAP_SIZE, dtype=np.int32)
        self._waiting = Candidates._make((keys, places, *np.zeros((3, HEAP_SIZE), np.int32)))
        self._tree = Tree(np.zeros((3, max_budget), np.int32), np.zeros(max_budget, np.float32))

    def grow(self, limits: Limits, context: Context, trusts: Trusts) -> DraftTree:
        """The DraftTree of a step."""
        budget, max_depth = limits[:2]
        if budget > self._max_budget or max_depth > self._max_depth:
            self._resize(max(budget, self._max_budget), max(max_depth, self._max_depth))
        num = grow_tree(
            limits, context, trusts, self.gathered, self._nodes, self._waiting, self._tree
        )
        if num == 0:
            return DraftTree.empty()
        ints, survival = self._tree
        block = ints[:2, :num].copy()
        return DraftTree(
            block[0], block[1], survival[:num].copy(), ints[2, :num].astype(np.uint8), _NO_CELLS
        )
