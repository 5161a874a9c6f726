"""POST /v1/chat/completions over a real socket, with the real openai client."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionChunk

from server.config import SamplingDefaults, SpeculationConfig, TaskConfig
from server.config.task import TaskLimits
from tests.api.chat_models import CONTEXT, EOS, TEMPLATES, decode, encode, says, weather
from tests.api.fixtures import Engines, chats_of
from tests.api.live import LiveServer, as_bytes
from tests.api.test_completions import events
from tests.api.test_errors import check, refused
from tests.fakes.scripted_engine import ScriptedEngine, saying, steps_of, together

REPLY = " over the lazy dog. Once upon a time — héllo wörld"
REPLY_IDS = encode(REPLY)
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
PROMPT = "<|im_start|>user\nthe quick brown fox<|im_end|>\n<|im_start|>assistant\n"
TASK = TaskConfig(
    name="brief",
    model="chatml",
    sampling=SamplingDefaults(max_tokens=4),
    limits=TaskLimits(max_tokens=8, max_choices=1, max_logprobs=2, max_prompt_tokens=50),
    speculation=SpeculationConfig(drafter="suffix", allowed_drafters=("suffix",)),
)


engines, server = chats_of(
    (*TEMPLATES, "base"),
    saying(REPLY_IDS),
    tasks={"brief": TASK},
    drafters=("off", "suffix", "auto"),
)


@pytest.fixture
def engine(engines: Engines) -> ScriptedEngine:
    return engines["chatml"]


def chat(server: LiveServer, **body: Any) -> httpx.Response:
    """POST a chat; model, messages and a short answer are defaults."""
    body = {"model": "chatml", "messages": MESSAGES, "max_completion_tokens": 8, **body}
    return server.post("/v1/chat/completions", **body)


# --- whole answers ---


def test_a_response_has_openais_members_and_vllms_nulls(server: LiveServer) -> None:
    body = chat(server).json()
    assert list(body) == [
        "id", "object", "created", "model", "choices", "usage", "system_fingerprint",
        *(of_vllm := ["service_tier", "prompt_logprobs", "prompt_token_ids"]),
    ]  # fmt: skip
    assert all(body[name] is None for name in of_vllm)
    assert (body["object"], body["model"]) == ("chat.completion", "chatml")
    [choice] = body["choices"]
    assert set(choice) == {
        "index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids",
    }  # fmt: skip
    assert choice["stop_reason"] is choice["token_ids"] is None  # vLLM's
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": decode(REPLY_IDS[:8]), "refusal": None, "annotations": [],
    }  # fmt: skip
    assert chat(server, service_tier="auto").json()["service_tier"] == "default"


def test_an_answer_may_fill_the_context_and_its_end_has_no_text(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    engine.script = says("short<|im_end|>")
    answer = chat(server, max_completion_tokens=None).json()
    assert answer["choices"][0]["message"]["content"] == "short"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(encode("short")) + 2
    [request] = engine.submitted
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt_ids)
    chat(server, max_completion_tokens=None, max_tokens=3)
    chat(server, max_completion_tokens=3, max_tokens=3)
    assert [r.sampling.max_tokens for r in engine.submitted[1:]] == [3, 3]


def test_roles_parts_and_names_reach_the_template(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "one"},
                                                    {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "refusal": "never"},
        {"role": "user", "content": ""},
    ]  # fmt: skip
    assert chat(server, messages=messages).status_code == 200
    text = decode(engine.submitted[0].prompt_ids)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nno<|im_end|>\n<|im_start|>assistant\nnever<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )


# --- logprobs ---


def test_logprobs_have_tokens_bytes_and_the_likeliest(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    text = "no €"
    ids = [*as_bytes(text), EOS]
    engine.script = lambda r: steps_of(r, ids, finish_reason="stop")
    answer = server.openai().chat.completions.create(
        model="chatml", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2
    )
    [choice] = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    # The EOS is no part of the content.
    assert [t.token for t in tokens] == ["n", "o", " ", "\\xe2", "\\x82", "\\xac"]
    assert b"".join(bytes(t.bytes or ()) for t in tokens).decode() == text
    assert [t.logprob for t in tokens] == [-0.25] * 6
    for token in tokens:
        assert [t.logprob for t in token.top_logprobs] == [-0.25, -1.25]
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].bytes == token.bytes
    assert choice.logprobs.refusal is None


def test_logprobs_alone_have_no_alternatives_and_minus_infinity_is_a_number(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    engine.script = lambda r: steps_of(r, [5, 6], logprob=lambda i: float("-inf"))
    [choice] = chat(server, logprobs=True).json()["choices"]
    assert [t["logprob"] for t in choice["logprobs"]["content"]] == [-9999.0] * 2
    assert all(t["top_logprobs"] == [] for t in choice["logprobs"]["content"])
    assert engine.submitted[0].sampling.num_logprobs == 0


# --- streams ---


@pytest.mark.parametrize("per_step", [1, 3, 7])
def test_a_stream_is_the_chunks_openai_sends(
    server: LiveServer, engine: ScriptedEngine, per_step: int
) -> None:
    engine.script = says(REPLY, per_step=per_step)
    response = chat(
        server, max_completion_tokens=None, stream=True, stream_options={"include_usage": True}
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, last = events(response)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(REPLY_IDS) + 1
    for chunk in [*chunks, last]:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["object"] == "chat.completion.chunk" and chunk["id"].startswith("chatcmpl-")
        assert chunk["system_fingerprint"] == "fp"
    assert len({(c["id"], c["created"], c["model"]) for c in [*chunks, last]}) == 1
    assert all("usage" in c and c["usage"] is None for c in chunks)
    choices = [c["choices"][0] for c in chunks]
    assert choices[0] == {
        "index": 0, "delta": {"role": "assistant", "content": "", "refusal": None},
        "logprobs": None, "finish_reason": None,
    }  # fmt: skip
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all(set(c["delta"]) == {"content"} and c["delta"]["content"] for c in choices[1:-1])
    assert all(c["finish_reason"] is None for c in choices[:-1])
    assert "".join(c["delta"]["content"] for c in choices[1:-1]) == REPLY


# --- prompts ---


def test_continue_and_generation_prompt(server: LiveServer, engine: ScriptedEngine) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon "}]
    chat(server, messages=messages, continue_final_message=True)
    chat(server, messages=messages, continue_final_message=True, add_generation_prompt=False)
    chat(server, add_generation_prompt=False)
    chat(server, add_generation_prompt=True)
    end = "<|im_start|>assistant\n"
    assert [decode(r.prompt_ids) for r in engine.submitted] == [
        PROMPT + "Once upon ", PROMPT + "Once upon ", PROMPT.removesuffix(end), PROMPT,
    ]  # fmt: skip


def test_a_prediction_becomes_ids_of_the_request(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    content: Any
    for content in (REPLY, [{"type": "text", "text": REPLY[:9]},
                            {"type": "text", "text": REPLY[9:]}]):  # fmt: skip
        prediction = {"type": "content", "content": content}
        assert chat(server, prediction=prediction).status_code == 200
        response = server.post(model="chatml", prompt="the", prediction=prediction)
        assert response.status_code == 200, response.text
    for request in engine.submitted:
        assert request.speculation.prediction_ids == tuple(REPLY_IDS)
        assert request.speculation.drafter == "auto" and request.speculation.max_draft_tokens > 0


def test_a_task_shapes_chats_too(server: LiveServer) -> None:
    body = chat(server, model="brief", max_completion_tokens=None).json()
    assert body["model"] == "brief" and body["usage"]["completion_tokens"] == 4
    check(chat(server, model="brief", max_completion_tokens=9), 400, "limit_exceeded",
          "max_completion_tokens")  # fmt: skip
    check(chat(server, model="brief", logprobs=True, top_logprobs=3), 400, "limit_exceeded",
          "top_logprobs")  # fmt: skip
    long = [{"role": "user", "content": "a b c d e f g h " * 9}]
    message = check(
        chat(server, model="brief", messages=long), 400, "context_length_exceeded", "messages"
    )
    assert message.startswith("messages: ")
    prediction = {"type": "content", "content": "x"}
    check(chat(server, model="brief", prediction=prediction), 400, "unsupported_parameter",
          "prediction")  # fmt: skip


# --- tools ---

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WRITTEN = {
    "hermes": f"Let me look.\n{CALL}\n{CALL.replace('Paris', 'Rome')}",
    "mistral": 'Let me look.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "get_weather", "arguments": {"city": "Rome"}}]',
    "llama": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
    '{"name": "get_weather", "parameters": {"city": "Rome"}}',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_tools_are_shown_and_calls_come_back(
    server: LiveServer, engines: Engines, name: str
) -> None:
    engine = engines[name]
    engine.script = says(WRITTEN[name])
    client = server.openai()
    tool: Any = weather()
    messages: list[Any] = [{"role": "user", "content": "Is it warmer in Paris or in Rome?"}]
    answer = client.chat.completions.create(model=name, messages=messages, tools=[tool])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls
    assert calls is not None and len({call.id for call in calls}) == 2
    found = [(c.function.name, c.function.arguments) for c in calls if c.type == "function"]
    assert found == [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Rome"}')]
    assert choice.message.content == (None if name == "llama" else "Let me look.")
    assert json.dumps(tool) in decode(engine.submitted[0].prompt_ids)

    engine.script = says("In Rome.")
    messages.append(choice.message)
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": f"{20 + i}°"}
        for i, call in enumerate(calls)
    ]
    answer = client.chat.completions.create(model=name, messages=messages, tools=[tool])
    assert answer.choices[0].message.content == "In Rome."
    assert answer.choices[0].finish_reason == "stop"
    text = decode(engine.submitted[1].prompt_ids)
    assert '{"city": "Paris"}' in text and text.index("20°") < text.index("21°")


def test_a_model_whose_template_has_no_tools_is_told_of_them(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    engine.script = says(CALL)
    system = {"role": "system", "content": "Be kind."}
    for messages in (MESSAGES, [system, *MESSAGES]):
        body = chat(server, messages=messages, tools=[weather()], max_completion_tokens=60).json()
        [call] = body["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    texts = [decode(r.prompt_ids) for r in engine.submitted]
    assert texts[0].startswith("<|im_start|>system\nYou can call functions.")
    assert texts[1].startswith("<|im_start|>system\nBe kind.\n\nYou can call functions.")
    assert all(json.dumps(weather()) in text and text.endswith(PROMPT) for text in texts)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": content} for content in "ab"]
    talk = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, *results]
    assert chat(server, messages=talk).status_code == 200
    text = decode(engine.submitted[-1].prompt_ids)
    assert text == PROMPT.removesuffix("<|im_start|>assistant\n") + (
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\na\n"
        "</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("per_step", [1, 4])
@pytest.mark.parametrize("name", WRITTEN)
def test_streamed_calls_are_the_deltas_openai_sends(
    server: LiveServer, engines: Engines, name: str, per_step: int
) -> None:
    engines[name].script = says(WRITTEN[name], per_step=per_step)
    chunks = events(chat(server, model=name, tools=[weather()], max_completion_tokens=None,
                         stream=True))  # fmt: skip
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0]["role"] == "assistant" and deltas[0]["refusal"] is None
    assert not any("role" in delta for delta in deltas[1:]) and deltas[-1] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    content = "".join(delta.get("content") or "" for delta in deltas)
    assert content == ("" if name == "llama" else "Let me look.")
    if name == "llama":
        assert deltas[0]["content"] is None and "tool_calls" in deltas[0]
    starts = [c for d in deltas for c in d.get("tool_calls", ()) if "id" in c]
    assert [(c["index"], c["type"], c["function"]) for c in starts] == [
        (i, "function", {"name": "get_weather", "arguments": ""}) for i in (0, 1)
    ]
    arguments = ["", ""]
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            arguments[call["index"]] += call["function"]["arguments"]
            assert "id" in call or set(call) == {"index", "function"}
    assert arguments == ['{"city": "Paris"}', '{"city": "Rome"}']
    if per_step == 1:
        assert sum("tool_calls" in delta for delta in deltas) > 6


def test_choices_begin_in_their_order(server: LiveServer, engine: ScriptedEngine) -> None:
    """OpenAI's client wants it, whichever has its first token first and if a call is held back."""
    said = (CALL, "Hi.", "Hello.")
    engine.script = lambda request: together(
        [
            steps_of(request, [*encode(said[k]), EOS], finish_reason="stop", choice_id=k)
            for k in (2, 0, 1)
        ]
    )
    asked: Any = {"messages": MESSAGES, "tools": [weather(strict=True)], "n": 3}
    with server.openai().chat.completions.stream(model="chatml", **asked) as stream:
        call, *texts = stream.get_final_completion().choices
    assert call.message.tool_calls and call.message.content is None
    assert [text.message.content for text in texts] == ["Hi.", "Hello."]


