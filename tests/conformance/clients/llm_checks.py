"""`llm`: conversations of two turns, without tools and with one, and a schema, through its model of
OpenAI-like servers."""

from __future__ import annotations

import json

from checks import BASE_URL, MODEL, check, finish
from conversation import CITY, QUESTION, weather
from llm.default_plugins.openai_models import Chat


def model() -> Chat:
    """The server as a model of `llm`."""
    made = Chat(
        MODEL, model_name=MODEL, api_base=BASE_URL, supports_schema=True, supports_tools=True
    )
    made.key = "none"
    made.needs_key = None
    return made


@check("llm conversation of two turns")
def _() -> None:
    conversation = model().conversation()
    assert conversation.prompt("Say hello.", max_tokens=8).text()
    assert conversation.prompt("And again.", max_tokens=8).text()


@check("llm prompt without a stream, with a schema")
def _() -> None:
    answer = model().prompt("Name a city.", schema=CITY, stream=False, max_tokens=60)
    assert set(json.loads(answer.text())) == {"name"}


@check("llm chain of two turns with a tool there")
def _() -> None:
    # `llm` forces no call: whether a model of this size makes one is its own affair.
    conversation = model().conversation()
    options = {"max_tokens": 40, "temperature": 0}
    for question in (QUESTION, "Thank you."):
        chain = conversation.chain(question, tools=[weather], options=options, chain_limit=3)
        assert chain.text() is not None
    assert len(conversation.responses) >= 2


finish()
