"""How good the model's own outputs are beside the data's, and what would make them better."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from server.commands.quality import estimate, exact, f1, repetition

_STOPS = ("\n\n", "\n", "###", "</s>", ";")
_FEW = 20  # outputs below which nothing is said of the model
_BETTER = 0.05  # what a stop must add to the mean F1 to be suggested
_FAILS = 0.2  # mean F1 below which the model does not do the task
_LOOPS = 0.5  # repetition from which on an output goes round in a circle
_SHOWN = 3
_MAX_TEXT = 90


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt's output beside the data's. hit_max: whether only max_tokens ended it."""

    gold: str
    output: str
    hit_max: bool


def quality(
    compared: Sequence[Compared], *, stops: Sequence[str], can_chat: bool
) -> dict[str, Any]:
    """Figures, examples and suggestions, as plain values; {} where there is nothing to compare.

    stops: the task's. can_chat: the model has a chat template, and the prompts are plain text.
    """
    if not compared:
        return {}
    scores = [f1(c.gold, c.output) for c in compared]
    right = estimate([exact(c.gold, c.output) for c in compared])
    overlap = estimate(scores)
    at_limit = sum(c.hit_max for c in compared) / len(compared)
    looping = sum(repetition(c.output) >= _LOOPS for c in compared) / len(compared)
    begins = sum(c.output.split()[:2] == c.gold.split()[:2] for c in compared) / len(compared)
    stop, with_stop = _best_stop(compared, overlap.mean)
    best_mean = max(overlap.mean, with_stop)
    fails = len(compared) >= _FEW and best_mean < _FAILS
    worst = sorted(range(len(compared)), key=lambda i: scores[i])
    shown = [compared[worst[i * (len(worst) - 1) // max(1, _SHOWN - 1)]] for i in range(_SHOWN)]
    return {
        "compared": len(compared),
        "exact_match": _interval(right),
        "f1": _interval(overlap),
        "begins_like_the_data": round(begins, 3),
        "hit_max_tokens": round(at_limit, 3),
        "repeats_itself": round(looping, 3),
        "does_the_task": not fails,
        "suggestions": list(_suggestions(stop, stops, with_stop, at_limit, fails, can_chat)),
        "examples": [{"data": c.gold, "model": c.output} for c in dict.fromkeys(shown)],
    }


def _interval(found: Any) -> dict[str, float]:
    return {
        "mean": round(found.mean, 3), "low": round(found.low, 3), "high": round(found.high, 3)
    }  # fmt: skip


def _best_stop(compared: Sequence[Compared], mean: float) -> tuple[str | None, float]:
    """The stop string that brings the outputs closest to the data, and the mean F1 with it."""
    best: tuple[str | None, float] = (None, mean)
    for stop in _STOPS:
        if any(stop in c.gold.strip() for c in compared):
            continue
        cut = [f1(c.gold, c.output.lstrip().partition(stop)[0]) for c in compared]
        if sum(cut) / len(cut) >= best[1] + _BETTER:
            best = (stop, sum(cut) / len(cut))
    return best


def _suggestions(
    stop: str | None,
    stops: Sequence[str],
    with_stop: float,
    at_limit: float,
    fails: bool,
    can_chat: bool,
) -> Iterable[str]:
    if stop is not None and stop not in stops:
        # As a shell takes it: within plain quotes \n stays two letters.
        typed = f"--stop $'{stop.encode('unicode_escape').decode()}'"
        yield f"stop: {json.dumps([stop])} would bring F1 to {with_stop:.0%} ({typed})"
    if at_limit > 0.1:
        yield (
            f"{at_limit:.0%} of the outputs were ended by max_tokens alone: "
            + ("with that stop they would end" if stop is not None else "give a stop, or raise it")
        )
    if can_chat and (fails or with_stop < 0.5):
        yield (
            "the model has a chat template and these prompts are plain text: give the data as "
            "messages"
        )
    if fails:
        yield "train the model on the task (tailor tasks train), or put examples into the prompt"


def quality_lines(found: dict[str, Any]) -> list[str]:
    """The figures as lines for people to read: at most 100 columns, examples side by side."""
    if not found:
        return []
    right, overlap = found["exact_match"], found["f1"]
    lines = [
        f"Quality: {found['compared']} outputs beside the data's: exact match {right['mean']:.0%} "
        f"({right['low']:.0%} to {right['high']:.0%}),",
        f"     F1 {overlap['mean']:.0%} ({overlap['low']:.0%} to {overlap['high']:.0%}); "
        f"{found['begins_like_the_data']:.0%} begin like the data, {found['hit_max_tokens']:.0%} "
        f"hit max_tokens, {found['repeats_itself']:.0%} repeat themselves.",
    ]
    if not found["does_the_task"]:
        lines.append(
            "     The model does not do this task: the speedups below are those of wrong answers."
        )
    lines += [f"     Try: {line}." for line in found["suggestions"]]
    for example in found["examples"]:
        lines.append(f"     data   {_short(example['data'])}")
        lines.append(f"     model  {_short(example['model'])}")
    return lines


def _short(text: str) -> str:
    shown = json.dumps(text, ensure_ascii=False)[1:-1]
    return shown if len(shown) <= _MAX_TEXT else f"{shown[:_MAX_TEXT]} ..."
