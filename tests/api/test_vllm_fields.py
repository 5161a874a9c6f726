"""Fields and routes of vLLM's that clients use: prompt_logprobs, bad_words, truncation, /tokenize
with messages, a chat's rendered prompt, /tokenizer_info, /ping, /load, HEAD."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.chat_models import CONTEXT, TABLE, decode, encode, weather
from tests.api.fixtures import Engines, chats_of
from tests.api.live import LiveServer
from tests.api.test_completions import events
from tests.api.test_errors import check
from tests.fakes.scripted_engine import saying

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
SAYS = encode(" the lazy dog")


engines, server = chats_of(("hermes", "base"), saying(SAYS))


def complete(server: LiveServer, **body: Any) -> httpx.Response:
    return server.post(**{"model": "base", "prompt": "the quick", "max_tokens": 3, **body})


def chat(server: LiveServer, **body: Any) -> httpx.Response:
    body = {"model": "hermes", "messages": MESSAGES, "max_completion_tokens": 3, **body}
    return server.post("/v1/chat/completions", **body)


# --- fields ---


def test_prompt_logprobs_of_completions(server: LiveServer, engines: Engines) -> None:
    [choice] = complete(server, prompt_logprobs=1).json()["choices"]
    request = engines["base"].submitted[-1]
    assert request.echo_logprobs == 1 and choice["logprobs"] is None
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(request.prompt_ids) - 1
    for token_id, entry in zip(request.prompt_ids[1:], others, strict=True):
        own = entry[str(token_id)]
        assert own["rank"] == 1 and own["logprob"] < 0
        assert own["decoded_token"] == decode([token_id])
    both = complete(server, prompt_logprobs=3, echo=True, logprobs=1).json()["choices"][0]
    assert engines["base"].submitted[-1].echo_logprobs == 3
    assert all(len(top) == 1 for top in both["logprobs"]["top_logprobs"][1:3])
    assert all(len(entry) == 3 for entry in both["prompt_logprobs"][1:])
    check(complete(server, prompt_logprobs=1, stream=True), 400, "invalid_value", "prompt_logprobs")
    check(complete(server, prompt_logprobs=21), 400, "invalid_value", "prompt_logprobs")


def test_prompt_logprobs_of_a_chat(server: LiveServer) -> None:
    answer = chat(server, prompt_logprobs=0).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert chat(server).json()["prompt_logprobs"] is None


def test_tokens_as_ids(server: LiveServer) -> None:
    options = {"return_tokens_as_token_ids": True}
    [choice] = complete(server, logprobs=1, **options).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in SAYS[:3]]
    [choice] = chat(server, logprobs=True, top_logprobs=1, **options).json()["choices"]
    [first, *_] = choice["logprobs"]["content"]
    assert first["token"] == first["top_logprobs"][0]["token"] == f"token_id:{SAYS[0]}"
    assert bytes(first["bytes"]).decode() == decode([SAYS[0]])


def test_bad_words_of_one_token_are_banned(server: LiveServer, engines: Engines) -> None:
    assert complete(server, bad_words=["the", " fox"]).status_code == 200
    banned = {i for i, bias in engines["base"].submitted[-1].sampling.logit_bias if bias == -100.0}
    assert {decode([i]).strip() for i in banned} == {"the", "fox"}
    assert len(banned) >= 3  # "the" and " the"
    long = ["the quick brown"]
    check(complete(server, bad_words=long), 400, "unsupported_parameter", "bad_words[0]")
    check(complete(server, bad_words=["the", " "]), 400, "unsupported_parameter", "bad_words[1]")


@pytest.mark.parametrize("prompt", ["the quick brown fox jumps", encode("the quick brown fox")])
def test_a_prompt_is_truncated_only_when_asked_and_told(
    server: LiveServer, engines: Engines, prompt: Any
) -> None:
    whole = complete(server, prompt=prompt).json()["usage"]
    assert "truncated_tokens" not in whole["prompt_tokens_details"]
    answer = complete(server, prompt=prompt, truncate_prompt_tokens=2, echo=True).json()
    assert answer["usage"]["prompt_tokens"] == 2
    cut = answer["usage"]["prompt_tokens_details"]["truncated_tokens"]
    assert cut == whole["prompt_tokens"] - 2
    kept = engines["base"].submitted[-1].prompt_ids
    assert kept == engines["base"].submitted[-2].prompt_ids[-2:]
    assert answer["choices"][0]["text"].startswith(decode(kept))
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    last = events(complete(server, prompt=prompt, truncate_prompt_tokens=2, **usage))[-1]
    assert last["usage"]["prompt_tokens_details"]["truncated_tokens"] == cut
    fits = complete(server, prompt=prompt, truncate_prompt_tokens=100).json()["usage"]
    assert fits == whole


def test_a_prompt_that_would_not_fit_can_be_truncated(server: LiveServer) -> None:
    long = "the quick brown fox " * CONTEXT
    check(complete(server, prompt=long), 400, "context_length_exceeded", "prompt")
    assert complete(server, prompt=long, truncate_prompt_tokens=10).status_code == 200
    response = chat(server, truncate_prompt_tokens=10)
    check(response, 400, "unsupported_parameter", "truncate_prompt_tokens")


def test_logprobs_of_named_ids(server: LiveServer, engines: Engines) -> None:
    """As in vLLM: they stand in place of the likeliest, beside the drawn token's own."""
    named = {"logprob_token_ids": [9, 4, 9], "return_tokens_as_token_ids": True}
    [choice] = complete(server, logprobs=5, echo=True, **named).json()["choices"]
    asked = engines["base"].submitted[-1].sampling
    assert (asked.num_logprobs, asked.logprob_token_ids) == (0, (4, 9))
    num_prompt, logprobs = len(encode("the quick")), choice["logprobs"]
    assert {len(top) for top in logprobs["top_logprobs"][1:num_prompt]} == {5}
    for token, top in zip(
        logprobs["tokens"][num_prompt:], logprobs["top_logprobs"][num_prompt:], strict=True
    ):
        assert set(top) == {token, "token_id:4", "token_id:9"}
    [choice] = chat(server, logprobs=True, top_logprobs=2, **named).json()["choices"]
    for entry in choice["logprobs"]["content"]:
        told = [t["token"] for t in entry["top_logprobs"]]
        assert told == [*dict.fromkeys((entry["token"], "token_id:4", "token_id:9"))]
    # An empty list names nothing.
    [choice] = chat(server, logprobs=True, top_logprobs=2, logprob_token_ids=[]).json()["choices"]
    assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {2}


