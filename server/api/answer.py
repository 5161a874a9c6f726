"""From Deltas to an answer: what the routes that generate share.

A Choice reads the Deltas of one choice, in the order in which they come or all at once, and tells
what they add: text and calls of tools, logprobs, ids, and which drafts they came from. A route puts
that into its own shapes, whole or as the chunks of a stream. Both come from the same Choice, so
they agree.

A client that sets `include_token_sources` gets, per choice and chunk, a list of runs. Their texts
joined are the chunk's text (without an echoed prompt), their token counts the chunk's tokens. With
`include_rejected_drafts` a choice and a chunk also have the drafts that were not accepted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from server.api.engines.submission import Submission
from server.api.order import Order
from server.api.shapes import (
    Chunk,
    Extras,
    FinishReason,
    PromptLogprobs,
    PromptTokenLogprob,
    RejectedDraft,
    SourceRun,
    Speculation,
)
from server.api.sse import DONE, error_event, event
from server.api.text import CharCounter, TextStream, TokenIdNames, TokenNames
from server.api.tools.calls import ToolEvent
from server.api.usage import speculation_report, usage_report
from server.errors import TailorError
from server.token_bytes import TokenBytes
from server.types import Delta, TokenLogprob

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
        self._rejected: RejectedDrafts | None = None
        if request.report_rejected:
            self._rejected = RejectedDrafts(order.table, skip_special=sampling.skip_special_tokens)
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
            called = reader is not None and reader.num_calls > 0
            self.finish_reason = "tool_calls" if called and ended == "stop" else ended
            self.stop_reason = delta.stop_reason
        return Piece(
            events,
            delta.logprobs,
            len(delta.logprobs) - self._stream.dropped_last,
            delta.token_ids,
            sources,
            [] if self._rejected is None else self._rejected.take(delta),
        )

    def end(self, shown: Extras) -> FinishReason:
        """The finish_reason of a choice that is shown; `shown` gets its stop_reason."""
        if self.stop_reason is not None:
            reason = self.stop_reason
            # b"" is a grammar's end
            shown.stop_reason = reason if isinstance(reason, int) else reason.decode() or None
        if self.finish_reason not in ("stop", "length", "tool_calls"):
            raise ValueError(f"no choice that is shown ends with {self.finish_reason}")
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
        if delta.rejected_drafts:
            rejected += [
                (at + len(ids), source, path) for at, source, path in delta.rejected_drafts
            ]
        ids += delta.token_ids
        logprobs += delta.logprobs
        if delta.sources:
            sources += delta.sources
    return replace(
        deltas[-1],
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


def shown_prompt_logprobs(
    entries: Sequence[TokenLogprob | None], num_top: int, names: TokenNames | TokenIdNames
) -> PromptLogprobs:
    """A prompt's logprobs in vLLM's shape, with the num_top likeliest of each position."""

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
    names = delta.sources or ("",) * len(ids)
    lengths = [(name, len(list(same))) for name, same in groupby(names)]
    runs: list[SourceRun] = []
    start = 0
    for i, (name, num_tokens) in enumerate(lengths):
        part = ids[start : start + num_tokens]
        start += num_tokens
        if finish_reason is not None and i + 1 == len(lengths):
            text = stream.finish(part, finish_reason, delta.stop_reason)
        else:
            text = stream.push(part)
        runs.append(SourceRun(source=name or None, tokens=num_tokens, text=text))
    return "".join(run.text for run in runs), runs


class RejectedDrafts:
    """The rejected drafts of one choice, Delta by Delta."""

    __slots__ = ("_counter", "_num_tokens", "_skip_special", "_table")

    def __init__(self, table: TokenBytes, *, skip_special: bool) -> None:
        self._table = table
        self._skip_special = skip_special
        self._counter = CharCounter()
        self._num_tokens = 0

    def take(self, delta: Delta) -> list[RejectedDraft]:
        """The rejected drafts of one Delta. Called for each, in order."""
        offsets = [
            self._counter.push(self._table.join((token,), skip_special=self._skip_special))
            for token in delta.token_ids
        ]
        before = self._num_tokens
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


# --- streams --------------------------------------------------------------------------------------

_Chunk = TypeVar("_Chunk", bound=Chunk)


class ChunkFrame(Generic[_Chunk]):
    """What is around the choice in every chunk.

    kind: the chunk's type. extra: further members of it; of_first: of the first chunk alone.
    num_sent, the tokens of the chunks so far, is written by the chunks' writer.
    """

    def __init__(
        self, order: Order, submission: Submission, kind: type[_Chunk], **extra: Any
    ) -> None:
        options = order.body.stream_options
        self._has_usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
        self._order = order
        self._submission = submission
        # One object for all chunks: what never changes is set once.
        self._chunk: _Chunk = kind(
            id=order.request_id,
            created=order.created,
            model=order.target.label,
            system_fingerprint=order.target.model.fingerprint or None,
            choices=[],
            **extra,
        )
        self.num_sent = 0
        self.of_first: dict[str, Any] = {}

    def chunk(self, choice: Any, *, is_last: bool) -> bytes:
        """The event of one choice. is_last: no further one with a choice comes."""
        chunk = self._chunk
        chunk.choices = [choice]
        if self._has_usage:
            chunk.usage = None
            if self._continuous:
                # The accounts may be ahead: several Deltas can have arrived before this chunk.
                chunk.usage = usage_report(self._submission.accounts, self.num_sent)
        elif is_last:
            chunk.speculation = speculation_of(self._order, self._submission)
        if not self.of_first:
            return event(chunk)
        first, self.of_first = self.of_first, {}
        return event(msgspec.structs.replace(chunk, **first))

    def closing(self) -> bytes:
        """The chunk without choices that has the sums; b"" unless include_usage."""
        if not self._has_usage:
            return b""
        chunk = self._chunk
        chunk.choices = []
        chunk.usage = usage_report(
            self._submission.accounts, num_truncated=self._order.num_truncated
        )
        chunk.speculation = speculation_of(self._order, self._submission)
        return event(chunk)


def speculation_of(order: Order, submission: Submission) -> Speculation | UnsetType:
    """The `speculation` object of an answer, where it was asked for."""
    if not order.body.include_speculation:
        return UNSET
    return speculation_report(submission.accounts)


async def stream_events(
    submission: Submission,
    write: Callable[[list[tuple[int, Delta]]], bytes],
    frame: ChunkFrame[Any],
) -> AsyncGenerator[bytes, None]:
    """The response as server-sent events, one byte string for all that arrived together.

    write: the events of what arrived, b"" for none. An error before the first event is raised;
    after the status was sent it becomes an event. [DONE] is always last.
    """
    started = False
    try:
        async for arrived in submission:
            if data := write(arrived):
                started = True
                yield data
    except TailorError as error:
        if not started:
            raise
        yield error_event(error)
        return
    yield frame.closing() + DONE
