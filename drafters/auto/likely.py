"""The model's own logits as a source: what it held likely after the same few tokens before.

Every verified row, that of a rejected node too, comes with the ids that were likeliest there. They
are kept by the last one, two and three tokens before them, as sums of chances. Token Recycling
(Luo et al., arXiv 2408.08696) keeps only the last row of each token; STAND (arXiv 2506.04708)
averages by n-gram, as this module does. LogitSpec (arXiv 2507.01449): what the last row held
likely and did not draw may come one token later; a session keeps that itself.

The table is a hash table in which a context lies within WAYS slots of its hash. It grows up to a
bound. From then on the context seen least is overwritten, and the others that a new context finds
in its way fade.
"""

from __future__ import annotations

import numpy as np

from drafters.arrays import Float32, Float32x2, Int32, Int32x2, Int64
from drafters.auto.cells import MAX_LIKELY_MATCH
from drafters.jit import borrowing, compiled, entry, inlined

NUM_LIKELY = 8
"""Ids kept of a row."""

WAYS = 8
FIRST_SLOTS = 1 << 9
MAX_SLOTS = 1 << 15  # 2.5 MB
DECAY = 0.9  # of a context's sums at each visit: about ten rows are remembered
FADE = 0.9  # of the contexts that another one finds in its way
EMPTY = 0

TableFields = tuple[Int64, Int32x2, Float32x2]
"""keys, ids and sums of a LikelyTable."""


@compiled
def longer_key(key: int, token: int) -> int:
    """The key, above 0, of what has one more token, or byte, than that of `key`; 0: of nothing."""
    h = (np.uint64(key) ^ np.uint64(token + 7)) * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(29)
    return int(np.int64((h >> np.uint64(2)) | np.uint64(1)))


@compiled
def find_context(keys: Int64, key: int) -> int:
    """The slot of a key, -1 where it is not kept."""
    mask = keys.shape[0] - 1
    home = (key >> 8) & mask
    for i in range(WAYS):
        if keys[(home + i) & mask] == key:
            return int((home + i) & mask)
    return -1


@inlined
def _slot_for(keys: Int64, sums: Float32, key: int) -> int:
    """The slot of a key: its own, an empty one, or that of the context seen least."""
    mask = keys.shape[0] - 1
    home = (key >> 8) & mask
    total = sums.shape[1] - 1
    best = home
    for i in range(WAYS):
        slot = (home + i) & mask
        if keys[slot] == key:
            return int(slot)
        if keys[slot] == EMPTY:
            best = slot
            break
        if sums[slot, total] < sums[best, total]:
            best = slot
    if keys[best] != EMPTY:
        for i in range(WAYS):
            for j in range(total + 1):
                sums[(home + i) & mask, j] *= np.float32(FADE)
    keys[best] = key
    for j in range(total + 1):
        sums[best, j] = 0.0
    return int(best)


@inlined
def _add(kept: Int32, sums: Float32, slot: int, ids: Int32, chances: Float32, row: int) -> None:
    """Add a row to a context's sums. kept: int32 [., K], sums: float32 [., K + 1], the last for
    all."""
    num = kept.shape[1]
    wide = min(num, ids.shape[1])
    if sums[slot, num] == 0.0:  # a new context, as most are
        for j in range(wide):
            if chances[row, j] <= 0.0:
                break
            kept[slot, j] = ids[row, j]
            sums[slot, j] = chances[row, j]
        sums[slot, num] = np.float32(1.0)
        return
    for i in range(num + 1):
        sums[slot, i] *= np.float32(DECAY)
    sums[slot, num] += np.float32(1.0)
    for j in range(wide):
        chance = chances[row, j]
        if chance <= 0.0:
            break
        place = -1
        least = 0
        for i in range(num):
            if kept[slot, i] == ids[row, j] and sums[slot, i] > 0.0:
                place = i
                break
            if sums[slot, i] < sums[slot, least]:
                least = i
        if place >= 0:
            sums[slot, place] += chance
        elif chance > sums[slot, least]:
            kept[slot, least] = ids[row, j]
            sums[slot, least] = chance


