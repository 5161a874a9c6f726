"""The items of an input, as /v1/responses and /v1/decisions have them: messages, calls and their
results.

Members that change no prompt (ids, statuses, phases, ...) may hold anything: clients send whole
answers back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from server.api.bodies import joined_texts, refuse_members, says_nothing
from server.api.chats import MAX_MESSAGES, Call, Turn
from server.errors import (
    InvalidRequestError,
    LimitExceededError,
    UnsupportedFieldError,
    echoed,
)

Item = dict[str, Any]

TEXTS: Mapping[str, str] = {
    "input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal",
}  # fmt: skip
_IGNORED = frozenset(
    {"id", "status", "type", "phase", "annotations", "logprobs", "caller", "async",
     "cache_control", "prompt_cache_breakpoint", "parsed", "parsed_arguments"}
)  # fmt: skip
_ROLES = ("user", "assistant", "system", "developer")


def text_of(content: Any, at: str) -> str:
    """The text of a string or of a list of parts. Raises InvalidRequestError and its kin."""
    return joined_texts(content, at, "\n", parts=TEXTS, ignored=_IGNORED)


@dataclass(frozen=True, slots=True)
class Items:
    """How a route reads items. calls: types of calls, and the member that holds what is called
    with. further: types of items that are no turns. reads: the text of a content, and where it
    lies. has_spaces: whether a call's namespace is part of its name; elsewhere tools have none."""

    calls: Mapping[str, str]
    further: tuple[str, ...] = ()
    reads: Callable[[Any, str], str] = text_of
    has_spaces: bool = False

    @property
    def types(self) -> list[str]:
        """All that an item's type may be."""
        results = [f"{call}_output" for call in self.calls]
        return ["message", *self.calls, *results, *self.further]

    def schema(self, content: dict[str, Any]) -> dict[str, Any]:
        """The JSON schema of an input. content: that of a content."""
        texts = ("call_id", "name", "id", *self.calls.values())
        item = {
            "type": "object",
            "properties": {
                "type": {"enum": self.types},
                "role": {"enum": list(_ROLES)},
                "content": content,
                "output": content,
                **{name: {"type": "string"} for name in texts},
            },
        }
        items = {"type": "array", "minItems": 1, "items": item}
        return {"anyOf": [{"type": "string", "minLength": 1}, items]}

    def turns(self, given: Any, kept: Callable[[Any], Item | None] | None = None) -> list[Turn]:
        """The input as Turns. kept: the item that an id names, None where no items are kept. Raises
        InvalidRequestError and its kin."""
        if not isinstance(given, list) or not given:
            raise InvalidRequestError(
                f"must be a text or a list of items, not empty; got {echoed(given)}.", at="input"
            )
        if len(given) > MAX_MESSAGES:
            raise LimitExceededError(f"at most {MAX_MESSAGES} items; got {len(given)}.", at="input")
        turns: list[Turn] = []
        referred: set[str] = set()
        for i, item in enumerate(given):
            at = f"input[{i}]"
            if not isinstance(item, dict):
                raise InvalidRequestError(f"must be an object; got {echoed(item)}.", at=at)
            kind = "message" if item.get("type") is None else item["type"]
            if kind == "item_reference" and kept is not None:
                refuse_members(item, {"id", "type"}, at)
                found = kept(item.get("id"))
                if found is None:
                    raise InvalidRequestError(
                        f"no item {echoed(item.get('id'), 60)} is kept here: of each key the last "
                        "ones are, in this process's memory. Send the item itself, as clients do "
                        "with store: false.",
                        at=f"{at}.id",
                    )
                if item["id"] in referred:  # a short body would become a prompt without end
                    raise InvalidRequestError("this item is there twice.", at=f"{at}.id")
                referred.add(item["id"])
                item, kind = found, found.get("type", "message")
            if kind == "reasoning":
                refuse_members(item, _IGNORED, at)  # thoughts are shown to no model
                continue
            turn = self._turn(item, kind, at)
            if turn.calls and turns and turns[-1].calls:  # calls of one turn
                turns[-1] = replace(turns[-1], calls=turns[-1].calls + turn.calls)
            else:
                turns.append(turn)
        if not turns:
            raise InvalidRequestError("it holds nothing to answer.", at="input")
        return turns

    def _turn(self, item: Item, kind: Any, at: str) -> Turn:
        if kind == "message":
            role = item.get("role")
            if role not in _ROLES:
                raise InvalidRequestError(
                    f"must be user, assistant, system or developer; got {echoed(role)}.",
                    at=f"{at}.role",
                )
            refuse_members(item, {"role", "content", *_IGNORED}, at)
            return Turn(role, self.reads(item.get("content"), f"{at}.content"), at)
        known = {"call_id", "name", *(["namespace"] if self.has_spaces else []), *_IGNORED}
        called = kind.removesuffix("_output") if isinstance(kind, str) else ""
        if called != kind and called in self.calls:
            refuse_members(item, {"output", *known}, at)
            told = self.reads(item.get("output"), f"{at}.output")
            name = None if says_nothing(item.get("name")) else _text(item, "name", at)
            return Turn("tool", told, at, name, call_id=_text(item, "call_id", at))
        if not isinstance(kind, str) or kind not in self.calls:
            raise UnsupportedFieldError(
                f"{echoed(kind, 40)} is not available; only {', '.join(self.types)} are, because "
                "no tools run here.",
                at=f"{at}.type",
            )
        what = self.calls[kind]
        refuse_members(item, {what, *known}, at)
        name, space = _text(item, "name", at), item.get("namespace")
        name = f"{space}.{name}" if self.has_spaces and space else name
        call = Call(_text(item, "call_id", at), name, _text(item, what, at, may_be_empty=True), at)
        return Turn("assistant", "", at, calls=(call,))


def _text(item: Item, name: str, at: str, *, may_be_empty: bool = False) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise InvalidRequestError(f"must be a text; got {echoed(value)}.", at=f"{at}.{name}")
    return value
