"""Chats on the real engine with the FakeRunner: predictions and drafts never change an answer, and
a call that must be made is made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.chat_models import chat_spec, encode, served, weather
from tests.api.fixtures import over
from tests.api.live import LiveServer
from tests.api.test_completions import events, streamed

MODELS = ("hermes", "mistral", "llama")
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


server = over(
    *(chat_spec(name, i) for i, name in enumerate(MODELS)),
    models=lambda: {name: served(name) for name in MODELS},
    drafters=("off", "suffix", "auto"),
)


def chat(server: LiveServer, **body: Any) -> Any:
    body = {
        "model": "hermes", "messages": MESSAGES, "max_completion_tokens": 60, "ignore_eos": True,
        **body,
    }  # fmt: skip
    response = server.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(
    "variant", [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "logprobs": True}], ids=str
)
def test_a_prediction_is_accepted_counted_and_changes_nothing(
    server: LiveServer, variant: dict[str, Any]
) -> None:
    # Letters that no merge joins: the ids of the text are the ids that were drawn.
    letters = sorted(encode("ZQXJKVY"))
    variant = {**variant, "allowed_token_ids": letters}
    plain = chat(server, speculation={"drafter": "off"}, return_token_ids=True, **variant).json()
    [choice] = plain["choices"]
    text = choice["message"]["content"]
    assert encode(text) == choice["token_ids"] and len(letters) == 7
    for right in (True, False):
        content = text if right else "something that the model never says " * 5
        body = chat(server, prediction={"type": "content", "content": content},
                    include_speculation=True, return_token_ids=True, **variant).json()  # fmt: skip
        assert body["choices"] == plain["choices"]
        details = body["usage"]["completion_tokens_details"]
        counted = body["speculation"]["by_source"].get("prediction", {})
        accepted = details["accepted_prediction_tokens"]
        assert accepted == counted.get("accepted_tokens", 0)
        rejected = counted.get("drafted_tokens", 0) - accepted
        assert details["rejected_prediction_tokens"] == rejected
        assert (accepted > 30) == right
        assert (body["speculation"]["steps"] < 30) == right
    assert streamed(chat(server, stream=True, **variant)) == [text]


CITY: dict[str, dict[str, Any]] = {
    "city": {"enum": ["Paris", "Rome", "Zürich"]},
    "days": {"type": "integer", "minimum": 1, "maximum": 99},
}
PARAMETERS = {"type": "object", "properties": CITY, "required": ["city", "days"]}


@pytest.mark.parametrize(("num_tools", "temperature"), [(1, 1.2), (2, 0)])
@pytest.mark.parametrize("model", MODELS)
def test_a_call_that_must_be_made_is_made(
    server: LiveServer, model: str, num_tools: int, temperature: float
) -> None:
    tools = [weather(f"tool{i}", parameters=PARAMETERS, strict=True) for i in range(num_tools)]
    options = {
        "model": model, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False,
        "temperature": temperature, "seed": 6, "max_completion_tokens": 200, "ignore_eos": None,
    }  # fmt: skip
    found = []
    for drafter in ("off", "auto"):
        speculation = {"drafter": drafter}
        [choice] = chat(server, speculation=speculation, **options).json()["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] in {f"tool{i}" for i in range(num_tools)}
        arguments = json.loads(call["function"]["arguments"])
        assert set(arguments) == {"city", "days"} and 1 <= arguments["days"] <= 99
        assert arguments["city"] in CITY["city"]["enum"]
        found.append(call["function"])
    chunks = events(chat(server, stream=True, **options))
    calls = [c["function"] for e in chunks for c in e["choices"][0]["delta"].get("tool_calls", ())]
    arguments = "".join(call["arguments"] for call in calls)
    assert found == [{"name": calls[0]["name"], "arguments": arguments}] * 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
