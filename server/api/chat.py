"""Deltas into a chat's answer: messages and tool calls, whole or in chunks as OpenAI's."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from server.api.chat_intake import ChatOrder
from server.api.engines.client import Submission
from server.api.sources import (
    RejectedDraft,
    RejectedDrafts,
    SourceRun,
    join_runs,
    text_by_source,
)
from server.api.streaming import (
    LOWEST_LOGPROB,
    ChunkFrame,
    quote,
    shown_stop_reason,
    stream_events,
)
from server.api.text import TextStream
from server.api.tools.reader import ArgumentsPiece, CallStart, ToolEvent
from server.api.usage import speculation_report, usage_report
from server.types import Delta, TokenLogprob

__all__ = ["chat_events", "chat_object"]


@dataclass(slots=True)
class _Piece:
    """What one Delta adds to a choice: content and calls in order, and facts about its tokens."""

    events: list[ToolEvent]
    logprobs: list[dict[str, Any]]
    token_ids: tuple[int, ...]
    sources: list[SourceRun]
    rejected: list[RejectedDraft]


class _Choice:
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

    def take(self, delta: Delta) -> _Piece:
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
        return _Piece(events, self._logprobs(delta), delta.token_ids, sources, rejected)

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        """Of the tokens that are the message's: an id that only ends it is none of them."""
        if self._order.order.logprobs is None:
            return []
        entries = delta.logprobs
        if entries and self._stream.dropped_last:
            entries = entries[:-1]
        return [self._entry(entry) for entry in entries]

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        return {
            **self._token(entry.token_id, entry.logprob),
            "top_logprobs": [self._token(token_id, value) for token_id, value in entry.top],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._order.names[token_id],
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self._order.table.bytes_of(token_id)),
        }


def _choices(order: ChatOrder) -> list[_Choice]:
    return [_Choice(order, i) for i in range(order.order.num_choices)]


@dataclass(slots=True)
class _Message:
    """A choice's message, put together from its pieces."""

    content: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sources: list[SourceRun] = field(default_factory=list)
    rejected: list[RejectedDraft] = field(default_factory=list)

    def add(self, piece: _Piece) -> None:
        for event in piece.events:
            if isinstance(event, str):
                self.content.append(event)
            elif isinstance(event, CallStart):
                function = {"name": event.name, "arguments": ""}
                self.calls.append({"id": event.call_id, "type": "function", "function": function})
            else:
                self.calls[event.index]["function"]["arguments"] += event.text
        self.logprobs += piece.logprobs
        self.token_ids += piece.token_ids
        self.sources += piece.sources
        self.rejected += piece.rejected

    def object(self) -> dict[str, Any]:
        """OpenAI's message."""
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self.calls else None,
            "refusal": None,
            "annotations": [],
        }
        if self.calls:
            message["tool_calls"] = self.calls
        return message


