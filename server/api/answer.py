"""From Deltas to an answer: what the routes that generate share.

A Choice reads the Deltas of one choice, in the order in which they come or all at once, and tells
what they add: text and calls of tools, logprobs, ids, and which drafts they came from. A route puts
that into its own shapes, whole or as the chunks of a stream. Both come from the same Choice, so
they agree.

A client that sets `include_token_sources` gets, per choice and chunk, a list of runs. Their texts
joined are the chunk's text (without an echoed prompt), their token counts the chunk's tokens. With
`include_rejected_drafts` a choice and a chunk also have the drafts that were not accepted.

A TextStream turns ids into text: never half a character, and nothing that may still be part of a
stop string (the engine matches those on the same bytes, and decides where a choice ends).
"""

from __future__ import annotations

import codecs
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from server import types
from server.api.engines.submission import RequestAccount, Submission
from server.api.order import Order
from server.api.route_context import DONE, StreamWriter, event
from server.api.shapes import (
    Chunk,
    CompletionDetails,
    Extras,
    FinishReason,
    InputDetails,
    OutputDetails,
    PromptDetails,
    PromptLogprobs,
    PromptTokenLogprob,
    RejectedDraft,
    SourceRun,
    SourceSums,
    Speculation,
    TokenUsage,
    Usage,
    VocabularyUse,
)
from server.api.tools import ToolEvent
from server.token_bytes import TokenBytes
from server.types import Delta, StepCounts, TokenLogprob, VocabularyCounts

