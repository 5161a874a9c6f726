"""`llm`: a conversation of two turns, and a schema, through its model of OpenAI-like servers."""

from __future__ import annotations

import json

from checks import BASE_URL, MODEL, check, finish
from llm.default_plugins.openai_models import Chat


def model() -> Chat:
    """The server as a model of `llm`."""
    made = Chat(MODEL, model_name=MODEL, api_base=BASE_URL, supports_schema=True)
    made.key = "none"
    made.needs_key = None
    return made


@check("llm conversation of two turns", needs_chat=True)
def _() -> None:
    conversation = model().conversation()
    assert conversation.prompt("Say hello.", max_tokens=8).text()
    assert conversation.prompt("And again.", max_tokens=8).text()


@check("llm prompt without a stream, with a schema", needs_chat=True)
def _() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}},
        "required": ["name"],
    }
    answer = model().prompt("Name a city.", schema=schema, stream=False, max_tokens=60)
    assert set(json.loads(answer.text())) == {"name"}


finish()