def test_one_call_at_a_time(server: LiveServer, engines: Engines) -> None:
    engines["hermes"].script = says(WRITTEN["hermes"])
    body = chat(server, model="hermes", tools=[weather()], parallel_tool_calls=False,
                max_completion_tokens=None).json()  # fmt: skip
    [choice] = body["choices"]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"


def test_with_none_the_tools_are_not_shown_and_nothing_is_a_call(
    server: LiveServer, engines: Engines
) -> None:
    for name in ("hermes", "chatml"):  # chatml's template has no tools at all
        engines[name].script = says(CALL)
        body = chat(server, model=name, tools=[weather()], tool_choice="none",
                    max_completion_tokens=None).json()  # fmt: skip
        assert body["choices"][0]["message"]["content"] == CALL
        assert body["choices"][0]["finish_reason"] == "stop"
        assert "get_weather" not in decode(engines[name].submitted[0].prompt_ids)


def test_a_call_that_is_cut_is_told_as_far_as_it_came(server: LiveServer, engines: Engines) -> None:
    engines["hermes"].script = lambda r: steps_of(r, encode(CALL)[:-6])
    body = chat(server, model="hermes", tools=[weather()], max_completion_tokens=99).json()
    [choice] = body["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert '{"city": "Paris"}'.startswith(call["function"]["arguments"])


def test_a_call_of_a_strict_tool_is_reported_when_its_arguments_fit(
    server: LiveServer, engines: Engines
) -> None:
    class Weather(pydantic.BaseModel):
        city: str
        unit: Literal["C", "F"]

    client = server.openai()
    tool = openai.pydantic_function_tool(Weather)
    assert tool["function"].get("strict") is True
    for arguments, fits in (('{"unit": "C", "city": "Rome"}', True), ('{"city": "Rome"}', False)):
        call = f'<tool_call>{{"name": "Weather", "arguments": {arguments}}}</tool_call>'
        engines["hermes"].script = says(call, per_step=2)
        answer = client.chat.completions.parse(
            model="hermes", messages=[{"role": "user", "content": "x"}], tools=[tool]
        )
        [choice] = answer.choices
        if fits:
            assert choice.message.tool_calls
            [found] = choice.message.tool_calls
            assert found.function.parsed_arguments == Weather(city="Rome", unit="C")
        else:
            assert choice.message.content == call and choice.finish_reason == "stop"
            assert not choice.message.tool_calls


FORCED = {
    "chatml": '<tool_call>\n{"name": "get_weather", "arguments":',
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments":',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments":',
    "llama": '{"name": "get_weather", "parameters":',
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FORCED)
def test_a_forced_call_is_opened_by_the_server_and_held_to_its_schema(
    server: LiveServer, engines: Engines, name: str, stream: bool
) -> None:
    engine = engines[name]
    arguments = '{"city": "Paris"}'
    engine.script = says(arguments)
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    tools = [weather(strict=True), weather("other")]
    response = chat(
        server, model=name, tools=tools, tool_choice=choice, stream=stream,
        max_completion_tokens=50,
    )  # fmt: skip
    assert response.status_code == 200, response.text
    if stream:
        chunks = events(response)
        calls = [c for e in chunks for c in e["choices"][0]["delta"].get("tool_calls", ())]
        assert calls[0]["function"]["name"] == "get_weather"
        assert "".join(call["function"]["arguments"] for call in calls) == arguments
        assert chunks[0]["choices"][0]["delta"]["content"] is None
    else:
        [shown] = response.json()["choices"]
        assert shown["finish_reason"] == "tool_calls" and shown["message"]["content"] is None
        [call] = shown["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": arguments}
    [request] = engine.submitted
    assert decode(request.prompt_ids).endswith(FORCED[name])
    assert request.grammar is not None and request.grammar.kind == "json_schema"
    schema = {**weather()["function"]["parameters"], "additionalProperties": False}
    assert json.loads(request.grammar.source) == schema


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("reason", "stop", "told"), [("stop", b";", ";"), ("stop", 0, 0), ("length", None, None)]
)
def test_a_forced_call_that_is_cut_is_no_call(
    server: LiveServer, engines: Engines, reason: Any, stop: Any, told: Any, several: bool
) -> None:
    text = ('{"name": "f", "arguments": ' if several else "") + '{"city": "A'
    ids = encode(text if stop is None else f"{text};")
    engines["hermes"].script = lambda r: steps_of(r, ids, finish_reason=reason, stop_reason=stop)
    body = {"model": "hermes", "tools": [weather("f"), weather("g")][: 1 + several],
            "tool_choice": "required", "stop": ";", "stop_token_ids": [0],
            "max_completion_tokens": 50}  # fmt: skip
    [choice] = chat(server, **body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, told)
    assert choice["message"]["content"] == '{"city": "A' and "tool_calls" not in choice["message"]
    end = events(chat(server, **body, stream=True))[-1]["choices"][0]
    assert (end["finish_reason"], end.get("stop_reason")) == (reason, told)


