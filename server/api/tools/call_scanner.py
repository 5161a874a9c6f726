"""Reads one call, {"name": ..., "arguments": {...}}, character by character as it is written."""

from __future__ import annotations

import json
from typing import Any, Literal

_SPACE = " \t\r\n"


class NotACall(Exception):
    """The text is not a call of a known tool."""


class CallScanner:
    """Reads one {"name": ..., "arguments": {...}} character by character.

    name is set once it is known, `done` behind the closing brace. raw: everything read so far.
    """

    def __init__(self, names: frozenset[str], arguments_key: str) -> None:
        self._names = names
        self._keys = (arguments_key, "arguments", "parameters")
        self.name: str | None = None
        self.has_arguments = False
        self.done = False
        self._read: list[str] = []
        self._arguments: list[str] = []
        self._state: Literal["open", "key", "colon", "value", "next"] = "open"
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def raw(self) -> str:
        return "".join(self._read)

    @property
    def arguments(self) -> str:
        """The part of the arguments' text that was not taken yet."""
        return "".join(self._arguments)

    def take_arguments(self) -> str:
        """`arguments`, which counts as taken from now on."""
        text = self.arguments
        self._arguments.clear()
        return text

    @property
    def is_known(self) -> bool:
        """Whether this is certainly a call of a known tool."""
        return self.name is not None and (self.has_arguments or self.done)

    def push(self, char: str) -> None:
        """Take one character. Raises NotACall."""
        self._read.append(char)
        if self._state == "open":
            if char == "{":
                self._state = "key"
            elif char not in _SPACE:
                raise NotACall
        elif self._state == "colon":
            if char == ":":
                self._state = "value"
                self._value = []
            elif char not in _SPACE:
                raise NotACall
        elif self._state == "next":
            self._after_value(char)
        else:  # a key or a value
            if not self._value and char in _SPACE:
                return
            if self._state == "key" and not self._value and char != '"':
                if char != "}" or self._key:
                    raise NotACall
                self._finish()
                return
            self._take(char)

    def _take(self, char: str) -> None:
        """One character of a key or a value."""
        first = not self._value
        is_bare = not first and self._value[0] not in '"[{'
        if is_bare and char in ",}" + _SPACE:  # a number or a word ends behind itself
            self._end_value()
            self._after_value(char)
            return
        if first and self._is_arguments:
            if char == "{":
                self.has_arguments = True
            elif char != '"':
                raise NotACall
        self._value.append(char)
        if self.has_arguments and self._is_arguments:
            self._arguments.append(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 0:
                    self._end_value()
        elif char == '"':
            self._in_string = True
        elif char in "[{":
            self._depth += 1
        elif char in "]}":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    @property
    def _is_arguments(self) -> bool:
        return self._state == "value" and self._key in self._keys

    def _end_value(self) -> None:
        text = "".join(self._value)
        self._value = []
        if self._state == "key":
            self._key = str(_json_of(text))
            self._state = "colon"
            return
        if self._key == "name":
            name = _json_of(text)
            if self.name is not None or not isinstance(name, str) or name not in self._names:
                raise NotACall
            self.name = name
        elif self._key in self._keys and text.startswith('"'):
            # Some models write the arguments as a string that holds JSON.
            inner = _json_of(text)
            if not isinstance(_json_of(str(inner)), dict):
                raise NotACall
            self._arguments.append(str(inner))
            self.has_arguments = True
        self._state = "next"

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._state = "key"
        elif char == "}":
            self._finish()
        elif char not in _SPACE:
            raise NotACall
        else:
            self._state = "next"

    def _finish(self) -> None:
        if self.name is None:
            raise NotACall
        if not self.has_arguments:
            self._arguments.append("{}")
            self.has_arguments = True
        self.done = True


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACall from None
