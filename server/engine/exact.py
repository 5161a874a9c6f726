"""ExactVerifier: emitted tokens of `exact` sequences that wait for the full head.

The slice proposes, the full head verifies (DESIGN.md section 6). Tokens drawn from a slice are
unverified. When N of a sequence wait, or the sequence would end, the unverified tokens of all
sequences are drawn again with the full head at once, because reading the head is the cost. The
tokens before the first wrong one stand, and that one is replaced by the right one.

`check` hands back an Outcome per sequence, one after the other: the engine concludes each before
the next is looked at, because a choice that fails takes the other choices of its request with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from server.engine.accept import StopCut, cut, why_ended
from server.engine.batch import NO_TOKEN_LEFT
from server.engine.draft import Drafts
from server.engine.results import Results, wait_for
from server.engine.sequence import Sequence, Status
from server.engine.slices import SliceBook


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a sequence's new tokens, all of which are verified now.

    end: where they end the choice, if they do. problem: why no token could be drawn, or "".
    """

    sequence: Sequence
    end: StopCut
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sequence that emitted from its slice in this step. end: where its tokens end the choice, if
    they are right. is_due: they must be verified in this step."""

    sequence: Sequence
    end: StopCut
    is_due: bool


class ExactVerifier:
    """What waits for the full head in one engine. Emission calls `add`; the engine empties it."""

    def __init__(self, slices: SliceBook, drafts: Drafts) -> None:
        self._slices = slices
        self._drafts = drafts
        self._waiting: list[_Waiting] = []

    def add(self, sequence: Sequence, end: StopCut, is_due: bool) -> None:
        """A sequence has emitted unverified tokens."""
        self._waiting.append(_Waiting(sequence, end, is_due))

    def drop(self) -> None:
        """Forget the step, which has failed: preemption takes its tokens back."""
        self._waiting = []

    @property
    def is_due(self) -> bool:
        """Whether unverified tokens must be verified in this step."""
        return any(
            w.is_due or w.end.finish_reason is not None or self._slices.is_due(w.sequence)
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
        results = wait_for(lambda: self._slices.verify(sequences))
        seconds = time.perf_counter() - began
        first = 0
        for w, num in zip(waiting, self._slices.observe_verify(sequences, seconds), strict=True):
            if w.sequence.status is Status.RUNNING:  # no other choice of its request has failed
                yield self._apply(w.sequence, w.end, results, range(first, first + num))
            first += num

    def _apply(self, sequence: Sequence, end: StopCut, results: Results, draws: range) -> Outcome:
        """Compare a sequence's unverified tokens with what the full head drew in their places."""
        base, num = sequence.num_verified, len(draws)
        emitted = sequence.output_ids(base)
        right = results.ids[draws.start : draws.stop]
        stands = next((i for i in range(num) if right[i] != emitted[i]), num)
        num_computed = sequence.num_computed
        if stands < num:
            self._drafts.roll_back(sequence, base + stands)
        self._slices.settle(sequence, stands, num)
        wants = sequence.request.sampling.num_logprobs is not None
        for i in range(min(stands + 1, num) if wants else 0):
            if right[i] >= 0:
                sequence.logprobs.append(results.logprob(draws[i]))
        sequence.verify(sequence.num_output)
        grammar = sequence.grammar
        if stands == num:
            has_problem = grammar is not None and grammar.problem != ""
            return Outcome(sequence, end, NO_TOKEN_LEFT if has_problem else "")
        if right[stands] < 0:
            return Outcome(sequence, end, results.problem(draws[stands]))
        return self._replace(sequence, right[stands], num_computed)

    def _replace(self, sequence: Sequence, token: int, num_computed: int) -> Outcome:
        """Emit the right token in place of the first wrong one; it is verified already."""
        grammar = sequence.grammar
        end = cut(sequence, [token], why_ended(sequence, token))
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
