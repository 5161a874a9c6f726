"""What cannot be honoured is refused with the name of its field, whoever finds it out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.fixtures import over
from tests.api.live import BYTE_IDS, TOKENIZER, LiveServer
from tests.api.real_engine import spec
from tests.api.test_errors import check

A = BYTE_IDS[b"a"]


server = over(spec(tokenizer=TOKENIZER))


ENDLESS = 3  # of REFUSED: their grammars have no end
LOOP = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": LOOP}}, "structured_outputs.json"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": LOOP}}},
     "response_format.json_schema.schema"),
    ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "start: <[49999]>"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "a{100000}"}}, "structured_outputs.regex"),
    (
        {"allowed_token_ids": [A], "structured_outputs": {"regex": "b"}},
        "allowed_token_ids",
    ),
    ({"min_tokens": 2, "structured_outputs": {"regex": "a+"}}, "min_tokens"),
    ({"ignore_eos": True, "structured_outputs": {"regex": "a+"}}, "ignore_eos"),
    ({"structured_outputs": {"grammar": 'root ::= "a" | b'}}, "structured_outputs.grammar"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[p for _, p in REFUSED])
def test_the_field_is_named(
    server: LiveServer, body: dict[str, Any], param: str, stream: bool
) -> None:
    response = server.post(prompt="the fox", max_tokens=20, stream=stream, **body)
    if stream and response.status_code == 200:  # it waited for longer than headers do
        error = json.loads(response.text.split("\n")[0].removeprefix("data: "))["error"]
    else:
        assert response.status_code == 400, response.text
        error = response.json()["error"]
    told = error["message"]
    assert error["param"] == param and param.split(".")[0] in told, error
    if (body, param) in REFUSED[:ENDLESS]:
        assert error["code"] == "invalid_value"
        assert "nothing matches it" in told and "Extension" not in told


def test_a_wrong_gbnf_grammar_is_called_so(server: LiveServer) -> None:
    response = server.post(structured_outputs={"grammar": "root ::= item+\nitem ::= ("})
    told = check(response, 400, "invalid_value", "structured_outputs.grammar")
    assert "not GBNF" in told


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-300, 1e-31])
def test_tiny_temperatures_are_greedy(server: LiveServer, temperature: float) -> None:
    greedy = server.post(prompt="the fox", max_tokens=12, temperature=0).json()["choices"]
    near = server.post(prompt="the fox", max_tokens=12, temperature=temperature, seed=7)
    assert near.json()["choices"] == greedy