_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """The text of one choice.

    stop: the request's stop strings in UTF-8. include_stop: whether the stop string (or the text of
    the id that ended the choice) is part of the text. skip_special: whether special ids have text.
    dropped_last: set by `finish` when the last id only ended the choice and has no text.
    """

    def __init__(
        self,
        table: TokenBytes,
        *,
        stop: Sequence[bytes] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._table = table
        self._include_stop = include_stop
        self._skip_special = skip_special
        self._stops = stop
        self._most_held = max(map(len, stop), default=1) - 1
        self._pending = b""
        self._decode = _decoder("replace").decode
        self.dropped_last = False

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that can be sent after `token_ids`, which do not end the choice."""
        new = self._table.join(token_ids, skip_special=self._skip_special)
        if not self._stops:
            return self._decode(new)
        pending = self._pending + new
        at = max(0, len(pending) - self._most_held)
        while at < len(pending) and not self._may_begin_a_stop(pending[at:]):
            at += 1
        self._pending = pending[at:]
        return self._decode(pending[:at])

    def _may_begin_a_stop(self, text: bytes) -> bool:
        # A whole one is let go: the engine has ignored it, before min_tokens.
        return any(stop != text and stop.startswith(text) for stop in self._stops)

    def finish(
        self,
        token_ids: Sequence[int],
        finish_reason: types.FinishReason,
        stop_reason: int | bytes | None,
    ) -> str:
        """The rest of the text, once the choice ended with these last ids.

        A stop string ends inside the last id: the text is cut there. An EOS or stop id (reason
        "stop" without a string) has no text; the id that completes a grammar (stop_reason b"") has.
        Bytes that never became a character are U+FFFD.
        """
        if finish_reason == "stop" and not isinstance(stop_reason, bytes):
            if token_ids and not self._include_stop:
                token_ids = token_ids[:-1]
                self.dropped_last = True
            stop_reason = None
        assert not isinstance(stop_reason, int)
        before = self._pending + self._table.join(token_ids[:-1], skip_special=self._skip_special)
        last = self._table.join(token_ids[-1:], skip_special=self._skip_special)
        text = before + last
        if stop_reason:
            at = text.find(stop_reason, max(0, len(before) - len(stop_reason) + 1))
            if at >= 0:
                text = text[: at + len(stop_reason) if self._include_stop else at]
        self._pending = b""
        return self._decode(text, True)


class CharCounter:
    """Character offsets of tokens in a text (logprobs.text_offset).

    A token's offset is the number of complete characters before its first byte; a token that
    continues a character has that character's index.
    """

    __slots__ = ("_decode", "num_chars")

    def __init__(self, num_chars: int = 0) -> None:
        self._decode = _decoder("replace").decode
        self.num_chars = num_chars

    def push(self, token: bytes) -> int:
        """The offset of the next token."""
        offset = self.num_chars
        self.num_chars += len(self._decode(token))
        return offset


LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have (as vLLM does)."""


@dataclass(slots=True)
class Piece:
    """What Deltas add to a choice.

    events: content and calls of tools, in order. logprobs: of all tokens; num_shown: how many of
    them have a place in a message, which an id that only ends the choice has not. rejected: empty
    unless asked for.
    """

    events: list[ToolEvent]
    logprobs: Sequence[TokenLogprob]
    num_shown: int
    token_ids: tuple[int, ...]
    sources: list[SourceRun]
    rejected: list[RejectedDraft]


class Choice:
    """One choice of an answer as it grows. Written by `take` alone.

    index: among all choices of the answer. prompt_id: of its prompt in the order.
    """

    def __init__(self, order: Order, prompt_id: int, index: int) -> None:
        request = order.requests[prompt_id]
        sampling = request.sampling
        self.index = index
        self.prompt_id = prompt_id
        self.request = request
        self.finish_reason: str | None = None
        self.stop_reason: int | bytes | None = None
        new_reader = order.generation.new_reader
        self._reader = None if new_reader is None else new_reader()
        self._is_forced = order.generation.forces_call
        self._table = order.table
        # Where rejected drafts are told: of the tokens so far.
        self._chars = CharCounter() if request.report_rejected else None
        self._num_tokens = 0
        self._stream = TextStream(
            order.table,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            skip_special=sampling.skip_special_tokens,
        )

    def take(self, delta: Delta) -> Piece:
        """Add one Delta, or several that were joined."""
        ended = delta.finish_reason
        sources: list[SourceRun] = []
        if self.request.report_sources:
            text, sources = _text_by_source(self._stream, delta)
        elif ended is None:
            text = self._stream.push(delta.token_ids)
        else:
            text = self._stream.finish(delta.token_ids, ended, delta.stop_reason)
        reader = self._reader
        events: list[ToolEvent] = [text] if text else []
        if reader is not None:
            events = reader.feed(text)
            if ended is not None:
                events += reader.finish()
        if ended is not None:
            is_cut = ended != "stop" or (self._is_forced and delta.stop_reason not in (None, b""))
            called = reader is not None and reader.num_calls > 0 and not is_cut
            self.finish_reason = "tool_calls" if called else ended
            self.stop_reason = delta.stop_reason
        return Piece(
            events,
            delta.logprobs,
            len(delta.logprobs) - self._stream.dropped_last,
            delta.token_ids,
            sources,
            [] if self._chars is None else self._rejected(delta, self._chars),
        )

    def _rejected(self, delta: Delta, chars: CharCounter) -> list[RejectedDraft]:
        skips, before = self.request.sampling.skip_special_tokens, self._num_tokens
        offsets = [
            chars.push(self._table.join((token,), skip_special=skips)) for token in delta.token_ids
        ]
        self._num_tokens += len(offsets)
        return [
            RejectedDraft(
                token=before + at,
                offset=offsets[at],
                source=source,
                tokens=len(ids),
                text=self._table.join(ids, skip_special=False).decode(errors="replace"),
            )
            for at, source, ids in delta.rejected_drafts
        ]

    def end(self, shown: Extras) -> FinishReason:
        """The finish_reason of a choice that is shown; `shown` gets its stop_reason."""
        if self.stop_reason is not None:
            reason = self.stop_reason
            # b"" is a grammar's end
            shown.stop_reason = reason if isinstance(reason, int) else reason.decode() or None
        return cast(FinishReason, self.finish_reason)


def choices_of(order: Order) -> list[list[Choice]]:
    """The choices of an order, by prompt."""
    return [
        [Choice(order, i, i * request.num_choices + k) for k in range(request.num_choices)]
        for i, request in enumerate(order.requests)
    ]


def joined(deltas: Sequence[Delta]) -> Delta:
    """All Deltas of one choice, in order, as one; without their counts."""
    if len(deltas) == 1:
        return deltas[0]
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    sources: list[str] = []
    rejected: list[tuple[int, str, tuple[int, ...]]] = []
    for delta in deltas:
        rejected += [(at + len(ids), source, path) for at, source, path in delta.rejected_drafts]
        ids += delta.token_ids
        logprobs += delta.logprobs
        sources += delta.sources
    return deltas[-1]._replace(
        token_ids=tuple(ids),
        logprobs=tuple(logprobs),
        prompt_logprobs=deltas[0].prompt_logprobs,
        sources=tuple(sources),
        rejected_drafts=tuple(rejected),
    )


# --- what is beside the text ----------------------------------------------------------------------


def add_extras(order: Order, shown: Extras, piece: Piece) -> None:
    """Give a choice, whole or a chunk's, the members beside OpenAI's that were asked for."""
    body = order.body
    if body.return_token_ids:
        shown.token_ids = piece.token_ids
    if body.include_token_sources:
        shown.token_sources = piece.sources
    if body.include_rejected_drafts:
        shown.rejected_drafts = piece.rejected


def around(order: Order) -> dict[str, Any]:
    """The members around the choices of an answer and of a chunk that do not change."""
    return {
        "id": order.request_id,
        "created": order.created,
        "model": order.target.label,
        "system_fingerprint": order.target.model.fingerprint or None,
    }


def sums_of(order: Order, submission: Submission) -> dict[str, Any]:
    """The members with sums of a whole answer, or of a stream's last chunk."""
    return {
        "usage": usage_report(submission.accounts, num_truncated=order.num_truncated),
        "speculation": speculation_of(order, submission),
    }


def shown_prompt_logprobs(
    order: Order, entries: Sequence[TokenLogprob | None]
) -> PromptLogprobs | None:
    """A prompt's logprobs in vLLM's shape, with as many of the likeliest of each position as were
    asked for; None where none were."""
    num_top, names = order.body.prompt_logprobs, order.token_names
    if num_top is None:
        return None

    def of(entry: TokenLogprob) -> dict[str, PromptTokenLogprob]:
        ranked = [(token_id, value, k + 1) for k, (token_id, value) in enumerate(entry.top)]
        own = (entry.token_id, entry.logprob, entry.rank)
        return {
            str(token_id): PromptTokenLogprob(
                logprob=max(value, LOWEST_LOGPROB), rank=rank, decoded_token=names[token_id]
            )
            for token_id, value, rank in [own, *ranked[:num_top]]
        }

    return [None if entry is None else of(entry) for entry in entries]


def _text_by_source(stream: TextStream, delta: Delta) -> tuple[str, list[SourceRun]]:
    """Push a Delta into its choice's TextStream: its text, and its runs of one draft source."""
    ids, finish_reason = delta.token_ids, delta.finish_reason
    if not ids:
        if finish_reason is None:
            return "", []
        text = stream.finish(ids, finish_reason, delta.stop_reason)
        return text, [SourceRun(source=None, tokens=0, text=text)] if text else []
    runs: list[SourceRun] = []
    start = 0
    for name, same in groupby(delta.sources or ("",) * len(ids)):
        num_tokens = len(list(same))
        part = ids[start : start + num_tokens]
        start += num_tokens
        if finish_reason is not None and start == len(ids):
            text = stream.finish(part, finish_reason, delta.stop_reason)
        else:
            text = stream.push(part)
        runs.append(SourceRun(source=name or None, tokens=num_tokens, text=text))
    return "".join(run.text for run in runs), runs


# --- streams --------------------------------------------------------------------------------------

_Chunk = TypeVar("_Chunk", bound=Chunk)


class ChunkWriter(StreamWriter, Generic[_Chunk]):
    """An answer in OpenAI's chunks; a route says what those of a Delta are. [DONE] is always last.

    kind: the chunk's type. extra: further members of it; of_first: of the first chunk alone.
    choices: by prompt. prompt_logprobs: of the prompts that have told theirs. num_sent, the tokens
    of the chunks so far, is written by `chunks`.
    """

    def __init__(
        self, order: Order, submission: Submission, kind: type[_Chunk], **extra: Any
    ) -> None:
        options = order.body.stream_options
        self._has_usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
        self._submission = submission
        # One object for all chunks: what never changes is set once.
        self._chunk: _Chunk = kind(**around(order), choices=[], **extra)
        self.order = order
        self.choices = choices_of(order)
        self.prompt_logprobs: dict[int, Sequence[TokenLogprob | None]] = {}
        self.num_sent = 0
        self.of_first: dict[str, Any] = {}
        self._num_open = sum(map(len, self.choices))

    @abstractmethod
    def chunks(self, i: int, delta: Delta) -> bytes:
        """The events of one Delta of the i-th prompt; b"" while its text may still be part of a
        stop string."""

    def end(self) -> bytes:
        if not self._has_usage:
            return DONE
        sums = sums_of(self.order, self._submission)  # in a chunk without choices
        return event(msgspec.structs.replace(self._chunk, choices=[], **sums)) + DONE

    def written(self, arrived: list[tuple[int, Delta]]) -> bytes:
        written = []
        if self._continuous:  # once for all chunks: an answer may have thousands of prompts
            self._arrived = usage_report(self._submission.accounts)
        for i, delta in arrived:
            if delta.prompt_logprobs:
                self.prompt_logprobs.setdefault(i, delta.prompt_logprobs)
        for i, delta in arrived:
            self._num_open -= delta.finish_reason is not None
            written.append(self.chunks(i, delta))
        return b"".join(written)

    def chunk(self, choice: Any) -> bytes:
        """The event of one choice."""
        chunk = self._chunk
        chunk.choices = [choice]
        if self._has_usage:
            chunk.usage = None
            if self._continuous:
                chunk.usage = _sent_of(self._arrived, self.num_sent)
        elif not self._num_open and choice.finish_reason is not None:
            chunk.speculation = speculation_of(self.order, self._submission)
        if not self.of_first:
            return event(chunk)
        first, self.of_first = self.of_first, {}
        return event(msgspec.structs.replace(chunk, **first))


def usage_report(accounts: Iterable[RequestAccount], num_truncated: int = 0) -> Usage:
    """OpenAI's `usage` of an HTTP request. Prompts count once, all choices (best_of too) count.

    num_truncated: tokens cut off the prompts.
    """
    prompt = cached = completion = accepted = rejected = base = 0
    for account in accounts:
        prompt += account.num_prompt_tokens
        cached += account.num_cached_tokens
        completion += account.num_completion_tokens
        base += account.num_base_tokens
        accepted += account.drafted.accepted_prediction_tokens
        rejected += account.drafted.rejected_prediction_tokens
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


def _sent_of(arrived: Usage, num_sent: int) -> Usage:
    """The usage where a stream has sent so many completion tokens of all that arrived."""
    if num_sent == arrived.completion_tokens:
        return arrived
    return msgspec.structs.replace(
        arrived,
        completion_tokens=num_sent,
        total_tokens=arrived.prompt_tokens + num_sent,
        completion_tokens_details=msgspec.structs.replace(
            arrived.completion_tokens_details, base_tokens=UNSET
        ),
    )


def token_usage(accounts: Sequence[RequestAccount]) -> TokenUsage:
    """The `usage` of routes whose input is no prompt."""
    usage = usage_report(accounts)
    return TokenUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(
            base_tokens=usage.completion_tokens_details.base_tokens
        ),
        total_tokens=usage.total_tokens,
    )


