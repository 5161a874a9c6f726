"""Templates: what a task's outputs share, with the parts that differ between them left open.

Behind a name or a number that no other output holds, no other output says how the text goes on: the
last tokens occurred nowhere. So the outputs beside a request are read a second time as *forms*: a
token that several of them hold is itself, a run of others is one SPAN. The same is made of the
text before a node, and what followed that form in the others is proposed: how a field ends, and
which one comes next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafters.arrays import Float32, Int32, Int64, Int64x2, UInt8
from drafters.auto.cells import TEMPLATE
from drafters.auto.copying import NO_COPY, CopyView, Pieces
from drafters.auto.text_index import TextIndex, empty_table, find_slot
from drafters.auto.views import TextView
from drafters.corpus_file import START
from drafters.jit import compiled, entry

SPAN = -3  # no token's id, nor START
MAX_FORM = 16  # symbols of a form that are compared
LEAST_SHARE = 0.25  # of the outputs that hold a token of the template; two of them at least
_START = np.array([START], np.int32)


@compiled
def is_numeral(offsets: Int64, blob: UInt8, token: int) -> bool:
    """Whether a token has a digit. Outputs share digits and not numbers."""
    if not 0 <= token < offsets.shape[0] - 1:
        return False
    found = False
    for i in range(offsets[token], offsets[token + 1]):
        found = found or 48 <= blob[i] <= 57
    return found


@entry
@compiled
def write_forms(
    ids: Int32, least: int, offsets: Int64, blob: UInt8, table: Int64x2, forms: Int32, at: Int32
) -> int:
    """Write the forms of outputs that begin with START each, and where in ids each symbol stands;
    returns their number. least: outputs that hold a token of the template. table: int64 [2, 2^k],
    empty, with room for the ids."""
    output = 0
    for token in ids:
        output += token == START
        slot = find_slot(table, int(token))
        if table[0, slot] != token:
            table[0, slot], table[1, slot] = token, 0
        if table[1, slot] & 0xFFFF != output:
            table[1, slot] = ((table[1, slot] >> 16) + 1) << 16 | output
    num = 0
    for i in range(ids.shape[0]):
        token = ids[i]
        many = table[1, find_slot(table, int(token))] >> 16 >= least
        if not many or is_numeral(offsets, blob, token):
            if forms[num - 1] == SPAN:
                continue
            token = SPAN
        forms[num], at[num] = token, i
        num += 1
    return num


@compiled
def write_form(path: Int32, size: int, table: Int64x2, form: Int32) -> tuple[int, int]:
    """Write the form of path[:size], newest first; returns its number of symbols, MAX_FORM at
    most, and how many of them stand behind its last SPAN: all where it has none. table: of the
    index of forms, which has every token of the template."""
    num, behind = 0, -1
    for i in range(size):
        token = path[i]
        if table[0, find_slot(table, int(token))] != token:
            if num > 0 and form[num - 1] == SPAN:
                continue
            token = np.int32(SPAN)
        if num == MAX_FORM:
            break
        if token == SPAN and behind < 0:
            behind = num
        form[num] = token
        num += 1
    return num, num if behind < 0 else behind


def in_a_row(
    outputs: Sequence[Int32], weights: Sequence[float], sources: Sequence[int]
) -> tuple[Int32, Float32]:
    """(the ids of outputs, each behind START, their marks as TextView has them)."""
    ids = np.concatenate([part for output in outputs for part in (_START, output)])
    sizes = [output.shape[0] + 1 for output in outputs]
    return ids, np.repeat(np.array([weights, sources], np.float32), sizes, axis=1)


def forms_of(outputs: Sequence[Int32], weights: Sequence[float], pieces: Pieces | None) -> TextView:
    """The index of the forms of outputs, each of which counts as its weight."""
    ids, marks = in_a_row(outputs, weights, [TEMPLATE] * len(outputs))
    index = TextIndex(ids.shape[0])
    forms, at = np.empty_like(ids), np.empty_like(ids)
    known: CopyView | Pieces = NO_COPY if pieces is None else pieces
    least = max(2, round(LEAST_SHARE * len(outputs)))
    num = write_forms(ids, least, known.offsets, known.blob, empty_table(index.room), forms, at)
    index.append(forms[:num])
    return index.view(np.ascontiguousarray(marks[:, at[:num]]))
