"""The answer of POST /v1/responses and the events of its stream (see server.api.responses)."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from server.api.responses import Count, DecisionUsage, Shape, Speculation

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class TextPart(Shape, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class MessageItem(Shape, kw_only=True, tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[TextPart]


class CallItem(Shape, kw_only=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = MessageItem | CallItem


class IncompleteDetails(Shape, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class TextSettings(Shape, kw_only=True):
    format: dict[str, Any]


class ResponseAnswer(Shape, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete"]
    background: Literal[False] = False
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: Count | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    service_tier: str
    store: Literal[False] = False
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: DecisionUsage | None = None
    user: str | None
    metadata: dict[str, Any]
    speculation: Speculation | UnsetType = UNSET


class ResponseEvent(Shape, kw_only=True):
    """One event of a stream; its type determines its members."""

    type: str
    sequence_number: Count
    response: ResponseAnswer | UnsetType = UNSET
    output_index: Count | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: Count | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: TextPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class ErrorEvent(Shape, kw_only=True):
    """An error after the status was sent."""

    type: Literal["error"] = "error"
    sequence_number: Count
    code: str | None
    message: str
    param: str | None
