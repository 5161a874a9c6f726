"""The chunks of streamed answers, declared once (see server.api.responses)."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from server.api.responses import (
    ChatLogprobs,
    Count,
    Extras,
    FinishReason,
    Logprobs,
    Shape,
    Speculation,
    Usage,
)


class CompletionChunkChoice(Extras, kw_only=True):
    text: str
    index: Count
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class CompletionChunk(Shape, kw_only=True):
    """A chunk of a streamed completion. usage: present with include_usage; null but in the last
    chunk, or in no chunk (continuous_usage_stats)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Count
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    speculation: Speculation | UnsetType = UNSET


class CallDelta(Shape, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Shape, kw_only=True):
    index: Count
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CallDelta


class MessageDelta(Shape, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChunkChoice(Extras, kw_only=True):
    index: Count
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Shape, kw_only=True):
    """See CompletionChunk."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: Count
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    service_tier: Literal["default"] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    speculation: Speculation | UnsetType = UNSET
