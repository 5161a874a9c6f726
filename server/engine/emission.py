"""Emission: turns what was drawn in a step into the tokens of one choice.

It follows the drawn ids through the tree, cuts them where the choice ends, and appends them.
Counts, draft sources and the draft session learn exactly the tokens that stand. Tokens drawn from
an `exact` slice wait for verification (exact.py); all others are verified at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from server.engine.accept import (
    StopCut,
    count_step,
    cut,
    merge_counts,
    plain_step,
    rejected_paths,
    sources_of,
)
from server.engine.ahead import follow
from server.engine.batch import NO_TOKEN_LEFT, Int32
from server.engine.drafting import CheckedTree
from server.engine.exact import ExactVerifier, Outcome
from server.engine.results import Results
from server.engine.sequence import Sequence
from server.engine.sessions import DraftSessions
from server.engine.slices import SliceBook


@dataclass(slots=True)
class _Run:
    """Drawn ids in order: those of the accepted nodes and the one after them. path: the accepted
    nodes. draws: the index of each id's draw."""

    ids: list[int]
    draws: list[int]
    path: list[int]

    def cut(self, num: int) -> None:
        """Keep the first num ids; the last of them may be one that no node proposed."""
        del self.ids[num:], self.draws[num:], self.path[num:]


def _run_of(tree: CheckedTree | None, draw: int, drawn_ids: list[int]) -> _Run:
    """The run of one choice. draw: index of its root's draw."""
    if tree is None:
        return _Run([drawn_ids[draw]], [draw], [])
    nodes = drawn_ids[draw + 1 : draw + 1 + len(tree.token_ids)]
    path = follow(drawn_ids[draw], tree.token_ids, tree.parents, nodes)
    draws = [draw, *(draw + 1 + node for node in path)]
    return _Run([drawn_ids[d] for d in draws], draws, path)


