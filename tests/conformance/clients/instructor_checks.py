"""instructor: typed answers by JSON schema and by tools, and a second turn on the first call."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from checks import BASE_URL, MODEL, check, finish
from pydantic import BaseModel


class Person(BaseModel):
    """What the model is asked for."""

    name: str
    age: int


def ask(mode: instructor.Mode) -> Person:
    """One question with one retry."""
    client = instructor.from_openai(
        openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0), mode=mode
    )
    return client.chat.completions.create(
        model=MODEL,
        response_model=Person,
        max_retries=1,
        max_tokens=80,
        temperature=0,
        messages=[{"role": "user", "content": "Ada is 36 years old."}],
    )


@check("instructor JSON_SCHEMA")
def _() -> None:
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA), Person)


@check("instructor TOOLS")
def _() -> None:
    assert isinstance(ask(instructor.Mode.TOOLS), Person)


@check("instructor TOOLS, a second turn on the first one's call")
def _() -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0), mode=instructor.Mode.TOOLS
    )
    options: Any = {"model": MODEL, "response_model": Person, "max_tokens": 80, "temperature": 0}
    messages: list[Any] = [{"role": "user", "content": "Ada is 36 years old."}]
    _, said = client.chat.completions.create_with_completion(messages=messages, **options)
    message = said.choices[0].message
    messages.append(message.model_dump())
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "noted"})
    messages.append({"role": "user", "content": "Grace is 37 years old."})
    assert isinstance(client.chat.completions.create(messages=messages, **options), Person)


finish()
