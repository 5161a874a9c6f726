"""Copying by text: the prompt's characters, a place in them, and what comes there.

A word has other ids behind a tag or a quote than behind a blank, and a corrected word other ids
than the wrong one, so ids do not find a copy that goes on behind them. Here texts are compared by
their letters and digits alone, in lower case: their *skeleton*. A place in the prompt is found by
the last four or more characters of the skeleton, and a Cursor follows the output through the prompt
from there: behind a tag it waits where it was left, behind an edit it goes on with the next word.
What is proposed is the prompt's own token where one begins, else the longest token that the
characters begin with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drafters.arrays import Float32x2, Int32, Int64, UInt8
from drafters.auto.likely import longer_key
from drafters.jit import compiled, entry, inlined

LONGEST_PIECE = 24  # bytes of a token that is proposed
TAIL = 7  # characters of the skeleton that a cursor remembers
LEAST_TAIL = 4  # so many find a place
JUMP_TAIL = 6  # so many move a cursor that has lost the text
MAX_PLACES = 8  # places of an equal tail that are looked at, the last in the prompt first
AHEAD = 48  # characters behind a cursor in which a left text is found again
MAX_OFF = 40  # tokens after which a cursor that was left is of no use
NUM_ENTERED = 512
ENTERED_MEMORY = 48.0


class Cursor(NamedTuple):
    """Where a text stands in the prompt. tail: the last TAIL characters of the skeleton of prompt
    and output, a byte each. place: the prompt's character that is next, or -1. off: tokens since
    the text left it; words: how many of those began a word. run: tokens that followed it before.
    """

    tail: int
    place: int
    off: int
    words: int
    run: int


class CopyView(NamedTuple):
    """What Pieces.index gives, as compiled code names them: chars uint8 [n], tokens and earlier
    int32 [n], heads int32 [2^k]; ids int32 [2^j], offsets int64 [V + 1], blob uint8; entered
    float32 [2, NUM_ENTERED]."""

    chars: UInt8
    tokens: Int32
    earlier: Int32
    heads: Int32
    ids: Int32
    offsets: Int64
    blob: UInt8
    entered: Float32x2


NOWHERE = Cursor(0, -1, 0, 0, 0)


@compiled
def bone(byte: int) -> int:
    """What a byte is in a skeleton; 0 for one that is left out."""
    if 65 <= byte <= 90:
        return byte + 32
    if 97 <= byte <= 122 or 48 <= byte <= 57 or byte >= 128:
        return byte
    return 0


@compiled
def _slot(
    ids: Int32, offsets: Int64, blob: UInt8, key: int, text: UInt8, first: int, end: int
) -> int:
    """The slot of the id whose bytes are text[first:end], which `key` is of, or the free one."""
    mask = ids.shape[0] - 1
    slot = (key >> 8) & mask
    while ids[slot] >= 0:
        start, i = offsets[ids[slot]], 0
        if offsets[ids[slot] + 1] - start == end - first:
            while i < end - first and blob[start + i] == text[first + i]:
                i += 1
            if i == end - first:
                break
        slot = (slot + 1) & mask
    return int(slot)


@compiled
def _head(heads: Int32, tail: int) -> int:
    """The list of a tail's last four characters."""
    mixed = np.uint64(tail & 0xFFFFFFFF) * np.uint64(0x9E3779B97F4A7C15)
    return int(np.int64((mixed >> np.uint64(32)) & np.uint64(heads.shape[0] - 1)))


@compiled
def _pushed(tail: int, char: int) -> int:
    return ((tail & 0xFFFFFFFFFFFF) << 8) | char


@entry
@compiled
def _index_pieces(offsets: Int64, blob: UInt8, ids: Int32) -> None:
    for token in range(offsets.shape[0] - 1):
        first, end = offsets[token], offsets[token + 1]
        if 0 < end - first <= LONGEST_PIECE:
            key = 0
            for i in range(first, end):
                key = longer_key(key, int(blob[i]))
            slot = _slot(ids, offsets, blob, key, blob, first, end)
            if ids[slot] < 0:
                ids[slot] = token


@entry
@compiled
def _index_chars(
    prompt: Int32,
    offsets: Int64,
    blob: UInt8,
    chars: UInt8,
    tokens: Int32,
    earlier: Int32,
    heads: Int32,
) -> int:
    """Write the prompt's characters; returns the tail behind them."""
    at, tail = 0, 0
    for token in prompt:
        if not 0 <= token < offsets.shape[0] - 1:
            continue
        first = at
        for i in range(offsets[token], offsets[token + 1]):
            chars[at], tokens[at], earlier[at] = blob[i], -1, -1
            char = bone(int(blob[i]))
            if char:
                tail = _pushed(tail, char)
                if tail >= 1 << 24:
                    head = _head(heads, tail)
                    earlier[at], heads[head] = heads[head], at
            at += 1
        if at > first:
            tokens[first] = token
    return tail


