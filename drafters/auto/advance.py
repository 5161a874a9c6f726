"""Going on by one emitted token: learning from it, appending it, and following it in the corpus.

All of it is one compiled call: a call from Python takes longer than most of what it does.
"""

from __future__ import annotations

from drafters.arrays import Float32, Float64
from drafters.auto.automaton import automaton_step
from drafters.auto.blend import learn_token
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
from drafters.jit import borrowing

LearnedFields = tuple[Float64, Float64, Float64]
"""weights, evidence and outcomes of a drafters.auto.trust.Trust."""

PlainFields = tuple[Float32, TextFields, CorpusFields]
"""What a context has without the corpus: marks of the own text, documents, corpus."""

NO_PLAIN: PlainFields = (NO_MARKS, NO_TEXT, NO_CORPUS)


@borrowing
def advance(
    token: int,
    fields: ContextFields,
    plain: PlainFields,
    learns: tuple[bool, bool],
    trust: LearnedFields,
    without: LearnedFields,
    scratch: GatheredFields,
) -> tuple[float, float, int, int]:
    """Go on by `token`. fields: the context before it; its text has room for one more.

    learns: whether `trust` learns from the token, and whether `without` does, which is that of the
    same context with `plain` in place of what the corpus says. scratch: a Gathered's.

    Returns the two chances that were given to the token (0 where nobody learns), and state and
    length of the corpus behind it.
    """
    context, found = context_of(fields), Gathered(*scratch)
    own, corpus = context.own, context.corpus
    chance = chance_without = 0.0
    if learns[0]:
        weights, asks, outcomes = trust
        chance = learn_token(token, context, weights, (asks, outcomes), found)
    if learns[1]:
        weights, asks, outcomes = without
        marks, docs, nothing = plain
        bare = Context(
            TextView(own.text, own.table, marks, own.size),
            context.num_output,
            TextView(*docs),
            context.hints,
            CorpusView(*nothing),
            context.ends,
            context.likely,
        )
        chance_without = learn_token(token, bare, weights, (asks, outcomes), found)
    append_id(own.text, own.table, own.size, token)
    state, length = int(corpus.state), int(corpus.length)
    if corpus.states.shape[0] > 0:
        state, length = automaton_step(corpus.states, corpus.edges, state, length, token)
    return chance, chance_without, state, length
