"""Tool calls in a model's output, read back while they stream.

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
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, TypeVar

from pydantic import Field

from server.api.bodies import BodyPart
from server.api.schemas import SchemaRules, StrictArguments, mapped, prepared
from server.errors import InvalidRequestError, LimitExceededError, echoed

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
_Reading = Generator[None, None, _T]
"""Goes on with more text wherever it yields."""


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


class NotACall(Exception):
    """The text is not a call of a known tool."""


class _Ended(Exception):
    """The text ends where more was expected."""


class ToolReader:
    """Splits the text of one choice into content and calls.

    names: the tools that may be called. strict: what the arguments of some of them must fit.
    max_calls: calls beyond it, and all that follows, are not reported. begun: the text continues a
    marker that the server wrote. forced: it continues a name, too: all of it is that call's
    arguments.

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
    ) -> None:
        self._style = style
        self._marker = MARKERS[style][0]
        self._names = names
        self._strict = strict or {}
        self._max_calls = max_calls
        self.num_calls = 0
        # What is not told yet: content if no call comes of it. It is read up to `_at`.
        self._text = ""
        self._at = 0
        self._has_ended = False
        self._events: list[ToolEvent] = []
        self._arguments: list[str] = []  # of the call that is read, not told yet
        self._is_reported = False
        self._reading = self._read(begun) if forced is None else self._read_forced(forced)

    def feed(self, text: str) -> list[ToolEvent]:
        """The events of more text."""
        self._text += text
        next(self._reading, None)
        self._tell_arguments()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ToolEvent]:
        """The events that waited for the end of the text."""
        self._has_ended = True
        return self.feed("")

    def _take(self) -> str:
        """What was read, which is not content any more."""
        taken, self._text, self._at = self._text[: self._at], self._text[self._at :], 0
        return taken

    def _take_all(self) -> str:
        self._at = len(self._text)
        return self._take()

    def _more(self) -> _Reading[None]:
        if self._has_ended:
            raise _Ended
        yield

    def _char(self, *, skips: bool = False) -> _Reading[str]:
        """The next character; skips: that is no white space."""
        while True:
            while self._at < len(self._text):
                char = self._text[self._at]
                self._at += 1
                if not skips or char not in _SPACE:
                    return char
            yield from self._more()

    # --- a whole text ---

    def _read_forced(self, name: str) -> _Reading[None]:
        self._report(name)
        while True:
            self._arguments.append(self._take_all())
            yield

    def _read(self, begun: bool) -> _Reading[None]:
        try:
            if not begun:
                yield from self._start() if self._style == "llama3" else self._content()
            while True:
                is_call = yield from self._call()
                if is_call and self.num_calls == self._max_calls:
                    break
                if is_call:
                    yield from self._after()
                    continue
                self._say(self._take())
                yield from self._plain() if self._style == "llama3" else self._content()
        except _Ended:
            left = "" if self._is_reported else self._take_all()
            if left and not (self.num_calls and left.isspace()):
                self._say(left)
        while True:  # what follows is not told
            self._take_all()
            yield

    def _start(self) -> _Reading[None]:
        """The start of an output that is a call only as a whole."""
        marker, start = self._marker, 0
        while len(rest := self._text[start:].lstrip(_SPACE)) < len(marker):
            start = len(self._text) - len(rest)
            if not marker.startswith(rest):
                return
            yield from self._more()
        if rest.startswith(marker):
            self._at = len(self._text) - len(rest) + len(marker)

    def _plain(self) -> _Reading[None]:
        """Content to the end."""
        while True:
            self._say(self._take_all())
            yield from self._more()

    def _content(self, *, behind_call: bool = False) -> _Reading[None]:
        """Content, up to a marker. White space before it waits for what follows."""
        marker, num_spaces = self._marker, 0  # at the text's start, which are not read again
        while True:
            text = self._text
            end = found = text.find(marker, num_spaces)
            if found < 0:
                held = range(min(len(marker) - 1, len(text)), 0, -1)
                end = len(text) - next((k for k in held if text.endswith(marker[:k])), 0)
            start = end - len(text[:end].lstrip(_SPACE)) if behind_call else 0
            is_said = bool(text[num_spaces:end].strip(_SPACE))
            content = text[start:end].rstrip(_SPACE) if is_said else ""
            if content:
                self._say(content)
                behind_call = False
            self._text = text[start + len(content) :]
            num_spaces = end - start - len(content)
            if found >= 0:
                self._at = found + len(marker) - start - len(content)
                return
            yield from self._more()

    def _after(self) -> _Reading[None]:
        """What may stand behind a call, up to a further one."""
        closing = MARKERS["hermes"][1] if self._style == "hermes" else ""
        while True:
            self._text = rest = self._text.lstrip(_SPACE)
            if rest and not (len(rest) < len(closing) and closing.startswith(rest)):
                break
            yield from self._more()
        self._is_reported = False
        if closing:
            self._text = rest.removeprefix(closing)
            yield from self._content(behind_call=True)
        elif rest[0] == ",":
            self._text = rest[1:]
        elif self._style == "llama3":
            self._text = rest.removeprefix(";")
            if rest[0] not in "{;":
                yield from self._plain()
        else:
            self._text = rest.removeprefix("]")
            yield from self._content(behind_call=True)

    # --- one call ---

    def _call(self) -> _Reading[bool]:
        """Reads what may stand behind a marker, and a call; returns whether there is one. What is
        broken behind known arguments changes nothing."""
        self._arguments = []
        while (char := (yield from self._char())) in _SPACE or (
            char == "[" and self._style == "mistral"
        ):
            pass
        if char != "{":
            self._at -= 1
            return False
        try:
            yield from self._members()
        except NotACall:
            if not self._is_reported:
                return False
        self._tell_arguments()
        self._take()
        return True

    def _members(self) -> _Reading[None]:
        """{"name": ..., "arguments": {...}} behind its brace. The call is reported once its name is
        known and its arguments have begun; a strict one at its end. Raises NotACall."""
        keys = (ARGUMENTS_KEY[self._style], "arguments", "parameters")
        name, has_arguments, char = "", False, ","
        while char != "}":
            if (yield from self._char(skips=True)) != '"':
                raise NotACall
            text, _ = yield from self._value('"')
            key = _json_of(text)
            if (yield from self._char(skips=True)) != ":":
                raise NotACall
            first = yield from self._char(skips=True)
            is_arguments = key in keys
            if is_arguments and first not in '{"':
                raise NotACall
            passes = is_arguments and first == "{"
            if passes:
                has_arguments = True
                self._report_if(name)
            text, char = yield from self._value(first, passes=passes)
            if key == "name":
                found = _json_of(text)
                if name or not isinstance(found, str) or found not in self._names:
                    raise NotACall
                name = found
            elif is_arguments and not passes:
                # Some models write the arguments as a string that holds JSON.
                inner = str(_json_of(text))
                if not isinstance(_json_of(inner), dict):
                    raise NotACall
                self._arguments.append(inner)
                has_arguments = True
            if has_arguments:
                self._report_if(name)
            char = char or (yield from self._char(skips=True))
            if char not in ",}":
                raise NotACall
        if not name:
            raise NotACall
        if not has_arguments:
            self._arguments.append("{}")
        check = self._strict.get(name)
        if check is not None and not check.fits("".join(self._arguments)):
            raise NotACall
        self._report(name)

    def _value(self, first: str, *, passes: bool = False) -> _Reading[tuple[str, str]]:
        """(a key's or value's text, the character behind it that ended it, "" for none). passes:
        whether it is the arguments, which are told as they come."""
        text = [first]
        if first not in '"[{':  # a number or a word ends behind itself
            if first in ",:]}":
                raise NotACall
            while (char := (yield from self._char())) not in ",}" + _SPACE:
                if char in '":[{':
                    raise NotACall
                text.append(char)
            return "".join(text), char.strip()
        if passes:
            text = self._arguments
            text.append(first)
        depth, in_string, escaped = int(first != '"'), first == '"', False
        while depth or in_string:
            char = yield from self._char()
            text.append(char)
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
        return "" if passes else "".join(text), ""

    def _report_if(self, name: str) -> None:
        if name and name not in self._strict:
            self._report(name)

    def _report(self, name: str) -> None:
        """Tell that a call of this name begins; once."""
        if self._is_reported:
            return
        call_id = f"call_{secrets.token_hex(12)}"
        if self._style == "mistral":  # its templates take nine letters and digits
            letters = string.ascii_letters + string.digits
            call_id = "".join(secrets.choice(letters) for _ in range(9))
        self._events.append(CallStart(self.num_calls, call_id, name))
        self.num_calls += 1
        self._is_reported = True

    def _tell_arguments(self) -> None:
        if self._is_reported and (text := "".join(self._arguments)):
            self._events.append(ArgumentsPiece(self.num_calls - 1, text))
            self._arguments.clear()

    def _say(self, content: str) -> None:
        """Neighbouring pieces of content are one; none is empty."""
        if content and self._events and isinstance(last := self._events[-1], str):
            self._events[-1] = last + content
        elif content:
            self._events.append(content)


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACall from None


