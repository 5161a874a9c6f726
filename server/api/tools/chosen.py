"""Which tools a chat may or must call: its tools, tool_choice and parallel_tool_calls together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.api.chat_protocol import MAX_TOOLS, MAX_TOOLS_CHARS, ChatBody
from server.api.closing import close_described
from server.api.tools.strict import StrictArguments
from server.errors import (
    InvalidRequestError,
    LimitExceededError,
    UnsupportedFieldError,
    echoed,
)


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


def chosen_tools(body: ChatBody, *, close: bool = True) -> ChosenTools:
    """The ChosenTools of a body. close: whether objects of parameters without additionalProperties
    have no further members.

    Raises InvalidRequestError and UnsupportedFieldError, naming the field. With tool_choice "none"
    the prompt leaves the tools out, so that the model calls none.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    shown = []
    strict: dict[str, str] = {}
    num_chars = 0
    for i, tool in enumerate(body.tools or ()):
        at = f"tools[{i}]"
        if tool.type != "function" or tool.custom is not None:
            raise UnsupportedFieldError(
                f"{at}.type: only function tools are available.", param=f"{at}.type"
            )
        function = tool.function
        if function is None:
            raise InvalidRequestError(
                f"The field {at}.function is required.", param=f"{at}.function"
            )
        if function.name in schemas:
            raise InvalidRequestError(
                f"{at}.function.name: {function.name} is there twice.", param=f"{at}.function.name"
            )
        if function.strict:
            strict[function.name] = f"{at}.function.parameters"
        parameters = function.parameters or {"type": "object", "properties": {}}
        num_chars += len(json.dumps(parameters)) + len(function.description or "")
        if num_chars > MAX_TOOLS_CHARS:
            raise LimitExceededError(
                f"tools: at most {MAX_TOOLS_CHARS} characters altogether.", param="tools"
            )
        if parameters.get("type", "object") != "object":
            raise InvalidRequestError(
                f"{at}.function.parameters: the type must be object.",
                param=f"{at}.function.parameters",
            )
        whole = {**parameters, "type": "object"}
        schemas[function.name] = (
            close_described(whole) if close or not function.parameters else whole
        )
        entry: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            entry["description"] = function.description
        entry["parameters"] = parameters
        shown.append({"type": "function", "function": entry})
    mode, allowed = _choice(body.tool_choice, schemas)
    if mode == "none" or not schemas:
        return ChosenTools(None, {}, {}, False, False, 0)
    checks: dict[str, StrictArguments] = {}
    if mode == "auto":
        checks = {
            name: StrictArguments(schemas[name], strict[name]) for name in allowed if name in strict
        }
    return ChosenTools(
        shown=tuple(shown),
        callable={name: schemas[name] for name in allowed},
        strict=checks,
        must_call=mode == "required",
        parallel=body.parallel_tool_calls is not False,
        num_chars=num_chars,
    )


def _choice(
    choice: Any, schemas: Mapping[str, Any]
) -> tuple[Literal["none", "auto", "required"], list[str]]:
    """(mode, names that may be called) of a tool_choice."""
    names = list(schemas)
    if choice is None or choice == "auto":
        return "auto", names
    if choice == "none":
        return "none", []
    if choice == "required":
        if not names:
            raise InvalidRequestError(
                "tool_choice: required is allowed only with tools.", param="tool_choice"
            )
        return "required", names
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "custom":
        raise UnsupportedFieldError(
            "tool_choice: only function tools are available.", param="tool_choice"
        )
    if kind == "function" and set(choice) == {"type", "function"}:
        return "required", [_named(choice, "tool_choice", names)]
    if kind == "allowed_tools" and set(choice) == {"type", "allowed_tools"}:
        inner = choice["allowed_tools"]
        if (
            isinstance(inner, dict)
            and set(inner) == {"mode", "tools"}
            and inner["mode"] in ("auto", "required")
            and isinstance(inner["tools"], list)
            and 0 < len(inner["tools"]) <= MAX_TOOLS
        ):
            at = "tool_choice.allowed_tools.tools"
            picked = [_named(tool, f"{at}[{i}]", names) for i, tool in enumerate(inner["tools"])]
            return inner["mode"], list(dict.fromkeys(picked))
        raise InvalidRequestError(
            "tool_choice.allowed_tools: must have a mode (auto or required) and tools.",
            param="tool_choice.allowed_tools",
        )
    raise InvalidRequestError(
        'tool_choice: must be "none", "auto", "required", a function ({"type": "function", '
        f'"function": {{"name": ...}}}}) or allowed_tools; got {echoed(choice)}.',
        param="tool_choice",
    )


def _named(tool: Any, at: str, names: Sequence[str]) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or set(function or {}) != {"name"} or tool["type"] != "function":
        raise InvalidRequestError(f"{at}: must name a function.", param=at)
    if name not in names:
        raise InvalidRequestError(f"{at}: {echoed(name)} is none of the tools.", param=at)
    return name
