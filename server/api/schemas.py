"""JSON schemas of clients as a grammar can hold them.

`prepared` is where every schema of a request goes through, whether it comes as a format or as a
tool's parameters:

- what says nothing is left out: annotations, `format`s that nobody knows, `propertyNames` of
  strings;
- what can be said in other keywords is: `propertyNames` with names or a pattern, `oneOf` of
  schemas that cannot match the same value, `unevaluatedProperties` of one object;
- what no grammar holds is refused by its name and path, or left out where the request or its task
  says so (`lenient_schemas`);
- objects that describe their members are closed, unless the request or its task opens them
  (`additional_properties`). Schemas that clients or pydantic write seldom have
  `additionalProperties`. JSON Schema then allows further members, and small models invent keys
  until the limit. llama.cpp and xgrammar close them, too.

What is left is narrower than JSON Schema in two ways, for those who read the output: members come
in the schema's order, and an integer has no fraction (1, never 1.0).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, partial
from typing import Any
from urllib.parse import quote, unquote

from server.api.bodies import extent, parse_object
from server.errors import InvalidBodyError, LimitExceededError, UnsupportedFieldError, echoed
from server.grammar_text import MAX_SOURCE_CHARS

MAX_DEPTH = 32
"""Levels of objects and lists of a schema."""

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
"""Formats that texts are held to. Others are annotations, as JSON Schema has them."""

LARGEST_NUMBER = 1e18
"""Bounds of a number further from 0 than this are drawn in: their digits are too many to hold."""

MAX_COMPARED = 5_000
"""Pairs of schemas of a document that are compared: a union of 100 has as many."""

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose members' names are names, not keywords."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
_COUNTS = frozenset(
    {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
)
_BOUNDS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"})
_NOT_HELD = frozenset(
    {"$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired",
     "dependentSchemas", "if", "not", "oneOf", "propertyNames", "unevaluatedItems",
     "unevaluatedProperties", "uniqueItems"}
)  # fmt: skip
_WITH: Mapping[str, str] = {
    "else": "if", "maxContains": "contains", "minContains": "contains", "then": "if",
}  # fmt: skip
"""Keywords that say nothing without another one."""
_APPLIES = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "dependentSchemas", "else", "if", "oneOf", "then"}
)
_REST = {"unevaluatedItems": "items", "unevaluatedProperties": "additionalProperties"}
_LOOKS_AROUND = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?(?:[=!]|<[=!])|\\[bB])")
_TEXT_ONLY = frozenset({"type", "$comment", "description", "title"})


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """How JSON schemas are taken. closes: objects that describe their members have no others.
    is_lenient: keywords that no grammar holds are left out."""

    closes: bool = True
    is_lenient: bool = False


def prepared(schema: Any, at: str, rules: SchemaRules, tool: str = "") -> Any:
    """The schema as a grammar holds it; see the top of this file.

    at: where it lies in the body. tool: the name of the tool that has it. Raises
    UnsupportedFieldError, and LimitExceededError for one that is nested too deeply.
    """
    if extent(schema, MAX_DEPTH + 1)[0] > MAX_DEPTH:
        raise LimitExceededError(f"nested more than {MAX_DEPTH} levels deep.", at=at)
    schema = _Taken(schema, at, rules.is_lenient, tool).schema(schema, "")
    return close_described(schema) if rules.closes else schema


# --- what can be held -----------------------------------------------------------------------------


class _Taken:
    """One document on its way to what a grammar holds."""

    def __init__(self, root: Any, at: str, is_lenient: bool, tool: str) -> None:
        self._root = root
        self._at = at
        self._is_lenient = is_lenient
        self._tool = tool
        self._num_compared = 0
        self._num_repeated = 0  # characters of schemas that each of some names has
        self._named = cache(partial(target, root))  # thousands of places may name a long one

    @cached_property
    def _has_ids(self) -> bool:
        """Whether a reference to another document may be one to a part of this."""
        return '"$id"' in json.dumps(self._root)

    def schema(self, schema: Any, path: str) -> Any:
        """A copy of the schema at `path` of the document."""
        if isinstance(schema, list):
            return [self.schema(item, f"{path}[{i}]") for i, item in enumerate(schema)]
        if not isinstance(schema, dict):
            return schema
        taken: dict[str, Any] = {}
        for key, value in schema.items():
            at = f"{path}.{_shown(key)}"
            if key == "x-guidance" or (key == "$id" and path and "$ref" in schema):
                raise self._refusal(at, "is not taken from a client.")
            if key in _NAMED and isinstance(value, dict):
                taken[key] = {
                    name: self.schema(item, f"{at}.{_shown(name)}") for name, item in value.items()
                }
            elif key in ("const", "enum") and not _keeps_digits(value):
                self._leave_out(at, "has a number of too many digits, which cannot be held")
            elif key in _VALUES:
                taken[key] = value
            elif key in _COUNTS:
                taken[key] = _whole(value)
            elif key in _BOUNDS:
                taken[key] = _drawn_in(key, value)
            elif key == "$ref" and isinstance(value, str):  # clients write names as they are
                taken[key] = quote(value, safe="#%/?:@!$&'()*+,;=")
                if value[:1] not in ("", "#") and not self._has_ids:
                    self._leave_out(at, "refers to another document, and nothing is fetched")
                    del taken[key]
            elif not _says_nothing(key, value, schema):
                taken[key] = self.schema(value, at)
        for key in [key for key in taken if key in _NOT_HELD]:
            said = taken.pop(key)
            if not self._in_other_words(taken, key, said):
                self._leave_out(f"{path}.{key}", "cannot be held while a text is written")
                if key == "oneOf":
                    taken.setdefault("anyOf", said)
        for key in [key for key in taken if _WITH.get(key, key) not in taken]:
            del taken[key]
        pattern = taken.get("pattern")
        if isinstance(pattern, str) and _LOOKS_AROUND.search(pattern):
            if "format" not in taken:  # which says the same, as zod writes both
                self._leave_out(f"{path}.pattern", "looks ahead or behind, which cannot be held")
            del taken["pattern"]
        return taken

    def _leave_out(self, path: str, why: str) -> None:
        if not self._is_lenient:
            way = "Leave it out, or have it left out by lenient_schemas: true."
            raise self._refusal(path, f"{why}. {way}")

    def _refusal(self, path: str, why: str) -> UnsupportedFieldError:
        shown = path.removeprefix(".")
        if len(shown) > 120:
            shown = f"...{shown[-117:]}"
        whose = f"of {self._tool}: " if self._tool else ""
        return UnsupportedFieldError(f"{whose}{shown} {why}", at=self._at)

    def _in_other_words(self, taken: dict[str, Any], key: str, said: Any) -> bool:
        """Whether `taken` could be made to say what the keyword says."""
        if key == "oneOf":
            if "anyOf" in taken or not isinstance(said, list) or not self._exclude(said):
                return False
            taken["anyOf"] = said
            return True
        if key in _REST and said is False and not _APPLIES & taken.keys():
            taken.setdefault(_REST[key], False)
            return True
        return key == "propertyNames" and self._names_members(taken, said)

    def _names_members(self, taken: dict[str, Any], names: Any) -> bool:
        """Whether the members' names are held by `properties` or `patternProperties` now."""
        names = self._target(names)
        if "patternProperties" in taken or not isinstance(names, dict):
            return False
        others = taken.get("additionalProperties", True)
        says = names.keys() - _TEXT_ONLY
        if names.get("type", "string") != "string" or len(says) != 1:
            return False
        [keyword] = says
        described = taken.get("properties", {})
        if not isinstance(described, dict):
            return False
        if keyword in ("enum", "const"):
            listed = names["enum"] if keyword == "enum" else [names["const"]]
            if not isinstance(listed, list):
                return False
            self._num_repeated += len(listed) * len(json.dumps(others))
            if self._num_repeated > MAX_SOURCE_CHARS:
                return False
            texts = [name for name in listed if isinstance(name, str)]
            taken["properties"] = {name: described.get(name, others) for name in texts}
        elif keyword in ("pattern", "minLength", "maxLength") and not described:
            pattern = names.get("pattern")
            if pattern is None:
                least, most = names.get("minLength", 0), names.get("maxLength", "")
                pattern = f"^[\\s\\S]{{{_whole(least)},{_whole(most)}}}$"
            if not isinstance(pattern, str) or _LOOKS_AROUND.search(pattern):
                return False
            taken["patternProperties"] = {pattern: others}
        else:
            return False
        taken["additionalProperties"] = False
        return True

    # What matches what.

    def _target(self, schema: Any) -> Any:
        """The schema, or what its only member `$ref` names in this document."""
        for _ in range(8):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self._named(str(schema["$ref"]))
        return None

    def _exclude(self, schemas: Sequence[Any]) -> bool:
        """Whether no value matches two of the schemas, as far as MAX_COMPARED pairs of a document
        show it."""
        targets = [self._target(schema) for schema in schemas]
        return all(
            self._differ(one, other) for i, one in enumerate(targets) for other in targets[:i]
        )

    def _differ(self, one: Any, other: Any, depth: int = 0) -> bool:
        self._num_compared += 1 + (extent(one, 2)[1] + extent(other, 2)[1]) // 1000
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        if self._num_compared > MAX_COMPARED or depth > MAX_DEPTH:
            return False
        kinds, kinds_of_other = _kinds(one), _kinds(other)
        if not kinds & kinds_of_other:
            return True
        values, values_of_other = _listed(one), _listed(other)
        if values is not None and values_of_other is not None:
            return {*map(_identity, values)}.isdisjoint(map(_identity, values_of_other))
        if kinds & kinds_of_other != {"object"}:
            return False
        members, members_of_other = _required(one), _required(other)
        return any(
            self._differ(self._target(member), self._target(members_of_other[name]), depth + 1)
            for name, member in members.items()
            if name in members_of_other
        )


