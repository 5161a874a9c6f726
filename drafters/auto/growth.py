"""Growing one tree from all sources, best-first, by the estimated chance of each node.

At a node the context is the path to it, then the text before it. Every source is asked which
tokens followed that context at *every* match length it has:

    corpus      a suffix automaton over a task's outputs (drafters.auto.automaton)
    prompt      the prompt of this sequence (drafters.auto.text_index)
    output      what it has emitted so far
    retrieved   outputs of the corpus' examples whose prompts are nearest to this one
    prediction  the text the client expects (OpenAI's Predicted Outputs)

The answers are blended from the shortest context to the longest: with q the shares at a level,
p = w q + (1 - w) p. This is deleted interpolation (Jelinek and Mercer 1980); w is the trust in
such a level, kept per cell of (source, match length, occurrences, agreement, whether the match
covers the whole output) and learned by expectation maximisation from the tokens that came
(`learn_token`). The product of p along a path is the node's survival, and a max-heap on it with
parent closure gives the tree: deep where the context is certain, broad where it is not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drafters.auto.text_index import START, find_slot, triple_key
from drafters.jit import compiled
from drafters.tree import DraftTree

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

__all__ = ["NUM_CELLS", "NUM_FACTORS", "SOURCES", "Workspace", "cell_of", "factor_cell"]

SOURCES = ("corpus", "prompt", "output", "retrieved", "prediction")
CORPUS, PROMPT, OUTPUT, RETRIEVED, PREDICTION = 0, 1, 2, 3, 4
NUM_SOURCES = 5
NUM_BUCKETS = 10  # match lengths 0, 1, 2, 3, 4, 5-6, 7-9, 10-15, 16-31, 32 and more
NUM_OCCURRENCES = 6  # 1, 2, 3-4, 5-9, 10-29, 30 and more
NUM_AGREEMENTS = 3  # share of the commonest next token: below 1/2, below 1, 1
NUM_LEVELS = NUM_SOURCES * NUM_BUCKETS
NUM_SITUATIONS = 6  # does the match cover the whole output; does a rival match longer
NUM_CELLS = NUM_LEVELS * NUM_OCCURRENCES * NUM_AGREEMENTS * NUM_SITUATIONS

NUM_SHARES = 10  # chances before correction: below 1%, 2%, 5%, 10%, 20%, 35%, 50%, 70%, 90%
NUM_BINS = 6  # match lengths of corrections: output start (or none), 1, 2, 3, 4, 5 and more
NUM_FACTORS = NUM_SOURCES * NUM_BINS * NUM_SITUATIONS * NUM_SHARES

MAX_MATCH = 34  # comparisons end here: longer matches share a bucket
MAX_VISITS = 64  # occurrences looked at per node and chain, newest first
MAX_RETRIEVED_VISITS = 24  # the same in retrieved outputs, the likest last and so seen first
MAX_RETRIEVED_MATCH = 34
MAX_CANDIDATES = 208  # distinct next tokens per node
MAX_TOP = 8  # commonest next tokens read per automaton state
HASH_SIZE = 1024
BASE_CHANCE = 1e-7  # what is left for a token that no source proposes


@compiled
def length_bucket(length: int) -> int:
    """Bucket of a match length, 0..NUM_BUCKETS-1."""
    if length <= 4:
        return length
    if length <= 6:
        return 5
    if length <= 9:
        return 6
    if length <= 15:
        return 7
    if length <= 31:
        return 8
    return 9


@compiled
def cell_of(level: int, total: float, top_share: float, situation: int) -> int:
    """The trust cell of a level: source * NUM_BUCKETS + bucket, its counts and its situation."""
    if total < 1.5:
        occurrences = 0
    elif total < 2.5:
        occurrences = 1
    elif total < 4.5:
        occurrences = 2
    elif total < 9.5:
        occurrences = 3
    elif total < 29.5:
        occurrences = 4
    else:
        occurrences = 5
    agreement = 0 if top_share < 0.5 else (1 if top_share < 0.999 else 2)
    cell = (level * NUM_OCCURRENCES + occurrences) * NUM_AGREEMENTS + agreement
    return cell * NUM_SITUATIONS + situation


@compiled
def factor_cell(level: int, situation: int, at_start: bool, chance: float) -> int:
    """The correction cell of a chance: the longest context that proposes the token, its size.

    level and situation are of that context; at_start: no output stands before the token.
    """
    if chance < 0.1:
        share = 0 if chance < 0.01 else (1 if chance < 0.02 else (2 if chance < 0.05 else 3))
    elif chance < 0.5:
        share = 4 if chance < 0.2 else (5 if chance < 0.35 else 6)
    else:
        share = 7 if chance < 0.7 else (8 if chance < 0.9 else 9)
    source, bucket = level // NUM_BUCKETS, level % NUM_BUCKETS
    length = 0 if at_start else min(bucket, NUM_BINS - 1)
    return ((source * NUM_BINS + length) * NUM_SITUATIONS + situation) * NUM_SHARES + share


@compiled
def automaton_step(
    states: Int32, edges: Int32, state: int, length: int, token: int
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
def _candidate(token: int, ints: Int32) -> int:
    """Number of a next token, given when it is new; -1 when there is no room.

    ints: int32 scratch: [0, 0] candidates, [0, 1] the node's stamp; row 1 candidate tokens;
    rows 2 and 3 the hash: stamp and candidate.
    """
    slot = (token * 40503) & (HASH_SIZE - 1)
    while ints[2, slot] == ints[0, 1]:
        row = int(ints[3, slot])
        if ints[1, row] == token:
            return row
        slot = (slot + 1) & (HASH_SIZE - 1)
    row = int(ints[0, 0])
    if row >= MAX_CANDIDATES:
        return -1
    ints[2, slot] = ints[0, 1]
    ints[3, slot] = row
    ints[1, row] = token
    ints[0, 0] = row + 1
    return row


@compiled
def _clear(counts: Float32, level: int) -> None:
    """Zero a level's counts: a loop becomes a memset here, a slice an array object."""
    for row in range(MAX_CANDIDATES):
        counts[level, row] = 0.0


