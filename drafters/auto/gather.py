"""Gathering: which tokens followed the context at one node, by source and match length.

At a node the context is the path to it, then the text before it. Every source gives the tokens
that followed that context, at *every* match length it has:

    corpus      a suffix automaton over a task's outputs (drafters.auto.automaton)
    prompt      the prompt of this sequence (drafters.auto.text_index)
    output      what it has emitted so far
    retrieved   outputs of the corpus' examples whose prompts are nearest to this one
    prediction  the text the client expects (OpenAI's Predicted Outputs)
    logits      what the model itself held likely after the same few tokens (drafters.auto.likely)
    prior       what a head on the model's last state says (drafters.auto.prior)
    template    what followed the same form in the retrieved outputs (drafters.auto.template)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drafters.arrays import Float32, Float32x2, Float64, Int32, Int32x2
from drafters.auto.cells import (
    COPIED,
    CORPUS,
    HASH_SIZE,
    LOGITS,
    MAX_CANDIDATES,
    MAX_LIKELY_MATCH,
    MAX_MATCH,
    MAX_RETRIEVED_VISITS,
    MAX_VISITS,
    NUM_BUCKETS,
    NUM_LEVELS,
    OUTPUT,
    PREDICTION,
    PRIOR,
    PROMPT,
    RETRIEVED,
    TEMPLATE,
    cell_of,
    length_bucket,
    prior_cell,
)
from drafters.auto.copying import (
    LEAST_TAIL,
    MAX_OFF,
    MAX_PLACES,
    CopyView,
    Cursor,
    bone,
    boundary,
    entered_class,
    first_place,
    last_byte,
    piece_at,
    resume_at,
    same_tail,
    skip_words,
)
from drafters.auto.likely import find_context, longer_key
from drafters.auto.prior import LEAST_CHANCE, PriorView, score
from drafters.auto.template import MAX_FORM, SPAN, write_form
from drafters.auto.text_index import find_slot, triple_key
from drafters.auto.views import SOURCE, WEIGHT, Context, CorpusView, LikelyView, TextView
from drafters.corpus_file import MAX_TOP, START
from drafters.jit import inlined

NUM, STAMP, OFF, ENTERED, FORM, BEHIND = range(6)  # in Gathered.state
OFF_TOTALS = (1.0, 2.0, 3.0, 6.0, 12.0, 40.0)  # an occurrences' bucket each
ENTERED_SHARES = (0.0, 0.7, 1.0)  # an agreement's bucket each
PRIOR_BUCKET = 2  # the prior is asked behind contexts of more tokens ...
PRIOR_LEFT = 0.1  # ... where they leave so much


class Gathered(NamedTuple):
    """The candidates at a node and their counts by level; written anew by every `gather`.

    state: int32 [6]: number of candidates; the node's stamp; where a copy was left, how long ago
    and whether one goes on behind the last token, as buckets; 0 where the form of the context ends
    with the template, else 1 and what a copy would go on with; symbols of it behind its last span.
    tokens: int32 [MAX_CANDIDATES].
    slot_stamps, slot_rows: int32 [HASH_SIZE], a hash from token to candidate; a slot with an older
    stamp is empty. counts: float32 [NUM_LEVELS, MAX_CANDIDATES], valid where totals is above 0.
    count_bits: int32, the same memory: floats of at least 0 are ordered as their bits are, and only
    of integers does the compiler take the largest of eight at a time.
    totals: float32 [NUM_LEVELS]. levels, cells: int32 [NUM_LEVELS]: the levels that have
    something, longest context first, and their trust cells. chances: float32 [MAX_CANDIDATES],
    written by drafters.auto.blend. path: int32, the context, newest token first. below: float64
    [NUM_LEVELS], scratch of learn_token. form: int32 [MAX_FORM], the context's form.
    """

    state: Int32
    tokens: Int32
    slot_stamps: Int32
    slot_rows: Int32
    counts: Float32x2
    count_bits: Int32x2
    totals: Float32
    levels: Int32
    cells: Int32
    chances: Float32
    path: Int32
    below: Float64
    form: Int32


def new_gathered(max_depth: int) -> Gathered:
    """Room for the contexts of trees up to `max_depth` deep."""
    counts = np.zeros((NUM_LEVELS, MAX_CANDIDATES), np.float32)
    return Gathered(
        np.zeros(6, np.int32),
        np.zeros(MAX_CANDIDATES, np.int32),
        np.zeros(HASH_SIZE, np.int32),
        np.zeros(HASH_SIZE, np.int32),
        counts,
        counts.view(np.int32),
        np.zeros(NUM_LEVELS, np.float32),
        np.zeros(NUM_LEVELS, np.int32),
        np.zeros(NUM_LEVELS, np.int32),
        np.zeros(MAX_CANDIDATES, np.float32),
        np.zeros(MAX_MATCH + 1 + max_depth, np.int32),
        np.zeros(NUM_LEVELS, np.float64),
        np.zeros(MAX_FORM, np.int32),
    )


@inlined
def _candidate(token: int, found: Gathered) -> int:
    """Number of a next token, given when it is new; -1 when there is no room."""
    stamp = found.state[STAMP]
    slot = (token * 40503) & (HASH_SIZE - 1)
    while found.slot_stamps[slot] == stamp:
        row = int(found.slot_rows[slot])
        if found.tokens[row] == token:
            return row
        slot = (slot + 1) & (HASH_SIZE - 1)
    row = int(found.state[NUM])
    if row >= MAX_CANDIDATES:
        return -1
    found.slot_stamps[slot] = stamp
    found.slot_rows[slot] = row
    found.tokens[row] = token
    found.state[NUM] = row + 1
    return row


@inlined
def _clear(counts: Float32, level: int) -> None:
    """Zero a level's counts: a loop becomes a memset here, a slice an array object."""
    for row in range(MAX_CANDIDATES):
        counts[level, row] = 0.0


