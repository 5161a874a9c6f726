r"""Tool calls in a model's output, read back while they stream.

A call is reported as soon as its name is known, is one of the request's tools, and its arguments
have begun; from then on they are passed through as the model writes them. Text that looks like a
call and is none (another name, no JSON) stays text. Whole and streamed answers come from the same
reader, so they agree.

A call of a strict tool waits for its end: it is reported if its arguments fit the tool's schema,
and stays text otherwise.

How each family of templates writes calls:

hermes   <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>, again and again (Qwen,
         Hermes; known by `<tool_call>` in the template)
mistral  [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
llama3   {"name": ..., "parameters": {...}} as the whole output, maybe after <|python_tag|>,
         more of them behind semicolons (known by `ipython` and `parameters`)
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from server.api.schemas import StrictArguments

ToolFormat = Literal["hermes", "mistral", "llama3"]

MARKERS: Mapping[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>",),
}
"""Tokens that a reader must see even where special tokens have no text."""

ARGUMENTS_KEY: Mapping[ToolFormat, str] = {
    "hermes": "arguments",
    "mistral": "arguments",
    "llama3": "parameters",
}


def format_of(template: str) -> ToolFormat | None:
    """How a template's model writes calls, or None for a way that cannot be read."""
    if "<function=" in template or "[ARGS]" in template:  # Qwen3-Coder; Mistral from v11 on
        return None
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "ipython" in template and "parameters" in template:
        return "llama3"
    return None


_SPACE = " \t\r\n"
_T = TypeVar("_T")
_Reading = Generator[None, str, _T]
"""Takes characters until it has what it reads."""
_State = Literal["start", "text", "open", "call", "after", "plain", "rest", "forced"]


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call whose name is known; its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of a call's arguments, JSON text as the model wrote it."""

    index: int
    text: str


ToolEvent = str | CallStart | ArgumentsPiece
"""str is content."""


