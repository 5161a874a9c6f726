"""pydantic-ai: typed output, a tool, and a second turn on the first one's messages."""

from __future__ import annotations

from checks import BASE_URL, MODEL, check, finish
from conversation import weather
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

PROVIDER = OpenAIProvider(base_url=BASE_URL, api_key="none")
SHORT = ModelSettings(max_tokens=60, temperature=0)


class City(BaseModel):
    """What the model is asked for."""

    name: str


@check("pydantic-ai two turns")
async def _() -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=PROVIDER), model_settings=SHORT)
    first = await agent.run("Say hello.")
    assert first.output
    assert (await agent.run("And again.", message_history=first.all_messages())).output


@check("pydantic-ai output as a forced call, then a second turn")
async def _() -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=PROVIDER), output_type=City, model_settings=SHORT)
    first = await agent.run("Name a city.")
    assert isinstance(first.output, City)
    second = await agent.run("Another one.", message_history=first.all_messages())
    assert isinstance(second.output, City)


@check("pydantic-ai native JSON schema")
async def _() -> None:
    agent = Agent(
        OpenAIChatModel(MODEL, provider=PROVIDER), output_type=NativeOutput(City),
        model_settings=SHORT,
    )  # fmt: skip
    assert isinstance((await agent.run("Name a city.")).output, City)


@check("pydantic-ai tool there, responses, two turns")
async def _() -> None:
    agent = Agent(
        OpenAIResponsesModel(MODEL, provider=PROVIDER), tools=[weather], model_settings=SHORT
    )
    first = await agent.run("Say hello.")
    assert (await agent.run("And again.", message_history=first.all_messages())).output


finish()
