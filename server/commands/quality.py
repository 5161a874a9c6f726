"""How good outputs are beside the data's: exact match, token F1, ROUGE-L, JSON fields.

    exact    the same text but for white space
    f1       words in common, as SQuAD counts them (without its removal of articles)
    rouge_l  F1 of the longest common subsequence of words (Lin 2004, section 3)
    json     F1 of the (path, value) pairs of two JSON texts; 0 where the output is no JSON

Words are runs of letters, digits and _, in lower case. Every score lies in 0..1. Intervals are
percentile bootstraps over the examples, with a fixed seed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_WORD = re.compile(r"\w+")
_NUM_RESAMPLES = 1000
_LOOP = 4  # words of a run whose return counts as repetition


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval over num examples."""

    mean: float
    low: float
    high: float
    num: int


def exact(gold: str, output: str) -> float:
    """1 for the same text but for white space at its ends and the length of gaps."""
    return float(gold.split() == output.split())


def f1(gold: str, output: str) -> float:
    """Harmonic mean of the shares of words that the other text has too."""
    ours, theirs = _words(output), _words(gold)
    return _f1((Counter(ours) & Counter(theirs)).total(), len(ours), len(theirs))


def rouge_l(gold: str, output: str) -> float:
    """F1 of the longest common subsequence of words."""
    ours, theirs = _words(output), _words(gold)
    places: Counter[str] = Counter()  # a bit for each place of the word in the other text
    for at, word in enumerate(theirs):
        places[word] += 1 << at
    every = free = (1 << len(theirs)) - 1  # a place loses its bit where the subsequence grows
    for word in ours:
        hits = free & places[word]
        free = (free + hits | free - hits) & every
    return _f1((every ^ free).bit_count(), len(ours), len(theirs))


def json_fields(gold: str, output: str) -> float:
    """F1 of the (path, value) pairs; the order of an object's members does not matter."""
    try:
        theirs = Counter(_pairs(json.loads(gold)))
        ours = Counter(_pairs(json.loads(output)))
    except (ValueError, RecursionError):
        return 0.0
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


METRICS: dict[str, Callable[[str, str], float]] = {
    "exact": exact,
    "f1": f1,
    "rouge_l": rouge_l,
    "json": json_fields,
}


def repetition(output: str) -> float:
    """Share of an output's runs of four words that repeat earlier ones."""
    words = _words(output)
    runs = [tuple(words[i : i + _LOOP]) for i in range(len(words) - _LOOP + 1)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def estimate(scores: Sequence[float]) -> Estimate:
    """Mean and 95 % interval. Raises ValueError for no scores."""
    import numpy as np

    if not scores:
        raise ValueError("no scores")
    num, draw = len(scores), np.random.default_rng(0).multinomial
    values, counts = np.unique(scores, return_counts=True)
    means = sorted(float(draw(num, counts / num) @ values) / num for _ in range(_NUM_RESAMPLES))
    low, high = means[int(0.025 * _NUM_RESAMPLES)], means[int(0.975 * _NUM_RESAMPLES)]
    return Estimate(sum(scores) / num, low, high, num)


def on_a_line(text: str | None, most: int) -> str:
    """A text as one line shows it, so many characters at most."""
    if text is None:
        return "(none)"
    shown = json.dumps(text, ensure_ascii=False)[1:-1]
    return shown if len(shown) <= most else f"{shown[:most]} ..."


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _f1(num_common: int, num_ours: int, num_theirs: int) -> float:
    if not num_ours and not num_theirs:
        return 1.0
    return 2 * num_common / (num_ours + num_theirs)


def _pairs(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _pairs(inner, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for inner in value:  # the place in a list is no part of the path
            yield from _pairs(inner, f"{path}[]")
    else:
        yield path, json.dumps(value)
