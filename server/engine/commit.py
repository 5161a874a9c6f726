"""Commit: what a step drew becomes tokens of its choices, and Deltas.

    commit(rows, trees, built, results) -> Outcomes, and Deltas of those that only go on

Drawn ids are followed through all trees at once (trees.follow). Choices whose tokens need nothing
but numbers are done with that. Of the others each is looked at: stop strings, grammar, logprobs,
what is told of drafts; tokens of an `exact` slice wait for verification (exact.py), all others are
verified at once. Counts, draft sources and the draft session learn exactly the tokens that stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from drafters.arrays import Int32, Int32x2
from server.engine.accept import (
    StopCut,
    count_step,
    cut,
    merge_counts,
    plain_step,
    rejected_paths,
    sources_of,
)
from server.engine.batch import NO_TOKEN_LEFT, Batch
from server.engine.build import Built
from server.engine.draft import Drafts
from server.engine.exact import ExactVerifier, Outcome
from server.engine.plan import Rows, Scheduler
from server.engine.results import Results
from server.engine.sequence import Sequence, Status
from server.engine.slices import SliceBook
from server.engine.trees import (
    DRAW,
    EMITTED,
    FAILED,
    NUM_FOUND_LINES,
    PUBLISH,
    SEAT,
    TRIM,
    Trees,
    follow,
)
from server.types import Delta, FinishReason, Request, StepCounts, TokenLogprob

_NO_COUNTS = StepCounts()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ends. Without a finish_reason it goes on."""

    finish_reason: FinishReason | None = None
    stop_reason: int | bytes | None = None
    error: str | None = None
    error_code: str | None = None


GOES_ON = Ending()


@dataclass(slots=True)
class _Run:
    """The ids of one choice that stand, in order: those of the accepted nodes and the one after
    them. draws: of each id. path: the accepted nodes. why: what the last one ends (trees.END)."""

    ids: list[int]
    draws: list[int]
    path: list[int]
    why: int

    def cut(self, num: int) -> None:
        """Keep the first num ids; the last of them may be one that no node proposed."""
        del self.ids[num:], self.draws[num:], self.path[num:]


