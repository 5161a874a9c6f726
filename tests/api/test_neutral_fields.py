"""The rule of all bodies: null is as good as absent; what would happen anyway may be said; a field
that would change something and is not honoured is refused by name, as the route calls it, and no
other word of an error changes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.config import SpeculationConfig, TaskConfig
from server.errors import LimitExceededError
from tests.api.chat_models import decode, weather
from tests.api.fixtures import chats_of
from tests.api.live import LiveServer
from tests.api.test_errors import check
from tests.fakes.scripted_engine import ScriptedEngine

USER = {"role": "user", "content": "the quick brown fox"}
SUFFIX = SpeculationConfig(drafter="suffix")
TASKS = {"prompt": TaskConfig(name="prompt", model="chatml", speculation=SUFFIX)}
DRAFTERS = ("off", "auto", "prompt", "suffix")
engines, server = chats_of(("chatml", "hermes", "base"), drafters=DRAFTERS, tasks=TASKS)


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
    ],
    ids=str,
)
def test_an_assistants_message_of_other_clients(
    server: LiveServer, engines: dict[str, ScriptedEngine], extra: dict[str, Any]
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


def test_calls_and_parts_of_other_clients(
    server: LiveServer, engines: dict[str, ScriptedEngine]
) -> None:
    call: dict[str, Any] = {
        "id": "call_1", "type": "function", "index": 0,
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }  # fmt: skip
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "id": None}
    messages = [
        {"role": "user", "content": [part]},
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
        {"function_call": "none"}, {"logprobs": False},
    ],
    ids=str,
)  # fmt: skip
def test_what_happens_anyway_in_a_chat(server: LiveServer, body: dict[str, Any]) -> None:
    answer = chat(server, **body)
    assert answer.status_code == 200, answer.text


def test_reasoning_effort_switches_thinking(
    server: LiveServer, engines: dict[str, ScriptedEngine]
) -> None:
    for effort in ("none", "minimal", "low", "high"):
        assert chat(server, reasoning_effort=effort).status_code == 200
    for thinks in (False, True):
        kwargs = {"enable_thinking": thinks}
        assert chat(server, chat_template_kwargs=kwargs).status_code == 200
    ids = [request.prompt_ids for request in engines["hermes"].submitted]
    off, on = ids[4:]
    assert off != on and ids[:4] == [off, off, on, on]


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