class ToolReader:
    """Splits the text of one choice into content and calls.

    names: the tools that may be called. strict: what the arguments of some of them must fit.
    max_calls: calls beyond it, and all that follows, are not
    reported. begun: the text continues a marker that the server wrote. forced: it continues a
    name, too: all of it is that call's arguments.

    Content that turns out to be none (white space around calls) is dropped; a piece that may still
    become a marker is held back until it is known.
    """

    def __init__(
        self,
        style: ToolFormat,
        names: frozenset[str],
        *,
        strict: Mapping[str, StrictArguments] | None = None,
        max_calls: int | None = None,
        begun: bool = False,
        forced: str | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._style = style
        self._marker = MARKERS[style][0]
        self._names = names
        self._strict = strict or {}
        self._max_calls = max_calls
        self._forced = forced
        self._new_id = new_id or (_short_id if style == "mistral" else _long_id)
        self.num_calls = 0
        self._held = ""
        self._opened = ""
        self._call: CallScanner | None = None
        self._reported = False
        self._behind_call = False  # nothing but white space since the last call
        self._state: _State = "text"
        if forced is not None:
            self._state = "forced"
        elif begun:
            self._state = "open"
        elif style == "llama3":
            self._state = "start"

    def feed(self, text: str) -> list[ToolEvent]:
        """The events of more text."""
        if self._state == "forced":
            return self._pass_forced(text)
        events: list[ToolEvent] = []
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            if self._state == "text":
                at = self._read_text(text, at, events)
            elif self._state == "start":
                at = self._read_start(text, at)
            elif self._state == "open":
                at = self._read_open(text, at, events)
            elif self._state == "call":
                at = self._read_call(text, at, events)
            elif self._state == "after":
                at = self._read_after(text, at)
            else:
                if self._state == "plain":
                    events.append(text[at:])
                at = len(text)
        return _joined(events)

    def finish(self) -> list[ToolEvent]:
        """The events that waited for the end of the text."""
        if self._state == "forced":
            return self._pass_forced("")
        left = ""
        if self._state == "call" and not self._reported:
            left = self._opened + (self._call.raw if self._call is not None else "")
        elif self._state in ("text", "start", "open"):
            left = self._opened + self._held
        self._held, self._call, self._state = "", None, "rest"
        if not left or (self.num_calls and left.isspace()):
            return []
        return [left]

    # --- states: each takes some of text[at:] and returns where it stopped ---

    def _pass_forced(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        if not self.num_calls:
            assert self._forced is not None
            events.append(CallStart(0, self._new_id(), self._forced))
            self.num_calls = 1
        if text:
            events.append(ArgumentsPiece(0, text))
        return events

    def _read_text(self, text: str, at: int, events: list[ToolEvent]) -> int:
        """Content, up to a marker or the end. White space before either waits for what follows."""
        marker = self._marker
        found = text.find(marker, at)
        end = found
        if found < 0:
            end = len(text)
            for k in range(min(len(marker) - 1, end - at), 0, -1):
                if text.endswith(marker[:k]):
                    end -= k
                    break
        start = at
        if self._behind_call:
            start = end - len(text[at:end].lstrip(_SPACE))
        content = text[start:end].rstrip(_SPACE)
        if content:
            events.append(content)
            self._behind_call = False
        rest = start + len(content)
        if found < 0:
            self._held = text[rest:]
            return len(text)
        self._opened = text[rest : found + len(marker)]
        self._state = "open"
        return found + len(marker)

    def _read_start(self, text: str, at: int) -> int:
        """The start of an output that is a call only as a whole."""
        rest = text[at:].lstrip(_SPACE)
        if len(rest) < len(self._marker) and self._marker.startswith(rest):
            self._held = text[at:]
            return len(text)
        self._state = "open"
        if not rest.startswith(self._marker):
            return at
        end = len(text) - len(rest) + len(self._marker)
        self._opened = text[at:end]
        return end

    def _read_open(self, text: str, at: int, events: list[ToolEvent]) -> int:
        """What may stand between a marker and a call."""
        char = text[at]
        if char == "{":
            self._state = "call"
            self._call = CallScanner(self._names, ARGUMENTS_KEY[self._style])
            self._reported = False
            return at
        if char in _SPACE or (char == "[" and self._style == "mistral"):
            self._opened += char
            return at + 1
        self._give_up(events, "")
        return at

    def _read_call(self, text: str, at: int, events: list[ToolEvent]) -> int:
        call = self._call
        assert call is not None
        failed = False
        while at < len(text) and not call.done and not failed:
            try:
                call.push(text[at])
            except NotACall:
                failed = True
            at += 1
        check = self._strict.get(call.name or "")
        if check is not None and call.done:
            failed = not check.fits(call.arguments)
        may_report = call.is_known and not failed if check is None else call.done and not failed
        if may_report and not self._reported:
            assert call.name is not None
            events.append(CallStart(self.num_calls, self._new_id(), call.name))
            self.num_calls += 1
            self._reported = True
        if self._reported:
            events.append(ArgumentsPiece(self.num_calls - 1, call.take_arguments()))
        if failed and not self._reported:
            self._give_up(events, call.raw)
        elif failed or call.done:  # what is broken behind known arguments changes nothing
            full = self._max_calls is not None and self.num_calls >= self._max_calls
            self._state = "rest" if full else "after"
            self._call, self._opened = None, ""
        return at

    def _read_after(self, text: str, at: int) -> int:
        """What may stand behind a call: its end, or a further one."""
        rest = text[at:].lstrip(_SPACE)
        start = len(text) - len(rest)
        if self._style == "hermes":
            closing = MARKERS["hermes"][1]
            if len(rest) < len(closing) and closing.startswith(rest):
                self._held = text[at:]
                return len(text)
            self._state, self._behind_call = "text", True
            return start + len(closing) if rest.startswith(closing) else start
        if not rest:
            return len(text)
        if rest[0] == ",":
            self._state = "open"
            return start + 1
        if self._style == "llama3":
            self._state = "open" if rest[0] in "{;" else "plain"
            return start + 1 if rest[0] == ";" else start
        self._state, self._behind_call = "text", True
        return start + 1 if rest[0] == "]" else start

    def _give_up(self, events: list[ToolEvent], read: str) -> None:
        """Make what was read since the last content part of the content."""
        events.append(self._opened + read)
        self._opened, self._call, self._behind_call = "", None, False
        self._state = "plain" if self._style == "llama3" else "text"


def _joined(events: Sequence[ToolEvent]) -> list[ToolEvent]:
    """Neighbouring pieces of one kind as one; no empty pieces."""
    joined: list[ToolEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if event == "" or (isinstance(event, ArgumentsPiece) and not event.text):
            continue
        if isinstance(event, str) and isinstance(last, str):
            joined[-1] = last + event
        elif (
            isinstance(event, ArgumentsPiece)
            and isinstance(last, ArgumentsPiece)
            and event.index == last.index
        ):
            joined[-1] = ArgumentsPiece(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates take nine letters and digits."""
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(9))


class NotACall(Exception):
    """The text is not a call of a known tool."""


class CallScanner:
    """Reads one {"name": ..., "arguments": {...}} character by character, as it is written.

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
        self._scan = self._object()
        next(self._scan)

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
        try:
            self._scan.send(char)
        except StopIteration:
            self.done = True

    def _object(self) -> _Reading[None]:
        """All of the call."""
        char = yield from _next()
        if char != "{":
            raise NotACall
        while char != "}":
            if (yield from _next()) != '"':
                raise NotACall
            text, _ = yield from self._value('"', passes=False)
            key = _json_of(text)
            if (yield from _next()) != ":":
                raise NotACall
            first = yield from _next()
            is_arguments = key in self._keys
            if is_arguments and first not in '{"':
                raise NotACall
            text, char = yield from self._value(first, passes=is_arguments and first == "{")
            if key == "name":
                name = _json_of(text)
                if self.name is not None or not isinstance(name, str) or name not in self._names:
                    raise NotACall
                self.name = name
            elif is_arguments and first == '"':
                # Some models write the arguments as a string that holds JSON.
                inner = str(_json_of(text))
                if not isinstance(_json_of(inner), dict):
                    raise NotACall
                self._arguments.append(inner)
                self.has_arguments = True
            char = char or (yield from _next())
            if char not in ",}":
                raise NotACall
        if self.name is None:
            raise NotACall
        if not self.has_arguments:
            self._arguments.append("{}")
            self.has_arguments = True

    def _value(self, first: str, *, passes: bool) -> _Reading[tuple[str, str]]:
        """(a key's or value's text, the character behind it that ended it, "" for none). passes:
        whether it is the arguments, which are told as they come."""
        text = [first]
        if first not in '"[{':  # a number or a word ends behind itself
            if first in ",:]}":
                raise NotACall
            while (char := (yield)) not in ",}" + _SPACE:
                if char in '":[{':
                    raise NotACall
                text.append(char)
            return "".join(text), char.strip()
        if passes:
            self.has_arguments = True
            self._arguments.append(first)
        depth, in_string, escaped = int(first != '"'), first == '"', False
        while depth or in_string:
            char = yield
            text.append(char)
            if passes:
                self._arguments.append(char)
            if escaped:
                escaped = False
            elif in_string:
                escaped, in_string = char == "\\", char != '"'
            elif char == '"':
                in_string = True
            elif char in "[{":
                depth += 1
            elif char in "]}":
                depth -= 1
        return "".join(text), ""


def _next() -> _Reading[str]:
    """The next character that is no white space."""
    while (char := (yield)) in _SPACE:
        pass
    return char


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACall from None