def test_one_of_several_tools_must_be_called(server: LiveServer, engines: Engines) -> None:
    """tools/test_calls.py has all models' ways to write it."""
    engine = engines["hermes"]
    engine.script = says(json.dumps({"name": "other", "arguments": {"city": "Rome"}}))
    tools = [weather(), weather("other"), weather("third")]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": n}}
                                             for n in ("get_weather", "other")]}  # fmt: skip
    for choice in ("required", {"type": "allowed_tools", "allowed_tools": allowed}):
        body = chat(server, model="hermes", tools=tools, tool_choice=choice,
                    max_completion_tokens=60).json()  # fmt: skip
        [found] = body["choices"][0]["message"]["tool_calls"]
        assert found["function"] == {"name": "other", "arguments": '{"city": "Rome"}'}
    sources = [r.grammar.source for r in engine.submitted if r.grammar is not None]
    assert len(sources) == 2 and '"third"' in sources[0] and '"third"' not in sources[1]


# --- refusals ---


def test_a_base_model_does_not_chat(server: LiveServer) -> None:
    message = check(chat(server, model="base"), 400, "unsupported_parameter", "model")
    assert "/v1/completions" in message
    assert server.post(model="base", prompt="the", max_tokens=1).status_code == 200


def one(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **message}]}


