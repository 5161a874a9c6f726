"""Which tools a chat may or must call, how they are told to the model, and how a call is forced.

A forced call (tool_choice "required" or a function) is opened by the server in the model family's
form, and a grammar makes the rest match the tools' JSON schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from server.api.schemas import SchemaRules, StrictArguments, prepared
from server.api.tools.calls import ARGUMENTS_KEY, ToolFormat
from server.errors import InvalidRequestError, LimitExceededError, UnsupportedFieldError, echoed

FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
MAX_TOOLS = 128
MAX_TOOLS_CHARS = 1 << 18


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. at: where it lies in the body."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool
    at: str


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """Which tools a chat may or must call.

    shown: the tools as templates read them, None for none. callable: parameters' schemas of those
    that may be called, by name. strict: checks of those whose arguments are checked after the
    call. must_call: whether the answer must be a call (a grammar forces it).
    num_chars: of all descriptions and schemas.
    """

    shown: tuple[dict[str, Any], ...] | None
    callable: Mapping[str, Mapping[str, Any]]
    strict: Mapping[str, StrictArguments]
    must_call: bool
    parallel: bool
    num_chars: int


NO_TOOLS = ChosenTools(None, {}, {}, must_call=False, parallel=False, num_chars=0)


def chosen_tools(
    tools: Sequence[Tool], choice: Any, rules: SchemaRules, *, parallel: bool, nests: bool = True
) -> ChosenTools:
    """The ChosenTools of a body's tools and tool_choice.

    nests: whether a choice has its function and its allowed tools in an object of their own, as in
    chats. Raises InvalidRequestError and its kin, naming the field. With tool_choice "none" the
    prompt leaves the tools out, so that the model calls none.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    shown = []
    num_chars = 0
    for tool in tools:
        if tool.name in schemas:
            raise InvalidRequestError(f"{tool.name} is there twice.", at=f"{tool.at}.name")
        parameters = tool.parameters or {"type": "object", "properties": {}}
        num_chars += len(json.dumps(parameters)) + len(tool.description or "")
        if num_chars > MAX_TOOLS_CHARS:
            raise LimitExceededError(
                f"at most {MAX_TOOLS_CHARS} characters altogether.", at="tools"
            )
        if parameters.get("type", "object") != "object":
            raise InvalidRequestError("the type must be object.", at=f"{tool.at}.parameters")
        schemas[tool.name] = {**parameters, "type": "object"}
        entry: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            entry["description"] = tool.description
        entry["parameters"] = parameters
        shown.append({"type": "function", "function": entry})
    mode, allowed = _choice(choice, list(schemas), nests)
    if mode == "none" or not schemas:
        return NO_TOOLS
    for tool in tools:  # where arguments may be anything, a schema is only shown
        if tool.name in allowed and (mode == "required" or tool.strict):
            closes = rules.closes or not tool.parameters
            schemas[tool.name] = prepared(
                schemas[tool.name],
                f"{tool.at}.parameters",
                replace(rules, closes=closes),
                tool.name,
            )
    return ChosenTools(
        shown=tuple(shown),
        callable={name: schemas[name] for name in allowed},
        strict={
            tool.name: StrictArguments(schemas[tool.name], f"{tool.at}.parameters")
            for tool in tools
            if mode == "auto" and tool.strict and tool.name in allowed
        },
        must_call=mode == "required",
        parallel=parallel,
        num_chars=num_chars,
    )


_Mode = Literal["none", "auto", "required"]


def _choice(choice: Any, names: list[str], nests: bool) -> tuple[_Mode, list[str]]:
    """(mode, names that may be called) of a tool_choice."""
    at = "tool_choice"
    if choice is None or choice == "auto":
        return "auto", names
    if choice == "none":
        return "none", []
    if choice == "required":
        if not names:
            raise InvalidRequestError("required is allowed only with tools.", at=at)
        return "required", names
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "custom":
        raise UnsupportedFieldError("only function tools are available.", at=at)
    if kind == "function":
        return "required", [_named(choice, names, at, nests)]
    if kind == "allowed_tools":
        inner = _inner(choice, "allowed_tools", nests)
        at += ".allowed_tools" if nests else ""
        tools = inner.get("tools")
        if (
            inner.keys() == {"mode", "tools"}
            and inner["mode"] in ("auto", "required")
            and isinstance(tools, list)
            and 0 < len(tools) <= MAX_TOOLS
        ):
            picked = [
                _named(tool, names, f"{at}.tools[{i}]", nests) for i, tool in enumerate(tools)
            ]
            return inner["mode"], list(dict.fromkeys(picked))
        raise InvalidRequestError("must have a mode (auto or required) and tools.", at=at)
    form = '"function": {"name": ...}' if nests else '"name": ...'
    raise InvalidRequestError(
        f'must be "none", "auto", "required", a function ({{"type": "function", {form}}}) or '
        f"allowed_tools; got {echoed(choice)}.",
        at=at,
    )


def _inner(value: Mapping[str, Any], key: str, nests: bool) -> Mapping[str, Any]:
    """What stands beside the type: the members, or the one object that has them."""
    beside = {name: item for name, item in value.items() if name != "type"}
    if not nests:
        return beside
    inner = beside.get(key) if len(beside) == 1 else None
    return inner if isinstance(inner, dict) else {}


def _named(tool: Any, names: Sequence[str], at: str, nests: bool) -> str:
    is_function = isinstance(tool, dict) and tool.get("type") == "function"
    function = _inner(tool, "function", nests) if is_function else {}
    name = function.get("name")
    if not isinstance(name, str) or len(function) != 1:
        raise InvalidRequestError("must name a function.", at=at)
    if name not in names:
        raise InvalidRequestError(f"{echoed(name)} is none of the tools.", at=at)
    return name


# --- telling --------------------------------------------------------------------------------------

_HOW_TO_CALL = """\
You can call functions. Their signatures, one a line:
{signatures}
To call one, answer with its name and its arguments as JSON, like this:
<tool_call>
{{"name": "<function>", "arguments": {{...}}}}
</tool_call>
The result comes back inside <tool_response></tool_response>."""


def tell_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The messages with tools, calls and results as text, for a template that knows none of them.

    The tools stand at the end of the system's message, which is made if there is none; results are
    the user's, those that follow each other in one message.
    """
    told: list[dict[str, Any]] = []
    in_results = False
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            block = f"<tool_response>\n{content}\n</tool_response>"
            if in_results:
                told[-1]["content"] += f"\n{block}"
            else:
                told.append({"role": "user", "content": block})
            in_results = True
            continue
        in_results = False
        blocks = [content] if content else []
        for call in message.get("tool_calls", ()):
            written = json.dumps(call["function"], ensure_ascii=False)
            blocks.append(f"<tool_call>\n{written}\n</tool_call>")
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        told.append({**others, "content": "\n".join(blocks)})
    if tools:
        signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        how = _HOW_TO_CALL.format(signatures=signatures)
        if told and told[0]["role"] == "system":
            told[0]["content"] += f"\n\n{how}"
        else:
            told.insert(0, {"role": "system", "content": how})
    return told


# --- forcing --------------------------------------------------------------------------------------


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
