"""From Deltas to a chat's answer: messages and tool calls, whole or as OpenAI's chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.api.chat_intake import ChatOrder
from server.api.chunks import (
    CallDelta,
    ChatChunk,
    ChatChunkChoice,
    MessageDelta,
    ToolCallDelta,
)
from server.api.engines.submission import Submission
from server.api.responses import (
    CallPart,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    RejectedDraft,
    SourceRun,
    TokenChance,
    TokenLogprobs,
    ToolCall,
)
from server.api.sources import RejectedDrafts, join_runs, text_by_source
from server.api.streaming import (
    LOWEST_LOGPROB,
    ChunkFrame,
    shown_finish,
    shown_prompt_logprobs,
    shown_stop_reason,
    stream_events,
)
from server.api.text import TextStream
from server.api.tools.reader import ArgumentsPiece, CallStart, ToolEvent
from server.api.usage import speculation_report, usage_report
from server.types import Delta, TokenLogprob


@dataclass(slots=True)
class ChoicePiece:
    """What one Delta adds to a choice: content and calls in order, and facts about its tokens."""

    events: list[ToolEvent]
    logprobs: list[TokenLogprobs]
    token_ids: tuple[int, ...]
    sources: list[SourceRun]
    rejected: list[RejectedDraft]


class ChoiceReader:
    """One choice as it grows. Written by `take` alone."""

    def __init__(self, order: ChatOrder, index: int) -> None:
        [request] = order.order.requests
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: int | bytes | None = None
        self._request = request
        self._order = order
        self._reader = order.new_reader()
        self._rejected = (
            RejectedDrafts(order.table, skip_special=request.sampling.skip_special_tokens)
            if order.order.include_rejected_drafts
            else None
        )
        self._stream = TextStream(
            order.table,
            stop=request.sampling.stop,
            include_stop=request.sampling.include_stop_str_in_output,
            skip_special=request.sampling.skip_special_tokens,
        )

    def take(self, delta: Delta) -> ChoicePiece:
        """Add one Delta."""
        text, sources = text_by_source(self._stream, delta, self._request.report_sources)
        reader = self._reader
        if reader is None:
            events: list[ToolEvent] = [text] if text else []
        else:
            events = reader.feed(text)
            if delta.finish_reason is not None:
                events += reader.finish()
        if delta.finish_reason is not None:
            called = reader is not None and reader.num_calls > 0
            ended = delta.finish_reason == "stop"
            self.finish_reason = "tool_calls" if called and ended else delta.finish_reason
            self.stop_reason = delta.stop_reason
        rejected = [] if self._rejected is None else self._rejected.take(delta)
        return ChoicePiece(events, self._logprobs(delta), delta.token_ids, sources, rejected)

    def _logprobs(self, delta: Delta) -> list[TokenLogprobs]:
        """Logprobs of the message's tokens, without that of an id that only ends it."""
        if self._order.order.logprobs is None:
            return []
        entries = delta.logprobs
        if entries and self._stream.dropped_last:
            entries = entries[:-1]
        return [self._entry(entry) for entry in entries]

    def _entry(self, entry: TokenLogprob) -> TokenLogprobs:
        token_id = entry.token_id
        return TokenLogprobs(
            token=self._order.names[token_id],
            logprob=max(entry.logprob, LOWEST_LOGPROB),
            bytes=list(self._order.table.bytes_of(token_id)),
            top_logprobs=[self._token(top_id, value) for top_id, value in entry.top],
        )

    def _token(self, token_id: int, logprob: float) -> TokenChance:
        return TokenChance(
            token=self._order.names[token_id],
            logprob=max(logprob, LOWEST_LOGPROB),
            bytes=list(self._order.table.bytes_of(token_id)),
        )


def _choices(order: ChatOrder) -> list[ChoiceReader]:
    return [ChoiceReader(order, i) for i in range(order.order.num_choices)]


@dataclass(slots=True)
class _Message:
    """A choice's message as its pieces arrive."""

    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sources: list[SourceRun] = field(default_factory=list)
    rejected: list[RejectedDraft] = field(default_factory=list)

    def add(self, piece: ChoicePiece) -> None:
        for event in piece.events:
            if isinstance(event, str):
                self.content.append(event)
            elif isinstance(event, CallStart):
                function = CallPart(name=event.name, arguments="")
                self.calls.append(ToolCall(id=event.call_id, function=function))
            else:
                self.calls[event.index].function.arguments += event.text
        self.logprobs += piece.logprobs
        self.token_ids += piece.token_ids
        self.sources += piece.sources
        self.rejected += piece.rejected

    def shown(self, *, was_cut: bool) -> ChatMessage:
        """OpenAI's message. was_cut: by max_tokens. A forced call that was cut is shown as text,
        because its arguments are not complete JSON."""
        content = "".join(self.content)
        if was_cut and self.calls and not _is_object(self.calls[-1].function.arguments):
            content += self.calls.pop().function.arguments
        message = ChatMessage(content=content if content or not self.calls else None)
        if self.calls:
            message.tool_calls = self.calls
        return message


async def chat_object(order: ChatOrder, submission: Submission) -> ChatAnswer:
    """The whole response, once every choice ended. Raises the TailorError that ended it early."""
    inner = order.order
    choices = _choices(order)
    messages = [_Message() for _ in choices]
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    async for arrived in submission:
        for _, delta in arrived:
            prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
            messages[delta.choice_id].add(choices[delta.choice_id].take(delta))
    return ChatAnswer(
        id=inner.request_id,
        created=inner.created,
        model=inner.label,
        choices=[_shown(order, *pair) for pair in zip(choices, messages, strict=True)],
        usage=usage_report(submission.accounts),
        system_fingerprint=inner.model.fingerprint or None,
        service_tier=_tier(order),
        speculation=(
            speculation_report(submission.accounts) if inner.include_speculation else UNSET
        ),
        prompt_logprobs=(
            UNSET
            if inner.prompt_logprobs is None
            else shown_prompt_logprobs(prompt_logprobs, inner.prompt_logprobs, order.names)
        ),
    )


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _tier(order: ChatOrder) -> Literal["default"] | UnsetType:
    return UNSET if order.service_tier is None else "default"