class Committer:
    """Writes what a step changes of its choices. deltas: those not handed out yet. moves: slots
    (from, to) that the runner has to copy after the step, int32 [2, n]: accepted nodes that do not
    lie where their positions are. The likeliest path lies first, so that usually there are none."""

    def __init__(
        self,
        scheduler: Scheduler,
        slices: SliceBook,
        drafts: Drafts,
        exact: ExactVerifier,
    ) -> None:
        self.deltas: list[Delta] = []
        self.moves: Int32x2 = np.empty((2, 0), np.int32)
        self._table = scheduler.table
        self._scheduler = scheduler
        self._slices = slices
        self._drafts = drafts
        self._exact = exact

    def commit(self, rows: Rows, trees: Trees, built: Built, results: Results) -> Iterator[Outcome]:
        """Emit what a step drew. Nothing has ended since it was planned. Each Outcome is to be
        concluded before the next is asked for: a choice that fails takes the others of its request
        with it."""
        table, choices = self._table, built.choices
        table.num_computed[rows.seats] = rows.start + rows.num
        if not rows.is_plain:
            yield from self._scores(rows, built, results)
        num_nodes = trees.nodes.shape[1]
        runs: Int32x2 = np.empty((3, choices.shape[1] + num_nodes), np.int32)
        found: Int32x2 = np.empty((NUM_FOUND_LINES, choices.shape[1]), np.int32)
        moves: Int32x2 = np.empty((2, num_nodes), np.int32)
        came: Int32 = np.empty(num_nodes, np.int32)
        num_moves = follow(
            table.numbers, table.blocks, table.ends, table.block_size, choices, trees.nodes,
            results.drawn.token_ids, runs, found, moves,
            came,
        )  # fmt: skip
        self.moves = moves[:, :num_moves]
        if num_nodes:
            self._drafts.observe(rows, trees, came)
        num_tokens = table.num_tokens[choices[SEAT]].tolist()
        ids, draws, nodes = runs.tolist()
        for c, (at, num, num_accepted, why, todo) in enumerate(found.T.tolist()):
            sequence, item = built.drawing[c], built.item_of[c]
            if sequence.status is Status.FINISHED:  # another choice of its request has failed
                continue
            if todo & EMITTED:
                own = ids[at : at + num]
                sequence.ids[num_tokens[c] - num : num_tokens[c]] = own
                path = nodes[at : at + num_accepted]
                if trees.why[item]:
                    counts = plain_step(trees.why[item])
                else:
                    counts = count_step(trees, item, path, sequence.sources, results.model_s)
                request = sequence.request
                self.deltas.append(
                    Delta(request.request_id, sequence.choice_id, tuple(own), counts=counts)
                )
                if todo & PUBLISH:
                    self._scheduler.publish(sequence)
                if todo & TRIM:
                    self._scheduler.trim(sequence)
                if sequence.session is not None:
                    self._drafts.teach(sequence, own, trees, item, path, draws[at], results)
                continue
            run = _Run(ids[at : at + num], draws[at : at + num], nodes[at : at + num_accepted], why)
            leader = rows.sequences[item]
            draw = int(choices[DRAW, c])
            if sequence is leader:
                outcome = self._emit(sequence, (trees, item), run, draw, results)
                if outcome is not None:
                    yield outcome
            elif leader.status is Status.RUNNING:
                yield from self._fork(leader, sequence, (trees, item), run, draw, results)

    def _fork(
        self,
        leader: Sequence,
        child: Sequence,
        of_item: tuple[Trees, int],
        run: _Run,
        draw: int,
        results: Results,
    ) -> Iterator[Outcome]:
        """A further choice has drawn its own first token from the prompt's last row; it runs alone
        from now on."""
        leader.siblings = []
        self._scheduler.publish(leader)
        child.prompt_logprobs = leader.prompt_logprobs
        child.num_cached_tokens = leader.num_cached_tokens
        child.first_step_s = leader.first_step_s
        self._slices.seat(child)
        self._drafts.seat(child)
        outcome = self._emit(child, of_item, run, draw, results)
        if outcome is not None:
            yield outcome
        if leader.status is Status.RUNNING and child.status is Status.NEW:
            self._scheduler.fork(leader, child)

    def _scores(self, rows: Rows, built: Built, results: Results) -> Iterator[Outcome]:
        """Note the logprobs that were asked for, publish prompts that go on, and end choices that
        want no tokens."""
        first_labels = {}
        for item, first, num_prompt, num_labels in built.scored:
            sequence = rows.sequences[item]
            _take_scores(sequence, built.batch, results, first, num_prompt)
            first_labels[item] = range(first + num_prompt, first + num_prompt + num_labels)
        for i, (sequence, draws) in enumerate(
            zip(rows.sequences, rows.draws.tolist(), strict=True)
        ):
            if draws and sequence.max_output:
                continue
            self._scheduler.publish(sequence)
            if not draws:
                continue
            labels = results.drawn.score_logprobs[list(first_labels.get(i, ()))]
            sequence.label_logprobs = tuple(labels.tolist())
            for choice in (*sequence.siblings, sequence):
                choice.prompt_logprobs = sequence.prompt_logprobs
                choice.num_cached_tokens = sequence.num_cached_tokens
                yield Outcome(choice, StopCut(0, "length"))

    def _emit(
        self,
        sequence: Sequence,
        of_item: tuple[Trees, int],
        run: _Run,
        draw: int,
        results: Results,
    ) -> Outcome | None:
        """Emit what was drawn for one choice, whose root draw is `draw`. of_item: the step's trees,
        and the item that the choice's is.

        None: its tokens are unverified, or wait to be drawn again.
        """
        head, grammar = sequence.head, sequence.grammar
        trees, item = of_item
        first, stop = trees.start[item : item + 2].tolist()
        waits = head is not None and head.mode == "exact" and head.proposes
        is_due = run.why == FAILED
        if not run.ids:
            # What comes before a failed draw stands, as it would without drafts, and its last
            # token is the next step's root, where the draw fails again. Tokens of a slice may be
            # wrong: they are checked first.
            if not (waits and sequence.num_output > sequence.num_verified):
                return Outcome(sequence, StopCut(0), results.problem(draw))
            sequence.num_computed -= 1
            self._exact.add(sequence, StopCut(0), True)
            return None
        end = cut(sequence, run.ids, run.why)
        if grammar is not None and grammar.problem:
            if not waits:
                return Outcome(sequence, end, NO_TOKEN_LEFT)
            # A wrong token may have caused it: tokens are checked before anything ends.
            end, is_due = StopCut(end.num_kept), True
        run.cut(end.num_kept)
        if waits:
            self._slices.keep(sequence, run.draws, len(run.ids))
        elif sequence.request.sampling.num_logprobs is not None:
            sequence.logprobs.extend(results.logprob(d) for d in run.draws)
        if sequence.request.report_sources:
            source = trees.source[first:stop].tolist()
            sequence.token_sources += sources_of(run.path, len(run.ids), source, sequence.sources)
        if first < stop and sequence.request.report_rejected:
            _note_rejected(sequence, trees, slice(first, stop), run)
        counts = count_step(trees, item, run.path, sequence.sources, results.model_s)
        sequence.counts = merge_counts(sequence.counts, counts)
        self._slices.count_step(sequence)
        sequence.num_computed += len(run.path)
        sequence.num_steps += 1
        sequence.append(run.ids)
        self._drafts.teach(sequence, run.ids, trees, item, run.path, draw, results)
        if waits:
            self._exact.add(sequence, end, is_due)
            return None
        if head is not None and head.mode == "exact":
            self._slices.learn(sequence, run.ids)
        sequence.verify(sequence.num_output)
        return Outcome(sequence, end)

    def release(self, sequence: Sequence, ending: Ending = GOES_ON) -> None:
        """Add a Delta with all tokens that are verified and not released yet.

        Prompt logprobs, the time in the queue, the number of cached tokens and the logprobs of
        labels are in the sequence's first Delta only.
        """
        request = sequence.request
        is_first = sequence.num_released == 0 and not sequence.has_spoken
        if not sequence.has_spoken:
            sequence.speak()
        start = sequence.num_released
        token_ids, logprobs = sequence.release()
        counts, sequence.counts = sequence.counts, _NO_COUNTS
        head = sequence.head
        delta = Delta(
            request.request_id,
            sequence.choice_id,
            token_ids,
            logprobs,
            tuple(sequence.prompt_logprobs) if is_first and not sequence.scores_prompt else (),
            ending.finish_reason,
            ending.stop_reason,
            ending.error,
            ending.error_code,
            num_cached_tokens=max(0, sequence.num_cached_tokens) if is_first else 0,
            queue_s=_queue_s(sequence) if is_first else 0.0,
            counts=counts,
            sources=tuple(sequence.token_sources[start : start + len(token_ids)]),
            label_logprobs=sequence.label_logprobs if is_first else (),
            vocabulary=None if head is None else head.take_counts(self._slices.verify_every(head)),
            rejected_drafts=sequence.rejected_since(start) if request.report_rejected else (),
        )
        self.deltas.append(delta)

    def refuse(self, request: Request, message: str, code: str) -> None:
        """The only Deltas of a request that was never queued: one per choice."""
        for choice_id in range(max(1, request.num_choices)):
            self.deltas.append(
                Delta(
                    request.request_id, choice_id, (), finish_reason="error", error=message,
                    error_code=code,
                )
            )  # fmt: skip


