"""POST /v1/completions over a real socket, with the real openai client."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from server.api import answer
from server.api.chat_template import ChatTemplate
from server.api.engines.submission import Submission
from server.api.faces.completions import _Chunks
from server.api.served_model import ServedModel
from server.metrics import Metrics
from server.types import Request
from tests.api.fixtures import BODIES, noted, served_by
from tests.api.live import TOKENIZER, LiveServer, as_bytes, encode, served
from tests.api.orders import completion, orders
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.fakes.scripted_engine import ScriptedEngine, saying, steps_of, together

REPLY = " over the lazy dog. Once upon a time — héllo wörld"
REPLY_IDS = encode(REPLY)
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


def chats() -> ServedModel:
    """The tests' model with a template, which writes the first message as it is."""
    template = ChatTemplate("{{ messages[0].content }}", byte_level_tokenizer())
    return replace(served(), chat=template)


engine, server = served_by(
    lambda: ScriptedEngine(saying(REPLY_IDS)), models=lambda: {"tiny": chats()}
)


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; the last must be [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def streamed(response: httpx.Response) -> list[str]:
    """What a stream says, a text a choice."""
    texts: dict[int, str] = {}
    for chunk in events(response):
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return [texts[i] for i in range(len(texts))]


def test_the_openai_client_gets_a_completion(server: LiveServer, engine: ScriptedEngine) -> None:
    answer = server.openai().completions.create(
        model="tiny", prompt="the quick brown fox jumps", max_tokens=5, temperature=0
    )
    assert answer.object == "text_completion" and answer.model == "tiny"
    assert answer.id.startswith("cmpl-") and answer.system_fingerprint == "fp"
    [choice] = answer.choices
    assert choice.text == TOKENIZER.decode(REPLY_IDS[:5])
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    num_prompt = len(encode("the quick brown fox jumps"))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == num_prompt + 5
    [request] = engine.submitted
    assert request.prompt_ids == tuple(encode("the quick brown fox jumps"))
    assert request.sampling.temperature == 0.0 and request.task == "completion"


def test_a_response_has_openais_members_and_vllms_nulls(server: LiveServer) -> None:
    body = server.post(max_tokens=2).json()
    assert set(body) == {
        "id", "object", "created", "model", "system_fingerprint", "choices", "usage",
    }  # fmt: skip
    of_vllm = {"stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"}
    [choice] = body["choices"]
    assert set(choice) == {"text", "index", "logprobs", "finish_reason", *of_vllm}
    assert {choice[name] for name in of_vllm} == {None}
    assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


@pytest.mark.parametrize("per_step", [1, 3, 7])
def test_a_stream_is_the_whole_text(
    server: LiveServer, engine: ScriptedEngine, per_step: int
) -> None:
    engine.script = saying(REPLY_IDS, per_step=per_step)
    stream = server.openai().completions.create(
        model="tiny", prompt="the", max_tokens=len(REPLY_IDS), stream=True
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == REPLY
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert all(c.usage is None and "usage" not in c.model_fields_set for c in chunks)


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("/v1/completions", [1, 2, 3, 4, 4]),
        ("/v1/chat/completions", [0, 1, 2, 3, 4, 4, 4]),  # as vLLM: none with the role
    ],
)
def test_continuous_usage_counts_up(server: LiveServer, path: str, counts: list[int]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", **BODIES[path], "max_tokens": 4}
    chunks = events(server.post(path, **body, stream=True, stream_options=options))
    assert [c["usage"]["completion_tokens"] for c in chunks] == counts
    assert [len(c["choices"]) for c in chunks] == [1] * (len(counts) - 1) + [0]


def test_the_usage_of_many_prompts_is_summed_once_for_all_that_came_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    order = completion(orders(), prompt=["the"] * 5, stream=True, stream_options=options)
    submission = Submission.answered(order.requests, Metrics(vllm_aliases=False))
    sums = noted(monkeypatch, answer, "usage_report", len)
    written = _Chunks(order, submission).written(asyncio.run(anext(submission)))
    assert written.count(b'"usage":{"prompt_tokens":5,') == 5 and sums == [5]


def test_prompt_shapes(server: LiveServer, engine: ScriptedEngine) -> None:
    a, b = encode("the quick"), encode("lazy dog")
    for prompt, expected in (
        ("the quick", [a]),
        (["the quick", "lazy dog"], [a, b]),
        (a, [a]),
        ([a, b], [a, b]),
    ):
        engine.submitted.clear()
        body = server.post(prompt=prompt, max_tokens=2).json()
        assert sorted(r.prompt_ids for r in engine.submitted) == sorted(map(tuple, expected))
        assert [c["index"] for c in body["choices"]] == list(range(len(expected)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert body["usage"]["completion_tokens"] == 2 * len(expected)


def test_prompts_of_a_list_have_fresh_seeds_or_the_given_one(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    server.post(prompt=["a", "b", "c"], max_tokens=1)
    assert len({r.sampling.seed for r in engine.submitted}) == 3
    engine.submitted.clear()
    server.post(prompt=["a", "b"], max_tokens=1, seed=-5)
    assert [r.sampling.seed for r in engine.submitted] == [2**64 - 5] * 2
    engine.submitted.clear()
    server.post(prompt=["a", "b"], max_tokens=1, seed=-1)  # vLLM's and llama.cpp's word for none
    fresh = {r.sampling.seed for r in engine.submitted}
    assert len(fresh) == 2 and 2**64 - 1 not in fresh


def test_best_of_returns_the_n_likeliest(server: LiveServer, engine: ScriptedEngine) -> None:
    means = [-3.0, -1.0, -2.0]

    def script(request: Request) -> Any:
        assert request.num_choices == 3 and request.sampling.num_logprobs == 0

        def mean_of(k: int, _: int) -> float:
            return means[k]

        return together(
            [
                steps_of(request, as_bytes(str(k)), choice_id=k, logprob=partial(mean_of, k))
                for k in range(3)
            ]
        )

    engine.script = script
    body = server.post(best_of=3, n=2, max_tokens=1).json()
    assert [(c["index"], c["text"], c["logprobs"]) for c in body["choices"]] == [
        (0, "1", None),
        (1, "2", None),
    ]
    assert body["usage"]["completion_tokens"] == 3


def test_logprobs_have_tokens_offsets_and_the_likeliest(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    text = "no €"
    engine.script = saying(as_bytes(text))
    answer = server.openai().completions.create(
        model="tiny", prompt="the", max_tokens=len(text.encode()), logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert logprobs.tokens == ["n", "o", " ", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert logprobs.text_offset == [0, 1, 2, 3, 3, 3]
    assert logprobs.token_logprobs == [-0.25] * 6
    assert logprobs.top_logprobs is not None
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert top[token] == -0.25 == max(top.values()) and len(top) == 2


def grown(whole: Any, part: Any) -> Any:
    """A part of an answer with what a chunk adds to it."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return whole | {name: grown(whole.get(name), value) for name, value in part.items()}
    if whole is not None and isinstance(part, str | list):
        return whole + part
    return whole if part is None else part


def added_up(chunks: list[Any]) -> dict[str, Any]:
    """The answer whose chunks these are."""
    answer: dict[str, Any] = {}
    choices: dict[int, Any] = {}
    for chunk in chunks:
        for choice in chunk.pop("choices"):
            if "delta" in choice:
                choice["message"] = {"annotations": [], **choice.pop("delta")}
            choices[choice["index"]] = grown(choices.get(choice["index"]), choice)
        answer |= chunk
    return answer | {"choices": [choices[i] for i in sorted(choices)]}


EXTRAS = ("token_ids", "token_sources", "rejected_drafts")


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("per_step", [2, 7])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": ["a", "the"], "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}),
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(
    server: LiveServer,
    engine: ScriptedEngine,
    path: str,
    asked: dict[str, Any],
    per_step: int,
    usage: bool,
) -> None:
    def script(request: Request) -> Any:
        assert request.report_sources and request.report_rejected
        said = [as_bytes(f"né {request.prompt_ids[0] + k:04} 日本!") for k in range(2)]
        steps = together(
            [
                steps_of(request, ids, per_step=per_step, choice_id=k, finish_reason="stop",
                         stop_reason=b"!")
                for k, ids in enumerate(said)
            ]
        )  # fmt: skip
        draft = ((0, "suffix", (5, 6)),)
        return [[delta._replace(rejected_drafts=draft) for delta in step] for step in steps]

    engine.script = script
    extras = {f"include_{name}": True for name in (*EXTRAS[1:], "speculation")}
    body = {"model": "tiny", "n": 2, "stop": "!", "return_token_ids": True, **extras, **asked}
    whole = server.post(path, **body).json()
    options = {"stream": True, "stream_options": {"include_usage": usage}}
    chunks = events(server.post(path, **body, **options))
    assert ["speculation" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    told = added_up(chunks)
    assert told["speculation"] == whole["speculation"]
    assert told.get("usage") == (whole["usage"] if usage else None)
    assert told.get("prompt_token_ids") == whole.get("prompt_token_ids")
    for streamed, choice in zip(told["choices"], whole["choices"], strict=True):
        assert all(choice[name] for name in EXTRAS)
        assert streamed == {name: choice[name] for name in streamed}
        # Runs of one source split no character, and show nothing of the stop string.
        said = "".join(run["text"] for run in choice["token_sources"])
        [first, *_] = choice.get("prompt_token_ids") or whole["prompt_token_ids"]
        assert f" {first + choice['index'] % 2:04} " in said
        assert said.startswith("né ") and said.endswith(" 日本")
        assert (choice["text"] if "text" in choice else choice["message"]["content"]).endswith(said)


def test_echo_gives_the_prompt_and_its_logprobs(server: LiveServer, engine: ScriptedEngine) -> None:
    prompt = "the quick brown"
    ids = encode(prompt)
    for given in (prompt, ids):
        choice = server.post(prompt=given, echo=True, logprobs=1, max_tokens=3).json()["choices"][0]
        assert choice["text"] == prompt + TOKENIZER.decode(REPLY_IDS[:3])
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + 3
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert (
            logprobs["token_logprobs"][1:] == [-2.0 - i for i in range(len(ids) - 1)] + [-0.25] * 3
        )
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"][offset:].startswith(token)
    assert engine.submitted[-1].echo_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_needs_no_engine(
    server: LiveServer, engine: ScriptedEngine, stream: bool
) -> None:
    first_tokens = server.sample("tailor_time_to_first_token_seconds_count")
    response = server.post(prompt="the answer", echo=True, max_tokens=0, stream=stream)
    choice = (events(response)[-1] if stream else response.json())["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("the answer", "length")
    assert engine.submitted == []
    assert server.sample("tailor_time_to_first_token_seconds_count") == first_tokens


def test_speculation_is_reported_only_when_asked(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    engine.script = saying(REPLY_IDS, per_step=4)
    body = server.post(max_tokens=8, include_speculation=True).json()
    report = body["speculation"]
    assert report["mean_tokens_per_step"] == 4.0
    # The step that ends the prompt and its first token left out: 7 tokens of one step.
    assert (report["steps"], report["decode_tokens_per_step"]) == (2, 7.0)
    one = server.post(max_tokens=4, include_speculation=True).json()["speculation"]
    assert one["decode_tokens_per_step"] is None, "its only step ended the prompt"
    assert (report["steps"], report["drafts"]) == (2, 2)
    assert (report["drafted_tokens"], report["accepted_tokens"]) == (8, 6)
    assert report["by_source"] == {"suffix": {"drafted_tokens": 8, "accepted_tokens": 6}}
    assert report["accepted_by_depth"] == [2, 2, 2] and report["drafter"] == "suffix"
    assert "speculation" not in server.post(max_tokens=2).json()


def test_token_sources_split_the_text(server: LiveServer, engine: ScriptedEngine) -> None:
    engine.script = saying(REPLY_IDS, per_step=3)
    options: dict[str, Any] = {"max_tokens": 8, "include_token_sources": True}
    [choice] = server.post(**options).json()["choices"]
    runs = choice["token_sources"]
    assert [(r["source"], r["tokens"]) for r in runs] == [
        ("suffix", 2), (None, 1), ("suffix", 2), (None, 1), ("suffix", 1), (None, 1),
    ]  # fmt: skip
    assert "".join(r["text"] for r in runs) == choice["text"]
    assert runs[0]["text"] == TOKENIZER.decode(REPLY_IDS[:2])
    for chunk in events(server.post(stream=True, **options)):
        [part] = chunk["choices"]
        assert "".join(r["text"] for r in part["token_sources"]) == part["text"]
    assert "token_sources" not in server.post(max_tokens=2).json()["choices"][0]


def test_rejected_drafts_stand_where_they_were_drafted(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    def script(request: Request) -> Any:
        steps = steps_of(request, as_bytes("né 日本!"), per_step=4)
        paths = ((0, "suffix", tuple(as_bytes("XY"))), (3, "corpus", tuple(as_bytes("é"))))
        return [[steps[0][0]._replace(rejected_drafts=paths)], *steps[1:]]

    engine.script = script
    options: dict[str, Any] = {"max_tokens": 20, "include_rejected_drafts": True}
    [choice] = server.post(**options).json()["choices"]
    assert choice["text"] == "né 日本!"
    assert choice["rejected_drafts"] == [
        {"token": 0, "offset": 0, "source": "suffix", "tokens": 2, "text": "XY"},
        {"token": 3, "offset": 2, "source": "corpus", "tokens": 2, "text": "é"},
    ]
    assert "rejected_drafts" not in server.post(max_tokens=3).json()["choices"][0]


def test_speculation_can_be_chosen(server: LiveServer, engine: ScriptedEngine) -> None:
    server.post(max_tokens=1, speculation={"drafter": "off"})
    server.post(max_tokens=1, speculation={"max_draft_tokens": 5})
    server.post(max_tokens=1, speculation={"max_draft_tokens": 0})
    chosen = [(r.speculation.drafter, r.speculation.max_draft_tokens) for r in engine.submitted]
    assert chosen == [("off", 0), ("suffix", 5), ("off", 0)]


SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "presence_penalty": 1,
    "frequency_penalty": -0.5, "repetition_penalty": 1.5, "min_tokens": 2, "stop": "x",
    "stop_token_ids": [9, 5, 9], "logit_bias": {"7": -100, "3": 2}, "allowed_token_ids": [8, 3],
    "ignore_eos": True, "seed": 3, "include_stop_str_in_output": True,
    "skip_special_tokens": False, "priority": -4, "cache_salt": "salt", "user": "me",
    "metadata": {"a": "b"}, "store": True, "safety_identifier": "s", "prompt_cache_key": "k",
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "further"),
    [
        ("/v1/completions", {"logprobs": 20}),
        (
            "/v1/chat/completions",
            {"logprobs": True, "top_logprobs": 20, "modalities": ["text"], "verbosity": "medium",
             "prompt_cache_retention": "in_memory", "reasoning_effort": "none",
             "response_format": {"type": "text"}},
        ),
    ],
)  # fmt: skip
def test_every_sampling_field_reaches_the_engine(
    server: LiveServer, engine: ScriptedEngine, path: str, further: dict[str, Any]
) -> None:
    body = {"model": "tiny", **BODIES[path], "max_tokens": 7, "n": 2, **SAMPLING, **further}
    answer = server.post(path, **body)
    assert answer.status_code == 200, answer.text
    [request] = engine.submitted
    assert request.num_choices == 2 and request.grammar is None
    s = request.sampling
    assert (s.max_tokens, s.temperature, s.top_p, s.top_k, s.min_p) == (7, 0.5, 0.9, 0, 0.1)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1.0, -0.5, 1.5)
    assert (s.min_tokens, s.stop, s.stop_token_ids) == (2, (b"x",), (5, 9))
    assert s.logit_bias == ((3, 2.0), (7, -100.0)) and s.allowed_token_ids == (3, 8)
    assert (s.ignore_eos, s.seed, s.num_logprobs) == (True, 3, 20)
    assert s.include_stop_str_in_output and not s.skip_special_tokens
    assert (request.priority, request.cache_salt) == (-4, "salt")


def test_top_p_of_zero_keeps_the_likeliest_alone(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    server.post(max_tokens=1, top_p=0)
    assert (engine.submitted[0].sampling.top_p, engine.submitted[0].sampling.top_k) == (1.0, 1)


def test_max_tokens_that_were_not_given_fit_the_context(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    server.post()
    server.post(prompt=[5] * 250)
    assert [r.sampling.max_tokens for r in engine.submitted] == [16, 6]


def test_a_stream_is_ascii_on_the_wire_and_splits_no_character(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    text = "a\u2028b\x85c né 日本 👩‍👧"
    engine.script = saying(as_bytes(text))
    response = server.post(stream=True, max_tokens=len(text.encode()))
    assert response.content.isascii()
    assert streamed(response) == [text]
