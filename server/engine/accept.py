"""What becomes of the ids of a run: where they end a choice, and what is counted of them.

trees.follow walks the tree along the drawn ids (docs/DESIGN.md 1.1: only integers are compared) and
ends the run at EOS, stop ids, max_tokens and the context's limit; `cut` ends it at a stop string
and where a grammar's text is complete. Usage, logprobs, counts and learning all come from the run
that they leave.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from server.engine.sequence import Sequence
from server.engine.trees import (
    END,
    END_ID,
    LENGTH,
    NUM_CHOICE_LINES,
    NUM_FOUND_LINES,
    SEAT,
    Trees,
    follow,
)
from server.types import FinishReason, StepCounts


@dataclass(frozen=True, slots=True)
class StopCut:
    """The first num_kept tokens of a run stand; why the choice ends there, if it does."""

    num_kept: int
    finish_reason: FinishReason | None = None
    stop_reason: int | bytes | None = None


def cut(sequence: Sequence, ids: SequenceOf[int], why: int) -> StopCut:
    """Where a run ends its choice.

    ids: in order, at least one, not appended yet. why: as `follow` found it: what the last one
    ends. The sequence's matcher, if any, has taken exactly the tokens before the run; afterwards it
    has taken the kept ones too. So has the grammar's state, but for an EOS, stop id or stop string
    that ends the choice.

    Order at each token: EOS, stop id, stop string, a grammar that is complete, length. The token
    that ends the choice is kept (usage counts it); the text of an EOS or stop id, and of a stop
    string, is the API's to drop.
    """
    matcher, grammar = sequence.matcher, sequence.grammar
    num_output, min_tokens = sequence.num_output, sequence.request.sampling.min_tokens
    num_text = len(ids) - (why == END_ID)
    for i in range(num_text if matcher is not None or grammar is not None else 0):
        if matcher is not None:
            found = matcher.push(ids[i])
            if found is not None and num_output + i + 1 > min_tokens:
                return StopCut(i + 1, "stop", found)
        if grammar is not None and (not grammar.consume(ids[i]) or grammar.is_complete):
            return StopCut(i + 1, "stop", b"")
    if why == END_ID:
        return StopCut(len(ids), "stop", None if ids[-1] in sequence.eos_ids else ids[-1])
    return StopCut(len(ids), "length" if why == LENGTH else None)


def why_ended(sequence: Sequence, token: int) -> int:
    """What one more token ends, as `follow` has it. The sequence is not simple."""
    table = sequence.table
    choice = np.zeros((NUM_CHOICE_LINES, 1), np.int32)
    choice[SEAT] = sequence.seat
    found, none = np.empty((NUM_FOUND_LINES, 1), np.int32), np.empty((3, 0), np.int32)
    follow(
        table.numbers, table.blocks, table.ends, table.block_size, choice, none,
        np.array([token], np.int32), np.empty((3, 1), np.int32), found, none[:2],
        none[0],
    )  # fmt: skip
    return int(found[END, 0])


@functools.cache
def plain_step(no_draft_reason: str) -> StepCounts:
    """The StepCounts of a step without drafts: there are as many as there are reasons."""
    return StepCounts(num_steps=1, no_draft_reason=no_draft_reason)


def count_step(
    trees: Trees,
    item: int,
    accepted: SequenceOf[int],
    source_names: SequenceOf[str],
    model_s: float = 0.0,
) -> StepCounts:
    """The StepCounts of one decode step of one choice.

    trees, item: what was verified. accepted: node indexes on the accepted path that survived the
    cut. model_s: of the step.
    """
    first, end = trees.start[item : item + 2].tolist()
    if first == end:
        return plain_step(trees.why[item])
    tenths, sources, claims, depth = trees.tallies[item]
    kept_tenths, kept_sources = [0] * len(tenths), [0] * len(sources)
    of_node = trees.marks
    for node in accepted:
        kept_tenths[of_node[0][first + node]] += 1
        kept_sources[of_node[1][first + node]] += 1
    by_source = tuple(
        (source_names[s] if s < len(source_names) else source_names[0], drafted, kept)
        for s, (drafted, kept) in enumerate(zip(sources, kept_sources, strict=True))
        if drafted
    )
    drafted, kept = next((row[1:] for row in by_source if row[0] == "prediction"), (0, 0))
    num_accepted = len(accepted)
    return StepCounts(
        num_steps=1,
        num_drafts=1,
        num_drafted=end - first,
        num_accepted=num_accepted,
        accepted_by_depth=(1,) * num_accepted + (0,) * (depth - num_accepted),
        offered_by_depth=(1,) * depth,
        by_source=by_source,
        accepted_prediction_tokens=kept,
        rejected_prediction_tokens=drafted - kept,
        expected_accepted=claims,
        by_survival=tuple(
            (tenth, drafted, kept)
            for tenth, (drafted, kept) in enumerate(zip(tenths, kept_tenths, strict=True))
            if drafted
        ),
        verify_s=model_s,
    )


def sources_of(
    accepted: SequenceOf[int], num_kept: int, source: SequenceOf[int], source_names: SequenceOf[str]
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
    token_ids: SequenceOf[int],
    parents: SequenceOf[int],
    source: SequenceOf[int],
    accepted: SequenceOf[int],
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
