"""POST /v1/responses over a real socket, with the real openai client."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from server.api.faces.responses import KeptItems, MessageItem, TextPart
from tests.api.chat_models import decode, encode, says, scripted, served, weather
from tests.api.fixtures import chat_by
from tests.api.live import LiveServer
from tests.api.test_errors import check, refused
from tests.fakes.scripted_engine import ScriptedEngine, saying, steps_of

REPLY = " over the lazy dog"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", **weather()["function"]}


engine, server = chat_by(says(REPLY), drafters=("off", "suffix"))


def post(server: LiveServer, **body: Any) -> httpx.Response:
    return server.post("/v1/responses", **{"model": "hermes", "input": "hello", **body})


def test_usage_counts_base_ids_of_a_model_with_tokens_of_its_own(server: LiveServer) -> None:
    def details(live: LiveServer) -> dict[str, int]:
        found: dict[str, int] = post(live).json()["usage"]["output_tokens_details"]
        return found

    assert "base_tokens" not in details(server)
    ids = encode(REPLY)
    model = replace(served("hermes"), own_ids={ids[0]: 3})
    with LiveServer([scripted("hermes", says(REPLY))], models={"hermes": model}) as live:
        assert details(live)["base_tokens"] == len(ids) + 1 + 2 * ids.count(ids[0])


def test_a_text_is_read_as_the_model_reads_prompts_and_given_ids_as_they_are(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    def given(live: LiveServer, engine: ScriptedEngine) -> list[tuple[int, ...]]:
        post(live)
        live.post("/v1/chat/completions", model="hermes", messages=MESSAGES)
        live.post(model="hermes", prompt="hello fox")
        live.post(model="hermes", prompt=[5, 6, 8])
        counted = live.post("/tokenize", model="hermes", prompt="hello fox").json()["tokens"]
        prompts = [request.prompt_ids for request in engine.submitted]
        assert counted == list(prompts[2])
        return prompts

    # Two ids are one token of the model's own.
    model = replace(served("hermes"), reads=lambda ids: [*ids[:-2], 7])
    other = scripted("hermes", says(REPLY))
    with LiveServer([other], models={"hermes": model}) as live:
        *own, own_ids = given(live, other)
    *base, base_ids = given(server, engine)
    assert own == [(*ids[:-2], 7) for ids in base]
    assert base_ids == own_ids == (5, 6, 8)


def test_a_text(server: LiveServer, engine: ScriptedEngine) -> None:
    answer = server.openai().responses.create(
        model="hermes", input="the quick brown fox", instructions="Be brief.", temperature=0,
        max_output_tokens=40, metadata={"a": "b"}, store=False,
    )  # fmt: skip
    assert answer.status == "completed" and answer.output_text == REPLY
    assert answer.id.startswith("resp_") and answer.object == "response"
    assert (answer.error, answer.incomplete_details) == (None, None)
    [item] = answer.output
    assert item.type == "message" and item.role == "assistant" and item.status == "completed"
    assert answer.usage is not None
    [request] = engine.submitted
    prompt = decode(request.prompt_ids)
    assert "Be brief." in prompt and "the quick brown fox" in prompt
    assert answer.usage.input_tokens == len(request.prompt_ids)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert request.sampling.temperature == 0 and request.sampling.max_tokens == 40
    assert answer.instructions == "Be brief." and answer.metadata == {"a": "b"}


def test_a_cut_answer_is_incomplete(server: LiveServer, engine: ScriptedEngine) -> None:
    engine.script = saying(encode(REPLY))
    answer = server.openai().responses.create(model="hermes", input="x", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == decode(encode(REPLY)[:2])


def test_events_of_a_text(server: LiveServer) -> None:
    with server.openai().responses.stream(model="hermes", input="x") as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds) > 10
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert "".join(e.delta for e in deltas) == deltas[-1].snapshot == REPLY
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == REPLY and final.usage is not None


def test_a_tool_is_called_and_answered(server: LiveServer, engine: ScriptedEngine) -> None:
    client = server.openai()
    engine.script = says(CALL)
    question: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
    first = client.responses.create(model="hermes", input=question, tools=[TOOL])
    [call] = first.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Rome"} and call.status == "completed"
    engine.script = says(REPLY)
    direct = {"caller": {"type": "direct"}}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    result |= {"name": call.name, "namespace": None, **direct}
    said = {**call.model_dump(), "parsed_arguments": {"city": "Rome"}, "async": False, **direct}
    history = [*question, said, {**result, "name": ""}]
    assert client.responses.create(model="hermes", input=history, tools=[TOOL]).output_text == REPLY
    history = [*question, said, result]
    second = client.responses.create(model="hermes", input=history, tools=[TOOL])
    assert second.output_text == REPLY
    prompt = decode(engine.submitted[-1].prompt_ids)
    assert "Rome" in prompt and "rain" in prompt
    [message] = (item.model_dump() for item in second.output)
    message["content"][0] |= {"parsed": {"city": "Rome"}, "cache_control": {"type": "ephemeral"}}
    again = [*history, message, *question]
    assert client.responses.create(model="hermes", input=again, tools=[TOOL]).output_text == REPLY
    assert REPLY.strip() in decode(engine.submitted[-1].prompt_ids)


@pytest.mark.parametrize("per_step", [1, 8])
def test_events_of_a_call(server: LiveServer, engine: ScriptedEngine, per_step: int) -> None:
    engine.script = says(f"So:\n{CALL}", per_step=per_step)
    with server.openai().responses.stream(model="hermes", input="x", tools=[TOOL]) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_response()
    text, call = final.output
    assert text.type == "message" and call.type == "function_call"
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1 and "".join(e.delta for e in deltas) == deltas[-1].snapshot
    assert json.loads(call.arguments) == json.loads(deltas[-1].snapshot) == {"city": "Rome"}
    added = [e.item for e in events if e.type == "response.output_item.added"]
    assert [item.status for item in added] == ["in_progress", "in_progress"]
    assert added[0].type == "message" and not added[0].content
    assert added[1].type == "function_call" and not added[1].arguments
    done = [e for e in events if e.type == "response.output_item.done"]
    assert [e.output_index for e in done] == [0, 1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_forced_call(server: LiveServer, engine: ScriptedEngine, choice: Any) -> None:
    engine.script = says(' {"city": "Rome"}')
    answer = server.openai().responses.create(
        model="hermes", input="x", tools=[TOOL], tool_choice=choice
    )
    assert answer.output[0].type == "function_call"
    assert answer.output[0].status == "completed"
    grammar = engine.submitted[-1].grammar
    assert grammar is not None and json.loads(grammar.source)["additionalProperties"] is False
    engine.script = lambda r: steps_of(
        r, encode('{"city": "A;'), finish_reason="stop", stop_reason=b";"
    )
    [cut] = post(server, tools=[TOOL], tool_choice=choice, stop=";").json()["output"]
    assert (cut["arguments"], cut["status"]) == ('{"city": "A', "incomplete")


def test_a_schema(server: LiveServer, engine: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = post(server, text={"format": form})
    assert answer.json()["text"]["format"]["name"] == "x"
    grammar = engine.submitted[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.source) == {**schema, "additionalProperties": False}
    assert post(server, text={"format": {"type": "json_object"}}).status_code == 200
    assert post(server, text={"format": {"type": "text"}}).status_code == 200


NEUTRAL: list[dict[str, Any]] = [
    {"store": False}, {"previous_response_id": None}, {"background": False}, {"include": []},
    {"truncation": "disabled"}, {"top_logprobs": 0}, {"reasoning": {"effort": "low"}},
    {"stream_options": {"include_obfuscation": False}}, {"stream_options": {}},
    {"parallel_tool_calls": True}, {"user": "u"}, {"service_tier": "auto"}, {"conversation": None},
    {"reasoning": {"mode": "standard", "context": "all_turns"}},
    {"prompt_cache_retention": "in_memory"}, {"context_management": []}, {"max_tool_calls": 1},
    {"prompt_cache_options": {"mode": "implicit"}}, {"access_programs": {"cyber": "standard"}},
    {"image": {"context_compression": "auto"}}, {"tool_choice": None},
    {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
    {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather", "mode": None}},
    {"tools": [TOOL], "tool_choice": {
        "type": "allowed_tools", "mode": "auto",
        "tools": [{"type": "function", "name": "get_weather"}] * 2}},
    {"tools": [{**TOOL, "async": False, "defer_loading": False, "allowed_callers": ["direct"]}]},
]  # fmt: skip


@pytest.mark.parametrize("body", NEUTRAL, ids=str)
def test_what_happens_anyway_may_be_said(server: LiveServer, body: dict[str, Any]) -> None:
    assert post(server, **body).status_code == 200


SAID = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "x"}


def test_a_value_is_told_as_the_client_wrote_it(server: LiveServer) -> None:
    assert "got true." in check(post(server, store=True), 400, "unsupported_parameter", "store")


@refused({
    "unsupported_parameter": [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}},
         "stream_options.continuous_usage_stats"),
        ({"input": [{"type": "item_search", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": 0, "role": "user", "content": "y"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0]"),
    ],
    "invalid_value": [
        ({"input": []}, "input"),
        ({"input": [{"role": "x", "content": "y"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}},
         "text.format.schema"),
        ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "async": True}]}, "tools[0].async"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"include": ["file_search_call.results", "message.output_text.logprobs"]}, "include[1]"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": 5}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {
            "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
         "tool_choice.tools[0].name"),
        ({"input": [{**RESULT, "name": ["f"]}]}, "input[0].name"),
        ({"stream_options": {"include_obfuscation": 0}}, "stream_options.include_obfuscation"),
        ({"input": [*MESSAGES, {**SAID, "arguments": "["}]}, "input[1].arguments"),
        ({"input": [*MESSAGES, SAID, {"type": "reasoning", "summary": []},
                    {**SAID, "arguments": "[]"}]}, "input[3].arguments"),
    ],
    "context_length_exceeded": [
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"input": "a b " * 5000}, "input"),
    ],
    "unknown_parameter": [
        ({"frobnicate": 1}, "frobnicate"),
        ({"input": [{**SAID, "namespace": "n"}]}, "input[0].namespace"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]},
         "input[0].encrypted_content"),
        ({"input": [{"type": "reasoning", "summary": [{"text": "x"}]}]}, "input[0].summary"),
    ],
})  # fmt: skip
def test_errors_name_this_bodys_fields(
    server: LiveServer, code: str, body: dict[str, Any], param: str
) -> None:
    told = check(post(server, **body), 400, code, param)
    assert not any(x in told for x in ("messages", "response_format", "tool_calls")), told


def test_an_error_in_a_stream_is_an_event(server: LiveServer, engine: ScriptedEngine) -> None:
    engine.script = lambda r: [
        *steps_of(r, encode(REPLY)[:2])[:-1], steps_of(r, [], finish_reason="error")[0],
    ]  # fmt: skip
    engine.step_s = 0.05
    events = list(server.openai().responses.create(model="hermes", input="x", stream=True))
    assert events[-1].type == "error" and events[-1].code == "engine_error"
    assert events[-1].sequence_number == len(events) - 1


def test_the_answer_is_openais(server: LiveServer) -> None:
    answer = post(server, tools=[TOOL], top_p=0).json()
    Response.model_validate(answer, strict=True)
    assert answer["top_p"] == 0


def test_an_item_is_referred_to_once(server: LiveServer) -> None:
    [item] = post(server).json()["output"]
    said = {"type": "item_reference", "id": item["id"]}
    asked = {"role": "user", "content": "x"}
    assert post(server, input=[said, asked]).status_code == 200
    answer = post(server, input=[said, asked, said])
    check(answer, 400, "invalid_value", "input[2].id")


def test_items_are_kept_for_their_key_and_within_bounds() -> None:
    def message(i: int, text: str = "x") -> MessageItem:
        return MessageItem(id=f"msg_{i}", status="completed", content=[TextPart(text=text)])

    kept = KeptItems(max_items=3, max_chars=100)
    for i in range(4):
        kept.keep("a", message(i))
    kept.keep("b", message(9))
    assert [kept.find("a", f"msg_{i}") is not None for i in (0, 1, 2, 3, 9)] == [
        False, True, True, True, False,
    ]  # fmt: skip
    kept.keep("a", message(5, "x" * 100))
    assert kept.find("a", "msg_3") is None and kept.find("a", "msg_5") is not None
    kept.keep("a", message(6, "x" * 101))  # more than a key may have
    assert kept.find("a", "msg_6") is None and kept.find("b", "msg_9") is not None
    assert kept.find("b", None) is None and kept.find("c", {}) is None
