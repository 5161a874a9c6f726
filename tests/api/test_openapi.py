"""What /openapi.json says of streams, held against the events that a server sends."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator, ValidationError

from server.types import Delta, Request
from tests.api.chat_models import encode, says
from tests.api.fixtures import BODIES, STREAMED, chat_by
from tests.api.live import LiveServer
from tests.fakes.scripted_engine import ScriptedEngine, steps_of

JSON = "application/json"
BROKEN: dict[str, str] = {
    "/v1/completions": '{"id": 1}',
    "/v1/chat/completions": "{}",
    "/v1/responses": "[DONE]",
}
"""Data that is none of the route's events."""


engine, server = chat_by(says(" over the lazy dog"))


def events_of(text: str) -> list[dict[str, str]]:
    """Server-sent events as a reader has them."""
    return [
        dict(line.split(": ", 1) for line in block.split("\n"))
        for block in text.strip().split("\n\n")
    ]


def schema_of(server: LiveServer, path: str) -> dict[str, Any]:
    operation = httpx.get(server.url + "/openapi.json").json()["paths"][path]["post"]
    schema: dict[str, Any] = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
    return schema


def hold(event: dict[str, str], schema: dict[str, Any]) -> None:
    """Raise unless the event is one, and its data one of the shapes, by their contentSchema."""
    Draft202012Validator(schema).validate(event)
    errors = []
    for shape in schema["properties"]["data"]["anyOf"]:
        if event["data"] == shape.get("const"):
            return
        if "contentSchema" in shape:
            assert shape["contentMediaType"] == JSON
            try:
                data = json.loads(event["data"])
                Draft202012Validator(shape["contentSchema"]).validate(data)
                return
            except (ValidationError, ValueError) as error:
                errors.append(error)
    raise errors[0]


def fails_later(request: Request) -> list[list[Delta]]:
    last = steps_of(request, [], finish_reason="error")[0]
    return [*steps_of(request, encode(" over the"))[:-1], last]


@pytest.mark.parametrize("path", STREAMED)
def test_events_are_what_the_document_says(
    server: LiveServer, engine: ScriptedEngine, path: str
) -> None:
    schema = schema_of(server, path)
    body = {"model": "hermes", "stream": True, **BODIES[path]}
    events = events_of(server.post(path, **body).text)
    assert len(events) > 3
    engine.script = fails_later
    engine.step_s = 0.05  # the first tokens are on their way before the error
    failed = events_of(server.post(path, **body).text)
    assert any("engine_error" in event["data"] for event in failed)
    for event in [*events, *failed]:
        hold(event, schema)
    with pytest.raises((ValidationError, ValueError)):
        hold({"data": BROKEN[path]}, schema)


@pytest.mark.parametrize("path", STREAMED)
def test_an_error_before_the_first_event_is_one_once_the_headers_are_sent(
    server: LiveServer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("server.api.route_context.HEADER_WAIT_S", 0.0)
    engine.script = lambda request: [steps_of(request, [], finish_reason="error")[0]]
    engine.step_s = 0.2
    answer = server.post(path, **{"model": "hermes", "stream": True, **BODIES[path]})
    assert answer.status_code == 200
    told, *end = events_of(answer.text)
    assert '"code":"engine_error"' in told["data"]
    assert end == ([] if path == "/v1/responses" else [{"data": "[DONE]"}])
    hold(told, schema_of(server, path))
