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
from typing import Any, Literal, TypeVar

from server.api.schemas import SchemaRules, StrictArguments, prepared
from server.errors import InvalidRequestError, LimitExceededError, UnsupportedFieldError, echoed

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
    ) -> None:
        self._style = style
        self._marker = MARKERS[style][0]
        self._names = names
        self._strict = strict or {}
        self._max_calls = max_calls
        self._forced = forced
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

    def _new_id(self) -> str:
        """Of a call. Mistral's templates take nine letters and digits."""
        if self._style != "mistral":
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

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


# --- which tools may be called --------------------------------------------------------------------

# Which tools a chat may or must call, how they are told to the model, and how a call is forced.
#
# A forced call (tool_choice "required" or a function) is opened by the server in the model
# family's form, and a grammar makes the rest match the tools' JSON schemas.


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