def _shown(order: ChatOrder, choice: ChoiceReader, message: _Message) -> ChatChoice:
    """The choice of the answer, once it ended."""
    inner = order.order
    shown = ChatChoice(
        index=choice.index,
        message=message.shown(
            was_cut=order.forced is not None and choice.finish_reason == "length"
        ),
        logprobs=None if inner.logprobs is None else ChatLogprobs(content=message.logprobs),
        finish_reason=shown_finish(choice.finish_reason),
    )
    if (reason := shown_stop_reason(choice.stop_reason)) is not None:
        shown.stop_reason = reason
    if inner.return_token_ids:
        shown.token_ids = tuple(message.token_ids)
        shown.prompt_token_ids = inner.requests[0].prompt_ids
    if inner.include_token_sources:
        shown.token_sources = join_runs(message.sources)
    if inner.include_rejected_drafts:
        shown.rejected_drafts = message.rejected
    return shown


class _ChunkWriter:
    """Writes the chunks of a response as events."""

    def __init__(self, order: ChatOrder, submission: Submission) -> None:
        self._order = order
        self._choices = _choices(order)
        self._num_open = len(self._choices)
        self._begun: set[int] = set()
        self._told_prompt: set[int] = set()
        self.frame = ChunkFrame(order.order, submission, ChatChunk, service_tier=_tier(order))

    def write(self, arrived: list[tuple[int, Delta]]) -> bytes:
        """The events of the Deltas that arrived together."""
        out: list[bytes] = []
        for _, delta in arrived:
            self._num_open -= delta.finish_reason is not None
            choice = self._choices[delta.choice_id]
            out += self._chunks(choice, delta, choice.take(delta))
        return b"".join(out)

    def _chunks(self, choice: ChoiceReader, delta: Delta, piece: ChoicePiece) -> list[bytes]:
        """The chunks of one Delta: the role first, one for each piece of content and of a call, and
        one with an empty delta and the finish_reason."""
        ended = delta.finish_reason is not None
        deltas = [_delta_of(event) for event in piece.events]
        if not deltas and (piece.logprobs or self._has_extras(piece)):
            deltas.append(MessageDelta(content=""))
        # A message may begin with content or with a call: the role waits for the first of them.
        waits = self._order.style is not None and not deltas and not ended
        chunks: list[bytes] = []
        if choice.index not in self._begun and not waits:
            self._begun.add(choice.index)
            if deltas and deltas[0].tool_calls is not UNSET:
                deltas[0].role, deltas[0].content, deltas[0].refusal = "assistant", None, None
            else:
                role = MessageDelta(role="assistant", content="", refusal=None)
                chunks.append(self._chunk(ChatChunkChoice(index=choice.index, delta=role)))
        self.frame.num_sent += len(delta.token_ids)
        for i, part in enumerate(deltas):
            shown = ChatChunkChoice(index=choice.index, delta=part)
            if self._order.order.logprobs is not None and i == 0:
                shown.logprobs = ChatLogprobs(content=piece.logprobs)
            if i == 0:
                self._add_extras(shown, piece)
            chunks.append(self._chunk(shown))
        if ended:
            shown = ChatChunkChoice(index=choice.index, delta=MessageDelta())
            shown.finish_reason = shown_finish(choice.finish_reason)
            if (reason := shown_stop_reason(choice.stop_reason)) is not None:
                shown.stop_reason = reason
            chunks.append(self._chunk(shown))
        return chunks

    def _has_extras(self, piece: ChoicePiece) -> bool:
        has_ids = self._order.order.return_token_ids and bool(piece.token_ids)
        return has_ids or bool(piece.sources or piece.rejected)

    def _add_extras(self, shown: ChatChunkChoice, piece: ChoicePiece) -> None:
        """Members beside OpenAI's, for the Delta's first chunk."""
        inner = self._order.order
        if inner.return_token_ids and piece.token_ids:
            shown.token_ids = piece.token_ids
            if shown.index not in self._told_prompt:
                self._told_prompt.add(shown.index)
                shown.prompt_token_ids = inner.requests[0].prompt_ids
        if piece.sources:
            shown.token_sources = piece.sources
        if piece.rejected:
            shown.rejected_drafts = piece.rejected

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        is_last = not self._num_open and choice.finish_reason is not None
        return self.frame.chunk(choice, is_last=is_last)


def _delta_of(event: ToolEvent) -> MessageDelta:
    """A chunk's delta."""
    if isinstance(event, str):
        return MessageDelta(content=event)
    if isinstance(event, CallStart):
        start = CallDelta(name=event.name, arguments="")
        call = ToolCallDelta(index=event.index, id=event.call_id, type="function", function=start)
    else:
        assert isinstance(event, ArgumentsPiece)
        call = ToolCallDelta(index=event.index, function=CallDelta(arguments=event.text))
    return MessageDelta(tool_calls=[call])


def chat_events(order: ChatOrder, submission: Submission) -> AsyncGenerator[bytes, None]:
    """The response as server-sent events (see stream_events): per choice a chunk with the role,
    then its content and calls, then one with the finish_reason and an empty delta."""
    writer = _ChunkWriter(order, submission)
    return stream_events(submission, writer.write, writer.frame)