@entry
@borrowing
def _grow(keys: Int64, ids: Int32x2, sums: Float32x2, to: TableFields) -> None:
    """Move all contexts into a larger, empty table."""
    for slot in range(keys.shape[0]):
        if keys[slot] != EMPTY:
            at = _slot_for(to[0], to[2], keys[slot])
            for j in range(ids.shape[1]):
                to[1][at, j] = ids[slot, j]
            for j in range(sums.shape[1]):
                to[2][at, j] = sums[slot, j]


RowsFields = tuple[Int32x2, Int32x2, Float32x2]
"""What a step's rows held likely. nodes: int32 [2, N], token and parent of the nodes that were
verified. ids: int32 [1 + N, K], chances: float32 [1 + N, K], the root's first; none where nothing
was told."""

NO_ROWS: RowsFields = (
    np.empty((2, 0), np.int32),
    np.empty((0, 0), np.int32),
    np.empty((0, 0), np.float32),
)


@inlined
def note_rows(
    table: tuple[Int64, Int32, Float32], text: Int32, root: int, told: RowsFields, path: Int32
) -> None:
    """Add the rows of a tree behind text[0, :root], of which the last three count. path: int32
    [MAX_LIKELY_MATCH or more], scratch."""
    keys, kept, sums = table
    nodes, ids, chances = told
    for row in range(ids.shape[0]):
        if chances[row, 0] <= 0.0:
            continue
        size = 0
        node = row - 1
        while node >= 0 and size < MAX_LIKELY_MATCH:
            path[size] = nodes[0, node]
            node = nodes[1, node]
            size += 1
        for i in range(min(root, MAX_LIKELY_MATCH - size)):
            path[size] = text[0, root - 1 - i]
            size += 1
        key = 0
        for i in range(size):
            key = longer_key(key, path[i])
            _add(kept, sums, _slot_for(keys, sums, key), ids, chances, row)


@inlined
def write_echo(told: RowsFields, tokens: Int32, echo_ids: Int32, echo_chances: Float32) -> int:
    """Write what the row that drew the last of `tokens`, which the step emitted, held likely beside
    it; returns how many.

    None where that row is not known. echo_ids, echo_chances: [K].
    """
    nodes, ids, chances = told
    if ids.shape[0] == 0 or tokens.shape[0] == 0:
        return 0
    row = 0
    for i in range(tokens.shape[0] - 1):
        found = -1
        for node in range(nodes.shape[1]):
            if nodes[1, node] == row - 1 and nodes[0, node] == tokens[i]:
                found = node
                break
        if found < 0:
            return 0
        row = found + 1
    num = 0
    for j in range(min(ids.shape[1], echo_ids.shape[0])):
        if chances[row, j] > 0.0 and ids[row, j] != tokens[-1]:
            echo_ids[num], echo_chances[num] = ids[row, j], chances[row, j]
            num += 1
    return num


class LikelyTable:
    """What the model held likely, by context. One writer: the sessions of one scope's drafter.

    arrays: keys, ids and sums, as compiled code takes them. keys: int64 [slots], 0 = empty. ids:
    int32 [slots, NUM_LIKELY]. sums: float32 [slots, NUM_LIKELY + 1]: the sum of each id's chances,
    and how many rows there were, both decayed.
    """

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        """max_slots: a power of two."""
        self._max_slots = max_slots
        self.keys, self.ids, self.sums = self.arrays = _empty(min(FIRST_SLOTS, max_slots))
        self._most_held = 0  # contexts, at most

    def make_room(self, num_rows: int) -> None:
        """Grow, if need be, before so many rows are noted."""
        num_slots = self.keys.shape[0]
        if num_slots < self._max_slots and 2 * self._most_held > num_slots:
            self._most_held = int(np.count_nonzero(self.keys))
            if 2 * self._most_held > num_slots:
                larger = _empty(min(4 * num_slots, self._max_slots))
                _grow(*self.arrays, larger)
                self.keys, self.ids, self.sums = self.arrays = larger
        self._most_held += MAX_LIKELY_MATCH * num_rows


def _empty(num_slots: int) -> tuple[Int64, Int32, Float32]:
    return (
        np.zeros(num_slots, np.int64),
        np.zeros((num_slots, NUM_LIKELY), np.int32),
        np.zeros((num_slots, NUM_LIKELY + 1), np.float32),
    )
