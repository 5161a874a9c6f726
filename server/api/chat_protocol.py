"""POST /v1/chat/completions: the fields of a body; its messages and tools as templates read them.

No-op fields are those of every route (server.api.protocol.NO_OP_FIELDS). Fields of OpenAI's that
this server cannot honour are declared here, so that they are refused with a reason and not as
unknown fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, WithJsonSchema, model_validator

from server.api.body import parse_object
from server.api.body_part import BodyPart, says_nothing
from server.api.protocol import INT31, GenerationBody, joined_texts, refuse_unless_neutral
from server.errors import (
    InvalidBodyError,
    InvalidRequestError,
    UnsupportedFieldError,
)

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TOOLS_CHARS = 1 << 18
MAX_CALLS = 128
FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"

_PART = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "refusal"]},
        "text": {"type": "string"},
        "refusal": {"type": "string"},
    },
    "required": ["type"],
    "additionalProperties": False,
}
_CONTENT = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}],
    "description": "text, or text parts, which are joined with line breaks",
}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "items": {"type": "object"}},
                    },
                    "required": ["mode", "tools"],
                },
            },
            "required": ["type", "allowed_tools"],
        },
        {"type": "null"},
    ]
}


class CalledFunctionBody(BodyPart):
    """Name and arguments (JSON text) of a call that was made."""

    name: str = Field(pattern=FUNCTION_NAME)
    arguments: str


class ToolCallBody(BodyPart):
    """A call in an assistant's message. index: as it is in chunks; changes nothing here."""

    index: int | None = None
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function", "custom"] = "function"
    function: CalledFunctionBody | None = None
    custom: Any = None


class MessageBody(BodyPart):
    """One message. `template_messages` checks which fields a role has.

    Members that are empty count as absent: clients send answers back with members of their own
    (`provider_specific_fields: {"refusal": null}`, `images: []`).
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Any, WithJsonSchema(_CONTENT)] = None
    name: str | None = Field(None, max_length=256, description="goes to the template")
    refusal: str | None = None
    reasoning_content: str | None = Field(None, description="for templates that read it")
    tool_calls: list[ToolCallBody] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = Field(None, min_length=1, max_length=256)
    annotations: list[Any] | None = Field(
        None, max_length=0, description="empty, as answers have it: clients send them back whole"
    )
    audio: Any = None
    function_call: Any = None
    id: str | None = Field(None, max_length=256, description="changes nothing")
    cache_control: Any = Field(None, description="of other vendors' prompt caches; changes nothing")

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = ("role", "content", "tool_call_id", "name", "refusal", "audio", "function_call")
        return {
            name: item for name, item in value.items() if name in kept or not says_nothing(item)
        }


class FunctionBody(BodyPart):
    """A function that the model may call."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments")
    strict: bool | None = Field(
        None, description="true: a call is reported only with arguments that fit parameters"
    )


