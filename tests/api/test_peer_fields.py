"""What clients of llama.cpp, SGLang and older vLLM send: settings that change nothing here are
taken, others are refused with what to send instead; a request needs no `model`.

And the rule of all bodies: null is as good as absent; what would happen anyway may be said; a field
that would change something and is not honoured is refused by name, as the route calls it, and no
other word of an error changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from server.api.bodies import GenerationBody
from server.api.faces.chat import ChatBody
from server.api.faces.completions import CompletionBody
from server.api.faces.responses import ResponsesBody
from server.config import SpeculationConfig, TaskConfig
from server.errors import LimitExceededError
from tests.api.chat_models import decode, weather
from tests.api.fixtures import BODIES, STREAMED, Engines, chats_of
from tests.api.live import LiveServer
from tests.api.test_errors import check

THINK, NOT = {"enable_thinking": True}, {"enable_thinking": False}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
GBNF = 'root ::= "yes" | "no" [a-z]*'


USER = {"role": "user", "content": "the quick brown fox"}
SUFFIX = SpeculationConfig(drafter="suffix")
TASKS = {"prompt": TaskConfig(name="prompt", model="chatml", speculation=SUFFIX)}
engines, server = chats_of(
    ("hermes", "base", "chatml"), drafters=("off", "auto", "prompt", "suffix"), tasks=TASKS
)


def post(server: LiveServer, path: str, secret: str = "", **body: Any) -> httpx.Response:
    return server.post(path, secret, **{"model": None, **BODIES[path], **body})


@pytest.mark.parametrize("path", STREAMED)
def test_settings_of_peers_that_change_nothing_are_taken(server: LiveServer, path: str) -> None:
    anyway = {name: values[0] for name, (values, _) in GenerationBody.NEUTRAL.items() if values}
    answer = post(server, path, model="hermes", **anyway)
    assert answer.status_code == 200, answer.text
    document = httpx.get(server.url + "/openapi.json").json()["paths"][path]["post"]
    schema = document["requestBody"]["content"]["application/json"]["schema"]
    assert set(anyway) <= set(schema["properties"])
    assert "model" not in schema["required"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("mirostat", 2, "only 0 is taken"),
        ("mirostat", False, "only 0 is taken"),
        ("cache_prompt", False, "only true is taken"),
        ("n_probs", 3, "Send logprobs."),
        ("repeat_last_n", 64, "penalties read the whole text; only -1 is taken, got 64"),
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
        ("/v1/completions", "temprature", "Did you mean temperature?"),
        ("/v1/chat/completions", "repeat_penaltyy", "Did you mean repeat_penalty?"),
        ("/v1/completions", "sampling_params", "Send its members themselves."),
        ("/v1/completions", "text", "Send prompt."),
        ("/v1/completions", "messages", "They belong to /v1/chat/completions."),
        ("/v1/chat/completions", "prompt", "It belongs to /v1/completions."),
        ("/v1/chat/completions", "input", "It belongs to /v1/responses."),
        ("/v1/chat/completions", "text", "Unknown field: 'text'."),
        ("/v1/completions", "frobnicate", "Unknown field: 'frobnicate'."),
    ],
)
def test_a_field_of_a_peer_is_told_what_to_send(
    server: LiveServer, path: str, field: str, says: str
) -> None:
    given: dict[str, Any] = {field: {}}
    answer = post(server, path, **given)
    assert check(answer, 400, "unknown_parameter", field).endswith(says)


@pytest.mark.parametrize("model", [CompletionBody, ChatBody, ResponsesBody])
def test_what_a_name_stands_for_is_a_field(model: type[GenerationBody]) -> None:
    for theirs, path in model.ALIASES.items():
        assert theirs not in model.model_fields
        assert path[0] in model.model_fields, theirs


@pytest.mark.parametrize(
    ("path", "theirs", "ours"),
    [
        ("/v1/completions", {"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ("/v1/completions", {"n_predict": 3}, {"max_tokens": 3}),
        ("/v1/chat/completions", {"max_new_tokens": 2}, {"max_completion_tokens": 2}),
        ("/v1/responses", {"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ("/v1/completions", {"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        ("/v1/chat/completions", {"think": False}, {"chat_template_kwargs": NOT}),
        ("/v1/chat/completions", {"think": True}, {"chat_template_kwargs": THINK}),
        ("/v1/completions", {"think": False}, {}),
        ("/v1/completions", {"regex": "[ab]+"}, {"structured_outputs": {"regex": "[ab]+"}}),
        ("/v1/completions", {"json_schema": CITY}, {"structured_outputs": {"json": CITY}}),
        (
            "/v1/completions",
            {"regex": "a", "structured_outputs": {"regex": None}},
            {"structured_outputs": {"regex": "a"}},
        ),
        ("/v1/completions", {"guided_json": CITY}, {"structured_outputs": {"json": CITY}}),
        ("/v1/completions", {"grammar": GBNF}, {"structured_outputs": {"grammar": GBNF}}),
        ("/v1/completions", {"ebnf": GBNF}, {"structured_outputs": {"grammar": GBNF}}),
    ],
    ids=str,
)
def test_what_others_call_otherwise_is_honoured(
    server: LiveServer,
    engines: Engines,
    path: str,
    theirs: dict[str, Any],
    ours: dict[str, Any],
) -> None:
    requests = []
    for body in (theirs, ours):
        answer = post(server, path, seed=1, **body)
        assert answer.status_code == 200, answer.text
        requests.append(engines["hermes"].submitted[-1])
    one, other = (replace(r, request_id="", arrival_s=0.0) for r in requests)
    assert one == other


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"repeat_penalty": 99}, "repeat_penalty", "invalid_value"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty", "invalid_value"),
        ({"regex": "("}, "regex", "invalid_value"),
        ({"regex": 3}, "regex", "invalid_value"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "invalid_value"),
        ({"regex": "a", "structured_outputs": {"choice": ["a"]}}, "structured_outputs",
         "invalid_value"),
        ({"regex": "a", "structured_outputs": "b"}, "structured_outputs", "invalid_value"),
        ({"regex": "a", "structured_outputs": []}, "structured_outputs", "invalid_value"),
        ({"grammar": "root ::= nothing"}, "grammar", "invalid_value"),
        ({"guided_json": {"not": {}}}, "guided_json", "unsupported_parameter"),
        ({"n_predict": 10_000}, "n_predict", "context_length_exceeded"),
    ],
)  # fmt: skip
def test_errors_have_the_name_that_was_sent(
    server: LiveServer, body: dict[str, Any], param: str, code: str
) -> None:
    told = check(post(server, "/v1/completions", **body), 400, code, param)
    assert param in told and "repetition_penalty: " not in told


@pytest.mark.parametrize("path", STREAMED)
def test_without_a_model_the_first_one_answers(server: LiveServer, path: str) -> None:
    answer = post(server, path)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "hermes"


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


# --- the rule of all bodies ---


def chat(server: LiveServer, **body: Any) -> httpx.Response:
    body = {"model": "hermes", "messages": [USER], "max_completion_tokens": 4, **body}
    return server.post("/v1/chat/completions", **body)


@pytest.mark.parametrize(
    "extra",
    [
        {"provider_specific_fields": None},  # LiteLLM's
        {"provider_specific_fields": {"refusal": None}},
        {"reasoning": None},  # OpenRouter's and vLLM's
        {"reasoning_content": None},
        {"reasoning_content": ""},
        {"id": "msg_123"},
        {"cache_control": {"type": "ephemeral"}},  # Anthropic's
        {"annotations": None},
        {"annotations": []},
        {"refusal": None},
        {"audio": None},
        {"function_call": None},
        {"tool_calls": None},
        {"images": [], "thinking_blocks": []},
        {"name": None},
        {"parsed": {"city": "Rome"}},  # OpenAI's own helpers send it back
    ],
    ids=str,
)
def test_an_assistants_message_of_other_clients(
    server: LiveServer, engines: Engines, extra: dict[str, Any]
) -> None:
    said = {"role": "assistant", "content": "Yes."}
    for message in (said, {**said, **extra}):
        answer = chat(server, messages=[USER, message, USER])
        assert answer.status_code == 200, answer.text
    one, other = engines["hermes"].submitted
    assert one.prompt_ids == other.prompt_ids


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"provider_specific_fields": {"thinking": "deep"}}, "provider_specific_fields"),
        ({"reasoning": "because"}, "reasoning"),
        ({"images": [{"url": "x"}]}, "images"),
    ],
)
def test_what_a_message_would_lose_is_refused(
    server: LiveServer, extra: dict[str, Any], name: str
) -> None:
    message = {"role": "assistant", "content": "Yes.", **extra}
    error = chat(server, messages=[USER, message, USER]).json()["error"]
    assert error["param"] == f"messages[1].{name}", error


def test_calls_and_parts_of_other_clients(server: LiveServer, engines: Engines) -> None:
    call: dict[str, Any] = {
        "id": "call_1", "type": "function", "index": 0,
        "function": {
            "name": "get_weather", "arguments": '{"city": "Rome"}',
            "parsed_arguments": {"city": "Rome"},
        },
    }  # fmt: skip
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "id": None}
    messages = [
        {"role": "user", "content": [{**part, "prompt_cache_breakpoint": {"mode": "explicit"}}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain", "cache_control": None},
    ]
    answer = chat(server, messages=messages, tools=[weather()])
    assert answer.status_code == 200, answer.text
    assert "Rome" in decode(engines["hermes"].submitted[-1].prompt_ids)


NEUTRAL: list[dict[str, Any]] = [
    {"prompt_logprobs": None}, {"use_beam_search": False}, {"length_penalty": 1.0},
    {"early_stopping": False}, {"spaces_between_special_tokens": True}, {"frobnicate": None},
    {"stream_options": {"include_usage": None}}, {"stream_options": {"include_usage": False}},
    {"speculation": {"drafter": None, "later": None}}, {"temperature": None, "stop": None},
]  # fmt: skip


@pytest.mark.parametrize("body", NEUTRAL, ids=str)
def test_what_happens_anyway_may_be_said(server: LiveServer, body: dict[str, Any]) -> None:
    for answer in (chat(server, **body), server.post(model="base", max_tokens=2, **body)):
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "body",
    [
        {"best_of": 1}, {"n": 2, "best_of": 2}, {"echo": False}, {"add_special_tokens": False},
        {"parallel_tool_calls": True}, {"parallel_tool_calls": False}, {"tools": []},
        {"tool_choice": "none"}, {"tool_choice": "auto"}, {"functions": []}, {"documents": None},
        {"chat_template_kwargs": {"enable_thinking": False}}, {"top_logprobs": 0},
        {"chat_template_kwargs": {"thinking": False, "frobnicate": None}},
        {"reasoning_effort": "none"}, {"reasoning_effort": "minimal"}, {"reasoning_effort": "low"},
        {"function_call": "none"}, {"logprobs": False}, {"tools": [{"function": {"name": "f"}}]},
    ],
    ids=str,
)  # fmt: skip
def test_what_happens_anyway_in_a_chat(server: LiveServer, body: dict[str, Any]) -> None:
    answer = chat(server, **body)
    assert answer.status_code == 200, answer.text


def test_reasoning_effort_switches_thinking(server: LiveServer, engines: Engines) -> None:
    for effort in ("none", "minimal", "low", "high"):
        assert chat(server, reasoning_effort=effort).status_code == 200
    for thinks in (False, True):
        kwargs = {"enable_thinking": thinks}
        assert chat(server, chat_template_kwargs=kwargs).status_code == 200
    ids = [request.prompt_ids for request in engines["hermes"].submitted]
    off, on = ids[4:]
    assert off != on and ids[:4] == [off, off, on, on]
    assert chat(server, reasoning_effort="none", think=False).status_code == 200
    told = check(
        chat(server, reasoning_effort="low", think=False), 400, "invalid_value", "reasoning_effort"
    )
    assert told == "reasoning_effort: this and think contradict each other."


# --- errors ---


def test_a_drafter_called_like_a_field_keeps_its_name(server: LiveServer) -> None:
    field = {"drafter": "nope"}
    refused = chat(server, model="chatml", speculation=field)
    told = check(refused, 400, "invalid_value", "speculation.drafter")
    assert told.endswith("choose from off, auto, prompt, suffix.")
    refused = server.post(model="chatml", speculation=field)
    assert check(refused, 400, "invalid_value", "speculation.drafter") == told


def test_a_task_called_like_a_field_keeps_its_name(server: LiveServer) -> None:
    refused = chat(server, model="prompt", vocabulary={"mode": "slice"})
    told = check(refused, 400, "invalid_value", "vocabulary.mode")
    assert "the task prompt allows" in told


def test_an_error_of_one_field_becomes_that_of_another() -> None:
    error = LimitExceededError("above 4; prompt: stays.", at="prompt[3]", retry_after_s=2.0)
    assert (error.message, error.param) == ("prompt[3]: above 4; prompt: stays.", "prompt[3]")
    moved = error.moved("input")
    assert type(moved) is LimitExceededError and moved.retry_after_s == 2.0
    assert (moved.message, moved.param) == ("input: above 4; prompt: stays.", "input")
