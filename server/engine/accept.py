"""What becomes of the drawn ids: pure functions, no engine state.

ahead.follow walks the tree along the drawn ids (docs/DESIGN.md 1.1: only integers are compared).
`cut` is the one place where EOS, stop ids, stop strings, max_tokens and the context limit end a
run; usage, logprobs, counts and learning all come from the run that `cut` leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from server.engine.grammar import GrammarState
from server.engine.stops import StopMatcher
from server.types import FinishReason, StepCounts


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends one choice.

    eos_ids, stop_ids: ids that end it (EOS empty under ignore_eos). max_output: most tokens it may
    have, the context limit included. min_tokens: up to this many tokens no stop string counts.
    """

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    max_output: int
    min_tokens: int


@dataclass(frozen=True, slots=True)
class StopCut:
    """The first num_kept tokens of a run stand; why the choice ends there, if it does."""

    num_kept: int
    finish_reason: FinishReason | None = None
    stop_reason: int | bytes | None = None


_GOES_ON = StopCut(1)  # what most steps end with


def cut(
    run: Sequence[int],
    num_output: int,
    rules: StopRules,
    matcher: StopMatcher | None,
    grammar: GrammarState | None = None,
) -> StopCut:
    """Where the run of newly drawn ids ends the choice.

    run: ids in order, at least one. num_output: tokens the choice had before. The matcher, if any,
    has taken exactly those; afterwards it has taken the kept ones too. So has the grammar's state,
    but for an EOS, stop id or stop string that ends the choice.

    Order at each token: EOS, stop id, stop string, a grammar that is complete, length. The token
    that ends the choice is kept (usage counts it); the text of an EOS or stop id, and of a stop
    string, is the API's to drop.
    """
    for i, token in enumerate(run):
        if token in rules.eos_ids:
            return StopCut(i + 1, "stop")
        if token in rules.stop_ids:
            return StopCut(i + 1, "stop", token)
        count = num_output + i + 1
        if matcher is not None:
            found = matcher.push(token)
            if found is not None and count > rules.min_tokens:
                return StopCut(i + 1, "stop", found)
        if grammar is not None and (not grammar.consume(token) or grammar.is_complete):
            return StopCut(i + 1, "stop", b"")
        if count >= rules.max_output:
            return StopCut(i + 1, "length")
    return _GOES_ON if len(run) == 1 else StopCut(len(run))


@functools.cache
def plain_step(no_draft_reason: str) -> StepCounts:
    """The StepCounts of a step without drafts: there are as many as there are reasons."""
    return StepCounts(num_steps=1, no_draft_reason=no_draft_reason)


def count_step(
    parents: Sequence[int],
    source: Sequence[int],
    accepted: Sequence[int],
    source_names: Sequence[str],
    no_draft_reason: str,
    survival: Sequence[float] = (),
    model_s: float = 0.0,
) -> StepCounts:
    """The StepCounts of one decode step of one choice.

    parents, source: of the nodes that were verified (source may be empty: all of source 0).
    accepted: node indexes on the accepted path that survived the cut. survival: the chance of each
    node as its drafter claims it (may be empty: not known). model_s: of the step.
    """
    num = len(parents)
    if num == 0:
        return plain_step(no_draft_reason)
    depths = [0] * num
    deepest = 0
    for i, parent in enumerate(parents):
        depth = 1 if parent < 0 else depths[parent] + 1
        depths[i] = depth
        if depth > deepest:
            deepest = depth
    by_source: dict[str, list[int]] = {}
    sources = source if len(source) == num else [0] * num
    for s in sources:
        name = source_names[s] if s < len(source_names) else source_names[0]
        by_source.setdefault(name, [0, 0])[0] += 1
    for i in accepted:
        s = sources[i]
        name = source_names[s] if s < len(source_names) else source_names[0]
        by_source[name][1] += 1
    prediction = by_source.get("prediction", [0, 0])
    tenths: dict[int, list[int]] = {}
    for chance in survival:
        tenths.setdefault(min(9, int(chance * 10.0)), [0, 0])[0] += 1
    if tenths:
        for i in accepted:
            tenths[min(9, int(survival[i] * 10.0))][1] += 1
    return StepCounts(
        num_steps=1,
        num_drafts=1,
        num_drafted=num,
        num_accepted=len(accepted),
        accepted_by_depth=tuple(1 if d < len(accepted) else 0 for d in range(deepest)),
        offered_by_depth=(1,) * deepest,
        by_source=tuple((name, d, a) for name, (d, a) in by_source.items()),
        accepted_prediction_tokens=prediction[1],
        rejected_prediction_tokens=prediction[0] - prediction[1],
        expected_accepted=float(sum(survival)),
        by_survival=tuple((tenth, d, a) for tenth, (d, a) in tenths.items()),
        verify_s=model_s,
    )