async def chat_object(order: ChatOrder, submission: Submission) -> dict[str, Any]:
    """The whole response, once every choice ended. Raises the TailorError that ended it early."""
    inner = order.order
    choices = _choices(order)
    messages = [_Message() for _ in choices]
    async for arrived in submission:
        for _, delta in arrived:
            messages[delta.choice_id].add(choices[delta.choice_id].take(delta))
    shown = []
    for choice, message in zip(choices, messages, strict=True):
        entry: dict[str, Any] = {
            "index": choice.index,
            "message": message.object(),
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if inner.logprobs is not None:
            entry["logprobs"] = {"content": message.logprobs, "refusal": None}
        if (reason := shown_stop_reason(choice.stop_reason)) is not None:
            entry["stop_reason"] = reason
        if inner.return_token_ids:
            entry["token_ids"] = message.token_ids
            entry["prompt_token_ids"] = list(inner.requests[0].prompt_ids)
        if inner.include_token_sources:
            entry["token_sources"] = join_runs(message.sources)
        if inner.include_rejected_drafts:
            entry["rejected_drafts"] = message.rejected
        shown.append(entry)
    response = {
        "id": inner.request_id,
        "object": "chat.completion",
        "created": inner.created,
        "model": inner.label,
        "choices": shown,
        "usage": usage_report(submission.accounts),
        "system_fingerprint": inner.model.fingerprint or None,
    }
    if order.service_tier is not None:
        response["service_tier"] = order.service_tier
    if inner.include_speculation:
        response["speculation"] = speculation_report(submission.accounts)
    return response


class _ChunkWriter:
    """Writes the chunks of a response as text."""

    def __init__(self, order: ChatOrder, submission: Submission) -> None:
        tier = "" if order.service_tier is None else f'"service_tier":{quote(order.service_tier)},'
        self._order = order
        self._choices = _choices(order)
        self._num_open = len(self._choices)
        self._begun: set[int] = set()
        self._told_prompt: set[int] = set()
        self.frame = ChunkFrame(order.order, submission, "chat.completion.chunk", tier)

    def write(self, arrived: list[tuple[int, Delta]]) -> str:
        """The events of what arrived together."""
        out: list[str] = []
        for _, delta in arrived:
            self._num_open -= delta.finish_reason is not None
            choice = self._choices[delta.choice_id]
            out += self._chunks(choice, delta, choice.take(delta))
        return "".join(out)

    def _chunks(self, choice: _Choice, delta: Delta, piece: _Piece) -> list[str]:
        """The chunks of one Delta: the role before anything else, one for each piece of content and
        of a call, and one without a delta that has the finish_reason."""
        self.frame.num_sent += len(delta.token_ids)
        ended = delta.finish_reason is not None
        deltas = [_delta_of(event) for event in piece.events]
        extra = self._extra(choice, piece)
        has_more = bool(piece.logprobs) or bool(extra)
        if has_more and not deltas:
            deltas.append('"content":""')
        # Whether a message begins with content or with a call is not known before either is there.
        waits = self._order.style is not None and not deltas and not ended
        chunks: list[str] = []
        if choice.index not in self._begun and not waits:
            self._begun.add(choice.index)
            if deltas and deltas[0].startswith('"tool_calls"'):
                deltas[0] = f'"role":"assistant","content":null,{deltas[0]},"refusal":null'
            else:
                chunks.append(
                    self._chunk(choice, '"role":"assistant","content":"","refusal":null', "null")
                )
        for i, text in enumerate(deltas):
            logprobs = "null"
            if self._order.order.logprobs is not None and i == 0:
                logprobs = json.dumps({"content": piece.logprobs, "refusal": None})
            chunks.append(self._chunk(choice, text, logprobs, extra=extra if i == 0 else ""))
        if ended:
            reason = shown_stop_reason(choice.stop_reason)
            told = "" if reason is None else f',"stop_reason":{json.dumps(reason)}'
            finish = quote(str(choice.finish_reason))
            chunks.append(self._chunk(choice, "", "null", finish=finish, extra=told))
        return chunks

    def _extra(self, choice: _Choice, piece: _Piece) -> str:
        """Members beside OpenAI's, for the Delta's first chunk."""
        inner = self._order.order
        extra = ""
        if inner.return_token_ids and piece.token_ids:
            extra = f',"token_ids":{json.dumps(piece.token_ids)}'
            if choice.index not in self._told_prompt:
                self._told_prompt.add(choice.index)
                extra += f',"prompt_token_ids":{json.dumps(inner.requests[0].prompt_ids)}'
        if piece.sources:
            extra += f',"token_sources":{json.dumps(piece.sources)}'
        if piece.rejected:
            extra += f',"rejected_drafts":{json.dumps(piece.rejected)}'
        return extra

    def _chunk(
        self, choice: _Choice, delta: str, logprobs: str, *, finish: str = "null", extra: str = ""
    ) -> str:
        return self.frame.chunk(
            f'{{"index":{choice.index},"delta":{{{delta}}},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{extra}}}',
            is_last=not self._num_open and finish != "null",
        )


def _delta_of(event: ToolEvent) -> str:
    """The members of a chunk's delta, as JSON text."""
    if isinstance(event, str):
        return f'"content":{quote(event)}'
    if isinstance(event, CallStart):
        return (
            f'"tool_calls":[{{"index":{event.index},"id":{quote(event.call_id)},'
            f'"type":"function","function":{{"name":{quote(event.name)},"arguments":""}}}}]'
        )
    assert isinstance(event, ArgumentsPiece)
    return (
        f'"tool_calls":[{{"index":{event.index},"function":{{"arguments":{quote(event.text)}}}}}]'
    )


def chat_events(order: ChatOrder, submission: Submission) -> AsyncGenerator[bytes, None]:
    """The response as server-sent events (see stream_events): per choice a chunk with the role,
    then its content and calls, then one with the finish_reason and an empty delta."""
    writer = _ChunkWriter(order, submission)
    return stream_events(submission, writer.write, writer.frame)
