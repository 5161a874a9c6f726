"""What clients of llama.cpp, SGLang and older vLLM send: settings that change nothing here are
taken, others are refused with what to send instead; a request needs no `model`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from server.api import peer_fields
from server.api.protocol import CompletionBody
from server.config import KeyConfig, ServerConfig, TaskConfig
from tests.api.chat_models import CONTEXT, TABLE, encode, served
from tests.api.live import LiveServer
from tests.api.test_errors import check
from tests.fakes.scripted_engine import ScriptedEngine, saying

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the quick", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2},
    "/v1/responses": {"input": "the", "max_output_tokens": 2},
}


def engine_of(name: str) -> ScriptedEngine:
    return ScriptedEngine(
        saying(encode(" dog")), name=f"engine-{name}", model=name,
        vocab_size=TABLE.vocab_size, max_model_len=CONTEXT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engines = [engine_of(name) for name in ("hermes", "base")]
    models = {name: served(name) for name in ("hermes", "base")}
    with LiveServer(engines, models=models) as live:
        yield live


def post(server: LiveServer, path: str, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {**ROUTES[path], **body}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=10)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_settings_of_peers_that_change_nothing_are_taken(server: LiveServer, path: str) -> None:
    answer = post(server, path, model="hermes", **peer_fields.APPLIES_ANYWAY)
    assert answer.status_code == 200, answer.text
    document = httpx.get(server.url + "/openapi.json").json()["paths"][path]["post"]
    schema = document["requestBody"]["content"]["application/json"]["schema"]
    assert set(peer_fields.APPLIES_ANYWAY) <= set(schema["properties"])
    assert "model" not in schema["required"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("repeat_penalty", 1.1, "Send repetition_penalty."),
        ("mirostat", 2, "only 0 is taken"),
        ("mirostat", False, "only 0 is taken"),
        ("cache_prompt", False, "only true is taken"),
        ("n_probs", 3, "Send logprobs."),
    ],
)
def test_settings_of_peers_that_change_something_are_refused(
    server: LiveServer, field: str, value: Any, says: str
) -> None:
    answer = post(server, "/v1/completions", **{field: value})
    assert says in check(answer, 400, "unsupported_parameter", field)


@pytest.mark.parametrize(
    ("path", "field", "says"),
    [
        ("/v1/completions", "guided_json", "Send structured_outputs.json or response_format."),
        ("/v1/chat/completions", "max_new_tokens", "Send max_tokens."),
        ("/v1/completions", "n_predict", "Send max_tokens."),
        ("/v1/completions", "sampling_params", "Send its members themselves."),
        ("/v1/completions", "text", "Send prompt."),
        ("/v1/chat/completions", "text", "Unknown field: 'text'."),
        ("/v1/completions", "frobnicate", "Unknown field: 'frobnicate'."),
    ],
)
def test_a_field_of_a_peer_is_told_what_to_send(
    server: LiveServer, path: str, field: str, says: str
) -> None:
    answer = post(server, path, **{field: {}})
    assert check(answer, 400, "unknown_parameter", field).endswith(says)


def test_what_is_advised_is_a_field() -> None:
    for theirs, ours in peer_fields.OURS.items():
        told = peer_fields.advice(theirs, {*CompletionBody.model_fields, "chat_template_kwargs"})
        assert told == f" Send {ours}."
        assert theirs not in CompletionBody.model_fields


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("body", [{}, {"model": None}])
def test_without_a_model_the_first_one_answers(
    server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "hermes"


def test_a_key_that_may_not_use_the_first_model_must_name_its_own() -> None:
    keys = (KeyConfig(id="a", key=SecretStr("secret-of-a"), tasks=("mine",)),)
    tasks = {"mine": TaskConfig(name="mine", model="base")}
    models = {name: served(name) for name in ("hermes", "base")}
    engines = [engine_of(name) for name in models]
    config = ServerConfig(keys=keys)
    with LiveServer(engines, models=models, tasks=tasks, config=config) as live:
        assert post(live, "/v1/completions", "secret-of-a", model="mine").status_code == 200
        told = check(post(live, "/v1/completions", "secret-of-a"), 400, "invalid_value", "model")
    assert "hermes" not in told


def test_a_schema_beside_the_type_is_taken_as_llama_cpp_takes_it(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "frob"}}}
    for kind in ("json_object", "json_schema"):
        answer = post(server, "/v1/completions", response_format={"type": kind, "schema": schema})
        check(answer, 400, "invalid_value", "response_format.schema")
    both = {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}
    answer = post(server, "/v1/completions", response_format=both)
    check(answer, 400, "invalid_value", "response_format.schema")


def test_a_wrong_shape_is_told_without_names_of_our_classes(server: LiveServer) -> None:
    told = check(
        post(server, "/v1/completions", response_format="json"),
        400, "invalid_value", "response_format",
    )  # fmt: skip
    assert told == "response_format: must be an object; got 'json'."
    told = check(
        post(server, "/v1/chat/completions", messages=[]), 400, "invalid_value", "messages"
    )
    assert told == "messages: must have a length of at least 1; got a list of 0 items."