def sources_of(
    accepted: Sequence[int], num_kept: int, source: Sequence[int], source_names: Sequence[str]
) -> list[str]:
    """Who drafted each kept token of a run: a source's name, "" for the token nothing drafted.

    accepted: node indexes on the accepted path that survived the cut, in order; they are the
    first of the num_kept tokens. source: of every node (may be empty: all of source 0).
    """
    names = [
        source_names[s] if s < len(source_names) else source_names[0]
        for s in (source[node] if node < len(source) else 0 for node in accepted)
    ]
    return names + [""] * (num_kept - len(names))


def rejected_paths(
    token_ids: Sequence[int],
    parents: Sequence[int],
    source: Sequence[int],
    accepted: Sequence[int],
) -> list[tuple[int, int, tuple[int, ...]]]:
    """What was drafted and not accepted: (place, source, ids) of each path to a rejected leaf.

    place: index in the step's run of the token that stands where the path left it. ids: from there
    to the leaf. source: of the path's first node (`source` may be empty: all of source 0).
    """
    place = {-1: 0} | {node: i + 1 for i, node in enumerate(accepted)}
    paths: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    inner: set[int] = set()
    for node, parent in enumerate(parents):
        if node in place:
            continue
        if parent in place:
            first = source[node] if len(source) == len(parents) else 0
            paths[node] = (place[parent], first, (token_ids[node],))
        else:
            at, first, ids = paths[parent]
            paths[node] = (at, first, (*ids, token_ids[node]))
            inner.add(parent)
    return [path for node, path in paths.items() if node not in inner]


def merge_counts(a: StepCounts, b: StepCounts) -> StepCounts:
    """The sum of two StepCounts; the later reason stands."""
    if a.num_steps == 0:
        return b
    if b.num_steps == 0:
        return a
    by_source: dict[str, tuple[int, int]] = {name: (d, k) for name, d, k in a.by_source}
    for name, drafted, kept in b.by_source:
        old = by_source.get(name, (0, 0))
        by_source[name] = (old[0] + drafted, old[1] + kept)
    by_survival: dict[int, tuple[int, int]] = {tenth: (d, k) for tenth, d, k in a.by_survival}
    for tenth, drafted, kept in b.by_survival:
        old = by_survival.get(tenth, (0, 0))
        by_survival[tenth] = (old[0] + drafted, old[1] + kept)
    return StepCounts(
        num_steps=a.num_steps + b.num_steps,
        num_drafts=a.num_drafts + b.num_drafts,
        num_drafted=a.num_drafted + b.num_drafted,
        num_accepted=a.num_accepted + b.num_accepted,
        accepted_by_depth=_add(a.accepted_by_depth, b.accepted_by_depth),
        offered_by_depth=_add(a.offered_by_depth, b.offered_by_depth),
        by_source=tuple((name, d, k) for name, (d, k) in by_source.items()),
        no_draft_reason=b.no_draft_reason or a.no_draft_reason,
        accepted_prediction_tokens=a.accepted_prediction_tokens + b.accepted_prediction_tokens,
        rejected_prediction_tokens=a.rejected_prediction_tokens + b.rejected_prediction_tokens,
        expected_accepted=a.expected_accepted + b.expected_accepted,
        by_survival=tuple((tenth, d, k) for tenth, (d, k) in by_survival.items()),
        verify_s=a.verify_s + b.verify_s,
    )


def _add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    if len(a) < len(b):
        a, b = b, a
    return tuple(x + (b[i] if i < len(b) else 0) for i, x in enumerate(a))
