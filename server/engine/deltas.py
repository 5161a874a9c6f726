"""Deltas: a sequence's verified tokens that were not sent yet, as the engine hands them out."""

from __future__ import annotations

from dataclasses import dataclass

from server.engine.sequence import Sequence
from server.engine.slices import SliceBook
from server.types import Delta, FinishReason, Request, StepCounts

_NO_COUNTS = StepCounts()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ends. Without a finish_reason it goes on."""

    finish_reason: FinishReason | None = None
    stop_reason: int | bytes | None = None
    error: str | None = None
    error_code: str | None = None


GOES_ON = Ending()


def next_delta(sequence: Sequence, slices: SliceBook, ending: Ending = GOES_ON) -> Delta:
    """A Delta with all tokens that are verified and not released yet; this releases them.

    Prompt logprobs, the time in the queue, the number of cached tokens and the logprobs of labels
    are in the sequence's first Delta only.
    """
    request = sequence.request
    is_first = sequence.num_released == 0 and not sequence.has_spoken
    sequence.has_spoken = True
    start = sequence.num_released
    token_ids, logprobs = sequence.release()
    counts, sequence.counts = sequence.counts, _NO_COUNTS
    head = sequence.head
    return Delta(
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
        vocabulary=None if head is None else head.take_counts(slices.verify_every(head)),
        rejected_drafts=sequence.rejected_since(start) if request.report_rejected else (),
    )


def _queue_s(sequence: Sequence) -> float:
    """Seconds from arrival to the first step."""
    arrival_s = sequence.request.arrival_s
    if arrival_s <= 0.0 or sequence.first_step_s <= 0.0:
        return 0.0
    return max(0.0, sequence.first_step_s - arrival_s)


def refused(request: Request, message: str, code: str) -> list[Delta]:
    """The only Deltas of a request that was never queued: one per choice."""
    return [
        Delta(
            request.request_id, choice_id, (), finish_reason="error", error=message, error_code=code
        )
        for choice_id in range(max(1, request.num_choices))
    ]