class Pieces:
    """The bytes of a vocabulary's ids, and the ids by their bytes. Immutable; of a model.

    offsets: int64 [V + 1], blob: uint8: the bytes of id i are blob[offsets[i] : offsets[i + 1]].
    """

    def __init__(self, offsets: Int64, blob: UInt8) -> None:
        slots = 1024
        while 2 * slots < 3 * offsets.shape[0]:
            slots *= 2
        # Not the mapped file's own types: compiled code takes plain arrays.
        self.offsets = np.asarray(offsets, np.int64)
        self.blob = np.asarray(blob, np.uint8)
        self.ids: Int32 = np.full(slots, -1, np.int32)
        _index_pieces(self.offsets, self.blob, self.ids)

    def index(self, prompt: Int32, entered: Float32x2) -> tuple[CopyView, Cursor]:
        """(the characters of a prompt, the cursor behind it). entered: float32 [2, NUM_ENTERED],
        how often a text that had left the prompt might go on behind a token, and did."""
        known = prompt[(prompt >= 0) & (prompt < self.offsets.shape[0] - 1)]
        num = int((self.offsets[known + 1] - self.offsets[known]).sum())
        slots = 256
        while slots < num:
            slots *= 2
        chars, heads = np.empty(num, np.uint8), np.full(slots, -1, np.int32)
        tokens, earlier = np.empty(num, np.int32), np.empty(num, np.int32)
        tail = _index_chars(prompt, self.offsets, self.blob, chars, tokens, earlier, heads)
        view = CopyView(
            chars, tokens, earlier, heads, self.ids, self.offsets, self.blob, entered
        )  # fmt: skip
        return view, Cursor(tail, -1, 0, 0, 0)


def no_entries() -> Float32x2:
    """For Pieces.index, where nothing was learned."""
    return np.zeros((2, NUM_ENTERED), np.float32)


NO_COPY = CopyView(
    np.empty(0, np.uint8),
    *(np.empty(0, np.int32),) * 4,
    np.empty(0, np.int64),
    np.empty(0, np.uint8),
    np.empty((2, 0), np.float32),
)


@inlined
def last_byte(view: CopyView, token: int) -> int:
    """The last byte of a token; 0 where it has none."""
    if not 0 <= token < view.offsets.shape[0] - 1:
        return 0
    end = view.offsets[token + 1]
    return int(view.blob[end - 1]) if end > view.offsets[token] else 0


@inlined
def boundary(view: CopyView, cursor: Cursor) -> int:
    """What a copy would go on with: 0 where none goes on, 1 a letter or digit, 2 a blank before
    one, 3 another blank or the end, 4 something else."""
    place, size = cursor.place, view.chars.shape[0]
    if place < 0 or cursor.off > 0:
        return 0
    if place >= size or view.chars[place] == 10:
        return 3
    byte = int(view.chars[place])
    if bone(byte) != 0:
        return 1
    if byte == 32:
        return 2 if place + 1 < size and bone(int(view.chars[place + 1])) != 0 else 3
    return 4


@inlined
def _behind(view: CopyView, token: int, place: int) -> int:
    """The place behind a token that has a skeleton, if that stands at `place`; else -1."""
    size = view.chars.shape[0]
    for i in range(view.offsets[token], view.offsets[token + 1]):
        char = bone(int(view.blob[i]))
        if char == 0:
            continue
        while place < size and bone(int(view.chars[place])) == 0:
            place += 1
        if place >= size or bone(int(view.chars[place])) != char:
            return -1
        place += 1
    return place


@inlined
def skip_words(view: CopyView, place: int, words: int) -> int:
    """The end of the word that begins before `place`, then of so many more words."""
    size = view.chars.shape[0]
    inside = 0 < place < size and bone(int(view.chars[place - 1])) != 0
    if inside:
        while place < size and bone(int(view.chars[place])) != 0:
            place += 1
    for _ in range(words):
        while place < size and bone(int(view.chars[place])) == 0:
            place += 1
        while place < size and bone(int(view.chars[place])) != 0:
            place += 1
    return place


@inlined
def same_tail(view: CopyView, place: int, tail: int) -> int:
    """How many of a tail's characters, the last first, end at `place`; TAIL at most."""
    num = 0
    while place >= 0 and num < TAIL:
        char = bone(int(view.chars[place]))
        if char:
            if char != tail & 255:
                break
            tail >>= 8
            num += 1
        place -= 1
    return num


@inlined
def first_place(view: CopyView, tail: int) -> int:
    """The last character of the prompt that may end in a tail; view.earlier has those before it."""
    return int(view.heads[_head(view.heads, tail)])


@inlined
def entered_class(view: CopyView, token: int) -> int:
    """Whether a copy goes on behind a token: 0 seldom, 1 not known, 2 often."""
    slot = token & (NUM_ENTERED - 1)
    asked, entered = view.entered[0, slot], view.entered[1, slot]
    if asked < 2.0:
        return 1
    return 2 if entered > 0.25 * asked else 0