_KINDS = {
    bool: "boolean", dict: "object", float: "number", int: "number", list: "array", str: "string",
    type(None): "null",
}  # fmt: skip
"""JSON Schema's types by Python's; integers are numbers."""


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema may match; integers are numbers."""
    told = schema.get("type")
    listed = told if isinstance(told, list) else _KINDS.values() if told is None else [told]
    kinds = {"number" if kind == "integer" else kind for kind in listed if isinstance(kind, str)}
    values = _listed(schema)
    return kinds if values is None else kinds & {_KINDS[type(value)] for value in values}


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists, None where it lists none."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _required(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The members that a schema describes and requires."""
    members, required = schema.get("properties"), schema.get("required")
    if not isinstance(members, dict) or not isinstance(required, list):
        return {}
    return {name: members[name] for name in required if isinstance(name, str) and name in members}


def _identity(value: Any) -> Any:
    """What two values share if they are equal in JSON, where 1 is 1.0 and true is not 1."""
    if isinstance(value, bool):
        return bool, value
    if isinstance(value, list):
        return list, *map(_identity, value)
    if isinstance(value, dict):
        return frozenset((name, _identity(item)) for name, item in value.items())
    return value


def target(root: Any, reference: str) -> Any:
    """The schema that a reference of this document names, or None."""
    found = root if reference.startswith("#") else None
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, (dict, bool)) else None


