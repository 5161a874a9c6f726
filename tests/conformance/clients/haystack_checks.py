"""Haystack's OpenAIChatGenerator: two turns, a tool and its result, a stream."""

from __future__ import annotations

import os
from typing import Any

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from checks import BASE_URL, MODEL, check, finish
from conversation import QUESTION, TOOL, weather
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret


def generator(**options: Any) -> OpenAIChatGenerator:
    """The server as a component."""
    settings = {"max_completion_tokens": 40, "temperature": 0, **options.pop("settings", {})}
    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"), model=MODEL, api_base_url=BASE_URL, max_retries=0,
        generation_kwargs=settings, **options,
    )  # fmt: skip


@check("haystack two turns")
def _() -> None:
    messages = [ChatMessage.from_user("Say hello.")]
    [first] = generator().run(messages=messages)["replies"]
    assert first.text
    again = [*messages, first, ChatMessage.from_user("And again.")]
    assert generator().run(messages=again)["replies"]


@check("haystack tool, then its result")
def _() -> None:
    tool = Tool(
        name="get_weather", description="The weather in a city.", function=weather,
        parameters=TOOL["function"]["parameters"],
    )  # fmt: skip
    forced = generator(tools=[tool], settings={"tool_choice": "required"})
    messages = [ChatMessage.from_user(QUESTION)]
    [answer] = forced.run(messages=messages)["replies"]
    [call] = answer.tool_calls
    result = ChatMessage.from_tool(weather(**call.arguments), origin=call)
    assert generator(tools=[tool]).run(messages=[*messages, answer, result])["replies"]


@check("haystack stream")
def _() -> None:
    chunks: list[Any] = []
    generator(streaming_callback=chunks.append).run(messages=[ChatMessage.from_user("Hello.")])
    assert chunks


finish()