@compiled
def _visit(
    text: Int32,
    marks: Float32,
    size: int,
    position: int,
    context: Int32,
    context_size: int,
    num_prompt: int,
    ints: Int32,
    counts: Float32,
    totals: Float32,
) -> None:
    """Count the token after `position` at the level of its match length with the context."""
    if position + 1 >= size:
        return
    token = text[0, position + 1]
    if token < 0:
        return
    length = 1
    limit = min(context_size, position + 1)
    while length < limit and text[0, position - length] == context[length]:
        length += 1
    weight = np.float32(1.0)
    if num_prompt < 0:
        weight = marks[0, position]
        source = int(marks[1, position])
    elif position + 1 < num_prompt:
        source = PROMPT
        if position < marks.shape[1]:
            weight = marks[0, position]
    else:
        source = OUTPUT
    level = source * NUM_BUCKETS + length_bucket(length)
    if totals[level] == 0.0:
        _clear(counts, level)
    totals[level] += weight
    row = _candidate(token, ints)
    if row >= 0:
        counts[level, row] += weight


@compiled
def _gather_text(
    text: Int32,
    table: Int64,
    marks: Float32,
    size: int,
    context: Int32,
    context_size: int,
    num_prompt: int,
    ints: Int32,
    counts: Float32,
    totals: Float32,
) -> None:
    """Next tokens after all occurrences of the context in a TextIndex, by exact match length.

    num_prompt: tokens of prompt in the sequence's own text, whose marks, if any, hold a weight
    for each position of the prompt; -1 for retrieved outputs, whose marks hold weight and source.
    """
    if size < 2 or context_size < 1:
        return
    position = int(table[1, find_slot(table, int(context[0]))])
    most = MAX_VISITS if num_prompt >= 0 else MAX_RETRIEVED_VISITS
    visits = 0
    while position >= 0 and visits < most:
        _visit(text, marks, size, position, context, context_size, num_prompt, ints, counts, totals)
        position = int(text[1, position])
        visits += 1
    if position >= 0 and context_size >= 3:
        # The common token's older occurrences: only those that match three tokens or more.
        newest = position
        key = triple_key(context[2], context[1], context[0])
        position = int(table[1, find_slot(table, key)])
        visits = 0
        while position >= 0 and visits < MAX_VISITS // 2:
            if position <= newest:
                _visit(
                    text,
                    marks,
                    size,
                    position,
                    context,
                    context_size,
                    num_prompt,
                    ints,
                    counts,
                    totals,
                )
            position = int(text[2, position])
            visits += 1


