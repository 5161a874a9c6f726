"""TextIndex: every earlier occurrence of the last tokens of a text, appended to and cut back.

For each position the index keeps the position before it that ends in the same token, and the one
that ends in the same three tokens. Walking these chains from the newest occurrence and comparing
backwards gives *all* match lengths at once; appending costs two hash look-ups, and cutting back
is popping, so a rollback leaves exactly the index that a fresh session would have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafters.arrays import Float32, Int32, Int32x2, Int64, Int64x2
from drafters.auto.views import TextView
from drafters.jit import compiled, entry, inlined

EMPTY_KEY = -(1 << 62)


@compiled
def find_slot(table: Int64, key: int) -> int:
    """The slot of `key` in an open-addressing table int64 [2, 2^k], or the free one for it."""
    mask = table.shape[1] - 1
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    slot = int(np.int64((mixed >> np.uint64(20)) & np.uint64(mask)))
    while table[0, slot] != key and table[0, slot] != EMPTY_KEY:
        slot = (slot + 1) & mask
    return slot


@entry
@compiled
def find_child(nodes: Int32x2, table: Int32, parent: int, token: int) -> int:
    """The slot of a parent's child by `token` in an open-addressing table int32 [2^k] of columns of
    `nodes`, whose rows begin with token and parent, or the free one (below 0) for it."""
    mask = table.shape[0] - 1
    mixed = (np.uint64(parent) << np.uint64(32)) ^ np.uint64(np.uint32(token))
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15)
    slot = int(np.int64((mixed >> np.uint64(20)) & np.uint64(mask)))
    while table[slot] >= 0:
        child = table[slot]
        if nodes[1, child] == parent and nodes[0, child] == token:
            break
        slot = (slot + 1) & mask
    return slot


@compiled
def triple_key(a: int, b: int, c: int) -> int:
    """A key for three token ids (c the last), apart from every single id's own key."""
    h = np.uint64(a + 7)
    h = (h * np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(b + 7)
    h = (h * np.uint64(0xC2B2AE3D27D4EB4F)) ^ np.uint64(c + 7)
    h = h * np.uint64(0x165667B19E3779F9)
    return int(np.int64((h >> np.uint64(2)) | np.uint64(1 << 61)))


@inlined
def append_id(text: Int32, table: Int64, size: int, token: int) -> None:
    """Index `token` behind the `size` tokens there are."""
    slot = find_slot(table, int(token))
    text[0, size] = token
    text[1, size] = table[1, slot]
    table[0, slot] = token
    table[1, slot] = size
    text[2, size] = -1
    if size >= 2:
        key = triple_key(text[0, size - 2], text[0, size - 1], token)
        slot = find_slot(table, key)
        text[2, size] = table[1, slot]
        table[0, slot] = key
        table[1, slot] = size


@entry
@compiled
def append_ids(text: Int32x2, table: Int64x2, size: int, ids: Int32) -> int:
    """Index `ids` behind the `size` tokens there are; returns the new size."""
    for token in ids:
        append_id(text, table, size, token)
        size += 1
    return size


@entry
@compiled
def truncate_ids(text: Int32x2, table: Int64x2, size: int, new_size: int) -> None:
    """Undo append_ids down to `new_size` tokens."""
    for i in range(size - 1, new_size - 1, -1):
        if i >= 2:
            key = triple_key(text[0, i - 2], text[0, i - 1], text[0, i])
            table[1, find_slot(table, key)] = text[2, i]
        table[1, find_slot(table, int(text[0, i]))] = text[1, i]


def empty_table(num_tokens: int) -> Int64:
    """A table for find_slot: int64 [2, 4 num_tokens], where num_tokens is a power of two."""
    # Two keys a token at most; half full at most.
    table = np.full((2, 4 * num_tokens), -1, np.int64)
    table[0] = EMPTY_KEY
    return table


class TextIndex:
    """A growing text and the chains over it. One writer; not for several threads.

    text: int32 [3, capacity]: token, previous position of the same token, previous position of
    the same three tokens (-1 = none). table: int64 [2, 4 * capacity]: keys and their newest
    position. Only the first `size` columns of text mean anything. Ids are >= 0, or START. room:
    how many more tokens fit.
    """

    def __init__(self, num_expected: int = 256) -> None:
        capacity = 256
        while capacity < num_expected:
            capacity *= 2
        self.text: Int32 = np.empty((3, capacity), np.int32)
        self.table: Int64 = empty_table(capacity)
        self.size = 0
        # Keys outlive a truncation: tokens indexed since the table was made fill it, not `size`.
        self.room = capacity

    def view(self, marks: Float32) -> TextView:
        """Its text with marks, as compiled code takes it; a plain tuple."""
        return self.text, self.table, marks, self.size  # type: ignore[return-value]

    def append(self, token_ids: Sequence[int] | Int32) -> None:
        """Add tokens at the end: O(1) each, amortised."""
        ids = np.asarray(token_ids, np.int32)
        self.make_room(ids.shape[0])
        self.size = append_ids(self.text, self.table, self.size, ids)
        self.room -= ids.shape[0]

    def make_room(self, num: int) -> None:
        """Make `text` and `table` large enough for `num` more tokens. Whoever indexes them in
        compiled code adds them to `size` and takes them off `room`."""
        if num > self.room:
            capacity, need = self.text.shape[1], self.size + num
            # A longer text, or many rollbacks; half of the room is free afterwards, so that
            # this stays O(1) a token.
            while capacity < 2 * need:
                capacity *= 2
            old = self.text[0, : self.size].copy()
            self.text = np.empty((3, capacity), np.int32)
            self.table = empty_table(capacity)
            append_ids(self.text, self.table, 0, old)
            self.room = capacity - self.size

    def truncate(self, new_size: int) -> None:
        """Cut the text back to its first `new_size` tokens."""
        if not 0 <= new_size <= self.size:
            raise ValueError(f"cannot cut a text of {self.size} tokens back to {new_size}")
        truncate_ids(self.text, self.table, self.size, new_size)
        self.size = new_size
