"""openai-agents: a run with a tool, two turns, through chat completions and through responses.

The library takes an answer that max_tokens cut for an error, so there is room for a whole one.
"""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import BASE_URL, MODEL, check, finish
from conversation import QUESTION, weather
from openai import AsyncOpenAI

set_tracing_disabled(True)
called: list[str] = []


def client() -> AsyncOpenAI:
    """A client for one check: each runs in an event loop of its own."""
    return AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    called.append(city)
    return weather(city)


async def two_turns(model: Any) -> None:
    """A turn whose first answer is a call for certain, then a second one on its history."""
    called.clear()
    settings = ModelSettings(tool_choice="required", max_tokens=400, temperature=0)
    agent = Agent(
        name="weather", instructions="Be brief.", tools=[get_weather], model=model,
        model_settings=settings,
    )  # fmt: skip
    first = await Runner.run(agent, QUESTION, max_turns=3)
    assert called and first.final_output
    history = [*first.to_input_list(), {"role": "user", "content": "Thank you."}]
    brief = ModelSettings(max_tokens=400, temperature=0)
    plain = Agent(name="plain", model=model, model_settings=brief)
    assert (await Runner.run(plain, history)).final_output


@check("openai-agents two turns with a tool, chat completions")
async def _() -> None:
    await two_turns(OpenAIChatCompletionsModel(model=MODEL, openai_client=client()))


@check("openai-agents two turns with a tool, responses")
async def _() -> None:
    await two_turns(OpenAIResponsesModel(model=MODEL, openai_client=client()))


@check("openai-agents stream, responses")
async def _() -> None:
    model = OpenAIResponsesModel(model=MODEL, openai_client=client())
    settings = ModelSettings(max_tokens=400, temperature=0)
    agent = Agent(name="plain", model=model, model_settings=settings)
    run = Runner.run_streamed(agent, "Say hello.")
    kinds = [event.type async for event in run.stream_events()]
    assert "raw_response_event" in kinds and run.final_output


finish()
