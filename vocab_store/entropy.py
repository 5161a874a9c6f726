"""How concentrated a task's outputs are: the measures by which TASC (arXiv 2602.24174) chooses.

H_1 = -sum p ln p and H_2 = -ln sum p^2 (Renyi, order 2; the paper's predictor of run time: a
higher H_2 of the output tokens means fewer tokens an answer), in nats; the normalised H_1 divides
by ln V. K80: the number of distinct n-grams, most frequent first, that cover 80 % of the mass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Concentration:
    """num: tokens (or n-grams) counted. num_distinct: different ones. h1, h2: nats. k80: see the
    module. normalised_h1: h1 / ln(vocab_size), 0 where no vocabulary size was given."""

    num: int
    num_distinct: int
    h1: float
    h2: float
    normalised_h1: float
    k80: int


def ngrams(texts: Iterable[Sequence[Hashable]], n: int) -> Counter[tuple[Hashable, ...]]:
    """How often each n-gram stands in the texts; none reaches over a text's end."""
    counts: Counter[tuple[Hashable, ...]] = Counter()
    for text in texts:
        counts.update(tuple(text[at : at + n]) for at in range(len(text) - n + 1))
    return counts


def measure(
    counts: Counter[tuple[Hashable, ...]], *, vocab_size: int = 0, share: float = 0.8
) -> Concentration:
    """The measures of a distribution given by counts. Empty counts are all zeros."""
    total = sum(counts.values())
    if total == 0:
        return Concentration(0, 0, 0.0, 0.0, 0.0, 0)
    times = sorted(counts.values(), reverse=True)
    h1 = -math.fsum(t / total * math.log(t / total) for t in times)
    h2 = -math.log(math.fsum((t / total) ** 2 for t in times))
    covered = k80 = 0
    for k80, t in enumerate(times, 1):  # noqa: B007
        covered += t
        if covered >= share * total:
            break
    normalised = h1 / math.log(vocab_size) if vocab_size > 1 else 0.0
    return Concentration(total, len(times), h1, h2, normalised, k80)