class ToolBody(BodyPart):
    """One tool."""

    type: Literal["function", "custom"]
    function: FunctionBody | None = None
    custom: Any = None
    cache_control: Any = Field(None, description="of other vendors' prompt caches; changes nothing")


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, le=INT31)
    max_tokens: int | None = Field(None, ge=1, le=INT31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, WithJsonSchema(_TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None

    # Honoured where they ask for the default, or for what the template can do.
    modalities: list[Literal["text", "audio"]] | None = Field(None, max_length=2)
    reasoning_effort: str | None = Field(None, max_length=64)
    verbosity: Literal["low", "medium", "high"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None

    # Accepted only with the value that applies anyway (see _NEUTRAL).
    best_of: Any = None
    echo: Any = None
    add_special_tokens: Any = None

    # vLLM's.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)

    # Refused by name.
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    truncate_prompt_tokens: Any = None
    web_search_options: Any = None


_REFUSED = {
    "audio": "this model writes text only",
    "chat_template": "a chat is rendered by the model's own template, never by a client's",
    "documents": "put them into the messages",
    "function_call": "it is OpenAI's old form; use tool_choice",
    "functions": "it is OpenAI's old form; use tools",
    "moderation": "this server has no moderation",
    "prompt_cache_options": "the prefix cache needs no options and promises no lifetime",
    "truncate_prompt_tokens": "a rendered chat is not cut; leave out messages",
    "web_search_options": "this server searches nothing",
}


_NEUTRAL: Mapping[str, tuple[bool | float, str]] = {
    "echo": (False, "an answer holds the message alone"),
    "add_special_tokens": (False, "the chat template writes all control tokens"),
}


def refuse_unsupported(body: ChatBody) -> None:
    """Raise UnsupportedFieldError for fields that no model here can honour, InvalidRequestError for
    fields that contradict each other."""
    for name, reason in _REFUSED.items():
        if getattr(body, name) not in (None, [], "none"):
            raise UnsupportedFieldError(f"{name}: {reason}.", param=name)
    refuse_unless_neutral(body, _NEUTRAL)
    most = body.n or 1
    refuse_unless_neutral(body, {"best_of": (most, "every choice is returned; it must equal n")})
    for name, value, allowed in (
        ("modalities", "audio" if "audio" in (body.modalities or ()) else None, ("text",)),
        ("verbosity", body.verbosity, ("medium",)),
        ("service_tier", body.service_tier, ("auto", "default")),
        ("prompt_cache_retention", body.prompt_cache_retention, ("in_memory",)),
    ):
        if value is not None and value not in allowed:
            raise UnsupportedFieldError(
                f"{name}: {value} is not available here, only {' and '.join(allowed)}.", param=name
            )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs is allowed only with logprobs true.", param="top_logprobs"
        )
    if (
        body.max_tokens is not None
        and body.max_completion_tokens is not None
        and body.max_tokens != body.max_completion_tokens
    ):
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens are two names of one limit; give one.",
            param="max_tokens",
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt contradict each other.",
            param="continue_final_message",
        )


# --- messages ---

_OF_ALL_ROLES = frozenset({"role", "id", "cache_control"})
_FIELDS_OF_ROLE: Mapping[str, frozenset[str]] = {
    "system": frozenset({"content", "name"}),
    "developer": frozenset({"content", "name"}),
    "user": frozenset({"content", "name"}),
    "assistant": frozenset(
        {"content", "name", "refusal", "reasoning_content", "tool_calls", "annotations"}
    ),
    "tool": frozenset({"content", "tool_call_id", "name"}),
}


def template_messages(
    messages: Sequence[MessageBody],
    *,
    has_developer: bool,
    has_reasoning: bool,
    paths: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The messages as templates read them: content a string, arguments of calls as objects.

    has_developer: whether the template knows that role; else it is the system's. has_reasoning:
    whether it reads reasoning_content. paths: where each message lies in the body, for errors;
    default messages[0], messages[1], ... Raises InvalidRequestError and UnsupportedFieldError,
    naming message and field.
    """
    rendered = []
    for i, message in enumerate(messages):
        at = paths[i] if paths else f"messages[{i}]"
        role = message.role
        fields = _FIELDS_OF_ROLE.get(role)
        if fields is None:
            raise UnsupportedFieldError(
                f"{at}.role: function is OpenAI's old form; use tool.", param=f"{at}.role"
            )
        for name in MessageBody.model_fields:
            if (
                name not in _OF_ALL_ROLES
                and name not in fields
                and getattr(message, name) is not None
            ):
                raise UnsupportedFieldError(
                    f"{at}.{name}: a message of the role {role} cannot have it.",
                    param=f"{at}.{name}",
                )
        shown: dict[str, Any] = {
            "role": "system" if role == "developer" and not has_developer else role,
            "content": _content(message, at),
        }
        if message.name is not None:
            shown["name"] = message.name
        if message.reasoning_content is not None:
            if not has_reasoning:
                raise UnsupportedFieldError(
                    f"{at}.reasoning_content: this model's chat template does not read it.",
                    param=f"{at}.reasoning_content",
                )
            shown["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            shown["tool_calls"] = [
                _call(call, f"{at}.tool_calls[{k}]") for k, call in enumerate(message.tool_calls)
            ]
        if role == "tool":
            if message.tool_call_id is None:
                raise InvalidRequestError(
                    f"The field {at}.tool_call_id is required.", param=f"{at}.tool_call_id"
                )
            shown["tool_call_id"] = message.tool_call_id
        rendered.append(shown)
    return rendered


def _content(message: MessageBody, at: str) -> str:
    if message.content is not None:
        # A line break between parts, as vLLM and llama.cpp put it.
        return joined_texts(message.content, f"{at}.content", "\n")
    if message.role == "assistant":
        if message.refusal is not None:
            return message.refusal
        if message.tool_calls:
            return ""
    raise InvalidRequestError(f"The field {at}.content is required.", param=f"{at}.content")


def _call(call: ToolCallBody, at: str) -> dict[str, Any]:
    if call.type != "function" or call.custom is not None:
        raise UnsupportedFieldError(
            f"{at}.type: only function tools are available.", param=f"{at}.type"
        )
    if call.function is None:
        raise InvalidRequestError(f"The field {at}.function is required.", param=f"{at}.function")
    text, where = call.function.arguments, f"{at}.function.arguments"
    return {
        "id": call.id,
        "type": "function",
        "function": {
            "name": call.function.name,
            # Some clients send "" for a call without arguments.
            "arguments": _object(text, where) if text.strip() else {},
        },
    }


def _object(text: str, at: str) -> dict[str, Any]:
    try:
        return parse_object(text.encode())
    except InvalidBodyError:
        raise InvalidRequestError(f"{at}: must be the text of a JSON object.", param=at) from None
