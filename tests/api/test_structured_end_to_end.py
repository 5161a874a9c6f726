"""Structured outputs over a real socket: the real Engine and llguidance, on the FakeRunner."""

from __future__ import annotations

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