@compiled
def _gather_automaton(
    states: Int32,
    edges: Int32,
    tops: Int32,
    state: int,
    length: int,
    ints: Int32,
    counts: Float32,
    totals: Float32,
) -> None:
    """Next tokens after the automaton's context and its suffixes, the longest of each bucket."""
    last_bucket = NUM_BUCKETS
    while state >= 0:
        bucket = length_bucket(length)
        if bucket < last_bucket:
            last_bucket = bucket
            level = CORPUS * NUM_BUCKETS + bucket
            first, end = states[state, 3], states[state + 1, 3]
            top = states[state, 4]
            # Every occurrence has a next token but those that end the corpus.
            totals[level] = states[state, 2]
            _clear(counts, level)
            # The targets' counts stand beside the tokens: a corpus is larger than any cache, and
            # asking each target for its own was a twentieth of what a proposal cost.
            for i in range(MAX_TOP if top >= 0 else end - first):
                if top >= 0:
                    token, count = tops[top + i, 0], tops[top + i, 1]
                else:
                    token, count = edges[first + i, 0], edges[first + i, 2]
                if token >= 0:
                    row = _candidate(token, ints)
                    if row >= 0:
                        counts[level, row] = count
        state = states[state, 0]
        if state >= 0:
            length = states[state, 1]


@compiled
def _levels(ints: Int32, counts: Float32, totals: Float32, cells: Int32, context_cover: int) -> int:
    """Turn counts by exact length into counts by context, longest context first.

    cells: int32 [2, NUM_LEVELS] out: the level and its trust cell. context_cover: tokens of
    output (path included) before this node. Returns the number of levels.
    """
    num_candidates = ints[0, 0]
    for source in range(1, NUM_SOURCES):
        # A context of length k also occurs wherever a longer one does.
        longer = -1
        for bucket in range(NUM_BUCKETS - 1, 0, -1):
            level = source * NUM_BUCKETS + bucket
            if totals[level] > 0.0:
                if longer >= 0:
                    totals[level] += totals[longer]
                    for row in range(num_candidates):
                        counts[level, row] += counts[longer, row]
                longer = level
    # A context is believed less where the rival source matches as much: the prompt's longest
    # match for all others, the corpus' longest for the prompt.
    prompt_longest, corpus_longest = 0, 0
    for bucket in range(NUM_BUCKETS - 1, 0, -1):
        if prompt_longest == 0 and totals[PROMPT * NUM_BUCKETS + bucket] > 0.0:
            prompt_longest = bucket
        if corpus_longest == 0 and totals[CORPUS * NUM_BUCKETS + bucket] > 0.0:
            corpus_longest = bucket
    num_levels = 0
    cover_bucket = length_bucket(context_cover)
    for bucket in range(NUM_BUCKETS - 1, -1, -1):
        for turn in range(NUM_SOURCES, -1, -1):
            if turn == NUM_SOURCES:
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
            top = np.float32(0.0)
            for row in range(num_candidates):
                top = max(top, counts[level, row])
            if source == CORPUS and bucket > 0:
                covers = bucket >= length_bucket(context_cover + 1)
            else:
                covers = context_cover > 0 and bucket >= cover_bucket
            cells[0, num_levels] = level
            rival = corpus_longest if source == PROMPT else prompt_longest
            situation = 1 if covers else 0
            if rival > 0:
                situation += 4 if rival >= bucket else 2
            cells[1, num_levels] = cell_of(level, total, top / total, situation)
            num_levels += 1
    return num_levels


@compiled
def _gather(
    own: Int32,
    own_table: Int64,
    own_marks: Float32,
    own_size: int,
    num_output: int,
    docs: Int32,
    docs_table: Int64,
    docs_marks: Float32,
    docs_size: int,
    hints: Int32,
    states: Int32,
    edges: Int32,
    tops: Int32,
    state: int,
    state_length: int,
    path: Int32,
    depth: int,
    ints: Int32,
    counts: Float32,
    totals: Float32,
    cells: Int32,
) -> int:
    """Ask all sources at one node. `hints`: places in docs that may come next at the root.

    `path`: int32 scratch whose first `depth` entries are the
    path to the node, newest first; the rest is filled with the context here."""
    ints[0, 0] = 0
    ints[0, 1] += 1
    for i in range(NUM_LEVELS):
        totals[i] = 0.0
    size = min(MAX_MATCH, depth + own_size)
    for i in range(depth, size):
        path[i] = own[0, own_size - 1 - (i - depth)]
    _gather_text(
        own,
        own_table,
        own_marks,
        own_size,
        path,
        size,
        own_size - num_output,
        ints,
        counts,
        totals,
    )
    cover = depth + num_output
    if docs_size > 0:
        size = min(MAX_RETRIEVED_MATCH, cover + 1)
        kept = path[size - 1]
        if size == cover + 1:
            path[cover] = START
        _gather_text(docs, docs_table, docs_marks, docs_size, path, size, -1, ints, counts, totals)
        path[size - 1] = kept
        if depth == 0:
            # Where the output left the prediction, its next token follows no known context.
            level = PREDICTION * NUM_BUCKETS
            for i in range(hints.shape[0]):
                if totals[level] == 0.0:
                    _clear(counts, level)
                totals[level] += 1.0
                row = _candidate(int(docs[0, hints[i]]), ints)
                if row >= 0:
                    counts[level, row] += 1.0
    if states.shape[0] > 0:
        _gather_automaton(states, edges, tops, state, state_length, ints, counts, totals)
    return _levels(ints, counts, totals, cells, cover)


