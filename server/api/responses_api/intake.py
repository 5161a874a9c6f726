"""From a Responses body to the order of a chat; errors name the body's own fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.api.chat_intake import ChatIntake, ChatNames, ChatOrder
from server.api.chat_protocol import ChatBody
from server.api.protocol import validate
from server.api.responses_api.body import FunctionToolBody, ResponsesBody
from server.api.responses_api.items import messages_of
from server.errors import InvalidRequestError, RequestError, UnsupportedFieldError, echoed

_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "store": ((False,), "nothing is stored here; send false"),
    "background": ((False,), "requests are answered while the client waits"),
    "include": (([], ["reasoning.encrypted_content"]), "there is nothing more to include"),
    "previous_response_id": ((), "nothing is stored here; send the whole conversation as input"),
    "conversation": ((), "nothing is stored here; send the whole conversation as input"),
    "prompt": ((), "prompt templates are not stored here; use a task"),
    "max_tool_calls": ((), "no tools run here; the client calls them"),
    "top_logprobs": ((0,), "use /v1/chat/completions"),
    "truncation": (("disabled",), "conversations are never cut"),
}
_NAMES = {"prompt": "input", "logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
_SAME = (
    "model", "temperature", "top_p", "parallel_tool_calls", "service_tier", "stream", "seed",
    "top_k", "min_p", "repetition_penalty", "cache_salt", "priority", "speculation",
    "additional_properties", "chat_template_kwargs",
)  # fmt: skip
_PATHS = (
    (re.compile(r"^response_format\.json_schema"), "text.format"),
    (re.compile(r"^response_format"), "text.format"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^messages\b"), "input"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
    (re.compile(r"^verbosity"), "text.verbosity"),
)
"""What a chat calls its fields, at the beginning of an error, and what they are called here."""


@dataclass(frozen=True, slots=True)
class ResponsesOrder:
    """A POST /v1/responses after intake."""

    chat: ChatOrder
    body: ResponsesBody


async def responses_order(
    body: ResponsesBody, chats: ChatIntake, response_id: str, room: int, tenant: str
) -> ResponsesOrder:
    """The order of one body. Raises the client's errors of server.errors (4xx)."""
    for name, (neutral, reason) in _NEUTRAL.items():
        value = getattr(body, name)
        same = any(value == item and type(value) is type(item) for item in neutral)
        if value is not None and not same:
            raise UnsupportedFieldError(f"{name}: {reason}; got {echoed(value)}.", param=name)
    messages, paths, calls = messages_of(body.input)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
        paths.insert(0, "instructions")
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.stream_options is not None:
        given["stream_options"] = body.stream_options.model_dump(exclude_none=True)
    if body.speculation is not None:
        given["speculation"] = body.speculation.model_dump(by_alias=True, exclude_none=True)
    given |= {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": _choice(body.tool_choice),
        "response_format": _format(body),
        "verbosity": None if body.text is None else body.text.verbosity,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    try:
        chat = validate(ChatBody, given)
        order = await chats.order(chat, response_id, room, tenant, ChatNames(_NAMES, paths))
    except RequestError as error:
        raise _renamed(error, calls) from None
    return ResponsesOrder(order, body)


def _tool(tool: FunctionToolBody) -> dict[str, Any]:
    function = tool.model_dump(exclude_none=True, exclude={"type"})
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        if set(choice) != {"type", "name"}:
            raise InvalidRequestError("tool_choice: must name a function.", param="tool_choice")
        return {"type": "function", "function": {"name": choice["name"]}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = [_choice(tool) for tool in choice.get("tools") or ()]
        inner = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": inner}
    return choice


def _format(body: ResponsesBody) -> dict[str, Any] | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    if form.type != "json_schema":
        if form.schema_value is not None and form.type == "text":
            raise InvalidRequestError(
                "text.format.schema is allowed only with the types json_schema and json_object.",
                param="text.format.schema",
            )
        return {"type": form.type, "schema": form.schema_value}
    schema = {"name": form.name, "schema": form.schema_value}
    return {"type": "json_schema", "json_schema": schema}


def _renamed(error: RequestError, calls: Mapping[str, str]) -> RequestError:
    """The error with this body's names of the fields that it begins with. calls: of messages_of."""
    message, param = error.message, error.param
    paths = [(re.compile(rf"^{re.escape(function)}\b"), at) for function, at in calls.items()]
    for pattern, name in (*_PATHS, *paths):
        message = pattern.sub(name, message)
        param = None if param is None else pattern.sub(name, param)
    again = type(error)(
        message, param=param, retry_after_s=error.retry_after_s, headers=error.headers
    )
    return error if (message, param) == (error.message, error.param) else again
