"""Blends the contexts' next-token shares into chances, and learns from emitted tokens.

The shares are blended from the shortest context to the longest: with q the shares at a level,
p = w q + (1 - w) p. This is deleted interpolation (Jelinek and Mercer 1980); w is the trust in
such a level, kept per cell of (source, match length, occurrences, agreement, whether the match
covers the whole output) and learned by expectation maximisation from the tokens that came
(`learn_token`). `advance` learns from emitted tokens, appends them, follows them in the corpus and
the prompt, and notes what the step's rows held likely: all in one compiled call, as a call from
Python takes longer than most of that.
"""

from __future__ import annotations

import numpy as np

from drafters.arrays import Float32, Float32x2, Float64, Float64x2, Int32, Int64x2, UInt8x2
from drafters.auto.automaton import automaton_step
from drafters.auto.cells import BASE_CHANCE, NUM_SITUATIONS, factor_cell
from drafters.auto.copying import Cursor, follow, learn_entry
from drafters.auto.gather import NUM, Gathered, gather
from drafters.auto.likely import RowsFields, note_rows, write_echo
from drafters.auto.prior import begin, go_on
from drafters.auto.text_index import append_id
from drafters.auto.views import (
    NO_CORPUS,
    NO_MARKS,
    NO_TEXT,
    Context,
    CorpusView,
    TextView,
)
from drafters.jit import borrowing, entry, inlined

LearnedFields = tuple[Float64, Float64x2, Float64x2]
"""weights, evidence and outcomes of a drafters.auto.trust.Trust."""


@inlined
def blend(weights: Float64, num_levels: int, found: Gathered) -> None:
    """Write found.chances from the longest context down: each level gets its trust's part of what
    the longer ones left."""
    num = found.state[NUM]
    chances = found.chances
    left = np.float32(1.0)
    for row in range(num):
        chances[row] = 0.0
    for i in range(num_levels):
        level = found.levels[i]
        w = np.float32(weights[found.cells[i]])
        scale = left * w / found.totals[level]
        for row in range(num):
            chances[row] += scale * found.counts[level, row]
        left *= np.float32(1.0) - w
        if left < 0.004:
            break
    for row in range(num):
        chances[row] += left * np.float32(BASE_CHANCE)


@inlined
def leader(row: int, num_levels: int, found: Gathered) -> int:
    """Index in found.levels of the longest context that proposes a candidate."""
    for i in range(num_levels):
        if found.counts[found.levels[i], row] > 0.0:
            return i
    return 0


@inlined
def is_end(token: int, ends: Int32) -> bool:
    """Whether the token is an EOS id."""
    found = False  # not any(): numba compiles no generators
    for k in range(ends.shape[0]):
        found = found or ends[k] == token
    return found


@inlined
def _share(row: int, level: int, found: Gathered) -> float:
    """Share of a level's occurrences that candidate `row` followed; 0 for -1."""
    if row < 0:
        return 0.0
    return float(found.counts[level, row] / found.totals[level])


@inlined
def _learn_trusts(
    row: int, num_levels: int, weights: Float64, asks: Float64, found: Gathered
) -> tuple[float, float]:
    """Add the expected asks and answers of every level, given that `row` came; returns its chance,
    and how many asks these are."""
    # Upward: the blend below each level; then downward: how likely the level was reached.
    below = found.below
    chance = BASE_CHANCE
    for i in range(num_levels - 1, -1, -1):
        below[i] = chance
        w = weights[found.cells[i]]
        chance = (1.0 - w) * chance + w * _share(row, found.levels[i], found)
    reach, asked = 1.0, 0.0
    for i in range(num_levels):
        cell = found.cells[i]
        w = weights[cell]
        here = w * _share(row, found.levels[i], found)
        answered = here / (here + (1.0 - w) * below[i])
        asked += reach
        asks[0, cell] += reach
        asks[1, cell] += reach * answered
        reach *= 1.0 - answered
        if reach < 1e-4:
            break
    return chance, asked


@inlined
def _learn_claims(
    row: int, num_levels: int, at_start: bool, ends: Int32, outcomes: Float64, found: Gathered
) -> None:
    """Compare what was claimed for every candidate with whether it came."""
    for i in range(found.state[NUM]):
        # Ends are never drafted, and would make their neighbours look right.
        claimed = found.chances[i]
        if claimed > 0.002 and not is_end(found.tokens[i], ends):
            first = leader(i, num_levels, found)
            situation = found.cells[first] % NUM_SITUATIONS
            cell = factor_cell(found.levels[first], situation, at_start, claimed)
            outcomes[0, cell] += claimed
            outcomes[2, cell] += 1.0
            if i == row:
                outcomes[1, cell] += 1.0


