"""Structured outputs over a real socket: the real Engine and llguidance, on the FakeRunner."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.api.fixtures import over
from tests.api.live import TOKENIZER, LiveServer
from tests.api.real_engine import spec
from tests.api.test_completions import streamed

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Za-z ]{1,8}$"},
        "year": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["big", "small"]},
    },
    "required": ["city", "year", "kind"],
    "additionalProperties": False,
}


server = over(spec(tokenizer=TOKENIZER, model={"context": 1, "boost": 4.0}))


def _texts(server: LiveServer, **body: Any) -> list[tuple[str, str]]:
    response = server.post(**{"max_tokens": 120, **body})
    assert response.status_code == 200, response.text
    return [(c["text"], c["finish_reason"]) for c in response.json()["choices"]]


def test_openai_and_vllm_fields_give_json_of_the_schema(server: LiveServer) -> None:
    client = server.openai()
    ways: list[dict[str, Any]] = [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
            }
        },
    ]
    texts = set()
    for body in ways:
        answer = client.completions.create(
            model="tiny", prompt="Once upon a time", max_tokens=120, seed=3, extra_body=body
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        place = json.loads(choice.text)
        assert list(place) == ["city", "year", "kind"] and place["kind"] in ("big", "small")
        assert 0 <= place["year"] <= 9999
        texts.add(choice.text)
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["yes", 'say "héllo"', "no\nway"]}, r'yes|say "héllo"|no\nway'),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        (
            {"grammar": r'root ::= "\u0061\U00000062\u00e9\xe8" [\u0063-\u0065]? "\[\\"'},
            r"abéè[c-e]?\[\\",
        ),
        ({"json": SCHEMA, "disable_any_whitespace": True}, r'\{"city":"[^"]+","year":\d+,.*\}'),
        ({"json": SCHEMA, "whitespace_pattern": "  "}, r'\{(  )?"city"(  )?:.*\}'),
    ],
)
@pytest.mark.parametrize(("temperature", "n"), [(0, 1), (1.3, 2)])
def test_every_form_matches_with_and_without_drafts(
    server: LiveServer, fields: dict[str, Any], pattern: str, temperature: float, n: int
) -> None:
    prompts = ["the quick brown fox", "Once upon"]
    body: dict[str, Any] = {
        "prompt": prompts, "structured_outputs": fields, "seed": 11, "temperature": temperature,
        "n": n,
    }  # fmt: skip
    plain = _texts(server, speculation={"drafter": "off"}, **body)
    assert _texts(server, **body) == plain
    stream = server.post(**{**body, "max_tokens": 120, "stream": True})
    assert streamed(stream) == [text for text, _ in plain]
    for text, finish_reason in plain:
        if finish_reason == "stop":
            assert re.fullmatch(pattern, text), text
    assert any(finish_reason == "stop" for _, finish_reason in plain)


def test_json_object_is_an_object(server: LiveServer) -> None:
    for body in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        for text, finish_reason in _texts(server, n=2, seed=1, **body):
            assert text.startswith("{")
            if finish_reason == "stop":
                assert isinstance(json.loads(text), dict)


def test_forced_tokens_are_reported_as_a_source(server: LiveServer) -> None:
    response = server.post(
        structured_outputs={"json": SCHEMA, "disable_any_whitespace": True},
        max_tokens=120,
        seed=2,
        include_speculation=True,
    )
    body = response.json()
    forced = body["speculation"]["by_source"]["forced"]
    # Those at the root are certain; those behind a node of the drafter go where it goes.
    assert 8 < forced["accepted_tokens"] <= forced["drafted_tokens"]
    assert body["speculation"]["mean_tokens_per_step"] > 1.5


def test_echo_and_prompts_in_ids_leave_the_grammar_to_the_output(server: LiveServer) -> None:
    text, finish_reason = _texts(
        server, prompt="the", echo=True, logprobs=1, structured_outputs={"choice": ["fox", "dog"]}
    )[0]
    assert text in ("thefox", "thedog") and finish_reason == "stop"
