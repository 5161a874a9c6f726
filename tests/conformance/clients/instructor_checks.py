"""instructor: typed answers by JSON schema and by tools."""

from __future__ import annotations

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


@check("instructor JSON_SCHEMA", needs_chat=True)
def _() -> None:
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA), Person)


@check("instructor TOOLS", needs_chat=True)
def _() -> None:
    assert isinstance(ask(instructor.Mode.TOOLS), Person)


finish()
