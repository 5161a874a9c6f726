"""A suffix automaton over a task's outputs: every context of any length and what followed it.

Built online (Blumer et al. 1985), one document after the other, each behind START; then frozen
into flat arrays that are memory-mapped and shared. A state stands for all contexts that occur at
the same places; its suffix link leads to the next shorter context that occurs at more of them.
So the state after the last tokens gives the longest match, and its links all shorter ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drafters.arrays import Int32, Int32x2, Int64
from drafters.auto.text_index import find_child
from drafters.corpus_file import MAX_TOP, START
from drafters.jit import compiled, entry

MAX_TOKENS = 1 << 29


@entry
@compiled
def automaton_step(
    states: Int32x2, edges: Int32x2, state: int, length: int, token: int
) -> tuple[int, int]:
    """The automaton's state and match length after one more token: O(1) amortised suffix links."""
    while True:
        low, high = states[state, 3], states[state + 1, 3]
        end = high
        while low < high:
            middle = (low + high) // 2
            if edges[middle, 0] < token:
                low = middle + 1
            else:
                high = middle
        if low < end and edges[low, 0] == token:
            return int(edges[low, 1]), length + 1
        state = int(states[state, 0])
        if state < 0:
            return 0, 0
        length = int(states[state, 1])


@compiled
def _clone(
    states: Int32,
    heads: Int32,
    edges: Int32,
    table: Int32,
    which: tuple[int, int, int, int],
) -> int:
    """Make state `clone` a copy of `target` that ends behind `state`; returns the new num_edges.

    which: (target, state, clone, num_edges).
    """
    target, state, clone, num_edges = which
    states[0, clone] = states[0, target]
    states[1, clone] = states[1, state] + 1
    states[2, clone] = 0
    heads[clone] = -1
    edge = heads[target]
    while edge >= 0:
        table[find_child(edges, table, clone, edges[0, edge])] = num_edges
        edges[0, num_edges], edges[1, num_edges] = edges[0, edge], clone
        edges[2, num_edges], edges[3, num_edges] = edges[2, edge], heads[clone]
        heads[clone] = num_edges
        num_edges += 1
        edge = edges[3, edge]
    return num_edges


@entry
@compiled
def _build(
    ids: Int32,
    document_starts: Int64,
    states: Int32x2,
    heads: Int32,
    edges: Int32x2,
    table: Int32,
) -> tuple[int, int]:
    """states: int32 [3, S] link, length, count. edges: int32 [4, E] token, state, target, next edge
    of the same state. heads: a state's newest edge. Returns (states, edges)."""
    num_states, num_edges = 1, 0
    states[0, 0], states[1, 0], states[2, 0] = -1, 0, 0
    heads[0] = -1
    num_documents = document_starts.shape[0]
    for document in range(num_documents):
        first = document_starts[document]
        end = ids.shape[0]
        if document + 1 < num_documents:
            end = document_starts[document + 1]
        last = 0
        for i in range(first - 1, end):
            token = START if i < first else int(ids[i])
            slot = find_child(edges, table, last, token)
            current = -1
            state = last
            if table[slot] < 0:
                current = num_states
                num_states += 1
                states[1, current] = states[1, last] + 1
                states[2, current] = 0
                states[0, current] = 0
                heads[current] = -1
                while state >= 0 and table[slot] < 0:
                    table[slot] = num_edges
                    edges[0, num_edges], edges[1, num_edges] = token, state
                    edges[2, num_edges], edges[3, num_edges] = current, heads[state]
                    heads[state] = num_edges
                    num_edges += 1
                    state = states[0, state]
                    if state >= 0:
                        slot = find_child(edges, table, state, token)
            if state >= 0:
                target = edges[2, table[slot]]
                if states[1, target] != states[1, state] + 1:
                    # Split: the clone takes the contexts that occur here too.
                    clone = num_states
                    num_states += 1
                    which = target, state, clone, num_edges
                    num_edges = _clone(states, heads, edges, table, which)
                    states[0, target] = clone
                    while state >= 0:
                        slot = find_child(edges, table, state, token)
                        if table[slot] < 0 or edges[2, table[slot]] != target:
                            break
                        edges[2, table[slot]] = clone
                        state = states[0, state]
                    target = clone
                if current >= 0:
                    states[0, current] = target
                else:
                    current = target
            last = current
            states[2, last] += 1
    return num_states, num_edges


