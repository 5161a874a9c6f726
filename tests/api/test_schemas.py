"""Which objects of a JSON schema are closed, and which fields and tasks open them again."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.api.bodies import validate
from server.api.faces.completions import CompletionBody
from server.api.grammars import format_of, grammar_of, grammar_of_schema
from server.api.order import rules_of
from server.api.schemas import SchemaRules, close_described, prepared
from server.api.tools import FunctionBody, chosen_tools
from server.config import TaskConfig
from server.errors import RequestError, UnsupportedFieldError
from server.grammar_text import grammar_problem
from tests.profiles import examples

CITY: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
}  # fmt: skip
SHUT = {**CITY, "additionalProperties": False}


def test_only_objects_that_are_described_whole_are_closed() -> None:
    free = {"type": "object"}
    said = {"properties": {}, "additionalProperties": True}
    patterns: dict[str, Any] = {"properties": {"a": {}}, "patternProperties": {"^x": {}}}
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


def test_a_member_that_is_required_and_not_described_may_hold_anything() -> None:
    schema = {**CITY, "required": ["zip", "city"]}
    closed = close_described(schema)
    assert closed == {
        **SHUT,
        "required": ["zip", "city"],
        "properties": {**CITY["properties"], "zip": True},
    }
    assert not grammar_problem(grammar_of_schema(schema, "schema", SchemaRules()))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [CITY, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/b", "$defs": {"b": CITY}},
        {"properties": {"a": {}}, "anyOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": CITY}},
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
    an_object, whose = {"type": "object"}, "disable_additional_properties"
    shut_object = {**an_object, "additionalProperties": False}
    for sent, said in (
        ({"structured_outputs": {"json": CITY}}, wanted),
        ({"structured_outputs": {"json": json.dumps(CITY)}}, wanted),
        ({"json_schema": CITY}, wanted),
        # the name is optional
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}}, wanted),
        ({"response_format": {"type": "json_object", "schema": CITY}}, wanted),
        ({"response_format": {"type": "json_object"}}, an_object),
        ({"structured_outputs": {"json_object": True}}, an_object),
        ({"structured_outputs": {"json": CITY, whose: True}}, SHUT),
        ({"structured_outputs": {"json": an_object, whose: True}}, shut_object),
        ({"structured_outputs": {"json": CITY, whose: False}}, CITY),
    ):
        body = validate(CompletionBody, {"prompt": "x", **sent})
        grammar = grammar_of(body, format_of(body.response_format), rules)
        assert grammar is not None and json.loads(grammar[0].source) == said
    tools = {"tools[0].function": FunctionBody(name="f", parameters=CITY)}
    chosen = chosen_tools(tools, ("required", {}), rules)
    assert chosen.callable["f"] == wanted
    assert chosen.shown is not None and chosen.shown[0]["function"]["parameters"] == CITY


def test_a_request_goes_before_its_task() -> None:
    def opens(given: bool | None, task: bool) -> bool:
        body = CompletionBody(model="m", prompt="x", additional_properties=given)
        return not rules_of(body, TaskConfig(name="t", additional_properties=task)).closes

    assert [opens(g, t) for g in (None, True, False) for t in (False, True)] == [
        False, True, True, True, False, False,
    ]  # fmt: skip


# --- what can be held -----------------------------------------------------------------------------

TEXT = {"type": "string"}
TAGS = {"type": "array", "items": TEXT, "uniqueItems": True}


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        # What says nothing is left out.
        ({"format": "byte"}, {}),
        ({"format": "uuid"}, {"format": "uuid"}),
        ({"uniqueItems": False}, {}),
        ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
        ({"propertyNames": {"type": "string", "title": "Key"}}, {}),
        ({"then": {"not": {}}, "minContains": 2}, {}),
        ({"unevaluatedProperties": True, "dependentRequired": {}}, {}),
        # Names stay names.
        ({"properties": {"format": {"format": "x"}}}, {"properties": {"format": {}}}),
        ({"const": {"uniqueItems": True}}, {"const": {"uniqueItems": True}}),
        # The same in other words.
        ({"minItems": 1.0}, {"minItems": 1}),
        ({"minimum": -3.4e38, "maximum": 3.4e38}, {"minimum": -1e18, "maximum": 1e18}),
        # Integers that a 64-bit float does not hold.
        (
            {"minimum": 2**53 + 1, "maximum": 10**18 - 1},
            {"minimum": 2**53 + 128, "maximum": 10**18 - 128},
        ),
        ({"maximum": -(2**53) - 1}, {"maximum": -(2**53) - 128}),
        ({"enum": [2**53, 10**18]}, {"enum": [2**53, 10**18]}),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": TEXT},
            {"properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"const": "a"}, "properties": {"a": TEXT, "b": TEXT}},
            {"properties": {"a": TEXT}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"pattern": "^x"}, "additionalProperties": TEXT},
            {"patternProperties": {"^x": TEXT}, "additionalProperties": False},
        ),
        ({"unevaluatedProperties": False}, {"additionalProperties": False}),
        ({"oneOf": [TEXT, {"type": "null"}]}, {"anyOf": [TEXT, {"type": "null"}]}),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, {"anyOf": [{"const": 1}, {"const": 2}]}),
        ({"format": "hostname", "pattern": "^(?=a)"}, {"format": "hostname"}),
    ],
)
def test_what_is_taken(schema: dict[str, Any], taken: dict[str, Any]) -> None:
    assert prepared(schema, "schema", SchemaRules(closes=False)) == taken


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"tags": TAGS}}, "properties.tags.uniqueItems cannot be held"),
        ({"items": [{}, {"not": TEXT}]}, "items[1].not cannot be held"),
        ({"$defs": {"a b": {"if": {}, "then": {}}}}, "$defs.a b.if cannot be held"),
        ({"if": {"items": {}}, "unevaluatedItems": False}, "if cannot be held"),
        ({"oneOf": [{"minimum": 1}, {"minimum": 2}]}, "oneOf cannot be held"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf cannot be held"),
        ({"oneOf": [{"$ref": "#"}, {"$ref": "#"}]}, "oneOf cannot be held"),
        ({"allOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties cannot"),
        ({"propertyNames": {"format": "uuid"}}, "propertyNames cannot be held"),
        ({"pattern": r"\\(?=a)"}, "pattern looks ahead or behind"),
        ({"pattern": r"^\w+\b"}, "pattern looks ahead or behind"),
        ({"items": {"$ref": "http://127.0.0.1/x"}}, "items.$ref refers to another document"),
        ({"enum": ["a", {"id": [2**53 + 1]}]}, "enum has a number of too many digits"),
        ({"items": {"const": 2**63}}, "items.const has a number of too many digits"),
    ],
)
def test_what_is_refused_is_told_with_its_path_and_left_out_when_asked(
    schema: dict[str, Any], path: str
) -> None:
    with pytest.raises(UnsupportedFieldError) as refused:
        prepared(schema, "response_format.schema", SchemaRules())
    told = refused.value.message
    assert told.startswith(f"response_format.schema: {path}")
    assert "lenient_schemas: true" in told and refused.value.param == "response_format.schema"
    left = prepared(schema, "response_format.schema", SchemaRules(is_lenient=True))
    assert left == prepared(left, "response_format.schema", SchemaRules())


def test_a_pattern_with_an_escaped_bracket_is_no_look_around() -> None:
    for pattern in (r"a\(?=b", r"a\\b"):
        assert prepared({"pattern": pattern}, "schema", SchemaRules()) == {"pattern": pattern}


def test_a_reference_to_an_id_of_the_document_stays() -> None:
    schema = {"$ref": "http://a.b/c", "$defs": {"c": {"$id": "http://a.b/c", "const": 1}}}
    assert prepared(schema, "schema", SchemaRules()) == schema
    assert not grammar_problem(grammar_of_schema(schema, "schema", SchemaRules()))


@pytest.mark.parametrize("reference", ["地址 <T>", "%E5%9C%B0%E5%9D%80%20%3CT%3E"])
def test_a_reference_may_have_any_name(reference: str) -> None:
    known = {"地址 <T>": CITY}
    one: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{reference}"}}}
    schema: dict[str, Any] = {"oneOf": [one, {"type": "null"}], "$defs": known}
    assert not grammar_problem(grammar_of_schema(schema, "schema", SchemaRules()))
    strict = FunctionBody(name="f", parameters={**one, "$defs": known}, strict=True)
    tools = {"tools[0]": strict}
    check = chosen_tools(tools, ("auto", {}), SchemaRules()).strict["f"]
    assert check.fits('{"a": {"city": "x"}}') and not check.fits('{"a": {"city": 1}}')


@pytest.mark.parametrize("schema", [{"x-guidance": {}}, {"items": {"x-guidance": {}}}])
def test_a_client_does_not_configure_the_grammar_library(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFieldError, match="x-guidance is not taken"):
        prepared(schema, "schema", SchemaRules(is_lenient=True))


def test_a_discriminated_union_is_a_choice_of_its_tags() -> None:
    def tagged(tag: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"tag": {"const": tag}}, "required": ["tag"]}

    schema = {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": tagged("a"), "b": tagged("b")},
    }
    assert "anyOf" in prepared(schema, "schema", SchemaRules())
    schema["$defs"]["b"] = tagged("a")  # type: ignore[index]
    with pytest.raises(UnsupportedFieldError, match="oneOf"):
        prepared(schema, "schema", SchemaRules())


def test_schemas_that_are_made_to_take_long_do_not() -> None:
    union = {"oneOf": [{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}] * 2000}
    wide: dict[str, Any] = {"type": "string"}
    for _ in range(12):
        wide = {
            "propertyNames": {"enum": [f"{i}" for i in range(60)]},
            "additionalProperties": wide,
        }
    listed = {"oneOf": [{"enum": [*range(20_000)]}, {"enum": [*range(40_000, 19_998, -1)]}]}
    many = {"enum": [f"{i}" for i in range(250)]}
    maps = [{"propertyNames": many, "additionalProperties": {"pattern": "x" * 900}}] * 100
    # References to what is long, and values that are looked at once for each pair.
    far = {"$defs": {"x": {"$ref": f"#{'/' * 50_000}"}}, "oneOf": [{"$ref": "#/$defs/x"}] * 4000}
    types = {"$defs": {"x": {"type": ["string"] * 10_000}}}
    tagged = [
        {"properties": {"a": {"$ref": "#/$defs/x"}, "b": {"const": i}}, "required": ["a", "b"]}
        for i in range(99)
    ]
    for schema in (union, wide, listed, {"anyOf": maps}, far, {**types, "oneOf": tagged}):
        began_s = time.process_time()
        with pytest.raises(UnsupportedFieldError):
            prepared(schema, "schema", SchemaRules())
        assert time.process_time() - began_s < 1.0
    names = {f"{i}": {"propertyNames": {"$ref": "#/$defs/x"}} for i in range(2000)}
    began_s = time.process_time()
    prepared(
        {"$defs": {"x": {"enum": [f"{i}" for i in range(15_000)]}}, "properties": names},
        "schema",
        SchemaRules(is_lenient=True),
    )
    assert time.process_time() - began_s < 1.0


def test_a_tool_is_judged_where_its_schema_is_held() -> None:
    def chosen(choice: Any, *, strict: bool = False, rules: SchemaRules | None = None) -> Any:
        parameters = {"type": "object", "properties": {"tags": TAGS}}
        tool = FunctionBody(name="find", parameters=parameters, strict=strict)
        tools = {"tools[0].function": tool}
        return chosen_tools(tools, (choice, {}), rules or SchemaRules())

    assert chosen("auto").callable["find"]["properties"] == {"tags": TAGS}
    for choice, strict in (("required", False), ("auto", True)):
        with pytest.raises(UnsupportedFieldError) as refused:
            chosen(choice, strict=strict)
        assert refused.value.message.startswith(
            "tools[0].function.parameters: of find: properties.tags.uniqueItems cannot be held"
        )
        lenient = chosen(choice, strict=strict, rules=SchemaRules(is_lenient=True))
        tags = lenient.callable["find"]["properties"]["tags"]
        assert tags == {"type": "array", "items": TEXT}


_KEYWORDS = sorted(
    {"$ref", "$id", "additionalProperties", "allOf", "anyOf", "const", "contains", "enum", "format",
     "if", "items", "maxItems", "minItems", "minLength", "minimum", "maximum", "not", "oneOf",
     "pattern", "properties", "propertyNames", "required", "then", "type", "unevaluatedProperties",
     "uniqueItems", "$defs", "patternProperties", "dependentRequired", "prefixItems"}
)  # fmt: skip
_WORDS = st.sampled_from(
    ["#", "#/$defs/a", "a", "^(?=a)", "uuid", "string", "object", "integer", "null"]
)
_ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(-1e30, 1e30), _WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(_KEYWORDS), inner, max_size=4),
        st.dictionaries(_WORDS, inner, max_size=3),
    ),
    max_leaves=20,
)


@settings(max_examples=examples(500))
@given(st.dictionaries(st.sampled_from(_KEYWORDS), _ANYTHING, max_size=5), st.booleans())
@example({"$id": {"properties": None, "oneOf": True}}, True)
def test_whatever_comes_is_taken_or_refused_in_words(schema: dict[str, Any], lenient: bool) -> None:
    before = json.dumps(schema)
    try:
        spec = grammar_of_schema(schema, "schema", SchemaRules(is_lenient=lenient))
        problem = grammar_problem(spec)
    except RequestError as error:
        problem = error.message
    assert problem.isprintable()
    assert json.dumps(schema) == before, "the client's own schema is not changed"