@compiled
def _blend(
    ints: Int32,
    counts: Float32,
    totals: Float32,
    cells: Int32,
    num_levels: int,
    trust: Float64,
    chances: Float32,
) -> None:
    """chances: float32 [MAX_CANDIDATES] out.

    From the longest context down: a level gets its trust's part of what the longer ones left.
    """
    num = ints[0, 0]
    left = np.float32(1.0)
    for row in range(num):
        chances[row] = 0.0
    for i in range(num_levels):
        level = cells[0, i]
        w = np.float32(trust[cells[1, i]])
        scale = left * w / totals[level]
        for row in range(num):
            chances[row] += scale * counts[level, row]
        left *= np.float32(1.0) - w
        if left < 0.004:
            break
    for row in range(num):
        chances[row] += left * np.float32(BASE_CHANCE)


@compiled
def _leader(row: int, counts: Float32, cells: Int32, num_levels: int) -> int:
    """Index in `cells` of the longest context that proposes a candidate."""
    for i in range(num_levels):
        if counts[cells[0, i], row] > 0.0:
            return i
    return 0


@compiled
def grow_tree(
    budget: int,
    max_depth: int,
    min_survival: float,
    own: Int32,
    own_table: Int64,
    own_marks: Float32,
    own_size: int,
    num_output: int,
    docs: Int32,
    docs_table: Int64,
    docs_marks: Float32,
    docs_size: int,
    hints: Int32,
    states: Int32,
    edges: Int32,
    tops: Int32,
    state: int,
    state_length: int,
    ends: Int32,
    trust: Float64,
    factors: Float64,
    ints: Int32,
    counts: Float32,
    heap: Float32,
    heap_ints: Int32,
    nodes: Int32,
    node_chances: Float32,
) -> int:
    """Grow a tree of at most `budget` nodes; returns their number. ends: EOS ids.

    heap: float32 [3, H] (survival, chance, bucket), heap_ints: int32 [3, H] (token, parent,
    source). nodes: int32 [12, N] out: rows 0..3 token, parent, source, bucket in final order;
    node_chances: float32 [2, N] out: survival, chance given the parent. Rest: scratch.
    """
    totals = np.empty(NUM_LEVELS, np.float32)
    cells = np.empty((2, NUM_LEVELS), np.int32)
    chances = np.empty(MAX_CANDIDATES, np.float32)
    path = np.empty(MAX_MATCH + 1 + max(max_depth, 0), np.int32)
    has_corpus = states.shape[0] > 0
    capacity = heap.shape[1]
    heap_size = 0
    num = 0
    node = -1
    depth = 0
    survival = np.float32(1.0)
    while True:
        if depth < max_depth and num < budget:
            at = node
            for i in range(depth):
                path[i] = nodes[4, at]
                at = nodes[5, at]
            here, here_length = state, state_length
            if node >= 0:
                here, here_length = nodes[9, node], nodes[10, node]
            num_levels = _gather(
                own,
                own_table,
                own_marks,
                own_size,
                num_output,
                docs,
                docs_table,
                docs_marks,
                docs_size,
                hints,
                states,
                edges,
                tops,
                here,
                here_length,
                path,
                depth,
                ints,
                counts,
                totals,
                cells,
            )
            _blend(ints, counts, totals, cells, num_levels, trust, chances)
            for row in range(ints[0, 0]):
                chance = chances[row]
                if survival * chance < 0.2 * min_survival:
                    continue
                leader = _leader(row, counts, cells, num_levels)
                level = cells[0, leader]
                situation = cells[1, leader] % NUM_SITUATIONS
                cell = factor_cell(level, situation, num_output + depth == 0, chance)
                chance = min(chance * np.float32(factors[cell]), np.float32(0.9999))
                value = survival * chance
                if value < min_survival or heap_size >= capacity:
                    continue
                # An end is never drafted: where it comes it is the bonus token for nothing, and
                # after it there is none.
                token = ints[1, row]
                is_end = False
                for k in range(ends.shape[0]):
                    is_end = is_end or ends[k] == token
                if is_end:
                    continue
                # Sift up.
                i = heap_size
                heap_size += 1
                while i > 0:
                    up = (i - 1) >> 1
                    if heap[0, up] >= value:
                        break
                    heap[0, i], heap[1, i], heap[2, i] = heap[0, up], heap[1, up], heap[2, up]
                    heap_ints[0, i] = heap_ints[0, up]
                    heap_ints[1, i] = heap_ints[1, up]
                    heap_ints[2, i] = heap_ints[2, up]
                    i = up
                heap[0, i], heap[1, i], heap[2, i] = value, chance, level % NUM_BUCKETS
                heap_ints[0, i] = token
                heap_ints[1, i] = node
                heap_ints[2, i] = level // NUM_BUCKETS
        if num >= budget or heap_size == 0:
            break
        # Pop the likeliest node.
        survival = heap[0, 0]
        node = num
        num += 1
        parent = heap_ints[1, 0]
        token = heap_ints[0, 0]
        nodes[4, node] = token
        nodes[5, node] = parent
        nodes[6, node] = heap_ints[2, 0]
        nodes[7, node] = np.int32(heap[2, 0])
        depth = 1 if parent < 0 else nodes[8, parent] + 1
        nodes[8, node] = depth
        node_chances[0, node] = survival
        node_chances[1, node] = heap[1, 0]
        if has_corpus and num < budget:
            before, before_length = state, state_length
            if parent >= 0:
                before, before_length = nodes[9, parent], nodes[10, parent]
            after, after_length = automaton_step(states, edges, before, before_length, token)
            nodes[9, node] = after
            nodes[10, node] = after_length
        heap_size -= 1
        value = heap[0, heap_size]
        i = 0
        while True:
            child = 2 * i + 1
            if child >= heap_size:
                break
            if child + 1 < heap_size and heap[0, child + 1] > heap[0, child]:
                child += 1
            if heap[0, child] <= value:
                break
            heap[0, i], heap[1, i], heap[2, i] = heap[0, child], heap[1, child], heap[2, child]
            heap_ints[0, i] = heap_ints[0, child]
            heap_ints[1, i] = heap_ints[1, child]
            heap_ints[2, i] = heap_ints[2, child]
            i = child
        heap[0, i] = heap[0, heap_size]
        heap[1, i] = heap[1, heap_size]
        heap[2, i] = heap[2, heap_size]
        heap_ints[0, i] = heap_ints[0, heap_size]
        heap_ints[1, i] = heap_ints[1, heap_size]
        heap_ints[2, i] = heap_ints[2, heap_size]

    # Preorder, siblings by survival: the likeliest path comes first, so that its KV stays put.
    # Nodes were popped by survival, so a parent's children lie in that order already; going
    # through them backwards and pushing each in front of its parent's list keeps it.
    for i in range(num):
        nodes[9, i] = -1  # first child
        nodes[10, i] = -1  # next sibling
    first_root = -1
    for i in range(num - 1, -1, -1):
        parent = nodes[5, i]
        if parent < 0:
            nodes[10, i] = first_root
            first_root = i
        else:
            nodes[10, i] = nodes[9, parent]
            nodes[9, parent] = i
    at = first_root
    place = 0
    survivals = node_chances[0, :num].copy()
    given = node_chances[1, :num].copy()
    while at >= 0:
        parent = nodes[5, at]
        nodes[11, at] = place
        nodes[0, place] = nodes[4, at]
        nodes[1, place] = -1 if parent < 0 else nodes[11, parent]
        nodes[2, place] = nodes[6, at]
        nodes[3, place] = nodes[7, at]
        node_chances[0, place] = survivals[at]
        node_chances[1, place] = given[at]
        place += 1
        if nodes[9, at] >= 0:
            at = nodes[9, at]
            continue
        while at >= 0 and nodes[10, at] < 0:
            at = nodes[5, at]
        if at >= 0:
            at = nodes[10, at]
    return num