@inlined
def learn_entry(view: CopyView, before: int, was: Cursor, now: Cursor) -> None:
    """Note whether a text that had left the prompt went on in it behind the token `before`."""
    if was.place >= 0 and 0 < was.off <= MAX_OFF:
        slot = before & (NUM_ENTERED - 1)
        if view.entered[0, slot] > ENTERED_MEMORY:
            view.entered[0, slot] *= np.float32(0.5)
            view.entered[1, slot] *= np.float32(0.5)
        view.entered[0, slot] += np.float32(1.0)
        if now.off == 0 and now.place > was.place:
            view.entered[1, slot] += np.float32(1.0)


@inlined
def _found(view: CopyView, tail: int) -> int:
    """The place behind the longest tail of at least JUMP_TAIL characters, the last in the prompt;
    -1 for none."""
    place = first_place(view, tail)
    best, longest = -1, JUMP_TAIL - 1
    for _ in range(MAX_PLACES):
        if place < 0:
            break
        num = same_tail(view, place, tail)
        if num > longest:
            best, longest = place + 1, num
        place = int(view.earlier[place])
    return best


@inlined
def follow(view: CopyView, cursor: Cursor, token: int) -> Cursor:
    """The cursor behind one more token."""
    if not 0 <= token < view.offsets.shape[0] - 1:
        return Cursor(cursor.tail, cursor.place, cursor.off + 1, cursor.words, 0)
    first, end = view.offsets[token], view.offsets[token + 1]
    tail, bones = cursor.tail, 0
    for i in range(first, end):
        char = bone(int(view.blob[i]))
        if char:
            tail = _pushed(tail, char)
            bones += 1
    place, off, words = cursor.place, cursor.off, cursor.words
    size = view.chars.shape[0]
    if bones == 0:
        # Blanks and punctuation: they are followed, or stand between.
        if place >= 0 and off == 0:
            at = place
            for i in range(first, end):
                if at >= size or view.chars[at] != view.blob[i]:
                    return Cursor(tail, place, 1, 0, 0)
                at += 1
            return Cursor(tail, at, 0, 0, cursor.run + 1)
        return Cursor(tail, place, off + 1, words, 0)
    if place >= 0 and off <= MAX_OFF:
        at = _behind(view, token, place)
        if at >= 0:
            return Cursor(tail, at, 0, 0, cursor.run + 1)
        if off > 0:
            at = _behind(view, token, skip_words(view, place, words))
            if at >= 0:
                return Cursor(tail, at, 0, 0, 1)
        if bones >= 3:
            for i in range(place + 1, min(place + AHEAD, size)):
                if bone(int(view.chars[i - 1])) == 0 and bone(int(view.chars[i])) != 0:
                    at = _behind(view, token, i)
                    if at >= 0:
                        return Cursor(tail, at, 0, 0, 1)
    at = _found(view, tail)
    if at >= 0:
        return Cursor(tail, at, 0, 0, 1)
    words += 1 if off == 0 or bone(int(view.blob[first])) == 0 else 0
    if off == 0 and bone(int(view.blob[first])) != 0 and cursor.run > 0:
        words = 0  # the rest of a word that began alike
    return Cursor(tail, place, off + 1, words, 0)


@inlined
def piece_at(view: CopyView, place: int) -> int:
    """The token that the prompt's characters begin with at `place`; -1 for none."""
    size = view.chars.shape[0]
    if place >= size:
        return -1
    if view.tokens[place] >= 0:
        return int(view.tokens[place])
    found, key, inside = -1, 0, False
    for i in range(place, min(place + LONGEST_PIECE, size)):
        byte = int(view.chars[i])
        is_bone = bone(byte) != 0
        if inside and not is_bone:
            break
        inside = inside or is_bone
        key = longer_key(key, byte)
        slot = _slot(view.ids, view.offsets, view.blob, key, view.chars, place, i + 1)
        if view.ids[slot] >= 0:
            found = int(view.ids[slot])
    return found


@inlined
def resume_at(view: CopyView, place: int, last: int, bare: bool) -> int:
    """The token with which a text whose last byte is `last` goes on at a word of the prompt.

    bare: without the punctuation before the word. Behind a tag, a quote or a blank no blank is
    written; behind a word or a comma the prompt's own, or one that it lacks.
    """
    size = view.chars.shape[0]
    opens = bone(last) == 0 and last not in (44, 46, 58, 59, 41, 93, 125, 33, 63)
    while place < size:
        byte = int(view.chars[place])
        if (bare and bone(byte) != 0) or (not bare and byte > 32):
            break
        place += 1
    if place >= size:
        return -1
    if opens:
        return piece_at(view, place)
    if place > 0 and view.chars[place - 1] == 32:
        return piece_at(view, place - 1)
    return piece_at(view, place)
