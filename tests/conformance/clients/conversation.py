"""What the conversations of this folder share: a tool, and the server's words for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

QUESTION = "What is the weather in Rome? Use the tool."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}},
    "required": ["name"],
}
CITY_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


def weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


def is_weather(arguments: str) -> bool:
    """Whether a call's arguments are those of the tool."""
    return set(json.loads(arguments)) == {"city"}


def three_turns(create: Callable[..., Any]) -> None:
    """A forced call, the words on its result, and thanks: what the library answers is sent back,
    dumped once and once as it is. create: makes a chat completion of messages and options."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {"tools": [TOOL], "max_tokens": 40, "temperature": 0}
    said = create(messages=messages, tool_choice="required", **options).choices[0].message
    [call] = said.tool_calls
    assert is_weather(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": weather("Rome")}
    messages += [said.model_dump(), result]
    second = create(messages=messages, **options).choices[0].message
    messages += [second, {"role": "user", "content": "Thank you."}]
    assert create(messages=messages, **options).choices
