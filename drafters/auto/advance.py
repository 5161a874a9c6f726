"""Going on by emitted tokens: learning from them, appending them, following them in the corpus.

All of it is one compiled call: a call from Python takes longer than most of what it does.
"""

from __future__ import annotations

from drafters.arrays import Float32x2, Float64, Float64x2, Int32, Int64x2, UInt8x2
from drafters.auto.automaton import automaton_step
from drafters.auto.blend import learn_token
from drafters.auto.copying import follow, learn_entry
from drafters.auto.gather import Gathered, GatheredFields
from drafters.auto.text_index import append_id
from drafters.auto.views import (
    NO_CORPUS,
    NO_MARKS,
    NO_TEXT,
    Context,
    ContextFields,
    CorpusFields,
    CorpusView,
    TextFields,
    TextView,
    context_of,
)
from drafters.jit import borrowing, entry

LearnedFields = tuple[Float64, Float64x2, Float64x2]
"""weights, evidence and outcomes of a drafters.auto.trust.Trust."""

PlainFields = tuple[Float32x2, TextFields, CorpusFields]
"""What a context has without the corpus: marks of the own text, documents, corpus."""

NO_PLAIN: PlainFields = (NO_MARKS, NO_TEXT, NO_CORPUS)


@entry
@borrowing
def advance(
    tokens: Int32,
    fields: ContextFields,
    plain: PlainFields,
    learns: UInt8x2,
    trust: LearnedFields,
    without: LearnedFields,
    scratch: GatheredFields,
    chances: Float64x2,
    places: Int64x2,
) -> None:
    """Go on by `tokens`, one after the other. fields: the context before them; its text has room
    for as many more.

    learns: uint8 [2, n or more], whether `trust` learns from each token, and whether `without`
    does, which is that of the same context with `plain` in place of what the corpus says. scratch:
    a Gathered's. chances: float64 [2, n or more], filled with the two that were given to each token
    (0 where nobody learns). places: int64 [7, n or more], filled with state and length of the
    corpus behind each, and with the cursor.
    """
    context, found = context_of(fields), Gathered(*scratch)
    own, corpus = context.own, context.corpus
    state, length, cursor = corpus.state, corpus.length, context.cursor
    for i in range(tokens.shape[0]):
        token, size, num_output = tokens[i], own.size + i, context.num_output + i
        chances[0, i] = chances[1, i] = 0.0
        if learns[0, i]:
            weights, asks, outcomes = trust
            here = Context(
                TextView(own.text, own.table, own.marks, size),
                num_output,
                context.docs,
                context.hints,
                CorpusView(corpus.states, corpus.edges, corpus.tops, state, length),
                context.ends,
                context.likely,
                context.copy,
                cursor,
            )
            chances[0, i] = learn_token(token, here, weights, (asks, outcomes), found)
        if learns[1, i]:
            weights, asks, outcomes = without
            marks, docs, nothing = plain
            bare = Context(
                TextView(own.text, own.table, marks, size),
                num_output,
                TextView(*docs),
                context.hints,
                CorpusView(*nothing),
                context.ends,
                context.likely,
                context.copy,
                cursor,
            )
            chances[1, i] = learn_token(token, bare, weights, (asks, outcomes), found)
        append_id(own.text, own.table, size, token)
        if corpus.states.shape[0] > 0:
            state, length = automaton_step(corpus.states, corpus.edges, state, length, token)
        if context.copy.chars.shape[0] > 0:
            after = follow(context.copy, cursor, token)
            if learns[0, i] and size > 0:
                learn_entry(context.copy, own.text[0, size - 1], cursor, after)
            cursor = after
        places[0, i], places[1, i] = state, length
        places[2, i], places[3, i], places[4, i] = cursor.tail, cursor.place, cursor.off
        places[5, i], places[6, i] = cursor.words, cursor.run