Rows = list[tuple[dict[str, Any], str]]
UNSUPPORTED: Rows = [
    ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"function_call": []}, "function_call"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    ({"verbosity": "low"}, "verbosity"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"chat_template": "{{ 7 * 7 }}"}, "chat_template"),
    ({"use_beam_search": 0}, "use_beam_search"),
    ({"length_penalty": 1.2}, "length_penalty"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"model": "coder", "tools": [weather()]}, "tools"),
    ({"model": "hermes", "tools": [weather(strict=True, parameters={"pattern": "(a+)+$"})]},
     "tools[0].function.parameters"),
    ({"model": "hermes", "tools": [weather()], "response_format": {"type": "json_object"}},
     "response_format"),
    (one(role="function"), "messages[0].role"),
    (one(tool_call_id="x"), "messages[0].tool_call_id"),
    (one(refusal="x"), "messages[0].refusal"),
    (one(role="assistant", audio={"id": "x"}), "messages[0].audio"),
    (one(role="assistant", function_call={}), "messages[0].function_call"),
    (one(role="assistant", reasoning_content="hm"), "messages[0].reasoning_content"),
    (one(content=[{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}]),
     "messages[0].content[0]"),
    (one(content=[{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]),
     "messages[0].content[1]"),
    (one(content=[{"type": "file", "file": {"file_id": "x"}}]), "messages[0].content[0]"),
]  # fmt: skip


