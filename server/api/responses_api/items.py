"""The input of a Responses body as a chat's messages, and where each of them came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.api.body_part import says_nothing
from server.api.chat_protocol import MAX_MESSAGES
from server.api.protocol import joined_texts
from server.errors import (
    InvalidRequestError,
    LimitExceededError,
    UnknownFieldError,
    UnsupportedFieldError,
    echoed,
)

_TEXTS: Mapping[str, str] = {
    "input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal",
}  # fmt: skip
_IGNORED = frozenset({"id", "status", "type", "phase", "annotations", "logprobs", "namespace"})
"""Members of items and parts that do not change the prompt: clients send whole answers back."""


def messages_of(given: Any) -> tuple[list[dict[str, Any]], list[str], dict[str, str]]:
    """(messages, path in the body of each, path of each call by what a chat calls its function).
    Raises InvalidRequestError and its kin."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"], {}
    if not isinstance(given, list) or not given:
        raise InvalidRequestError(
            f"input: must be a text or a list of items, not empty; got {echoed(given)}.",
            param="input",
        )
    if len(given) > MAX_MESSAGES:
        raise LimitExceededError(f"input: at most {MAX_MESSAGES} items.", param="input")
    messages: list[dict[str, Any]] = []
    paths: list[str] = []
    calls: dict[str, str] = {}
    for i, item in enumerate(given):
        at = f"input[{i}]"
        if not isinstance(item, dict):
            raise InvalidRequestError(f"{at}: must be an object; got {echoed(item)}.", param=at)
        kind = item.get("type", "message")
        if (
            kind == "reasoning"
            and says_nothing(item.get("content"))
            and says_nothing(item.get("summary"))
        ):
            continue
        message = _message(item, kind, at)
        last = messages[-1] if messages else {}
        if kind == "function_call" and last.get("tool_calls"):
            last["tool_calls"] += message["tool_calls"]  # calls of one turn
        else:
            messages.append(message)
            paths.append(at)
        if kind == "function_call":
            calls[f"{paths[-1]}.tool_calls[{len(messages[-1]['tool_calls']) - 1}].function"] = at
    if not messages:
        raise InvalidRequestError("input: it holds nothing to answer.", param="input")
    return messages, paths, calls


def _message(item: Mapping[str, Any], kind: Any, at: str) -> dict[str, Any]:
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise InvalidRequestError(
                f"{at}.role: must be user, assistant, system or developer; got {echoed(role)}.",
                param=f"{at}.role",
            )
        _only(item, ("role", "content"), at)
        return {"role": role, "content": _text_of(item, "content", at)}
    if kind == "function_call":
        _only(item, ("call_id", "name", "arguments"), at)
        function = {key: _text(item, key, at) for key in ("name", "arguments")}
        call = {"id": _text(item, "call_id", at), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        _only(item, ("call_id", "output"), at)
        output = _text_of(item, "output", at)
        return {"role": "tool", "tool_call_id": _text(item, "call_id", at), "content": output}
    raise UnsupportedFieldError(
        f"{at}.type: {echoed(kind, 40)} is not available; only message, function_call and "
        "function_call_output are, because nothing is stored and no tools run here.",
        param=f"{at}.type",
    )


def _only(item: Mapping[str, Any], known: tuple[str, ...], at: str) -> None:
    for name, value in item.items():
        if name not in known and name not in _IGNORED and not says_nothing(value):
            path = f"{at}.{echoed(name, 40).strip(chr(39))}"
            raise UnknownFieldError(f"Unknown field: {path}.", param=path)


def _text(item: Mapping[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or (not value and name != "arguments"):
        raise InvalidRequestError(
            f"{at}.{name}: must be a text; got {echoed(value)}.", param=f"{at}.{name}"
        )
    return value


def _text_of(item: Mapping[str, Any], name: str, at: str) -> str:
    """The text of a member that is a string or a list of parts."""
    return joined_texts(item.get(name), f"{at}.{name}", "\n", parts=_TEXTS, ignored=_IGNORED)
