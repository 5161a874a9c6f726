"""Whether the arguments of a call fit a strict tool's JSON schema.

A model that chooses by itself whether to call a tool (tool_choice "auto") writes without a grammar;
a call of a strict tool is then reported only if its arguments fit. The keywords are those of
OpenAI's strict schemas and what pydantic writes; others are refused by name before admission.
Checking takes a bounded number of steps; beyond them the arguments do not fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from server.api.schemas import same, target
from server.errors import UnsupportedFieldError, echoed

MAX_STEPS = 20_000
"""Most pairs of a schema and a value to check; a call's arguments take a few hundred."""

_ANNOTATIONS = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "format",
     "title"}
)  # fmt: skip
_CHECKED = frozenset(
    {"$defs", "$ref", "additionalProperties", "allOf", "anyOf", "const", "definitions", "enum",
     "exclusiveMaximum", "exclusiveMinimum", "items", "maxItems", "maxLength", "maximum",
     "minItems", "minLength", "minimum", "multipleOf", "properties", "required", "type"}
)  # fmt: skip
_MAPS = ("$defs", "definitions", "properties")
_LISTS = ("allOf", "anyOf")

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "array": lambda v: isinstance(v, list),
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: _is_number(v) and float(v).is_integer(),
    "null": lambda v: v is None,
    "number": lambda v: _is_number(v),
    "object": lambda v: isinstance(v, dict),
    "string": lambda v: isinstance(v, str),
}
_BOUNDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda v, bound: v >= bound,
    "maximum": lambda v, bound: v <= bound,
    "exclusiveMinimum": lambda v, bound: v > bound,
    "exclusiveMaximum": lambda v, bound: v < bound,
    "multipleOf": lambda v, bound: bound > 0 and math.remainder(v, bound) == 0,
}


class _TooManySteps(Exception):
    pass


class StrictArguments:
    """The check of one tool. at: the path of its schema in the body, for errors.

    Raises UnsupportedFieldError for a keyword that is not checked here.
    """

    def __init__(self, schema: Mapping[str, Any], at: str) -> None:
        self._root = schema
        self._at = at
        self._learn(schema)

    def fits(self, text: str) -> bool:
        """Whether the text is a JSON object that matches the schema."""
        try:
            value = json.loads(text)
            return isinstance(value, dict) and _Walk(self._root).matches(self._root, value)
        except (ValueError, RecursionError, OverflowError, _TooManySteps):
            return False

    def _learn(self, schema: Any) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise self._refusal(f"{echoed(schema)} where a schema should be")
        for key, value in schema.items():
            if key in _ANNOTATIONS:
                continue
            if key not in _CHECKED or not _is_well_formed(key, value):
                raise self._refusal(f"the keyword {echoed(key, 40)}")
            if key in _MAPS:
                for inner in value.values():
                    self._learn(inner)
            elif key in _LISTS:
                for inner in value:
                    self._learn(inner)
            elif key in ("items", "additionalProperties"):
                self._learn(value)
            elif key == "$ref" and target(self._root, value) is None:
                raise self._refusal(f"the reference {echoed(value, 40)}")

    def _refusal(self, what: str) -> UnsupportedFieldError:
        return UnsupportedFieldError(
            f"strict cannot be honoured with tool_choice auto: {what} is not checked.", at=self._at
        )


class _Walk:
    """One check of one value, with its steps counted."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_steps = 0

    def matches(self, schema: Any, value: Any) -> bool:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise _TooManySteps
        if isinstance(schema, bool):
            return schema
        reference = schema.get("$ref")
        if reference is not None and not self.matches(target(self._root, reference), value):
            return False
        kinds = schema.get("type", ())
        if kinds and not any(_TYPES[k](value) for k in ([kinds] if type(kinds) is str else kinds)):
            return False
        if "const" in schema and not same(schema["const"], value):
            return False
        if "enum" in schema and not any(same(option, value) for option in schema["enum"]):
            return False
        if "anyOf" in schema and not any(self.matches(s, value) for s in schema["anyOf"]):
            return False
        if not all(self.matches(s, value) for s in schema.get("allOf", ())):
            return False
        if isinstance(value, dict):
            return self._object(schema, value)
        if isinstance(value, list):
            return _sized(schema, "Items", len(value)) and all(
                self.matches(schema.get("items", True), item) for item in value
            )
        if isinstance(value, str):
            return _sized(schema, "Length", len(value))
        if _is_number(value):
            return all(fits(value, schema[key]) for key, fits in _BOUNDS.items() if key in schema)
        return True

    def _object(self, schema: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
        properties = schema.get("properties", {})
        if not all(name in value for name in schema.get("required", ())):
            return False
        others = schema.get("additionalProperties", True)
        return all(self.matches(properties.get(name, others), item) for name, item in value.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_well_formed(key: str, value: Any) -> bool:
    """Whether a keyword's value is of its kind; schemas inside are looked at by themselves."""
    if key in _MAPS:
        return isinstance(value, dict)
    if key in _LISTS or key == "enum":
        return isinstance(value, list) and bool(value)
    if key == "required":
        return isinstance(value, list) and all(isinstance(name, str) for name in value)
    if key == "type":
        kinds = [value] if isinstance(value, str) else value
        return isinstance(kinds, list) and all(
            isinstance(kind, str) and kind in _TYPES for kind in kinds
        )
    if key in _BOUNDS or key in ("minItems", "maxItems", "minLength", "maxLength"):
        return _is_number(value)
    return key != "$ref" or isinstance(value, str)


def _sized(schema: Mapping[str, Any], what: str, size: int) -> bool:
    return bool(schema.get(f"min{what}", 0) <= size <= schema.get(f"max{what}", size))