@inlined
def _count(level: int, token: int, weight: np.float32, found: Gathered) -> None:
    """Count a next token at a level; one below 0 is none that could be proposed."""
    if found.totals[level] == 0.0:
        _clear(found.counts, level)
    found.totals[level] += weight
    if token >= 0:
        row = _candidate(token, found)
        if row >= 0:
            found.counts[level, row] += weight


@inlined
def _visit(
    of: TextView, position: int, path: Int32, context_size: int, num_prompt: int, found: Gathered
) -> None:
    """Count the token after `position` at the level of its match length with the context."""
    text = of.text
    if position + 1 >= of.size:
        return
    token = text[0, position + 1]
    if token < 0 and token != SPAN:
        return
    length = 1
    limit = min(context_size, position + 1)
    while length < limit and text[0, position - length] == path[length]:
        length += 1
    weight = np.float32(1.0)
    if num_prompt < 0:
        weight = of.marks[WEIGHT, position]
        source = int(of.marks[SOURCE, position])
    elif position + 1 < num_prompt:
        source = PROMPT
        if position < of.marks.shape[1]:
            weight = of.marks[WEIGHT, position]
    else:
        source = OUTPUT
    _count(source * NUM_BUCKETS + length_bucket(length), token, weight, found)


@inlined
def _gather_text(
    of: TextView, path: Int32, context_size: int, num_prompt: int, found: Gathered
) -> None:
    """Next tokens after all occurrences of the context in a TextIndex, by exact match length.

    num_prompt: tokens of prompt in the sequence's own text, whose marks, if any, hold a weight
    for each position of the prompt; -1 for documents, whose marks hold weight and source.
    """
    if of.size < 2 or context_size < 1:
        return
    position = int(of.table[1, find_slot(of.table, int(path[0]))])
    most = MAX_VISITS if num_prompt >= 0 else MAX_RETRIEVED_VISITS
    visits = 0
    while position >= 0 and visits < most:
        _visit(of, position, path, context_size, num_prompt, found)
        position = int(of.text[1, position])
        visits += 1
    if position >= 0 and context_size >= 3:
        # The common token's older occurrences: only those that match three tokens or more.
        newest = position
        key = triple_key(path[2], path[1], path[0])
        position = int(of.table[1, find_slot(of.table, key)])
        visits = 0
        while position >= 0 and visits < MAX_VISITS // 2:
            if position <= newest:
                _visit(of, position, path, context_size, num_prompt, found)
            position = int(of.text[2, position])
            visits += 1