@compiled
def learn_token(
    token: int,
    own: Int32,
    own_table: Int64,
    own_marks: Float32,
    own_size: int,
    num_output: int,
    docs: Int32,
    docs_table: Int64,
    docs_marks: Float32,
    docs_size: int,
    hints: Int32,
    states: Int32,
    edges: Int32,
    tops: Int32,
    state: int,
    state_length: int,
    ends: Int32,
    trust: Float64,
    evidence: Float64,
    outcomes: Float64,
    ints: Int32,
    counts: Float32,
) -> float:
    """One step of expectation maximisation for the trusts, *before* `token` is appended.

    evidence: float64 [2, NUM_CELLS]: expected times a level was asked, and answered. outcomes:
    float64 [3, NUM_FACTORS]: sum of the chances given to candidates, how often one was right, how
    many there were. Returns the chance that was given to `token`.
    """
    totals = np.empty(NUM_LEVELS, np.float32)
    cells = np.empty((2, NUM_LEVELS), np.int32)
    path = np.empty(MAX_MATCH + 1, np.int32)
    num_levels = _gather(
        own,
        own_table,
        own_marks,
        own_size,
        num_output,
        docs,
        docs_table,
        docs_marks,
        docs_size,
        hints,
        states,
        edges,
        tops,
        state,
        state_length,
        path,
        0,
        ints,
        counts,
        totals,
        cells,
    )
    row = -1
    for i in range(ints[0, 0]):
        if ints[1, i] == token:
            row = i
    # Upward: the blend below each level; then downward: how likely the level was reached.
    below = np.empty(NUM_LEVELS, np.float64)
    chance = BASE_CHANCE
    for i in range(num_levels - 1, -1, -1):
        below[i] = chance
        w = trust[cells[1, i]]
        share = 0.0
        if row >= 0:
            share = counts[cells[0, i], row] / totals[cells[0, i]]
        chance = (1.0 - w) * chance + w * share
    reach = 1.0
    for i in range(num_levels):
        cell = cells[1, i]
        w = trust[cell]
        share = 0.0
        if row >= 0:
            share = counts[cells[0, i], row] / totals[cells[0, i]]
        here = w * share
        answered = here / (here + (1.0 - w) * below[i])
        evidence[0, cell] += reach
        evidence[1, cell] += reach * answered
        reach *= 1.0 - answered
        if reach < 1e-4:
            break
    chances = np.empty(MAX_CANDIDATES, np.float32)
    _blend(ints, counts, totals, cells, num_levels, trust, chances)
    for i in range(ints[0, 0]):
        claimed = chances[i]
        # Ends are never drafted, and would make their neighbours look right.
        for k in range(ends.shape[0]):
            if ends[k] == ints[1, i]:
                claimed = np.float32(0.0)
        if claimed > 0.002:
            leader = _leader(i, counts, cells, num_levels)
            situation = cells[1, leader] % NUM_SITUATIONS
            cell = factor_cell(cells[0, leader], situation, num_output == 0, claimed)
            outcomes[0, cell] += claimed
            outcomes[2, cell] += 1.0
            if i == row:
                outcomes[1, cell] += 1.0
    return chance