@inlined
def learn_token(
    token: int,
    context: Context,
    more: int,
    state: int,
    length: int,
    cursor: Cursor,
    followed: int,
    trust: LearnedFields,
    found: Gathered,
) -> tuple[float, float]:
    """One step of expectation maximisation for the trusts, *before* `token` is appended. more,
    state, length, cursor, followed: see gather; the prior's state is its first.

    Returns the chance that was given to `token`, and the asks that it added to the evidence.
    """
    weights, asks, outcomes = trust
    num_levels = gather(context, more, weights, state, length, cursor, 0, followed, 0, found)
    row = -1
    for i in range(found.state[NUM]):
        if found.tokens[i] == token:
            row = i
    told = _learn_trusts(row, num_levels, weights, asks, found)
    blend(weights, num_levels, found)
    at_start = context.num_output + more == 0
    _learn_claims(row, num_levels, at_start, context.ends, outcomes, found)
    return told


PlainFields = tuple[Float32x2, TextView, CorpusView]
"""What a context has without the corpus: marks of the own text, documents, corpus."""

NO_PLAIN: PlainFields = (NO_MARKS, NO_TEXT, NO_CORPUS)


@entry
@borrowing
def advance(
    tokens: Int32,
    context: Context,
    plain: PlainFields,
    learns: UInt8x2,
    trust: LearnedFields,
    without: LearnedFields,
    found: Gathered,
    chances: Float64x2,
    places: Int64x2,
    told: RowsFields,
    root: int,
    echo: tuple[Int32, Float32],
) -> tuple[float, float, int]:
    """Go on by `tokens`, one after the other. context: that before them; its text has room
    for as many more. Returns the asks that the evidence of `trust` and of `without` got, and how
    many ids `echo` holds.

    learns: uint8 [2, n], whether `trust` learns from each token, and whether `without`
    does, which is that of the same context with `plain` in place of what the corpus says. found:
    scratch. chances: float64 [2, n], filled with the two that were given to each token
    (0 where nobody learns). places: int64 [outputs, 7], of which the row of each number of output
    tokens is filled: state and length of the corpus behind the last of them, and the cursor. told:
    what the rows of the step held likely, or none; it is noted once all tokens were learned from,
    behind the first `root` ids of the text. echo: written, what may come one token later.
    """
    own, corpus, likely = context.own, context.corpus, context.likely
    state, length, cursor = corpus.state, corpus.length, context.cursor
    followed = begin(context.prior, own.text, own.size)
    asked, asked_without = 0.0, 0.0
    marks, docs, nothing = plain
    bare = Context(
        TextView(own.text, own.table, marks, own.size), context.num_output, docs, context.hints,
        nothing, context.ends, likely, context.copy, cursor, context.prior, NO_TEXT,
    )  # fmt: skip
    for i in range(tokens.shape[0]):
        token, size, num_output = tokens[i], own.size + i, context.num_output + i
        chances[0, i] = chances[1, i] = 0.0
        if learns[0, i]:
            learned = learn_token(token, context, i, state, length, cursor, followed, trust, found)
            chances[0, i] = learned[0]
            asked += learned[1]
        if learns[1, i]:
            learned = learn_token(token, bare, i, 0, 0, cursor, followed, without, found)
            chances[1, i] = learned[0]
            asked_without += learned[1]
        append_id(own.text, own.table, size, token)
        if corpus.states.shape[0] > 0:
            state, length = automaton_step(corpus.states, corpus.edges, state, length, token)
        if context.copy.chars.shape[0] > 0:
            after = follow(context.copy, cursor, token)
            if learns[0, i] and size > 0:
                learn_entry(context.copy, own.text[0, size - 1], cursor, after)
            cursor = after
        at = num_output + 1
        places[at, 0], places[at, 1] = state, length
        places[at, 2], places[at, 3], places[at, 4] = cursor.tail, cursor.place, cursor.off
        places[at, 5], places[at, 6] = cursor.words, cursor.run
        if followed >= 0:
            followed = go_on(context.prior, 0, token, 0, followed)
    note_rows((likely.keys, likely.ids, likely.sums), own.text, root, told, found.path)
    return asked, asked_without, write_echo(told, tokens, *echo)
