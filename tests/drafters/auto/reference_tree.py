"""The tree of `auto` in plain Python: contexts are counted by looking at every position.

Own text and a corpus of outputs without prompts; short texts, so that no bound of a look-up is
reached.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np

from drafters.auto.cells import (
    BASE_CHANCE,
    CORPUS,
    MAX_MATCH,
    NUM_BUCKETS,
    NUM_SITUATIONS,
    OUTPUT,
    PROMPT,
    cell_of,
    factor_cell,
    length_bucket,
)
from drafters.auto.trust import Trust
from drafters.corpus_file import START

Counts = dict[tuple[int, int], tuple[float, Counter[int]]]
"""(source, bucket) -> how often the context occurred, and what followed it."""


def _suffix(text: Sequence[int], end: int, context: Sequence[int], most: int) -> int:
    """Length of the common suffix of text[:end] and context."""
    length = 0
    while length < min(end, len(context), most) and text[end - 1 - length] == context[-1 - length]:
        length += 1
    return length


def _own_counts(prompt: Sequence[int], output: Sequence[int], path: Sequence[int]) -> Counts:
    text = [*prompt, *output]
    context = [*text, *path]
    exact: Counts = {}
    for end in range(1, len(text)):
        length = _suffix(text, end, context, MAX_MATCH)
        if length:
            source = PROMPT if end < len(prompt) else OUTPUT
            at = (source, length_bucket(length))
            total, followed = exact.get(at, (0.0, Counter()))
            exact[at] = (total + 1.0, followed + Counter([text[end]]))
    # A context also occurs wherever a longer one does.
    counts: Counts = {}
    for source, bucket in exact:
        deeper = [v for (s, b), v in exact.items() if s == source and b >= bucket]
        followed = sum((found for _, found in deeper), Counter())
        counts[source, bucket] = (sum(total for total, _ in deeper), followed)
    return counts


def _corpus_counts(documents: Sequence[Sequence[int]], context: Sequence[int]) -> Counts:
    texts = [[START, *document] for document in documents]
    places = [(text, end) for text in texts for end in range(1, len(text) + 1)]
    longest = max(_suffix(text, end, context, len(context)) for text, end in places)
    counts: Counts = {}
    seen = 0
    for length in range(longest, -1, -1):
        ends = [place for place in places if _suffix(*place, context, length) == length]
        if len(ends) == seen:
            continue  # the same occurrences as a longer context: the automaton has one state
        seen = len(ends)
        at = (CORPUS, length_bucket(length))
        if at not in counts:
            if length == 0:  # every first token counts as following nothing
                followed = Counter(token for text in texts for token in text)
            else:
                followed = Counter(text[end] for text, end in ends if end < len(text))
            followed.pop(START, None)
            counts[at] = (float(len(ends)), followed)
    return counts


def _levels(counts: Counts, cover: int) -> list[tuple[int, int, float, Counter[int]]]:
    """(level, trust cell, total, followed), longest context first."""
    longest = {
        source: max((b for s, b in counts if s == source and b), default=0)
        for source in (PROMPT, CORPUS)
    }
    found = []
    for bucket in range(NUM_BUCKETS - 1, -1, -1):
        for source in (OUTPUT, PROMPT, CORPUS):
            if (source, bucket) not in counts:
                continue
            total, followed = counts[source, bucket]
            if source == CORPUS and bucket > 0:
                covers = bucket >= length_bucket(cover + 1)
            else:
                covers = cover > 0 and bucket >= length_bucket(cover)
            rival = longest[CORPUS if source == PROMPT else PROMPT]
            situation = int(covers) + (0 if not rival else 4 if rival >= bucket else 2)
            level = source * NUM_BUCKETS + bucket
            top = max(followed.values(), default=0)
            cell = cell_of(level, total, top / total, situation)
            found.append((level, cell, total, followed))
    return found


def chances(
    prompt: Sequence[int],
    output: Sequence[int],
    path: Sequence[int],
    documents: Sequence[Sequence[int]],
    trust: Trust,
) -> dict[int, float]:
    """The corrected chance of every next token."""
    counts = _own_counts(prompt, output, path)
    if documents:
        counts |= _corpus_counts(documents, [START, *output, *path])
    levels = _levels(counts, len(output) + len(path))
    claimed: dict[int, float] = {t: 0.0 for _, _, _, followed in levels for t in followed}
    # In the blend's float32: default trusts of 0.975 and 0.84 leave 0.004, which is less or not.
    left = np.float32(1.0)
    for _, cell, total, followed in levels:
        weight = np.float32(trust.weights[cell])
        for token, count in followed.items():
            claimed[token] += float(left) * float(weight) * count / total
        left *= np.float32(1.0) - weight
        if float(left) < 0.004:
            break
    corrected = {}
    for token, chance in claimed.items():
        chance += float(left) * BASE_CHANCE
        level, cell, _, _ = next(found for found in levels if token in found[3])
        at_start = not output and not path
        factor = trust.factors[factor_cell(level, cell % NUM_SITUATIONS, at_start, chance)]
        corrected[token] = min(chance * float(factor), 0.9999)
    return corrected


def grow(
    prompt: Sequence[int],
    output: Sequence[int],
    documents: Sequence[Sequence[int]],
    trust: Trust,
    limits: tuple[int, int, float],
    ends: Sequence[int] = (),
) -> dict[tuple[int, ...], float]:
    """Survival of every path of the tree."""
    budget, max_depth, least = limits
    grown: dict[tuple[int, ...], float] = {}
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while waiting and len(grown) <= budget:
        survival, path = heapq.heappop(waiting)
        grown[path] = -survival
        if len(path) < max_depth:
            for token, chance in chances(prompt, output, path, documents, trust).items():
                if -survival * chance >= least and token not in ends:
                    heapq.heappush(waiting, (survival * chance, (*path, token)))
    del grown[()]
    return grown