class Workspace:
    """Scratch arrays of grow_tree, shared by all sessions of a Drafter (one thread)."""

    __slots__ = ("counts", "heap", "heap_ints", "ints", "node_chances", "nodes")

    def __init__(self, max_budget: int = 64) -> None:
        self.ints: Int32 = np.zeros((4, HASH_SIZE), np.int32)
        self.counts: Float32 = np.zeros((NUM_LEVELS, MAX_CANDIDATES), np.float32)
        self.heap: Float32 = np.zeros((3, 4096), np.float32)
        self.heap_ints: Int32 = np.zeros((3, 4096), np.int32)
        self.resize(max_budget)

    def resize(self, max_budget: int) -> None:
        """Room for trees of `max_budget` nodes."""
        self.nodes: Int32 = np.zeros((12, max_budget), np.int32)
        self.node_chances: Float32 = np.zeros((2, max_budget), np.float32)

    def tree(self, num_nodes: int) -> DraftTree:
        """The tree that grow_tree has just left here."""
        if num_nodes == 0:
            return DraftTree.empty()
        block = self.nodes[:2, :num_nodes].copy()
        return DraftTree(
            block[0],
            block[1],
            self.node_chances[0, :num_nodes].copy(),
            self.nodes[2, :num_nodes].astype(np.uint8),
        )