def test_named_ids_are_checked(server: LiveServer) -> None:
    def refused(response: httpx.Response, code: str = "invalid_value") -> None:
        check(response, 400, code, "logprob_token_ids")

    refused(complete(server, logprob_token_ids=[1]))
    refused(chat(server, logprob_token_ids=[1]))
    refused(complete(server, logprob_token_ids=[1], logprobs=1, echo=True, max_tokens=0))
    refused(complete(server, logprob_token_ids=[TABLE.vocab_size], logprobs=1))
    refused(complete(server, logprob_token_ids=list(range(129)), logprobs=1))


# --- routes ---


def test_tokenize_reads_messages_and_tools(server: LiveServer, engines: Engines) -> None:
    bodies: list[dict[str, Any]] = [
        {}, {"tools": [weather()]}, {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ]  # fmt: skip
    for body in bodies:
        told = server.post("/tokenize", model="hermes", messages=MESSAGES, **body).json()
        assert chat(server, **body).status_code == 200
        assert tuple(told["tokens"]) == engines["hermes"].submitted[-1].prompt_ids
        shown = server.post(
            "/v1/chat/completions/render", model="hermes", messages=MESSAGES, **body
        ).json()
        assert shown["prompt_token_ids"] == told["tokens"] and shown["count"] == told["count"]
        assert shown["prompt"] == decode(told["tokens"])


def test_tokenize_takes_either_a_prompt_or_messages(server: LiveServer) -> None:
    def refused(param: str, **body: Any) -> None:
        response = server.post("/tokenize", model="hermes", **body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param

    refused("prompt")
    refused("prompt", prompt="x", messages=MESSAGES)
    refused("tools", prompt="x", tools=[weather()])
    assert server.post("/tokenize", model="hermes", prompt="x", tools=[]).status_code == 200
    refused("messages[0].role", messages=[{"role": "x"}])
    refused("add_special_tokens", messages=MESSAGES, add_special_tokens=True)
    base = server.post("/tokenize", model="base", messages=MESSAGES)
    check(base, 400, "unsupported_parameter", "model")


def test_tokenizer_info(server: LiveServer) -> None:
    told = httpx.get(server.url + "/tokenizer_info", params={"model": "hermes"}).json()
    assert told["model"] == "hermes" and told["vocab_size"] == TABLE.vocab_size
    assert "<tool_call>" in told["chat_template"] and told["tool_chat_template"] is None
    assert told["special_tokens"]["eos_token"] == "<|end|>"
    assert all(decode([t["id"]]) == t["content"] for t in told["added_tokens"])
    base = httpx.get(server.url + "/tokenizer_info", params={"model": "base"}).json()
    assert base["chat_template"] is None
    nobody = httpx.get(server.url + "/tokenizer_info", params={"model": "nobody"})
    check(nobody, 404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("path", "code", "param"),
    [
        ("/tokenizer_info?modl=x", "unknown_parameter", "modl"),
        ("/tokenizer_info?model=base&model=hermes", "invalid_value", "model"),
        ("/v1/models?limit=3", "unknown_parameter", "limit"),
        ("/v1/models/base?limit=3", "unknown_parameter", "limit"),
        ("/version?%0a=1", "unknown_parameter", "\\n"),
        ("/dashboard/history?before=1", "unknown_parameter", "before"),
    ],
)
def test_an_unknown_query_key_is_refused_by_name(
    server: LiveServer, path: str, code: str, param: str
) -> None:
    check(httpx.get(server.url + path), 400, code, param)
    assert httpx.head(server.url + path).status_code == 400


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/metrics", "/dashboard"])
def test_probes_and_pages_ignore_their_query(server: LiveServer, path: str) -> None:
    assert httpx.get(server.url + path, params={"t": 1}).status_code == 200


def test_ping_and_load(server: LiveServer) -> None:
    ping = httpx.get(server.url + "/ping")
    assert (ping.status_code, ping.content) == (200, b"")
    assert httpx.get(server.url + "/load").json() == {"server_load": 0}


def test_head_on_every_get_route(server: LiveServer) -> None:
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    assert not any("head" in operations for operations in paths.values())
    plain = [path for path, operations in paths.items() if "get" in operations and "{" not in path]
    assert {"/v1/models", "/health", "/ready", "/version", "/metrics"} <= set(plain)
    for path in [*plain, "/v1/models/base"]:
        got, head = httpx.get(server.url + path), httpx.head(server.url + path)
        assert (head.status_code, head.content) == (got.status_code, b""), path
    assert httpx.head(server.url + "/v1/completions").status_code == 405