@inlined
def _gather_corpus(corpus: CorpusView, state: int, length: int, found: Gathered) -> None:
    """Next tokens after the automaton's context and its suffixes, the longest of each bucket."""
    states, edges, tops = corpus.states, corpus.edges, corpus.tops
    last_bucket = NUM_BUCKETS
    while state >= 0:
        bucket = length_bucket(length)
        if bucket < last_bucket:
            last_bucket = bucket
            level = CORPUS * NUM_BUCKETS + bucket
            first, end = states[state, 3], states[state + 1, 3]
            top = states[state, 4]
            # Every occurrence has a next token but those that end the corpus.
            found.totals[level] = states[state, 2]
            _clear(found.counts, level)
            # The targets' counts stand beside the tokens: a corpus is larger than any cache, and
            # asking each target for its own was a twentieth of what a proposal cost.
            for i in range(MAX_TOP if top >= 0 else end - first):
                if top >= 0:
                    token, count = tops[top + i, 0], tops[top + i, 1]
                else:
                    token, count = edges[first + i, 0], edges[first + i, 2]
                if token >= 0:
                    row = _candidate(token, found)
                    if row >= 0:
                        found.counts[level, row] = count
        state = states[state, 0]
        if state >= 0:
            length = states[state, 1]


@inlined
def _gather_hints(docs: TextView, hints: Int32, found: Gathered) -> None:
    """Where the output left the prediction, its next token follows no known context."""
    for i in range(hints.shape[0]):
        token = int(docs.text[0, hints[i]])
        _count(PREDICTION * NUM_BUCKETS, token, np.float32(1.0), found)


@inlined
def _gather_likely(likely: LikelyView, size: int, depth: int, found: Gathered) -> None:
    """What the model held likely after the last tokens of found.path[:size], newest first."""
    key = 0
    for length in range(1, min(size, MAX_LIKELY_MATCH) + 1):
        key = longer_key(key, found.path[length - 1])
        slot = find_context(likely.keys, key)
        if slot < 0:
            break  # a longer context was not seen either
        level = LOGITS * NUM_BUCKETS + length
        found.totals[level] = likely.sums[slot, likely.ids.shape[1]]
        _clear(found.counts, level)
        for i in range(likely.ids.shape[1]):
            share = likely.sums[slot, i]
            if share > 0.0:
                row = _candidate(likely.ids[slot, i], found)
                if row >= 0:
                    found.counts[level, row] = share
    if depth == 0 and likely.echo_ids.shape[0] > 0:
        # What the last row held likely beside the token that it drew may come one later.
        level = LOGITS * NUM_BUCKETS
        found.totals[level] = 1.0
        _clear(found.counts, level)
        for i in range(likely.echo_ids.shape[0]):
            row = _candidate(likely.echo_ids[i], found)
            if row >= 0:
                found.counts[level, row] = likely.echo_chances[i]


@inlined
def _count_copied(bucket: int, token: int, found: Gathered) -> None:
    """Count a token at a level of COPIED."""
    if token >= 0:
        _count(COPIED * NUM_BUCKETS + bucket, token, np.float32(1.0), found)


@inlined
def _gather_copied(copy: CopyView, cursor: Cursor, depth: int, found: Gathered) -> None:
    """Where the text stands in the prompt's characters, and may stand."""
    if copy.chars.shape[0] == 0:
        return
    last = last_byte(copy, found.path[0])
    place, off, run = cursor.place, cursor.off, cursor.run
    if place >= 0 and off == 0:
        bucket = 6 if run < 2 else (7 if run < 4 else (8 if run < 8 else 9))
        _count_copied(bucket, piece_at(copy, place), found)
    elif place >= 0 and off <= MAX_OFF:
        found.state[OFF] = min(off - 1, 3) if off < 5 else (4 if off < 9 else 5)
        found.state[ENTERED] = entered_class(copy, found.path[0])
        _count_copied(4, resume_at(copy, place, last, False), found)
        _count_copied(4, resume_at(copy, place, last, True), found)
        behind = skip_words(copy, place, cursor.words)
        if behind != place:
            _count_copied(2, resume_at(copy, behind, last, False), found)
            _count_copied(2, resume_at(copy, behind, last, True), found)
    if depth == 0:
        at = first_place(copy, cursor.tail)
        for _ in range(MAX_PLACES):
            if at < 0:
                break
            num = same_tail(copy, at, cursor.tail)
            if num >= LEAST_TAIL and (off > 0 or at + 1 != place):
                if bone(last) != 0:
                    token = piece_at(copy, at + 1)
                else:
                    token = resume_at(copy, at + 1, last, True)
                _count_copied(1 if num < 6 else (3 if num < 7 else 5), token, found)
            at = int(copy.earlier[at])


