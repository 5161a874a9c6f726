"""DSPy: a chat of two turns through its LM, three with a tool, and a JSON schema."""

from __future__ import annotations

import json
from typing import Any

import dspy
from checks import BASE_URL, MODEL, check, finish
from conversation import CITY_FORMAT, QUESTION, TOOL, is_weather, weather

LM = dspy.LM(
    f"openai/{MODEL}", api_base=BASE_URL, api_key="none", max_tokens=120, temperature=0.0,
    cache=False, num_retries=0,
)  # fmt: skip


@check("dspy LM of two turns")
def _() -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    [first] = LM(messages=messages, max_tokens=8)
    messages += [{"role": "assistant", "content": str(first)}, messages[0]]
    assert LM(messages=messages, max_tokens=8)


@check("dspy LM with a JSON schema")
def _() -> None:
    # What dspy.Predict makes of a small model's own words is not the server's to answer for.
    [text] = LM("What is the capital of Italy?", response_format=CITY_FORMAT, max_tokens=60)
    assert set(json.loads(str(text))) == {"name"}


@check("dspy LM of three turns with a tool")
def _() -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    [first] = LM(messages=messages, tools=[TOOL], tool_choice="required", max_tokens=60)
    [call] = first["tool_calls"]
    assert is_weather(call["function"]["arguments"])
    said = {"role": "assistant", "content": first.get("text") or "", "tool_calls": [dict(call)]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": weather("Rome")}
    [second] = LM(messages=[*messages, said, result], tools=[TOOL], max_tokens=20)
    text = second if isinstance(second, str) else second.get("text") or ""
    messages += [said, result, {"role": "assistant", "content": text}]
    assert LM(messages=[*messages, {"role": "user", "content": "Thank you."}], max_tokens=8)


finish()
