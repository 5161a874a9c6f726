"""The check of strict tools' arguments against their schemas."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from server.api.schemas import StrictArguments
from server.errors import UnsupportedFieldError
from server.grammar_text import grammar_problem
from server.types import GrammarSpec
from tests.api.tools.test_calls import CASES, read


class Item(BaseModel):
    name: str = Field(min_length=1, max_length=5)
    price: float | None = Field(None, ge=0, lt=100)
    parts: list[Item] = Field(default_factory=list, max_length=2)


class Order(BaseModel):
    kind: Literal["buy", "sell"]
    items: list[Item]
    count: int = Field(1, multiple_of=2)
    paid: bool | None = None

    model_config = {"extra": "forbid"}


GOOD: list[Any] = [
    {"kind": "buy", "items": []},
    {"items": [{"name": "a", "price": None}, {"name": "b", "price": 0.5, "x": 1}], "kind": "sell"},
    {"kind": "buy", "items": [{"name": "é", "parts": [{"name": "x"}, {"name": "y"}]}], "count": 4},
    {"kind": "buy", "items": [], "count": 6.0},
    {"kind": "buy", "items": [], "paid": None},
]  # fmt: skip
BAD: list[Any] = [
    {}, [], "x", None, {"kind": "buy"}, {"kind": "keep", "items": []}, {"kind": 1, "items": []},
    {"kind": "buy", "items": [{}]}, {"kind": "buy", "items": {}},
    {"kind": "buy", "items": [], "extra": 1}, {"kind": "buy", "items": [], "count": 3},
    {"kind": "buy", "items": [], "count": 2.5}, {"kind": "buy", "items": [], "count": True},
    {"kind": "buy", "items": [], "paid": 1},
    {"kind": "buy", "items": [{"name": ""}]}, {"kind": "buy", "items": [{"name": "sixsix"}]},
    {"kind": "buy", "items": [{"name": "a", "price": -1}]},
    {"kind": "buy", "items": [{"name": "a", "price": 100}]},
    {"kind": "buy", "items": [{"name": "a", "parts": [{"name": "b"}] * 3}]},
    {"kind": "buy", "items": [{"name": "a", "parts": [{"name": 5}]}]},
]  # fmt: skip


def test_what_pydantic_describes_is_told_apart() -> None:
    schema = Order.model_json_schema()
    assert grammar_problem(GrammarSpec("json_schema", json.dumps(schema))) == ""
    check = StrictArguments(schema, "tools[0]")
    assert [value for value in GOOD if not check.fits(json.dumps(value))] == []
    assert [value for value in BAD if check.fits(json.dumps(value))] == []
    assert not check.fits('{"kind": "buy", "items": [}')


def test_equality_is_that_of_json() -> None:
    schema = {"properties": {"a": {"enum": [1, [True, {"b": None}]]}, "c": {"const": 0}}}
    check = StrictArguments(schema, "x")
    assert check.fits('{"a": 1.0, "c": 0}') and check.fits('{"a": [true, {"b": null}]}')
    assert not check.fits('{"a": true}') and not check.fits('{"a": [1, {"b": null}]}')
    assert not check.fits('{"c": false}')
    both = StrictArguments({"additionalProperties": {"const": 1, "enum": [1, 2]}}, "x")
    assert both.fits('{"a": 1}') and not both.fits('{"a": 2}')


def test_a_multiple_is_one_of_the_decimals_that_are_written() -> None:
    check = StrictArguments({"properties": {"price": {"multipleOf": 0.01}}}, "x")
    assert all(check.fits(f'{{"price": {price}}}') for price in ("0.3", "19.99", "1e22", "-7"))
    assert not any(check.fits(f'{{"price": {price}}}') for price in ("0.305", "1e-9", "NaN"))


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', '1, "a": 1'])
def test_what_a_client_could_not_send_back_does_not_fit(value: str) -> None:
    assert not StrictArguments({}, "x").fits(f'{{"a": {value}}}')


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "(a+)+$"}, {"patternProperties": {}}, {"not": {}}, {"properties": []},
        {"properties": {"a": 5}}, {"type": "float"}, {"type": [[]]}, {"required": [1]},
        {"anyOf": []}, {"enum": 5}, {"minimum": "x"}, {"items": [{}]},
        {"$ref": "http://127.0.0.1/x"}, {"$ref": "#/$defs/missing"}, {"$ref": 5},
        {"properties": {"a": {"oneOf": [{}]}}},
        {"$ref": "#/default", "default": {"enum": 5}},
        {"$ref": "#/default", "default": {"$ref": "#/$defs/missing"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_checked_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFieldError) as error:
        StrictArguments(schema, "tools[3].function.parameters")
    assert error.value.param == "tools[3].function.parameters"


def test_references_that_multiply_or_never_end_are_cut_short() -> None:
    definitions = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 3, "allOf": [{"type": "object"}]}
        for i in range(40)
    }
    doubling = {"$defs": {**definitions, "d40": {"type": "null"}}, "$ref": "#/$defs/d0"}
    listed = {"additionalProperties": {"enum": [f"{i}" for i in range(30_000)]}}
    many = json.dumps({f"{i}": "29999" for i in range(10_000)})
    start_s = time.process_time()
    assert StrictArguments(listed, "x").fits(many)
    twice = {"additionalProperties": {"required": ["a"] * 20_000}}
    assert StrictArguments(twice, "x").fits(json.dumps({f"{i}": {"a": 1} for i in range(8_000)}))
    assert not StrictArguments(doubling, "x").fits("{}")
    far = {"$ref": f"#/$defs/{'%41' * 20_000}"}
    led = {"$defs": {"x": far, "A" * 20_000: False}, "anyOf": [{"$ref": "#/$defs/x"}] * 2000}
    assert not StrictArguments(led, "x").fits("{}")
    one = {"multipleOf": 10**4000}
    for schema in ({"type": ["object"] * 9}, {"items": one}):
        with pytest.raises(UnsupportedFieldError, match=r"the keyword '(type|multipleOf)'"):
            StrictArguments(schema, "x")
    assert not StrictArguments({"$ref": "#"}, "x").fits("{}")
    assert not StrictArguments({}, "x").fits('{"a": ' + "[" * 100_000)
    assert time.process_time() - start_s < 2


def test_a_strict_call_waits_for_its_end() -> None:
    never = {"f": StrictArguments({"required": ["no"]}, "x")}
    always = {"f": StrictArguments({}, "x")}
    for style, text, options, expected in CASES:
        if "forced" in options or any(isinstance(e, tuple) and e[1] == '{"a": 1' for e in expected):
            continue
        for size in (1, 4, 1000):
            assert read(style, text, size, strict=always, **options) == expected
            found = read(style, text, size, strict=never, **options)
            assert not any(isinstance(event, tuple) and event[0] == "f" for event in found)
    cut = '<tool_call>{"name": "f", "arguments": {"a": 1}'
    assert read("hermes", cut, 3, strict=always) == [cut]
