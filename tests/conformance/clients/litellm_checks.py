"""LiteLLM: text completions and chat through its OpenAI providers."""

from __future__ import annotations

from functools import partial
from typing import Any

import litellm
from checks import BASE_URL, MODEL, check, finish
from conversation import three_turns

COMMON: dict[str, Any] = {"api_base": BASE_URL, "api_key": "none", "num_retries": 0}
TEXT: dict[str, Any] = {"model": f"text-completion-openai/{MODEL}", **COMMON}
CHAT: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "messages": [{"role": "user", "content": "Say hello."}],
    **COMMON,
}


@check("litellm text_completion")
def _() -> None:
    answer = litellm.text_completion(
        prompt="The capital of France is", max_tokens=5, temperature=0, **TEXT
    )
    assert answer.choices[0].text and answer.usage.completion_tokens == 5


@check("litellm text_completion stream")
def _() -> None:
    chunks = litellm.text_completion(
        prompt="One, two,", max_tokens=6, temperature=0, stream=True, **TEXT
    )
    assert "".join(chunk.choices[0].text or "" for chunk in chunks)


@check("litellm list of prompts")
def _() -> None:
    answer = litellm.text_completion(prompt=["a b c", "1 2 3"], max_tokens=2, **TEXT)
    assert len(answer.choices) == 2


@check("litellm maps a 400")
def _() -> None:
    try:
        litellm.text_completion(prompt="x", temperature=9, **TEXT)
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("no error")


@check("litellm maps a 404")
def _() -> None:
    try:
        litellm.text_completion(prompt="x", **{**TEXT, "model": "text-completion-openai/nobody"})
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("no error")


@check("litellm completion")
def _() -> None:
    answer = litellm.completion(max_tokens=8, **CHAT)
    assert answer.choices[0].message.content and answer.usage.total_tokens > 0


@check("litellm completion stream")
def _() -> None:
    chunks = litellm.completion(max_tokens=8, stream=True, **CHAT)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check("litellm acompletion")
async def _() -> None:
    answer = await litellm.acompletion(max_tokens=4, **CHAT)
    assert answer.choices[0].finish_reason in ("stop", "length")


@check("litellm two turns with a tool, its own messages sent back")
def _() -> None:
    three_turns(partial(litellm.completion, model=f"openai/{MODEL}", **COMMON))


@check("litellm responses")
def _() -> None:
    model = f"openai/{MODEL}"
    answer = litellm.responses(model=model, input="Say hello.", max_output_tokens=8, **COMMON)
    assert answer.output


finish()
