"""What is known of the candidates at a node, as features: to measure what a better choice could
bring (loadtest.choice_bound). The server does not use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafters.arrays import Float32, Float64, Int32
from drafters.auto.automaton import automaton_step
from drafters.auto.blend import blend, is_end, leader
from drafters.auto.cells import (
    MAX_CANDIDATES,
    NUM_BUCKETS,
    NUM_SITUATIONS,
    NUM_SOURCES,
    factor_cell,
)
from drafters.auto.drafter import AutoDrafter, AutoSession
from drafters.auto.gather import NUM, Gathered, GatheredFields, gather
from drafters.auto.views import Context, ContextFields, TrustsFields, context_of
from drafters.jit import borrowing, inlined

MOST = 24  # candidates of a node that are described, the likeliest
OF_SOURCE = 5  # bucket, log occurrences, share, share in the next shorter match, share of the top
OWN = NUM_SOURCES * OF_SOURCE  # first feature beside those of the sources
CHANCE = OWN + 1  # auto's chance; at OWN that before its correction
NUM_FEATURES = OWN + 12
LOOK_BACK = 2000  # tokens of text that a candidate is looked for in


@inlined
def _rank(
    context: Context,
    depth: int,
    num_levels: int,
    factors: Float64,
    chances: Float64,
    rows: Int32,
    found: Gathered,
) -> int:
    """Write auto's chances by row, and the likeliest MOST rows first into `rows`; returns how many
    there are."""
    num = 0
    for row in range(found.state[NUM]):
        if is_end(found.tokens[row], context.ends):
            continue
        first = leader(row, num_levels, found)
        situation = found.cells[first] % NUM_SITUATIONS
        at_start = context.num_output + depth == 0
        cell = factor_cell(found.levels[first], situation, at_start, found.chances[row])
        chances[row] = min(found.chances[row] * factors[cell], 0.9999)
        rows[num] = row
        num += 1
    kept = min(num, MOST)
    for i in range(kept):
        best = i
        for j in range(i + 1, num):
            if chances[rows[j]] > chances[rows[best]]:
                best = j
        rows[i], rows[best] = rows[best], rows[i]
    return kept


@inlined
def _tell_sources(row: int, i: int, features: Float32, found: Gathered) -> None:
    """Write the features of each source."""
    for source in range(NUM_SOURCES):
        at = source * OF_SOURCE
        seen = 0
        for bucket in range(NUM_BUCKETS - 1, -1, -1):
            level = source * NUM_BUCKETS + bucket
            total = found.totals[level]
            if total <= 0.0 or seen > 1:
                continue
            if seen == 1:
                features[i, at + 3] = found.counts[level, row] / total
            else:
                top = np.float32(0.0)
                for other in range(found.state[NUM]):
                    top = max(top, found.counts[level, other])
                features[i, at] = bucket
                features[i, at + 1] = np.log(total)
                features[i, at + 2] = found.counts[level, row] / total
                features[i, at + 4] = top / total
            seen += 1


@inlined
def _tell_text(token: int, i: int, context: Context, last: int, features: Float32) -> None:
    """Write how far back the candidate last followed the newest token, and how often it stands."""
    own = context.own
    times = 0
    for at in range(own.size - 2, max(-1, own.size - LOOK_BACK), -1):
        if own.text[0, at + 1] == token:
            times += 1
            if own.text[0, at] == last and np.isnan(features[i, OWN + 10]):
                features[i, OWN + 10] = own.size - at
    features[i, OWN + 11] = times


@borrowing
def _describe(
    context_fields: ContextFields,
    trusts: TrustsFields,
    scratch: GatheredFields,
    path: Int32,
    place: tuple[int, int],
    chances: Float64,
    rows: Int32,
    told: tuple[Int32, Float32],
) -> int:
    """Write tokens int32 [MOST] and features float32 [MOST, .] into `told`; returns how many."""
    context, found = context_of(context_fields), Gathered(*scratch)
    weights, factors = trusts
    tokens, features = told
    depth = path.shape[0]
    for i in range(depth):
        found.path[i] = path[depth - 1 - i]
    num_levels = gather(context, place[0], place[1], depth, found)
    blend(weights, num_levels, found)
    kept = _rank(context, depth, num_levels, factors, chances, rows, found)
    for i in range(kept):
        row = rows[i]
        tokens[i] = found.tokens[row]
        for column in range(features.shape[1]):
            features[i, column] = np.nan
        _tell_sources(row, i, features, found)
        leading = found.levels[leader(row, num_levels, found)]
        features[i, OWN] = found.chances[row]
        features[i, CHANCE] = chances[row]
        features[i, OWN + 2] = i
        features[i, OWN + 3] = leading // NUM_BUCKETS
        features[i, OWN + 4] = leading % NUM_BUCKETS
        features[i, OWN + 5] = chances[rows[0]]
        features[i, OWN + 6] = chances[rows[1]] if kept > 1 else 0.0
        features[i, OWN + 7] = found.state[NUM]
        features[i, OWN + 8] = context.num_output + depth
        features[i, OWN + 9] = depth
        _tell_text(tokens[i], i, context, found.path[0], features)
    return kept


def describe(
    drafter: AutoDrafter, session: AutoSession, path: Sequence[int]
) -> tuple[Int32, Float32]:
    """(tokens, features [., NUM_FEATURES], nan where there is none) of the likeliest candidates
    behind a path of drafted tokens, the likeliest first."""
    state, length = session.place
    index = drafter.automaton
    for token in path if index.num_states else ():
        state, length = automaton_step(index.states, index.edges, state, length, token)
    told = np.zeros(MOST, np.int32), np.zeros((MOST, NUM_FEATURES), np.float32)
    num = _describe(
        session.context(),
        drafter.trust.fields,
        drafter.workspace.gathered,
        np.asarray(path, np.int32),
        (state, length),
        np.zeros(MAX_CANDIDATES, np.float64),
        np.zeros(MAX_CANDIDATES, np.int32),
        told,
    )
    return told[0][:num], told[1][:num]
