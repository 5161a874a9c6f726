"""What a proposal reads, as compiled code names it.

Compiled code takes any tuple of the same items for one of these. Where one is made for each step,
Python makes a plain tuple and says so: a NamedTuple takes eight times as long to make, and a
proposal takes 15 us.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drafters.arrays import Float32, Float32x2, Float64, Int32, Int32x2, Int64, Int64x2
from drafters.auto.copying import CopyView, Cursor
from drafters.auto.prior import PriorView

WEIGHT, SOURCE = 0, 1  # rows of TextView.marks


class Limits(NamedTuple):
    """How large a tree may grow. min_survival: of the path to a node. least: the same, of the node
    that would be the i-th, and the last of it of all further ones; the first node is free."""

    budget: int
    max_depth: int
    min_survival: float
    least: Float64


ANY_SURVIVAL: Float64 = np.zeros(1)
"""Limits.least where nodes have no price."""


class TextView(NamedTuple):
    """A drafters.auto.text_index.TextIndex and what its positions count for.

    text: int32 [3, capacity]: token, previous position of it, previous position of the last three.
    table: int64 [2, slots]. marks: float32 [2, positions]: weight and, for documents, source of
    each position; no columns where every position counts fully. size: tokens that are valid.
    """

    text: Int32x2
    table: Int64x2
    marks: Float32x2
    size: int


class CorpusView(NamedTuple):
    """A drafters.auto.automaton.Automaton and where the output stands in it.

    state, length: the state of the text so far and the length of its match.
    """

    states: Int32x2
    edges: Int32x2
    tops: Int32x2
    state: int
    length: int


class LikelyView(NamedTuple):
    """A drafters.auto.likely.LikelyTable, and the likeliest ids of the row that drew the last
    token.

    keys: int64 [slots]. ids: int32 [slots, K]. sums: float32 [slots, K + 1]. echo_ids: int32 [K]
    and echo_chances: float32 [K], or empty.
    """

    keys: Int64
    ids: Int32x2
    sums: Float32x2
    echo_ids: Int32
    echo_chances: Float32


class Context(NamedTuple):
    """All that the next token is guessed from.

    own: prompt and output. num_output: tokens of output at its end. docs: retrieved outputs and the
    prediction. hints: int32, positions in docs that may come next. ends: int32, EOS ids, which are
    never drafted. likely: the table of the model's own logits. copy, cursor: the prompt's
    characters, and where the text stands in them.
    prior: a head on the model's state. forms: those of the outputs in docs.
    """

    own: TextView
    num_output: int
    docs: TextView
    hints: Int32
    corpus: CorpusView
    ends: Int32
    likely: LikelyView
    copy: CopyView
    cursor: Cursor
    prior: PriorView
    forms: TextView


class Trusts(NamedTuple):
    """weights: float64 [NUM_CELLS]. factors: float64 [NUM_FACTORS]. See drafters.auto.trust."""

    weights: Float64
    factors: Float64


NO_MARKS = np.empty((2, 0), np.float32)
NO_HINTS = np.empty(0, np.int32)
NO_TEXT = TextView(np.empty((3, 0), np.int32), np.empty((2, 0), np.int64), NO_MARKS, 0)
NO_CORPUS = CorpusView(
    np.empty((0, 5), np.int32), np.empty((0, 3), np.int32), np.empty((0, 2), np.int32), 0, 0
)
NO_ECHO = np.empty(0, np.int32), np.empty(0, np.float32)
NO_LIKELY = LikelyView(
    np.empty(0, np.int64), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32), *NO_ECHO
)
