"""Calls that an answer must make (tool_choice "required" or a function).

The server writes the opening of a call in the model family's form, and a grammar makes the rest
match the tools' JSON schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.api.tools.formats import ARGUMENTS_KEY, ToolFormat


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A call that the output must make.

    opening: what the server puts at the end of the prompt. schema: JSON schema of what the model
    writes. name: the function, where the opening names it. begun: whether the opening holds the
    family's marker.
    """

    opening: str
    schema: Mapping[str, Any]
    name: str | None
    begun: bool


def force_call(
    style: ToolFormat, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool
) -> ForcedCall:
    """How a call of one of `tools` (parameters' JSON schemas by name) is forced.

    One tool: the server writes its name and the model the arguments. Several: the model writes name
    and arguments; more than one call only in Mistral's lists, and if parallel.
    """
    key = ARGUMENTS_KEY[style]
    if len(tools) == 1:
        [(name, schema)] = tools.items()
        head = {"hermes": "<tool_call>\n", "mistral": "[TOOL_CALLS] [", "llama3": ""}[style]
        opening = f'{head}{{"name": {json.dumps(name)}, "{key}":'
        return ForcedCall(opening, schema, name, begun=True)
    definitions: dict[str, Any] = {}
    calls = []
    for i, (name, schema) in enumerate(tools.items()):
        # Parameters may refer to their own definitions: each keeps them, one level further in.
        definitions[f"tool{i}"] = _moved(schema, f"#/$defs/tool{i}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    key: {"$ref": f"#/$defs/tool{i}"},
                },
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    one: dict[str, Any] = {"anyOf": calls}
    if style == "mistral":
        many: dict[str, Any] = {"type": "array", "items": one, "minItems": 1}
        if not parallel:
            many["maxItems"] = 1
        return ForcedCall("[TOOL_CALLS]", {**many, "$defs": definitions}, None, begun=True)
    opening = "<tool_call>\n" if style == "hermes" else ""
    return ForcedCall(opening, {**one, "$defs": definitions}, None, begun=style == "hermes")


def _moved(schema: Any, root: str) -> Any:
    """A schema whose local references point below `root`."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, root)
            for key, value in schema.items()
        }
    if isinstance(schema, (list, tuple)):
        return [_moved(item, root) for item in schema]
    return schema