HERMES_CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
INVALID: Rows = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    (one(content=5), "messages[0].content"),
    (one(content=["x"]), "messages[0].content[0]"),
    (one(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (one(name=5), "messages[0].name"),
    (one(role="assistant", annotations=[{"type": "url_citation"}]), "messages[0].annotations"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ({"max_completion_tokens": True}, "max_completion_tokens"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}},
     "tool_choice.function.name"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tool_choice": {"function": {"name": "f"}}}, "tool_choice.type"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tool_choice": ["auto"]}, "tool_choice"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"prompt_cache_options": {"ttl": "12h"}}, "prompt_cache_options.ttl"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}},
     "stream_options.continuous_usage_stats"),
    ({"model": "hermes", "reasoning_effort": "x"}, "reasoning_effort"),
    ({"model": "hermes", "tools": [weather(), weather()]}, "tools[1].function.name"),
    ({"model": "hermes", "tools": [weather("bad name")]}, "tools[0].function.name"),
    ({"model": "hermes", "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"model": "hermes", "tools": [weather(parameters={"type": "array"})]},
     "tools[0].function.parameters"),
    ({"model": "hermes", "tools": [weather()],
      "tool_choice": {"type": "function", "function": {"name": "other"}}},
     "tool_choice.function.name"),
    ({"model": "hermes", "tools": [weather()],
      "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools.tools"),
    ({"model": "hermes", "tools": [weather()], "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "x"}]}}},
     "tool_choice.allowed_tools.tools[0].type"),
    ({"model": "hermes", "tool_choice": "required",
      "tools": [weather(parameters={"type": "object", "properties": {"a": {"type": "what"}}})]},
     "tools[0].function.parameters"),
    ({"model": "hermes", "tool_choice": "required",
      "tools": [weather(), weather("g", parameters={"properties": {"a": {"$ref": "#/no"}}})]},
     "tools[1].function.parameters"),
    ({"model": "hermes", **one(role="tool")}, "messages[0].tool_call_id"),
    ({"model": "hermes", **one(role="assistant", tool_calls=[
        {**HERMES_CALL, "function": {"name": "f", "arguments": "[1]"}}])},
     "messages[0].tool_calls[0].function.arguments"),
    ({"model": "mistral", **one(role="system")}, "messages"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
]  # fmt: skip


UNKNOWN: Rows = [
    ({"frobnicate": 1}, "frobnicate"),
    ({"prompt": "x"}, "prompt"),
    (one(mood="happy"), "messages[0].mood"),
    (one(content=[{"type": "text", "text": "a", "cache": 1}]), "messages[0].content[0].cache"),
]
REFUSED = {
    "unsupported_parameter": UNSUPPORTED, "invalid_value": INVALID, "unknown_parameter": UNKNOWN,
}  # fmt: skip


@refused(REFUSED)
def test_what_is_refused_is_a_400_that_names_the_field(
    server: LiveServer, code: str, body: dict[str, Any], param: str
) -> None:
    """What all bodies refuse is in test_errors.py and test_peer_fields.py."""
    check(chat(server, **body), 400, code, param)


def test_too_much_is_refused_by_name(server: LiveServer) -> None:
    big = weather(parameters={"type": "object", "description": "x" * (1 << 18)})
    check(chat(server, model="hermes", tools=[big]), 400, "limit_exceeded", "tools")
    check(chat(server, messages=MESSAGES * 4097), 400, "invalid_value", "messages")
    check(chat(server, model="hermes", tools=[weather(f"f{i}") for i in range(129)]), 400,
          "invalid_value", "tools")  # fmt: skip


def test_what_does_not_fit_is_refused_whole(server: LiveServer) -> None:
    for content in ("the " * 2000, "x" * 150_000, "é<|im_end|>" * 20_000):
        message = check(
            chat(server, **one(content=content)), 400, "context_length_exceeded", "messages"
        )
        assert "never truncated" in message
    for name in ("max_completion_tokens", "max_tokens"):
        body = {"max_completion_tokens": None, name: CONTEXT}
        message = check(chat(server, **body), 400, "context_length_exceeded", name)
        assert f"({name})" in message
    prediction = {"type": "content", "content": "x" * 100_000}
    check(chat(server, prediction=prediction), 400, "limit_exceeded", "prediction")


def test_predictions_need_the_drafter_that_uses_them(server: LiveServer) -> None:
    prediction = {"type": "content", "content": "x"}
    for speculation in ({"drafter": "suffix"}, {"drafter": "off"}, {"max_draft_tokens": 0}):
        response = chat(server, prediction=prediction, speculation=speculation)
        check(response, 400, "unsupported_parameter", "prediction")
    response = chat(server, prediction=prediction, speculation={"drafter": "auto"})
    assert response.status_code == 200
