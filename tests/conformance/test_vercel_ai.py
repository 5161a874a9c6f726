"""Whole conversations of the Vercel AI SDK by /v1/responses, as clients/vercel_ai.mjs recorded
them: what it sends, with the ids of the answers that it gets here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.types import Request
from tests.api.chat_models import decode, encode
from tests.api.fixtures import chat_by
from tests.api.live import LiveServer
from tests.fakes.scripted_engine import steps_of

TALKS = json.loads(Path(__file__).with_name("vercel_ai.json").read_text())
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def reply(request: Request) -> Any:
    """A call where a tool was not called yet, an object where a grammar asks for it, else a text
    that tells whether the model was shown its first answer."""
    prompt = decode(request.prompt_ids)
    text = "It is warm again." if "It is warm." in prompt else "It is warm."
    if request.grammar is not None:
        text = '{"city": "Rome"}'
    elif "get_weather" in prompt and "degrees" not in prompt:
        text = CALL
    return steps_of(request, [*encode(text), 0], finish_reason="stop")


engine, server = chat_by(reply)


def answered(text: str) -> dict[str, Any]:
    """The response of an answer or of the last event of a stream."""
    events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    told: dict[str, Any] = json.loads(events[-1] if events else text)
    whole: dict[str, Any] = told.get("response", told)
    return whole


@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: talk["title"])
def test_a_conversation(server: LiveServer, talk: dict[str, Any]) -> None:
    ours: dict[str, str] = {}
    whole: dict[str, Any] = {}
    for turn in talk["turns"]:
        sent = json.dumps(turn["sent"])
        for theirs, own in ours.items():
            sent = sent.replace(theirs, own)
        answer = server.post("/v1/responses", **json.loads(sent))
        assert answer.status_code == 200, answer.text
        whole = answered(answer.text)
        ids = [item[name] for item in whole["output"] for name in ("id", "call_id") if name in item]
        ours |= dict(zip(turn["ids"], ids, strict=True))
    assert whole["output"][-1]["content"][0]["text"].replace(": ", ":") == talk["text"]


def test_an_item_that_is_not_kept_is_told(server: LiveServer) -> None:
    first = server.post("/v1/responses", model="hermes", input="Hello.", store=False).json()
    said = [{"type": "item_reference", "id": first["output"][0]["id"]}]
    answer = server.post("/v1/responses", model="hermes", input=said)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input[0].id")
    assert "store: false" in error["message"]