class KvMoves:
    """Which KV entries must be copied because accepted nodes do not lie where their positions are.
    The likeliest path lies first, so that usually nothing moves."""

    def __init__(self) -> None:
        self._src: list[int] = []
        self._dst: list[int] = []

    def add(self, sequence: Sequence, accepted: list[int]) -> None:
        """Note an accepted path. Called before num_computed moves on by its nodes."""
        size, table, first = sequence.block_size, sequence.table, sequence.num_computed
        for i, node in enumerate(accepted):
            if node != i:
                at, to = first + node, first + i
                self._src.append(int(table[at // size]) * size + at % size)
                self._dst.append(int(table[to // size]) * size + to % size)

    def take(self) -> tuple[Int32, Int32] | None:
        """int32 slots (from, to) since the last call, or None."""
        src, dst = self._src, self._dst
        if not src:
            return None
        self._src, self._dst = [], []
        return np.array(src, np.int32), np.array(dst, np.int32)


class Emission:
    """Appends drawn tokens to sequences. `moves`: what the runner has to copy after the step."""

    def __init__(self, slices: SliceBook, sessions: DraftSessions, exact: ExactVerifier) -> None:
        self.moves = KvMoves()
        self._slices = slices
        self._sessions = sessions
        self._exact = exact

    def emit(
        self, sequence: Sequence, tree: CheckedTree | None, draw: int, results: Results
    ) -> Outcome | None:
        """Emit what was drawn for one choice, whose root draw is `draw`.

        None: its tokens are unverified, or wait to be drawn again.
        """
        head = sequence.head
        if tree is None and head is None and sequence.grammar is None and results.ids[draw] >= 0:
            return self._emit_one(sequence, draw, results)
        run = _run_of(tree, draw, results.ids)
        waits = head is not None and head.mode == "exact" and head.proposes
        is_due = min(run.ids) < 0
        if is_due:
            # What comes before the failed draw stands, as it would without drafts, and its last
            # token is the next step's root, where the draw fails again. Tokens of a slice may be
            # wrong: they are checked first.
            if run.ids[0] < 0 and not (waits and sequence.num_output > sequence.num_verified):
                return Outcome(sequence, StopCut(0), results.problem(draw))
            run.cut(next(i for i, token in enumerate(run.ids) if token < 0))
            del run.path[max(0, len(run.ids) - 1) :]
            if not run.ids:
                sequence.num_computed -= 1
                self._exact.add(sequence, StopCut(0), True)
                return None
        end = cut(run.ids, sequence.num_output, sequence.rules, sequence.matcher, sequence.grammar)
        if sequence.grammar is not None and sequence.grammar.problem:
            if not waits:
                return Outcome(sequence, end, NO_TOKEN_LEFT)
            # A wrong token may have caused it: tokens are checked before anything ends.
            end, is_due = StopCut(end.num_kept), True
        run.cut(end.num_kept)
        if waits:
            self._slices.keep(sequence, run.draws, len(run.ids))
        elif sequence.request.sampling.num_logprobs is not None:
            sequence.logprobs.extend(results.logprob(d) for d in run.draws)
        if sequence.session is not None:
            likely = results.likely(draw, 0 if tree is None else len(tree.token_ids))
            self._sessions.note_likely(sequence, tree, likely)
        self._append(sequence, tree, run, results.model_s)
        if waits:
            self._exact.add(sequence, end, is_due)
            return None
        if head is not None and head.mode == "exact":
            self._slices.learn(sequence, run.ids)
        sequence.verify(sequence.num_output)
        return Outcome(sequence, end)

    def _emit_one(self, sequence: Sequence, draw: int, results: Results) -> Outcome:
        """`emit` of the one token of a step without drafts, drawn from the full head without a
        grammar: what most steps are, in less of the host's time."""
        ids = [results.ids[draw]]
        end = cut(ids, sequence.num_output, sequence.rules, sequence.matcher)
        request = sequence.request
        if request.sampling.num_logprobs is not None:
            sequence.logprobs.append(results.logprob(draw))
        if sequence.session is not None:
            self._sessions.note_likely(sequence, None, results.likely(draw, 0))
        if request.report_sources:
            sequence.token_sources.append("")
        sequence.counts = merge_counts(sequence.counts, plain_step(sequence.no_draft_reason))
        sequence.num_steps += 1
        sequence.append(ids)
        self._sessions.learn(sequence)
        sequence.verify(sequence.num_output)
        return Outcome(sequence, end)

    def _append(
        self, sequence: Sequence, tree: CheckedTree | None, run: _Run, model_s: float
    ) -> None:
        """Append the tokens of a run, count them, and teach the session."""
        source = [] if tree is None else tree.tree.source.tolist()
        if sequence.request.report_sources:
            sequence.token_sources += sources_of(run.path, len(run.ids), source, sequence.sources)
        if tree is None:
            counts = plain_step(sequence.no_draft_reason)
        else:
            counts = count_step(
                tree.parents,
                source,
                run.path,
                sequence.sources,
                sequence.no_draft_reason,
                tree.survival.tolist(),
                model_s,
            )
        sequence.counts = merge_counts(sequence.counts, counts)
        self._slices.count_step(sequence)
        if tree is not None:
            if sequence.request.report_rejected:
                _note_rejected(sequence, tree, run)
            self.moves.add(sequence, run.path)
            sequence.num_computed += len(run.path)
        sequence.num_steps += 1
        sequence.append(run.ids)
        self._sessions.learn(sequence, tree, run.path)


def _note_rejected(sequence: Sequence, tree: CheckedTree, run: _Run) -> None:
    """Note what was drafted beside the run's tokens. Called before they are appended."""
    start, names = sequence.num_output, sequence.sources
    source = tree.tree.source.tolist()
    sequence.rejected_drafts.extend(
        (start + place, names[first] if first < len(names) else names[0], ids)
        for place, first, ids in rejected_paths(tree.token_ids, tree.parents, source, run.path)
        if place < len(run.ids)  # what lies past the end of the answer is left out
    )
