"""Commit: what a step drew becomes tokens of its choices, and Deltas.

    commit(rows, trees, built, results) -> Outcomes, and Deltas of those that only go on

Drawn ids are followed through all trees at once (trees.follow). Choices whose tokens need nothing
but numbers are done with that. Of the others each is looked at: stop strings, grammar, logprobs,
what is told of drafts; tokens of an `exact` slice wait for verification, all others are verified
at once. Counts, draft sources and the draft session learn exactly the tokens that stand.

`follow` ends a run at EOS, stop ids, max_tokens and the context's limit; `cut` ends it at a stop
string and where a grammar's text is complete.

The slice proposes, the full head verifies (DESIGN.md section 6): ExactVerifier. When N tokens of a
sequence wait, or it would end, those of all sequences are drawn again with the full head at once,
because reading the head is the cost. The tokens before the first wrong one stand, and that one is
replaced by the right one. The engine concludes each Outcome before the next is looked at, because a
choice that fails takes the other choices of its request with it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from drafters.arrays import Int32x2
from server.engine.batch import NO_TOKEN_LEFT, Drawn
from server.engine.build import Built
from server.engine.draft import Drafts
from server.engine.plan import Rows, Scheduler
from server.engine.run import wait_for
from server.engine.sequence import Sequence, Status
from server.engine.slices import SliceBook
from server.engine.table import advance
from server.engine.trees import (
    DRAW,
    EMITTED,
    END,
    END_ID,
    FAILED,
    FIRST_SOURCE,
    LENGTH,
    MAX_DEPTH,
    NUM_CHOICE_LINES,
    NUM_FOUND_LINES,
    PUBLISH,
    SEAT,
    TRIM,
    Trees,
    follow,
    tally,
)
from server.types import Delta, FinishReason, Request, StepCounts, TokenLogprob

_NO_COUNTS = StepCounts()
_NO_MOVES: Int32x2 = np.empty((2, 0), np.int32)


# -- what becomes of the ids of a run --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ends. Without a finish_reason it goes on."""

    finish_reason: FinishReason | None = None
    stop_reason: int | bytes | None = None
    error: str | None = None
    error_code: str | None = None


GOES_ON = Ending()