def speculation_of(order: Order, submission: Submission) -> Speculation | UnsetType:
    """The `speculation` object of an answer, where it was asked for: sums over all prompts and
    choices."""
    if not order.body.include_speculation:
        return UNSET
    accounts = submission.accounts
    steps = sum(account.num_steps for account in accounts)
    tokens = sum(account.num_completion_tokens for account in accounts)
    firsts = sum(account.num_begun for account in accounts)
    told = reduce(StepCounts.plus, (account.drafted for account in accounts))
    return Speculation(
        drafter=accounts[-1].request.speculation.drafter,
        steps=steps,
        drafts=told.num_drafts,
        drafted_tokens=told.num_drafted,
        accepted_tokens=told.num_accepted,
        mean_tokens_per_step=tokens / steps if steps else None,
        decode_tokens_per_step=(tokens - firsts) / (steps - firsts) if steps > firsts else None,
        accepted_by_depth=list(told.accepted_by_depth),
        offered_by_depth=list(told.offered_by_depth),
        by_source={
            source: SourceSums(drafted_tokens=drafted, accepted_tokens=accepted)
            for source, drafted, accepted in sorted(told.by_source)
        },
        vocabulary=_vocabulary_use(accounts),
    )


def _vocabulary_use(accounts: Iterable[RequestAccount]) -> VocabularyUse | UnsetType:
    """What LM-head slices did, UNSET in mode "full"."""
    sliced = [a for a in accounts if a.request.vocabulary.mode != "full"]
    if not sliced:
        return UNSET
    sums = reduce(VocabularyCounts.plus, (a.vocabulary for a in sliced))
    use = VocabularyUse(
        mode=sliced[0].request.vocabulary.mode,
        slice_size=sums.num_ids,
        loaded_rows=sums.num_loaded,
        steps_from_slice=sums.num_slice_steps,
        steps_from_full_head=sums.num_full_steps,
        head_rows=sums.head_rows,
    )
    if use.mode == "exact":
        use.verify_every = max(a.vocabulary.verify_every for a in sliced)
        use.windows = sums.num_verifications
        use.verified_tokens = sums.num_checked
        use.misses = sums.num_missed
        use.dropped_tokens = sums.num_dropped
        use.verify_seconds = round(sums.verify_s, 6)
    return use
