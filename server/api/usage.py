"""The account of one Request: the sums of its Deltas, for both `usage` and the metrics.

`observe` is the only place where tokens are counted, so the counters in /metrics equal the sums of
the usage that clients see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from msgspec import UNSET, UnsetType

from server.api.shapes import (
    CompletionDetails,
    PromptDetails,
    SourceSums,
    Speculation,
    Usage,
    VocabularyUse,
)
from server.metrics.series import Metrics
from server.types import Delta, Request, VocabularyCounts


class RequestAccount:
    """Sums over the Deltas of one Request. Written by `observe` alone."""

    def __init__(self, request: Request, metrics: Metrics) -> None:
        self.request = request
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0
        self.num_base_tokens = 0
        self.own_ids: Mapping[int, int] = {}  # ServedModel.own_ids; set before the first Delta
        self.accepted_prediction_tokens = 0
        self.rejected_prediction_tokens = 0
        self.num_steps = 0
        self.num_drafts = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.accepted_by_depth: list[int] = []
        self.offered_by_depth: list[int] = []
        self.by_source: dict[str, list[int]] = {}
        self.vocabulary: dict[str, float] = dict.fromkeys(_VOCABULARY_SUMS, 0)
        self.num_slice_ids = 0
        self.verify_every = 0
        self.verify_s = 0.0
        self.queue_s = 0.0
        self.started = False
        self._metrics = metrics
        self._series = metrics.task(request.task, request.speculation.drafter, request.model)
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def observe(self, delta: Delta, now_s: float) -> None:
        """Count one Delta of this request. now_s: time.monotonic() at its arrival."""
        request = self.request
        series = self._series
        if not self.started and delta.finish_reason not in ("error", "abort"):
            self.started = True
            self.num_cached_tokens = delta.num_cached_tokens
            self.queue_s = delta.queue_s
            series.prompt_tokens.inc(self.num_prompt_tokens)
            series.prompt_size.observe(self.num_prompt_tokens)
            if delta.num_cached_tokens:
                series.cached_tokens.inc(delta.num_cached_tokens)
            series.queue.observe(delta.queue_s)
            series.time_to_first_token.observe(now_s - request.arrival_s)
            series.prefill.observe(max(0.0, now_s - request.arrival_s - delta.queue_s))
        choice, num_tokens, counts = delta.choice_id, len(delta.token_ids), delta.counts
        if num_tokens:
            last_s = self._last_s.get(choice)
            if last_s is None:
                self._first_s[choice] = now_s
            else:
                gap_s = (now_s - last_s) / num_tokens
                for _ in range(num_tokens):
                    series.inter_token.observe(gap_s)
            self._last_s[choice] = now_s
            self._tokens[choice] = self._tokens.get(choice, 0) + num_tokens
            self.num_completion_tokens += num_tokens
            if self.own_ids:
                self.num_base_tokens += sum(self.own_ids.get(i, 1) for i in delta.token_ids)
        self._metrics.count_step(series, num_tokens, counts)
        self.num_steps += counts.num_steps
        self.accepted_prediction_tokens += counts.accepted_prediction_tokens
        self.rejected_prediction_tokens += counts.rejected_prediction_tokens
        if counts.num_drafts:
            self.num_drafts += counts.num_drafts
            self.num_drafted += counts.num_drafted
            self.num_accepted += counts.num_accepted
            self.verify_s += counts.verify_s
            _add(self.accepted_by_depth, counts.accepted_by_depth)
            _add(self.offered_by_depth, counts.offered_by_depth)
            for source, drafted, accepted in counts.by_source:
                sums = self.by_source.setdefault(source, [0, 0])
                sums[0] += drafted
                sums[1] += accepted
        if delta.vocabulary is not None:
            self._metrics.count_vocabulary(
                request.task, request.vocabulary.mode, request.model, delta.vocabulary
            )
            for name in _VOCABULARY_SUMS:
                self.vocabulary[name] += getattr(delta.vocabulary, name)
            self.num_slice_ids = max(self.num_slice_ids, delta.vocabulary.num_ids)
            self.verify_every = delta.vocabulary.verify_every or self.verify_every
        if delta.finish_reason is not None:
            self._metrics.count_choice(request.task, request.model, delta.finish_reason)
            total = self._tokens.get(choice, 0)
            series.generation_size.observe(total)
            series.end_to_end.observe(now_s - request.arrival_s)
            if total > 1:
                decode_s = self._last_s[choice] - self._first_s[choice]
                series.decode.observe(decode_s)
                series.per_output_token.observe(decode_s / (total - 1))

    @property
    def num_begun(self) -> int:
        """Choices that have a token."""
        return len(self._first_s)

    @property
    def first_token_s(self) -> float | None:
        """time.monotonic() of the first token of any choice; None before that."""
        return min(self._first_s.values(), default=None)

    @property
    def last_token_s(self) -> float | None:
        """time.monotonic() of the latest token; None before the first."""
        return max(self._last_s.values(), default=None)

    def close(self, outcome: str) -> None:
        """The request has ended. outcome: "ok", "abort" or "error". Called once."""
        self._metrics.count_outcome(self.request.task, self.request.model, outcome)


_VOCABULARY_SUMS = tuple(
    f.name for f in fields(VocabularyCounts) if f.name not in ("num_ids", "verify_every")
)


def _add(sums: list[int], more: tuple[int, ...]) -> None:
    if len(more) > len(sums):
        sums.extend([0] * (len(more) - len(sums)))
    for i, number in enumerate(more):
        sums[i] += number


def usage_report(
    accounts: Iterable[RequestAccount], num_sent: int | None = None, num_truncated: int = 0
) -> Usage:
    """OpenAI's `usage` of an HTTP request. Prompts count once, all choices (best_of too) count.

    num_sent: completion tokens sent so far, where a stream has not sent all that arrived.
    num_truncated: tokens cut off the prompts.
    """
    prompt = cached = completion = accepted = rejected = base = 0
    for account in accounts:
        prompt += account.num_prompt_tokens
        cached += account.num_cached_tokens
        completion += account.num_completion_tokens
        base += account.num_base_tokens
        accepted += account.accepted_prediction_tokens
        rejected += account.rejected_prediction_tokens
    if num_sent is not None:
        base = base if num_sent == completion else 0
        completion = num_sent
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(
            cached_tokens=cached, truncated_tokens=num_truncated or UNSET
        ),
        completion_tokens_details=CompletionDetails(
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=rejected,
            base_tokens=base or UNSET,
        ),
    )


def speculation_report(accounts: Iterable[RequestAccount]) -> Speculation:
    """The `speculation` object (include_speculation): sums over all prompts and choices."""
    accounts = list(accounts)
    steps = drafts = drafted = accepted = tokens = firsts = 0
    by_depth: list[int] = []
    offered: list[int] = []
    sources: dict[str, SourceSums] = {}
    drafter = "off"
    for account in accounts:
        drafter = account.request.speculation.drafter
        steps += account.num_steps
        drafts += account.num_drafts
        drafted += account.num_drafted
        accepted += account.num_accepted
        tokens += account.num_completion_tokens
        firsts += account.num_begun
        _add(by_depth, tuple(account.accepted_by_depth))
        _add(offered, tuple(account.offered_by_depth))
        for source, (num_drafted, num_accepted) in account.by_source.items():
            sums = sources.setdefault(source, SourceSums(drafted_tokens=0, accepted_tokens=0))
            sums.drafted_tokens += num_drafted
            sums.accepted_tokens += num_accepted
    return Speculation(
        drafter=drafter,
        steps=steps,
        drafts=drafts,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        mean_tokens_per_step=tokens / steps if steps else None,
        decode_tokens_per_step=(tokens - firsts) / (steps - firsts) if steps > firsts else None,
        accepted_by_depth=by_depth,
        offered_by_depth=offered,
        by_source=dict(sorted(sources.items())),
        vocabulary=_vocabulary_use(accounts),
    )


def _vocabulary_use(accounts: Iterable[RequestAccount]) -> VocabularyUse | UnsetType:
    """What LM-head slices did, UNSET in mode "full"."""
    sliced = [a for a in accounts if a.request.vocabulary.mode != "full"]
    if not sliced:
        return UNSET
    sums: dict[str, Any] = {
        name: sum(a.vocabulary[name] for a in sliced) for name in _VOCABULARY_SUMS
    }
    use = VocabularyUse(
        mode=sliced[0].request.vocabulary.mode,
        slice_size=max(a.num_slice_ids for a in sliced),
        loaded_rows=sums["num_loaded"],
        steps_from_slice=sums["num_slice_steps"],
        steps_from_full_head=sums["num_full_steps"],
        head_rows=sums["head_rows"],
    )
    if use.mode == "exact":
        use.verify_every = max(a.verify_every for a in sliced)
        use.windows = sums["num_verifications"]
        use.verified_tokens = sums["num_checked"]
        use.misses = sums["num_missed"]
        use.dropped_tokens = sums["num_dropped"]
        use.verify_seconds = round(sums["verify_s"], 6)
    return use
