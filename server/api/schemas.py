"""Closes JSON schemas: their objects have only the members that the schema describes.

Schemas that clients or pydantic write seldom have `additionalProperties`. JSON Schema then allows
further members, and small models invent keys until the limit. So such objects are closed, as
llama.cpp and xgrammar do, unless the request or its task opens them (`additional_properties`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose members' names are names, not keywords."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
_SAYS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_MIXES = frozenset({"$ref", "allOf", "anyOf", "if", "oneOf"})
_TURNS = frozenset({"dependentSchemas", "if", "not"})


def close_described(schema: Any) -> Any:
    """The schema, closed where an object describes its members and nothing else adds to them.

    Objects without `properties` stay as they are: they are meant to hold anything. Where a schema
    is put together from parts that describe one object (allOf, $ref or anyOf beside properties) no
    part knows the others' members: then nothing is closed.
    """
    return schema if _is_mixed(schema) else _mapped(schema, _close_one)


def close_all(schema: Any) -> Any:
    """The schema with every object closed that has no additionalProperties."""

    def close(part: dict[str, Any]) -> dict[str, Any]:
        if "properties" in part or "patternProperties" in part or part.get("type") == "object":
            part.setdefault("additionalProperties", False)
        return part

    return _mapped(schema, close)


def _close_one(part: dict[str, Any]) -> dict[str, Any]:
    if "properties" in part and not _SAYS.intersection(part) and not _MIXES.intersection(part):
        part["additionalProperties"] = False
    return part


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with `change` applied to a copy of each schema in it, inner ones first."""
    if isinstance(schema, (list, tuple)):
        return [_mapped(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    # The branches of an object that describes members itself describe the same object.
    described = change is _close_one and "properties" in schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            changed[key] = {name: _mapped(item, change) for name, item in value.items()}
        elif key in _VALUES or (described and key in _MIXES):
            changed[key] = value
        else:
            changed[key] = _mapped(value, change)
    return change(changed)


def _is_mixed(schema: Any) -> bool:
    """Whether some object is described by several schemas that lie in different places."""
    if isinstance(schema, (list, tuple)):
        return any(map(_is_mixed, schema))
    if not isinstance(schema, Mapping):
        return False
    if _TURNS.intersection(schema):
        return True
    parts = schema.get("allOf")
    if parts is not None and (not isinstance(parts, (list, tuple)) or len(parts) != 1):
        return True
    if "properties" in schema and ("$ref" in schema or parts is not None):
        return True
    if "properties" in schema and any(
        isinstance(part, Mapping) and "$ref" in part
        for key in ("anyOf", "oneOf")
        for part in schema.get(key) or ()
    ):
        return True
    return any(
        any(map(_is_mixed, value.values()))
        if key in _NAMED and isinstance(value, Mapping)
        else key not in _VALUES and _is_mixed(value)
        for key, value in schema.items()
    )
