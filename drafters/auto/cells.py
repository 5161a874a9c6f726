"""Cells: into which kinds of context evidence is sorted, and the bounds of a look-up.

A *level* is a source with a bucket of match lengths. A *trust cell* is a level with how often its
context occurred, how far its next tokens agree, and the situation: whether the match covers the
whole output, and whether a rival source matches longer. A *claim cell* is the leading context of
a candidate with what the blend claims for it.
"""

from __future__ import annotations

from drafters.jit import compiled

SOURCES = (
    "corpus", "prompt", "output", "retrieved", "prediction",
    "logits", "copied", "prior", "template",
)  # fmt: skip
CORPUS, PROMPT, OUTPUT, RETRIEVED, PREDICTION, LOGITS, COPIED, PRIOR, TEMPLATE = range(9)
NUM_SOURCES = 9
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
MAX_RETRIEVED_VISITS = (
    24  # the same in retrieved outputs; the most similar is last, so it is seen first
)
MAX_LIKELY_MATCH = 3  # longest contexts whose likeliest ids are kept
MAX_CANDIDATES = 208  # distinct next tokens per node
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
def prior_cell(level: int, top: float, situation: int) -> int:
    """The trust cell of the prior, whose likeliest id has the chance `top`."""
    if top < 0.35:
        return cell_of(level, 1.0 if top < 0.1 else (2.0 if top < 0.2 else 3.0), 0.0, situation)
    if top < 0.8:
        return cell_of(level, 5.0 if top < 0.5 else 10.0, 0.7, situation)
    return cell_of(level, 30.0, 1.0, situation)


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