def cut(sequence: Sequence, ids: SequenceOf[int], why: int) -> tuple[int, Ending]:
    """How many tokens of a run stand, and how the choice ends there, if it does.

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
                return i + 1, Ending("stop", found)
        if grammar is not None and (not grammar.consume(ids[i]) or grammar.is_complete):
            return i + 1, Ending("stop", b"")
    if why == END_ID:
        return len(ids), Ending("stop", None if ids[-1] in sequence.eos_ids else ids[-1])
    return len(ids), Ending("length") if why == LENGTH else GOES_ON


def why_ended(sequence: Sequence, token: int) -> int:
    """What one more token ends, as `follow` has it. The sequence is not simple."""
    table = sequence.table
    choice = np.zeros((NUM_CHOICE_LINES, 1), np.int32)
    choice[SEAT] = sequence.seat
    found, none = np.empty((1, NUM_FOUND_LINES), np.int32), np.empty((3, 0), np.int32)
    follow(
        table.numbers, table.blocks, table.ends, table.block_size, choice, none,
        np.array([token], np.int32), np.empty((3, 1), np.int32), found, none[:2],
        none[0],
    )  # fmt: skip
    return int(found[0, END])


@functools.cache
def plain_step(no_draft_reason: str) -> StepCounts:
    """The StepCounts of a step without drafts: there are as many as there are reasons."""
    return StepCounts(num_steps=1, no_draft_reason=no_draft_reason)


def count_step(
    trees: Trees,
    item: int,
    runs: Int32x2,
    run: int,
    num_accepted: int,
    source_names: SequenceOf[str],
    model_s: float = 0.0,
) -> StepCounts:
    """The StepCounts of one decode step of one choice.

    trees, item: what was verified. runs, run: of `follow`. num_accepted: nodes on the accepted path
    that survived the cut. model_s: of the step.
    """
    first, end = trees.start[item : item + 2].tolist()
    if first == end:
        return plain_step(trees.why[item])
    counts = np.zeros((2, FIRST_SOURCE + len(source_names)), np.int64)
    claims = tally(trees.start, trees.nodes, trees.survival, item, runs, run, num_accepted, counts)
    drafted, kept = counts.tolist()
    depth = drafted[MAX_DEPTH]
    by_source = [
        (name, drafted[at], kept[at])
        for at, name in enumerate(source_names, FIRST_SOURCE)
        if drafted[at]
    ]
    predicted, stood = next((row[1:] for row in by_source if row[0] == "prediction"), (0, 0))
    return StepCounts(
        num_steps=1,
        num_drafts=1,
        num_drafted=end - first,
        num_accepted=num_accepted,
        accepted_by_depth=(1,) * num_accepted + (0,) * (depth - num_accepted),
        offered_by_depth=(1,) * depth,
        by_source=tuple(by_source),
        accepted_prediction_tokens=stood,
        rejected_prediction_tokens=predicted - stood,
        expected_accepted=claims,
        by_survival=tuple([(i, drafted[i], kept[i]) for i in range(10) if drafted[i]]),
        verify_s=model_s,
    )


def rejected_paths(
    token_ids: SequenceOf[int],
    parents: SequenceOf[int],
    sources: SequenceOf[str],
    accepted: SequenceOf[int],
) -> list[tuple[int, str, tuple[int, ...]]]:
    """What was drafted and not accepted: (place, source, ids) of each path to a rejected leaf.

    place: index in the step's run of the token that stands where the path left it. ids: from there
    to the leaf. sources: of every node; told is that of the path's first.
    """
    place = {-1: 0} | {node: i + 1 for i, node in enumerate(accepted)}
    paths: dict[int, tuple[int, str, tuple[int, ...]]] = {}
    inner: set[int] = set()
    for node, parent in enumerate(parents):
        if node in place:
            continue
        if parent in place:
            paths[node] = (place[parent], sources[node], (token_ids[node],))
        else:
            at, first, ids = paths[parent]
            paths[node] = (at, first, (*ids, token_ids[node]))
            inner.add(parent)
    return [path for node, path in paths.items() if node not in inner]


@dataclass(slots=True)
class _Run:
    """The ids of one choice that stand, in order: those of the accepted nodes and the one after
    them. trees, item: the step's, and which the choice's is. draw: its root's. runs, at: of
    `follow`, which found them. draws: of each id. path: the accepted nodes. why: what the last one
    ends (trees.END)."""

    trees: Trees
    item: int
    draw: int
    runs: Int32x2
    at: int
    ids: list[int]
    draws: list[int]
    path: list[int]
    why: int

    def cut(self, num: int) -> None:
        """Keep the first num ids; the last of them may be one that no node proposed."""
        del self.ids[num:], self.draws[num:], self.path[num:]


# -- unverified tokens -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a sequence's new tokens, all of which are verified now.

    end: where they end the choice, if they do. problem: why no token could be drawn, or "".
    """

    sequence: Sequence
    end: Ending
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sequence that emitted from its slice in this step. end: where its tokens end the choice, if
    they are right. is_due: they must be verified in this step."""

    sequence: Sequence
    end: Ending
    is_due: bool


class ExactVerifier:
    """What waits for the full head in one engine. Emission calls `add`; the engine empties it."""

    def __init__(self, slices: SliceBook, drafts: Drafts) -> None:
        self._slices = slices
        self._drafts = drafts
        self._waiting: list[_Waiting] = []

    def add(self, sequence: Sequence, end: Ending, is_due: bool) -> None:
        """A sequence has emitted unverified tokens."""
        self._waiting.append(_Waiting(sequence, end, is_due or end.finish_reason is not None))

    def drop(self) -> None:
        """Forget the step, which has failed: preemption takes its tokens back."""
        self._waiting = []

    def is_due(self, *, at_once: bool) -> bool:
        """Whether unverified tokens must be verified in this step. at_once: any that there are."""
        return any(
            at_once or w.is_due or self._slices.is_due(w.sequence)
            for w in self._waiting
            if w.sequence.status is Status.RUNNING
        )

    def keep_waiting(self) -> list[Sequence]:
        """Nothing is due: the sequences that emitted unverified tokens in this step."""
        waiting, self._waiting = self._waiting, []
        return [w.sequence for w in waiting if w.sequence.status is Status.RUNNING]

    def check(self) -> Iterator[Outcome]:
        """Verify all that wait. Raises StepFailedError before the first Outcome only."""
        waiting, self._waiting = self._waiting, []
        waiting = [w for w in waiting if w.sequence.status is Status.RUNNING]
        sequences = [w.sequence for w in waiting]
        began = time.perf_counter()
        results = wait_for(lambda: self._slices.verify(sequences), began)
        seconds = time.perf_counter() - began
        first = 0
        for w, num in zip(waiting, self._slices.observe_verify(sequences, seconds), strict=True):
            if w.sequence.status is Status.RUNNING:  # no other choice of its request has failed
                yield self._apply(w.sequence, w.end, results, range(first, first + num))
            first += num

    def _apply(self, sequence: Sequence, end: Ending, results: Drawn, draws: range) -> Outcome:
        """Compare a sequence's unverified tokens with what the full head drew in their places."""
        base, num = sequence.num_verified, len(draws)
        emitted = sequence.output_ids(base)
        right: list[int] = results.token_ids[draws.start : draws.stop].tolist()
        stands = next((i for i in range(num) if right[i] != emitted[i]), num)
        num_computed = sequence.num_computed
        if stands < num:
            self._drafts.roll_back(sequence, base + stands)
        self._slices.settle(sequence, stands, num)
        wants = sequence.request.sampling.num_logprobs is not None
        for i in range(min(stands + 1, num) if wants else 0):
            if right[i] >= 0:
                sequence.logprobs.append(results.logprob(draws[i]))
        grammar = sequence.grammar
        if stands == num and grammar is not None and grammar.problem:
            # One that the grammar did not take is not told, as without a slice.
            sequence.verify(min(sequence.num_output, grammar.num_consumed))
            return Outcome(sequence, end, NO_TOKEN_LEFT)
        sequence.verify(sequence.num_output)
        if stands == num:
            return Outcome(sequence, end)
        if right[stands] < 0:
            return Outcome(sequence, end, results.problem(draws[stands]))
        return self._replace(sequence, right[stands], num_computed)

    def _replace(self, sequence: Sequence, token: int, num_computed: int) -> Outcome:
        """Emit the right token in place of the first wrong one; it is verified already."""
        grammar = sequence.grammar
        _, end = cut(sequence, [token], why_ended(sequence, token))
        if grammar is not None and grammar.problem:
            return Outcome(sequence, end, NO_TOKEN_LEFT)
        if sequence.request.report_sources:
            sequence.token_sources.append("")
        sequence.append([token])
        # The rows before the right token belong to tokens that stand.
        sequence.num_computed = min(num_computed, sequence.num_tokens - 1)
        self._drafts.correct(sequence, token)
        sequence.verify(sequence.num_output)
        self._slices.extend(sequence, token)
        return Outcome(sequence, end)