@inlined
def _add_longer(found: Gathered) -> None:
    """Counts by exact length become counts by context: it also occurs wherever a longer does.

    Those of the corpus and of the logits are kept by context.
    """
    num_candidates = found.state[NUM]
    counts, totals = found.counts, found.totals
    for source in (PROMPT, OUTPUT, RETRIEVED, PREDICTION, TEMPLATE):
        longer = -1
        for bucket in range(NUM_BUCKETS - 1, 0, -1):
            level = source * NUM_BUCKETS + bucket
            if totals[level] > 0.0:
                if longer >= 0:
                    totals[level] += totals[longer]
                    for row in range(num_candidates):
                        counts[level, row] += counts[longer, row]
                longer = level


@inlined
def _longest(source: int, totals: Float32) -> int:
    """Bucket of a source's longest match of at least a token; 0 for none."""
    for bucket in range(NUM_BUCKETS - 1, 0, -1):
        if totals[source * NUM_BUCKETS + bucket] > 0.0:
            return bucket
    return 0


@inlined
def _gather_prior(prior: PriorView, row: int, level: int, found: Gathered) -> float:
    """What the prior says behind states[row]; returns the highest chance, 0 where it says nothing
    that is worth a node."""
    place = score(prior, row)
    total = prior.totals[place]
    found.totals[level] = 1.0
    _clear(found.counts, level)
    highest = np.float32(0.0)
    least = np.float32(LEAST_CHANCE) * total
    for output in range(prior.scores.shape[1]):
        if prior.scores[place, output] > least and prior.head.ids[output] >= 0:
            candidate = _candidate(prior.head.ids[output], found)
            if candidate >= 0:
                chance = prior.scores[place, output] / total
                found.counts[level, candidate] = chance
                highest = max(highest, chance)
    return float(highest)


@inlined
def _highest(level: int, found: Gathered) -> np.float32:
    """The highest count of a candidate at a level."""
    top_bits = np.int32(0)
    for row in range(found.state[NUM]):
        top_bits = max(top_bits, found.count_bits[level, row])
    return np.int32(top_bits).view(np.float32)