def _shown(name: str) -> str:
    return echoed(name, 40)[1:-1]


def _says_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key == "format":
        return not isinstance(value, str) or value not in FORMATS
    if key == "uniqueItems":
        return value is False or schema.get("maxItems") in (1,)
    if key == "propertyNames":
        if not isinstance(value, dict):
            return value is True
        says = (word for word in value if word not in _TEXT_ONLY)
        is_text = bool(value.get("type", "string") == "string")
        return is_text and all(_says_nothing(word, value[word], value) for word in says)
    if key in _WITH:
        return _WITH[key] not in schema
    if key == "if":
        told = {"then", "else", "unevaluatedItems", "unevaluatedProperties"}
        return told.isdisjoint(schema)
    if key in ("dependencies", "dependentRequired", "dependentSchemas"):
        return isinstance(value, dict) and not value
    if key in _REST:
        return value is True or value in ({},)
    return key == "not" and value is False


def _whole(number: Any) -> Any:
    """2.0 as 2."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _keeps_digits(value: Any) -> bool:
    """Whether integers of a value stay what they are as 64-bit floats, as grammars read them."""
    if isinstance(value, (dict, list)):
        return all(map(_keeps_digits, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or (abs(value) <= LARGEST_NUMBER and float(value) == value)


def _drawn_in(key: str, bound: Any) -> Any:
    """A bound that is further from 0 than LARGEST_NUMBER, at it, where that allows less; one of
    more than 53 bits at a next multiple of 128, which a 64-bit float holds."""
    if not _is_number(bound):
        return bound
    is_least = key.lower().endswith("minimum")
    bound = max(bound, -LARGEST_NUMBER) if is_least else min(bound, LARGEST_NUMBER)
    if isinstance(bound, int) and 1 << 53 < abs(bound) < LARGEST_NUMBER:
        return -(-bound // 128 * 128) if is_least else bound // 128 * 128
    return bound


# --- objects that have no other members -----------------------------------------------------------

_SAYS = frozenset({"additionalProperties", "patternProperties", "anyOf"})


def close_described(schema: Any) -> Any:
    """A schema that can be held, closed where an object describes its members and nothing else adds
    to them.

    Objects without `properties` stay as they are: they are meant to hold anything. Where a schema
    is put together from parts that describe one object (allOf, $ref or anyOf beside properties) no
    part knows the others' members: then nothing is closed.
    """
    is_mixed = False

    def look(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal is_mixed
        parts, turns = part.get("allOf"), part.get("anyOf")
        beside = [part, *(turns if isinstance(turns, list) else ())]
        refers = any(isinstance(one, dict) and "$ref" in one for one in beside)
        is_one = isinstance(parts, list) and len(parts) == 1
        if (parts is not None and not is_one) or (
            "properties" in part and (refers or parts is not None)
        ):
            is_mixed = True
        return part

    mapped(schema, look)
    return schema if is_mixed else mapped(schema, _close_one)


def close_all(schema: Any) -> Any:
    """The schema with every object closed that has no additionalProperties."""

    def close(part: dict[str, Any]) -> dict[str, Any]:
        if "properties" in part or "patternProperties" in part or part.get("type") == "object":
            part.setdefault("additionalProperties", False)
        return part

    return mapped(schema, close)


def _close_one(part: dict[str, Any]) -> dict[str, Any]:
    if "properties" in part and not _SAYS.intersection(part):
        part["additionalProperties"] = False
        members, required = part["properties"], part.get("required")
        if isinstance(members, dict) and isinstance(required, list):
            others = {n: True for n in required if isinstance(n, str) and n not in members}
            part["properties"] = members | others  # which may hold anything
    return part


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with `change` applied to a copy of each schema in it, inner ones first."""
    if isinstance(schema, (list, tuple)):
        return [mapped(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    # The branches of an object that describes members itself describe the same object.
    described = change is _close_one and "properties" in schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            changed[key] = {name: mapped(item, change) for name, item in value.items()}
        elif key in _VALUES or (described and key == "anyOf"):
            changed[key] = value
        else:
            changed[key] = mapped(value, change)
    return change(changed)


# --- whether arguments fit ------------------------------------------------------------------------

# A model that chooses by itself whether to call a tool (tool_choice "auto") writes without a
# grammar; a call of a strict tool is then reported only if its arguments fit. The keywords are
# those of OpenAI's strict schemas and what pydantic writes; others are refused by name before
# admission. Checking takes a bounded number of steps; beyond them the arguments do not fit.

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
_LISTS = ("allOf", "anyOf")

_LIMITS: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda v, bound: v >= bound,
    "maximum": lambda v, bound: v <= bound,
    "exclusiveMinimum": lambda v, bound: v > bound,
    "exclusiveMaximum": lambda v, bound: v < bound,
    "multipleOf": lambda v, bound: (
        bound > 0 and (Fraction(str(v)) / Fraction(str(bound))).denominator == 1
    ),
}


class StrictArguments:
    """The check of one tool. at: the path of its schema in the body, for errors.

    Raises UnsupportedFieldError for a keyword that is not checked here.
    """

    def __init__(self, schema: Mapping[str, Any], at: str) -> None:
        self._root = schema
        self._named = cache(partial(target, schema))
        self._at = at
        self._num_steps = 0  # of the check of one call
        # By a schema's id(): identities of what it lists, and names of members that must be there.
        self._options: dict[int, set[Any]] = {}
        self._required: dict[int, set[str]] = {}
        self._learn(schema)

    def fits(self, text: str) -> bool:
        """Whether the text is a JSON object that matches the schema."""
        self._num_steps = 0
        try:
            return self._matches(self._root, parse_object(text.encode()))
        except (InvalidBodyError, RecursionError, OverflowError):
            return False

    def _learn(self, schema: Any) -> None:
        """Look at every schema that a value may be held to, wherever a reference finds it."""
        seen: set[int] = set()
        ahead = [schema]
        while ahead:
            part = ahead.pop()
            if isinstance(part, bool) or id(part) in seen:
                continue
            if not isinstance(part, dict):
                raise self._refusal(f"{echoed(part)} where a schema should be")
            seen.add(id(part))
            for key, value in part.items():
                if key in _ANNOTATIONS:
                    continue
                if key not in _CHECKED or not _is_well_formed(key, value):
                    raise self._refusal(f"the keyword {echoed(key, 40)}")
                if key in _NAMED:
                    ahead += value.values()
                elif key in _LISTS:
                    ahead += value
                elif key in ("items", "additionalProperties"):
                    ahead.append(value)
                elif key in ("const", "enum"):
                    options = {*map(_identity, value if key == "enum" else [value])}
                    self._options[id(part)] = options & self._options.get(id(part), options)
                elif key == "required":
                    self._required[id(part)] = set(value)
                elif key == "$ref":
                    found = self._named(value)
                    if found is None:
                        raise self._refusal(f"the reference {echoed(value, 40)}")
                    ahead.append(found)

    def _refusal(self, what: str) -> UnsupportedFieldError:
        return UnsupportedFieldError(
            f"strict cannot be honoured with tool_choice auto: {what} is not checked.", at=self._at
        )

    def _matches(self, schema: Any, value: Any) -> bool:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise RecursionError
        if isinstance(schema, bool):
            return schema
        reference = schema.get("$ref")
        if reference is not None and not self._matches(self._named(reference), value):
            return False
        kinds, kind = schema.get("type", ()), _KINDS[type(value)]
        if kind == "number" and "integer" in kinds and float(value).is_integer():
            kind = "integer"
        if kinds and kind not in ([kinds] if isinstance(kinds, str) else kinds):
            return False
        options = self._options.get(id(schema))
        if options is not None:
            self._num_steps += extent(value)[1]
            if _identity(value) not in options:
                return False
        if "anyOf" in schema and not any(self._matches(s, value) for s in schema["anyOf"]):
            return False
        if not all(self._matches(s, value) for s in schema.get("allOf", ())):
            return False
        if isinstance(value, dict):
            members, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            return self._required.get(id(schema), set()) <= value.keys() and all(
                self._matches(members.get(name, others), item) for name, item in value.items()
            )
        if isinstance(value, list):
            return _sized(schema, "Items", len(value)) and all(
                self._matches(schema.get("items", True), item) for item in value
            )
        if isinstance(value, str):
            return _sized(schema, "Length", len(value))
        if _is_number(value):
            return all(fits(value, schema[key]) for key, fits in _LIMITS.items() if key in schema)
        return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_well_formed(key: str, value: Any) -> bool:
    """Whether a keyword's value is of its kind; schemas inside are looked at by themselves."""
    if key in _NAMED:
        return isinstance(value, dict)
    if key in _LISTS or key == "enum":
        return isinstance(value, list) and bool(value)
    if key == "required":
        return isinstance(value, list) and all(isinstance(name, str) for name in value)
    if key == "type":
        kinds = [value] if isinstance(value, str) else value
        named = ("integer", *_KINDS.values())
        return isinstance(kinds, list) and len(kinds) <= len(named) and all(map(named.count, kinds))
    if key in _LIMITS or key in ("minItems", "maxItems", "minLength", "maxLength"):
        return _is_number(value) and _keeps_digits(value)
    return key != "$ref" or isinstance(value, str)


def _sized(schema: Mapping[str, Any], what: str, size: int) -> bool:
    return bool(schema.get(f"min{what}", 0) <= size <= schema.get(f"max{what}", size))