@entry
@compiled
def _propagate(states: Int32x2, order: Int64) -> None:
    """Add counts to the suffix links, longest states first."""
    for i in range(order.shape[0] - 1, -1, -1):
        state = order[i]
        link = states[0, state]
        if link >= 0:
            states[2, link] += states[2, state]


@entry
@compiled
def _commonest(packed: Int32x2, edges: Int32x2, tops: Int32x2) -> int:
    """Fill column 4 of the states, column 2 of the edges, and `tops`; returns the entries used."""
    for edge in range(edges.shape[0]):
        edges[edge, 2] = packed[edges[edge, 1], 2]
    used = 0
    for state in range(packed.shape[0] - 1):
        first, end = packed[state, 3], packed[state + 1, 3]
        packed[state, 4] = -1
        if end - first <= MAX_TOP:
            continue
        packed[state, 4] = used
        num = 0
        for edge in range(first, end):
            count = edges[edge, 2]
            place = num
            while place > 0 and tops[used + place - 1, 1] < count:
                if place < MAX_TOP:
                    tops[used + place, 0] = tops[used + place - 1, 0]
                    tops[used + place, 1] = tops[used + place - 1, 1]
                place -= 1
            if place < MAX_TOP:
                tops[used + place, 0] = edges[edge, 0]
                tops[used + place, 1] = count
                num = min(num + 1, MAX_TOP)
        used += MAX_TOP
    return used


class Automaton(NamedTuple):
    """Frozen. states: int32 [num_states + 1, 5]: suffix link (-1 for the root), length of the
    longest context, occurrences, first edge (the next row's ends them), index in tops or -1.
    edges: int32 [num_edges, 3]: token, target and the target's occurrences, by token inside a
    state. tops: int32 [n, 2]: tokens and occurrences of the MAX_TOP commonest edges of each state
    that has more. Occurrences are repeated there so that a proposal reads them from one place."""

    states: Int32
    edges: Int32
    tops: Int32

    @property
    def num_states(self) -> int:
        return max(int(self.states.shape[0]) - 1, 0)

    @staticmethod
    def empty() -> Automaton:
        """An automaton without outputs; grow_tree skips it."""
        return Automaton(
            np.empty((0, 5), np.int32), np.empty((0, 3), np.int32), np.empty((0, 2), np.int32)
        )


def build_automaton(token_ids: Int32, document_starts: Int64) -> Automaton:
    """The automaton of the documents: token_ids int32 [tokens] in a row, document_starts
    int64 [documents] ascending, the first 0. About 2 us and 100 bytes a token while building.

    Raises ValueError for more than 2^29 tokens or ids below 0.
    """
    ids = np.ascontiguousarray(token_ids, np.int32)
    starts = np.ascontiguousarray(document_starts, np.int64)
    total = ids.shape[0] + starts.shape[0]
    if total > MAX_TOKENS:
        raise ValueError(f"{total} tokens are too many for one automaton")
    if ids.shape[0] and int(ids.min()) < 0:
        raise ValueError("token ids must not be negative")
    if starts.shape[0] == 0:
        return Automaton.empty()
    states = np.empty((3, 2 * total + 2), np.int32)
    heads = np.empty(2 * total + 2, np.int32)
    edges = np.empty((4, 3 * total + 4), np.int32)
    slots = 1024
    while slots < 6 * total:
        slots *= 2
    table = np.full(slots, -1, np.int32)
    num_states, num_edges = _build(ids, starts, states, heads, edges, table)
    del table, heads
    edges = edges[:, :num_edges]
    _propagate(states, np.argsort(states[1, :num_states], kind="stable"))
    states = states[:, :num_states]
    key = (edges[1].astype(np.int64) << 32) + edges[0] - START
    order = np.argsort(key)
    packed_edges = np.empty((num_edges, 3), np.int32)
    packed_edges[:, :2] = edges[::2, order].T
    degrees = np.bincount(edges[1], minlength=num_states)
    packed = np.zeros((num_states + 1, 5), np.int32)
    packed[:num_states, :3] = states.T
    packed[1:, 3] = np.cumsum(degrees)
    tops = np.zeros((int((degrees > MAX_TOP).sum()) * MAX_TOP, 2), np.int32)
    _commonest(packed, packed_edges, tops)
    return Automaton(packed, packed_edges, tops)
