"""How concentrated a task's outputs are: the measures by which TASC (arXiv 2602.24174) chooses.

Of any n-grams: H_1 = -sum p ln p and H_2 = -ln sum p^2 (Renyi, order 2), in nats; the normalised
H_1 divides by ln V; K80 is the number of distinct n-grams, most frequent first, that cover 80 % of
the mass. Table 1 compares word bigrams of outputs and of inputs: outputs that are much more
concentrated than what they answer are what the paper's methods live on. H_2 of the output *tokens*
(without the one that ends every output, which is no choice of the tokenizer's) predicts run time: a
higher H_2 means fewer tokens an answer.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

_CJK = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Concentration:
    """num: tokens (or n-grams) counted. h1, h2: nats. k80: see the module. normalised_h1: h1 /
    ln(vocab_size), 0 where no vocabulary size was given."""

    num: int
    h1: float
    h2: float
    normalised_h1: float
    k80: int

    @property
    def bits(self) -> float:
        """h1 in bits."""
        return self.h1 / math.log(2)


@dataclass(frozen=True, slots=True)
class WordBigrams:
    """Table 1's line: the word bigrams of a task's outputs and of its inputs.

    delta_h: how much lower the outputs' entropy is, in nats. ratio: how many times fewer bigrams
    cover 80 % of them.
    """

    outputs: Concentration
    inputs: Concentration

    @property
    def delta_h(self) -> float:
        """Nats."""
        return self.inputs.h1 - self.outputs.h1

    @property
    def ratio(self) -> float:
        """Of the numbers K80."""
        return self.inputs.k80 / max(1, self.outputs.k80)


def ngrams(texts: Iterable[Sequence[Hashable]], n: int) -> Counter[tuple[Hashable, ...]]:
    """How often each n-gram stands in the texts; none reaches over a text's end."""
    counts: Counter[tuple[Hashable, ...]] = Counter()
    for text in texts:
        counts.update(tuple(text[at : at + n]) for at in range(len(text) - n + 1))
    return counts


def measure(counts: Iterable[int], *, vocab_size: int = 0) -> Concentration:
    """The measures of a distribution given by counts, each above 0. Of no counts all are zero."""
    times = sorted(counts, reverse=True)
    total = sum(times)
    if total == 0:
        return Concentration(0, 0.0, 0.0, 0.0, 0)
    # Not -fsum(...): of one n-gram alone that is -0.0, and told as -0.00.
    h1 = 0.0 - math.fsum(t / total * math.log(t / total) for t in times)
    h2 = 0.0 - math.log(math.fsum((t / total) ** 2 for t in times))
    k80 = bisect_left(list(accumulate(times)), 0.8 * total) + 1
    normalised = h1 / math.log(vocab_size) if vocab_size > 1 else 0.0
    return Concentration(total, h1, h2, normalised, k80)


def words(text: str) -> list[str]:
    """Lower-cased words, single punctuation marks, and Chinese characters one by one."""
    return _WORD.findall(text.lower())


def word_bigrams(inputs: Sequence[str], outputs: Sequence[str]) -> WordBigrams:
    """Table 1 of a task's texts. What all inputs begin and end with, a template, is left out."""
    own = _without_template([words(text) for text in inputs])
    written = (words(text) for text in outputs)
    return WordBigrams(measure(ngrams(written, 2).values()), measure(ngrams(own, 2).values()))


def _without_template(texts: Sequence[list[str]]) -> list[list[str]]:
    if len(texts) < 2:
        return list(texts)
    least = min(map(len, texts))

    def shared(text: list[str], other: list[str], most: int) -> int:
        """Words that two texts begin with alike."""
        pairs = enumerate(zip(text[:most], other[:most], strict=False))
        return next((i for i, (a, b) in pairs if a != b), most)

    start = end = least
    for text in texts[1:]:
        start = shared(texts[0], text, start)
        end = shared(texts[0][::-1], text[::-1], min(end, least - start))
    return [text[start : len(text) - end] for text in texts]


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of (x, y): 1 where they rise together, -1 where one falls as the other rises;
    None where all of one are equal."""
    each = np.array(pairs, np.float64).reshape(-1, 2).T
    x, y = (np.sign(np.subtract.outer(v, v)) for v in each)  # of every two, both ways
    scale = float((x * x).sum() * (y * y).sum())
    return float((x * y).sum()) / math.sqrt(scale) if scale else None


def direction(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The share of neighbouring (x, y) whose y falls where x rises; None where no x rises."""
    rising = [d < b for (a, b), (c, d) in pairwise(pairs) if c > a]
    return sum(rising) / len(rising) if rising else None
