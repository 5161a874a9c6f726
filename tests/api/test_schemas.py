"""Which objects of a JSON schema are closed, and which fields and tasks open them again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.api.bodies import validate
from server.api.faces.completions import CompletionBody
from server.api.grammars import SchemaRules, format_of, grammar_of
from server.api.order import rules_of
from server.api.schemas import close_described
from server.api.tools.chosen import Tool, chosen_tools
from server.config import TaskConfig

CITY: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
}  # fmt: skip
SHUT = {**CITY, "additionalProperties": False}


def test_only_objects_that_are_described_whole_are_closed() -> None:
    free = {"type": "object"}
    said = {"properties": {}, "additionalProperties": True}
    patterns = {"properties": {"a": {}}, "patternProperties": {"^x": {}}}
    mixed = {"properties": {"a": CITY}, "anyOf": [{"properties": {"b": {}}}, {"required": ["c"]}]}
    schema = {
        "properties": {
            "free": free, "said": said, "mixed": mixed, "list": {"items": CITY},
            "patterns": patterns, "one": {"allOf": [{"$ref": "#/$defs/city"}]},
        },
        "$defs": {"city": {"anyOf": [CITY, {"type": "null"}]}},
    }  # fmt: skip
    assert close_described(schema) == {
        "properties": {
            "free": free, "said": said, "mixed": {**mixed, "properties": {"a": SHUT}},
            "list": {"items": SHUT}, "patterns": patterns,
            "one": {"allOf": [{"$ref": "#/$defs/city"}]},
        },
        "$defs": {"city": {"anyOf": [SHUT, {"type": "null"}]}},
        "additionalProperties": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [CITY, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/b", "$defs": {"b": CITY}},
        {"properties": {"a": {}}, "anyOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": CITY}},
        {"properties": {"a": {"not": CITY}}},
        {"type": "string"}, {"const": CITY}, {"enum": [CITY]}, True, {},
    ],
    ids=str,
)  # fmt: skip
def test_schemas_that_stay_as_they_are(schema: Any) -> None:
    assert close_described(schema) == schema


def test_a_property_called_like_a_keyword() -> None:
    schema = {"properties": {"properties": {"type": "string"}, "allOf": CITY, "not": CITY}}
    assert close_described(schema) == {
        "properties": {"properties": {"type": "string"}, "allOf": SHUT, "not": SHUT},
        "additionalProperties": False,
    }


@pytest.mark.parametrize("close", [True, False])
def test_every_field_that_brings_a_schema(close: bool) -> None:
    wanted, rules = SHUT if close else CITY, SchemaRules(closes=close)
    for given in (
        {"structured_outputs": {"json": CITY}},
        {"json_schema": CITY},
        # the name is optional
        {"response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}},
        {"response_format": {"type": "json_object", "schema": CITY}},
    ):
        body = validate(CompletionBody, {"prompt": "x", **given})
        grammar = grammar_of(body, format_of(body.response_format), rules)
        assert grammar is not None and json.loads(grammar[0].source) == wanted
    tool = Tool("f", None, CITY, strict=False, at="tools[0].function")
    chosen = chosen_tools([tool], None, rules, parallel=True)
    assert chosen.callable["f"] == wanted
    assert chosen.shown is not None and chosen.shown[0]["function"]["parameters"] == CITY


def test_a_request_goes_before_its_task() -> None:
    def opens(given: bool | None, task: bool) -> bool:
        body = CompletionBody(model="m", prompt="x", additional_properties=given)
        return not rules_of(body, TaskConfig(name="t", additional_properties=task)).closes

    assert [opens(g, t) for g in (None, True, False) for t in (False, True)] == [
        False, True, True, True, False, False,
    ]  # fmt: skip