# --- which tools may be called --------------------------------------------------------------------

# Which tools a chat may or must call, how they are told to the model, and how a call is forced.
#
# A forced call (tool_choice "required" or a function) is opened by the server in the model
# family's form, and a grammar makes the rest match the tools' JSON schemas.


FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
MAX_TOOLS = 128
MAX_TOOLS_CHARS = 1 << 18


class FunctionBody(BodyPart):
    """A function that the model may call."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments")
    strict: bool | None = Field(
        None, description="true: a call is reported only with arguments that fit parameters"
    )


Tools = Mapping[str, FunctionBody]
"""The functions that the model may call, by where they lie in the body."""


Mode = Literal["none", "auto", "required"]
ToolChoice = tuple[Mode, Mapping[str, str]]
"""A mode, and the functions that may be called with where the body names each; {} is all."""


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
    num_chars: int


def chosen_tools(tools: Tools, choice: ToolChoice, rules: SchemaRules) -> ChosenTools:
    """The ChosenTools of a body's tools and tool_choice.

    Raises InvalidRequestError and its kin, naming the field. With tool_choice "none" the prompt
    leaves the tools out, so that the model calls none.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    shown = []
    num_chars = 0
    for at, tool in tools.items():
        if tool.name in schemas:
            raise InvalidRequestError(f"{tool.name} is there twice.", at=f"{at}.name")
        parameters = tool.parameters or {"type": "object", "properties": {}}
        num_chars += len(json.dumps(parameters)) + len(tool.description or "")
        if num_chars > MAX_TOOLS_CHARS:
            raise LimitExceededError(
                f"at most {MAX_TOOLS_CHARS} characters altogether.", at="tools"
            )
        if parameters.get("type", "object") != "object":
            raise InvalidRequestError("the type must be object.", at=f"{at}.parameters")
        schemas[tool.name] = {**parameters, "type": "object"}
        entry: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            entry["description"] = tool.description
        entry["parameters"] = parameters
        shown.append({"type": "function", "function": entry})
    mode, named = choice
    for name, at in named.items():
        if name not in schemas:
            raise InvalidRequestError(f"{echoed(name)} is none of the tools.", at=at)
    if mode == "required" and not schemas:
        raise InvalidRequestError("required is allowed only with tools.", at="tool_choice")
    if mode == "none" or not schemas:
        return ChosenTools(None, {}, {}, must_call=False, num_chars=0)
    allowed = named or schemas
    for at, tool in tools.items():  # where arguments may be anything, a schema is only shown
        if tool.name in allowed and (mode == "required" or tool.strict):
            closes = rules.closes or not tool.parameters
            schemas[tool.name] = prepared(
                schemas[tool.name],
                f"{at}.parameters",
                replace(rules, closes=closes),
                tool.name,
            )
    return ChosenTools(
        shown=tuple(shown),
        callable={name: schemas[name] for name in allowed},
        strict={
            tool.name: StrictArguments(schemas[tool.name], f"{at}.parameters")
            for at, tool in tools.items()
            if mode == "auto" and tool.strict and tool.name in allowed
        },
        must_call=mode == "required",
        num_chars=num_chars,
    )


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
    for is_result, run in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            blocks = [f"<tool_response>\n{one['content']}\n</tool_response>" for one in run]
            told.append({"role": "user", "content": "\n".join(blocks)})
            continue
        for message in run:
            blocks = [message["content"]] if message["content"] else []
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

    def move(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            part["$ref"] = root + reference[1:]
        return part

    return mapped(schema, move)