@inlined
def _order_levels(
    found: Gathered,
    context_cover: int,
    weights: Float64,
    prior: PriorView,
    followed: int,
    row_of_prior: int,
) -> int:
    """Write levels and cells, longest context first; returns their number.

    context_cover: tokens of output (path included) before this node. The prior is asked here, where
    longer contexts leave something: weights of theirs. followed, row_of_prior: as of `gather`.
    """
    left = 1.0
    totals = found.totals
    # A context is trusted less where the rival source matches as much: the prompt's longest
    # match for all others, the corpus' longest for the prompt.
    prompt_longest, corpus_longest = _longest(PROMPT, totals), _longest(CORPUS, totals)
    num_levels = 0
    cover_bucket = length_bucket(context_cover)
    # Forms come first: a copy is sure of the next token of its text, and not of where it ends.
    for bucket in range(NUM_BUCKETS - 1, max(1, length_bucket(found.state[BEHIND])), -1):
        level = TEMPLATE * NUM_BUCKETS + bucket
        if totals[level] > 0.0:
            top = _highest(level, found)
            if top > 0.0:
                found.levels[num_levels] = level
                found.cells[num_levels] = cell_of(
                    level, totals[level], top / totals[level], found.state[FORM]
                )
                left *= 1.0 - weights[found.cells[num_levels]]
                num_levels += 1
    for bucket in range(NUM_BUCKETS - 1, -1, -1):
        if bucket == PRIOR_BUCKET and followed >= 0 and left > PRIOR_LEFT:
            level = PRIOR * NUM_BUCKETS + 1 + followed
            highest = _gather_prior(prior, row_of_prior, level, found)
            if highest > 0.0:
                situation = 0 if prompt_longest == 0 else (4 if prompt_longest > bucket else 2)
                found.levels[num_levels] = level
                found.cells[num_levels] = prior_cell(level, highest, situation)
                num_levels += 1
        for turn in range(PRIOR, -1, -1):
            if turn == PRIOR:
                # Hints tell more than a match of one or two tokens.
                if bucket != 2:
                    continue
                source, level = PREDICTION, PREDICTION * NUM_BUCKETS
            else:
                source, level = turn, turn * NUM_BUCKETS + bucket
                if level == PREDICTION * NUM_BUCKETS:
                    continue
            total = totals[level]
            if total <= 0.0:
                continue
            top = _highest(level, found)
            if source == CORPUS and bucket > 0:
                covers = bucket >= length_bucket(context_cover + 1)
            else:
                covers = context_cover > 0 and bucket >= cover_bucket
            rival = corpus_longest if source == PROMPT else prompt_longest
            situation = 1 if covers else 0
            if rival > 0:
                situation += 4 if rival >= bucket else 2
            share = top / total
            if source == LOGITS:  # a chance, not a count: nothing ever has all of it
                share = np.float32(0.0 if share < 0.35 else (0.7 if share < 0.8 else 1.0))
            if source == COPIED:
                situation = 0 if prompt_longest == 0 else (1 if prompt_longest < 3 else 2)
                situation += 3 if corpus_longest > 2 else 0
                if bucket == 2 or bucket == 4:
                    total = np.float32(OFF_TOTALS[found.state[OFF]])
                    share = np.float32(ENTERED_SHARES[found.state[ENTERED]])
            found.levels[num_levels] = level
            found.cells[num_levels] = cell_of(level, total, share, situation)
            left *= 1.0 - weights[found.cells[num_levels]]
            num_levels += 1
    return num_levels


@inlined
def gather(
    context: Context,
    more: int,
    weights: Float64,
    state: int,
    length: int,
    cursor: Cursor,
    depth: int,
    followed: int,
    row_of_prior: int,
    found: Gathered,
) -> int:
    """Ask all sources at one node; returns the number of levels that have something.

    more: tokens that were appended to the text since the context was made. weights: of the trust
    cells. followed: ids behind the prior's last state of the model; -1: it is
    not asked. row_of_prior: of its states, that of this node.

    state, length: of the corpus after the path; cursor: after it. found.path: its first `depth`
    entries are the path to the node, newest first; the rest is filled with the context here.
    """
    found.state[NUM] = 0
    found.state[STAMP] += 1
    for i in range(NUM_LEVELS):
        found.totals[i] = 0.0
    given, docs, path = context.own, context.docs, found.path
    own = TextView(given.text, given.table, given.marks, given.size + more)
    size = min(MAX_MATCH, depth + own.size)
    for i in range(depth, size):
        path[i] = own.text[0, own.size - 1 - (i - depth)]
    _gather_text(own, path, size, given.size - context.num_output, found)
    cover = depth + context.num_output + more
    if docs.size > 0:
        size = min(MAX_MATCH, cover + 1)
        kept = path[size - 1]
        if size == cover + 1:
            path[cover] = START
        _gather_text(docs, path, size, -1, found)
        if context.forms.size > 0:
            form = found.form
            num, found.state[BEHIND] = write_form(path, size, context.forms.table, form)
            found.state[FORM] = 0 if form[0] != SPAN else 1 + boundary(context.copy, cursor)
            # Without a span it says what the outputs do; no span ends inside a word that is copied.
            if found.state[BEHIND] < num and found.state[FORM] != 2:
                _gather_text(context.forms, form, num, -1, found)
        path[size - 1] = kept
        if depth == 0:
            _gather_hints(docs, context.hints, found)
    if context.corpus.states.shape[0] > 0:
        _gather_corpus(context.corpus, state, length, found)
    if context.likely.keys.shape[0] > 0:
        _gather_likely(context.likely, min(MAX_LIKELY_MATCH, depth + own.size), depth, found)
    _gather_copied(context.copy, cursor, depth, found)
    _add_longer(found)
    return _order_levels(found, cover, weights, context.prior, followed, row_of_prior)
