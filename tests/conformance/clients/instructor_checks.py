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


OPTIONS: Any = {"model": MODEL, "response_model": Person, "max_tokens": 80, "temperature": 0}
ADA: Any = {"role": "user", "content": "Ada is 36 years old."}


def client(mode: instructor.Mode) -> instructor.Instructor:
    """The server, asked for Persons."""
    return instructor.from_openai(
        openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0), mode=mode
    )


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):

    @check(f"instructor {mode.name}")
    def _(mode: instructor.Mode = mode) -> None:
        completions = client(mode).chat.completions
        assert isinstance(completions.create(messages=[ADA], max_retries=1, **OPTIONS), Person)


@check("instructor TOOLS, a second turn on the first one's call")
def _() -> None:
    completions, messages = client(instructor.Mode.TOOLS).chat.completions, [ADA]
    _, said = completions.create_with_completion(messages=messages, **OPTIONS)
    message = said.choices[0].message
    messages.append(message.model_dump())
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "noted"})
    messages.append({"role": "user", "content": "Grace is 37 years old."})
    assert isinstance(completions.create(messages=messages, **OPTIONS), Person)


finish()