def _take_scores(
    sequence: Sequence, batch: Batch, results: Results, first: int, num_prompt: int
) -> None:
    """Append the prompt logprobs that a step computed to the sequence."""
    drawn = results.drawn
    for c in range(first, first + num_prompt):
        sequence.prompt_logprobs.append(
            TokenLogprob(
                int(batch.score_targets[c]),
                float(drawn.score_logprobs[c]),
                int(drawn.score_ranks[c]),
                tuple(drawn.score_top[c]),
            )
        )


def _queue_s(sequence: Sequence) -> float:
    """Seconds from arrival to the first step."""
    arrival_s = sequence.request.arrival_s
    if arrival_s <= 0.0 or sequence.first_step_s <= 0.0:
        return 0.0
    return max(0.0, sequence.first_step_s - arrival_s)


def _note_rejected(sequence: Sequence, trees: Trees, at: slice, run: _Run) -> None:
    """Note what was drafted beside the run's tokens. Called before they are appended. at: the nodes
    of its tree."""
    start, names = sequence.num_output, sequence.sources
    (ids, parents, _), source = trees.nodes[:, at].tolist(), trees.source[at].tolist()
    sequence.rejected_drafts.extend(
        (start + place, names[first] if first < len(names) else names[0], ids)
        for place, first, ids in rejected_paths(ids, parents, source, run.path)
        if place < len(run.ids)  # what lies past the end of the answer is left out
    )
