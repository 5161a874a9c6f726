"""What the conversations of this folder share: a tool, and the server's words for it."""

from __future__ import annotations

import json
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


def weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


def is_weather(arguments: str) -> bool:
    """Whether a call's arguments are those of the tool."""
    return set(json.loads(arguments)) == {"city"}