# -- a step's ids ----------------------------------------------------------------------------------


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
        self.moves: Int32x2 = _NO_MOVES
        self._table = scheduler.table
        self._scheduler = scheduler
        self._slices = slices
        self._drafts = drafts
        self._exact = exact

    def commit(self, rows: Rows, trees: Trees, built: Built, results: Drawn) -> Iterator[Outcome]:
        """Emit what a step drew. Nothing has ended since it was planned. Each Outcome is to be
        concluded before the next is asked for: a choice that fails takes the others of its request
        with it."""
        table, choices, runs = self._table, built.choices, built.runs
        advance(table.numbers, rows.seats, rows.start, rows.num)
        if not rows.is_plain:
            yield from self._scores(rows, built, results)
        num_moves = follow(
            table.numbers, table.blocks, table.ends, table.block_size, choices, trees.nodes,
            results.token_ids, runs, built.found, built.moves, built.came,
        )  # fmt: skip
        self.moves = built.moves[:, :num_moves] if num_moves else _NO_MOVES
        if built.came.shape[0]:
            self._drafts.observe(rows, trees, built.came)
        ids, draws, nodes = runs.tolist()
        for c, (at, num, num_accepted, why, todo, total) in enumerate(built.found.tolist()):
            sequence, item = built.drawing[c], built.item_of[c]
            if sequence.status is Status.FINISHED:  # another choice of its request has failed
                continue
            if todo & EMITTED:
                own = ids[at : at + num]
                sequence.ids[total - num : total] = own
                path = nodes[at : at + num_accepted]
                if trees.why[item]:
                    counts = plain_step(trees.why[item])
                else:
                    counts = count_step(
                        trees, item, runs, at, num_accepted, sequence.sources, results.model_s
                    )
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
            own, path = ids[at : at + num], nodes[at : at + num_accepted]
            draw, leader = int(choices[DRAW, c]), rows.sequences[item]
            run = _Run(trees, item, draw, runs, at, own, draws[at : at + num], path, why)
            if sequence is leader:
                outcome = self._emit(sequence, run, results)
                if outcome is not None:
                    yield outcome
            elif leader.status is Status.RUNNING:
                yield from self._fork(leader, sequence, run, results)

    def _fork(
        self, leader: Sequence, child: Sequence, run: _Run, results: Drawn
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
        outcome = self._emit(child, run, results)
        if outcome is not None:
            yield outcome
        if leader.status is Status.RUNNING and child.status is Status.NEW:
            self._scheduler.fork(leader, child)

    def _scores(self, rows: Rows, built: Built, results: Drawn) -> Iterator[Outcome]:
        """Note the logprobs that were asked for, publish prompts that go on, and end choices that
        want no tokens."""
        targets, logprobs, first_labels = built.batch.score_targets, results.score_logprobs, {}
        for item, first, num_prompt, num_labels in built.scored:
            sequence = rows.sequences[item]
            for c in range(first, first + num_prompt):
                scored = int(targets[c]), float(logprobs[c]), int(results.score_ranks[c])
                sequence.prompt_logprobs.append(TokenLogprob(*scored, tuple(results.score_top[c])))
            first_labels[item] = range(first + num_prompt, first + num_prompt + num_labels)
        for i, (sequence, draws) in enumerate(
            zip(rows.sequences, rows.draws.tolist(), strict=True)
        ):
            if draws and sequence.max_output:
                continue
            self._scheduler.publish(sequence)
            if not draws:
                continue
            labels = logprobs[list(first_labels.get(i, ()))]
            sequence.label_logprobs = tuple(labels.tolist())
            for choice in (*sequence.siblings, sequence):
                choice.prompt_logprobs = sequence.prompt_logprobs
                choice.num_cached_tokens = sequence.num_cached_tokens
                yield Outcome(choice, Ending("length"))

    def _emit(self, sequence: Sequence, run: _Run, results: Drawn) -> Outcome | None:
        """Emit what was drawn for one choice. None: its tokens are unverified, or wait to be drawn
        again."""
        head, grammar, trees, item = sequence.head, sequence.grammar, run.trees, run.item
        waits = head is not None and head.mode == "exact" and head.proposes
        is_due = run.why == FAILED
        if not run.ids:
            # What comes before a failed draw stands, as it would without drafts, and its last
            # token is the next step's root, where the draw fails again. Tokens of a slice may be
            # wrong: they are checked first.
            if not (waits and sequence.num_output > sequence.num_verified):
                return Outcome(sequence, GOES_ON, results.problem(run.draw))
            sequence.num_computed -= 1
            self._exact.add(sequence, GOES_ON, True)
            return None
        num_kept, end = cut(sequence, run.ids, run.why)
        if grammar is not None and grammar.problem:
            if not waits:
                return Outcome(sequence, end, NO_TOKEN_LEFT)
            # A wrong token may have caused it: tokens are checked before anything ends.
            end, is_due = GOES_ON, True
        # Where all stand and no token could be drawn behind them, the last is the next step's root.
        num_again = run.why == FAILED and num_kept == len(run.ids)
        run.cut(num_kept)
        if waits:
            self._slices.keep(sequence, run.draws, len(run.ids))
        elif sequence.request.sampling.num_logprobs is not None:
            sequence.logprobs.extend(results.logprob(d) for d in run.draws)
        _note_sources(sequence, run)
        counts = count_step(
            trees, item, run.runs, run.at, len(run.path), sequence.sources, results.model_s
        )
        sequence.counts = sequence.counts.plus(counts)
        self._slices.count_step(sequence)
        sequence.num_computed += len(run.path) - num_again
        sequence.num_steps += 1
        sequence.append(run.ids)
        self._drafts.teach(sequence, run.ids, trees, item, run.path, run.draw, results)
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
        queue_s = 0.0  # from arrival to the first step
        if is_first and request.arrival_s > 0.0 and sequence.first_step_s > 0.0:
            queue_s = max(0.0, sequence.first_step_s - request.arrival_s)
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
            queue_s=queue_s,
            counts=counts,
            sources=tuple(sequence.token_sources[start : start + len(token_ids)]),
            label_logprobs=sequence.label_logprobs if is_first else (),
            vocabulary=None if head is None else head.take_counts(self._slices.verify_every(head)),
            rejected_drafts=sequence.take_rejected(start) if request.report_rejected else (),
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


def _note_sources(sequence: Sequence, run: _Run) -> None:
    """Note who drafted the run's tokens ("": nobody), and what was drafted beside them, where the
    request asks. Called before they are appended."""
    request, start, names = sequence.request, sequence.num_output, sequence.sources
    if not (request.report_sources or request.report_rejected):
        return
    first, end = run.trees.start[run.item : run.item + 2].tolist()
    ids, parents, _, source, _ = run.trees.nodes[:, first:end].tolist()
    drafted_by = [names[at] if at < len(names) else names[0] for at in source]
    if request.report_sources:
        sequence.token_sources += [drafted_by[node] for node in run.path]
        sequence.token_sources += [""] * (len(run.ids) - len(run.path))
    if request.report_rejected:
        sequence.rejected_drafts.extend(
            (start + place, name, path)
            for place, name, path in rejected_paths(ids, parents, drafted_by, run.path)
        )
