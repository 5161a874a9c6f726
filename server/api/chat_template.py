"""A model's chat template: turns messages into text and ids, with control tokens only where the
template wrote them.

A template is a jinja2 program that comes with the model; it runs in jinja2's immutable sandbox. Its
output mixes the template's text (`<|im_start|>user`) with clients' text, and the tokenizer would
turn a `<|im_end|>` in either into the same id. No client may end their own message and speak as the
system. So every control token inside a client's string is put between two marks before rendering:
private-use characters that occur nowhere in the request. The marks survive what templates do with
strings (trim, split, tojson, concatenation). Afterwards the text is cut at the marks and each piece
is encoded by itself; a marked token is cut in two, so that it is read as the plain text that it is.
A client's string that begins or ends with a part of a control token gets a mark at that edge, so
that two strings cannot make one together. Text without any of this is encoded in one piece: the ids
are the tokenizer's own.

Control tokens are the tokenizer's special tokens, and those of its other added tokens that the
template writes (`<tool_call>` and `<think>` in Qwen's). An assistant's message may hold the latter:
the model wrote them, templates look for them, and they do not end a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from server.errors import InvalidRequestError, echoed

MAX_TEMPLATE_CHARS = 1 << 20

# Supplementary Private Use Area-A. The marks are taken from it, those first that no string has.
_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD
_PRIVATE = re.compile(r"[\U000F0000-\U000FFFFD]")
_ESCAPED = re.compile(r"\\U000(f[0-9a-f]{4})|\\u(db[89a-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})", re.I)


_ANCHOR = "\n"


class SegmentEncoder:
    """Encodes texts that continue another one: a piece of a chat, a predicted output; without the
    tokenizer's own BOS and EOS, but added tokens are found in them.

    SentencePiece-like tokenizers put a space before whatever they are given (Llama 2's "▁"),
    because they take it for the start of a text. Encoding a later piece behind a line break, and
    taking the break's ids off again, gives the ids that the piece has inside a text.
    """

    __slots__ = ("_anchor_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor_ids: list[int] | None = None  # the line break's, found when first needed

    def first(self, text: str) -> list[int]:
        """Ids of a text that starts the prompt."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def later(self, text: str) -> list[int]:
        """Ids of a text that other text stands before."""
        anchor = self._anchor_ids
        if anchor is None:  # stays empty for a tokenizer that puts no space before a text
            anchor, behind = self.first(_ANCHOR), self.first(_ANCHOR + "a")
            if behind[: len(anchor)] != anchor or behind[len(anchor) :] == self.first("a"):
                anchor = []
            self._anchor_ids = anchor
        if anchor and text:
            ids = self.first(_ANCHOR + text)
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
        return self.first(text)


class TemplateRefusal(Exception):
    """The message of a template's raise_exception."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own way to say it)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on: not escaped for HTML, unlike jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
)
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.now().strftime(form)


def _alternation(words: Iterable[str]) -> str:
    """A regular expression of literal words that prefers the longest, as a tree of prefixes.
    Scanning for Gemma's six thousand added tokens is as fast as for one."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}

    def write(node: dict[str, Any]) -> str:
        branches = [re.escape(c) + write(child) for c, child in sorted(node.items()) if c]
        if not branches:
            return ""
        body = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
        return f"(?:{body})?" if "" in node else body

    return write(root) or "(?!)"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _code_points(text: str) -> Iterator[int]:
    """The private-use characters of a text, written as they are or as Python or JSON escapes."""
    if not text.isascii():
        yield from map(ord, _PRIVATE.findall(text))
    for match in _ESCAPED.finditer(text) if "\\" in text else ():
        long, high, low = match.groups()
        if long:
            yield int(long, 16)
        else:
            yield 0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00


class _Marks(NamedTuple):
    """begin and end: around a control token. edge: where a part of one begins or ends a string.
    cut: where the last message's content ends."""

    begin: str
    end: str
    edge: str
    cut: str


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered chat, cut where no token may span two parts. The segments joined are the text."""

    segments: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.segments)

    @property
    def num_bytes(self) -> int:
        """Its length in UTF-8."""
        return sum(len(segment.encode()) for segment in self.segments)


class ChatTemplate:
    """One model's template, or two: some models have one of their own for requests with tools.

    source, tool_source: jinja2. tokenizer: the model's. constants: the special tokens' texts by the
    names templates use (bos_token, ...). Raises ValueError for a template that is no jinja2.
    Rendering and encoding are safe to call from several threads.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        constants: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        self.source = source
        self.tool_source = tool_source or source
        self.constants = dict(constants or {})
        self._encoder = SegmentEncoder(tokenizer)
        literals: list[str] = []
        names: list[set[str]] = []
        compiled: list[jinja2.Template] = []
        for text in (source, self.tool_source):
            if len(text) > MAX_TEMPLATE_CHARS:
                raise ValueError(f"the chat template is longer than {MAX_TEMPLATE_CHARS}")
            try:
                tree = _ENVIRONMENT.parse(text)
                compiled.append(_ENVIRONMENT.from_string(text))
            except jinja2.TemplateSyntaxError as error:
                raise ValueError(f"the chat template, line {error.lineno}: {error.message}") from (
                    None
                )
            literals += [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
            for const in tree.find_all(jinja2.nodes.Const):
                if isinstance(const.value, str):
                    literals.append(const.value)
            names.append({n.name for n in tree.find_all(jinja2.nodes.Name) if n.ctx == "load"})
        self._template, self._tool_template = compiled
        self._names, self._tool_names = names
        written = "\0".join([*literals, *self.constants.values()])
        self._reserved = frozenset(_code_points(written))
        added = tokenizer.get_added_tokens_decoder()
        controls = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content.strip() and (token.special or token.content in written)
        }
        self._control_ids = frozenset(controls.values())
        self._controls = _alternation(controls)
        self._control = re.compile(self._controls)
        self._special = re.compile(
            _alternation(t.content for t in added.values() if t.special and t.content.strip())
        )
        self._heads = {token[:k] for token in controls for k in range(1, len(token))}
        self._tails = {token[k:] for token in controls for k in range(1, len(token))}
        self._longest = max(map(len, controls), default=1)

    @property
    def has_tools(self) -> bool:
        """Whether the template reads tools."""
        return "tools" in self._tool_names

    def reads(self, *, with_tools: bool) -> Set[str]:
        """The names of the variables that the template reads."""
        return self._tool_names if with_tools else self._names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        opening: str = "",
    ) -> RenderedChat:
        """The text of a chat.

        messages: role, content (text) and what else templates read, as plain values.
        continue_final_message: the text ends where the last message's content does.
        variables: further ones the client chose. opening: text that the server puts at the end, the
        start of an answer; control tokens in it are meant.
        Raises InvalidRequestError for what the template refuses or cannot render.
        """
        marks = self._marks([list(messages), tools, variables])
        marked = [self._mark_message(message, marks) for message in messages]
        marked_tools, marked_variables = self._mark([tools, variables], marks)
        if continue_final_message:
            marked[-1]["content"] += marks.cut
        template = self._template if tools is None else self._tool_template
        try:
            text = template.render(
                {
                    **self.constants,
                    **(marked_variables or {}),
                    "messages": marked,
                    "tools": marked_tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateRefusal as refusal:
            raise InvalidRequestError(
                f"the model's chat template refuses them: {echoed(str(refusal), 200)}",
                at="messages",
            ) from None
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequestError(
                f"the model's chat template cannot render them ({type(error).__name__}).",
                at="messages",
            ) from None
        # What str() and ASCII JSON make of the marks.
        if "\\" in text:
            for mark in marks:
                text = text.replace(repr(mark)[1:-1], mark).replace(json.dumps(mark)[1:-1], mark)
        if continue_final_message:
            at = text.rfind(marks.cut)
            if at < 0:
                raise InvalidRequestError(
                    "the model's chat template does not end with the last message's content.",
                    at="continue_final_message",
                )
            text = text[:at]
        segments = list(self._segments(text, marks))
        if opening:
            segments.append(opening)
        return RenderedChat(tuple(segments))

    def encode(self, chat: RenderedChat) -> list[int]:
        """The ids of a rendered chat. Raises InvalidRequestError when a client's text would become
        a control token in spite of this (by the tokenizer's normalisation)."""
        ids: list[int] = []
        for i, segment in enumerate(chat.segments):
            new = self._encoder.later(segment) if i else self._encoder.first(segment)
            num_controls = sum(token_id in self._control_ids for token_id in new)
            if num_controls and num_controls > len(self._control.findall(segment)):
                raise InvalidRequestError(
                    "they hold text that the tokenizer reads as a control token.", at="messages"
                )
            ids += new
        return ids

    # --- marks ---

    def _marks(self, values: Any) -> _Marks:
        """Characters that are in no string of the request nor of the template."""
        used = set(self._reserved)
        for text in _strings(values):
            used.update(_code_points(text))
        free = [chr(c) for c in range(_FIRST_MARK, _FIRST_MARK + len(used) + 4) if c not in used]
        if len(free) < 4 or ord(free[3]) > _LAST_MARK:
            raise InvalidRequestError(
                "they use every private-use character there is.", at="messages"
            )
        return _Marks(*free[:4])

    def _mark(self, value: Any, marks: _Marks) -> Any:
        if isinstance(value, str):
            return self._mark_text(value, marks)
        if isinstance(value, Mapping):
            return {self._mark(k, marks): self._mark(item, marks) for k, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mark(item, marks) for item in value]
        return value

    def _mark_message(self, message: Mapping[str, Any], marks: _Marks) -> dict[str, Any]:
        marked: dict[str, Any] = self._mark(message, marks)
        if message["role"] == "assistant":
            for key in ("content", "reasoning_content"):
                if key in message:
                    marked[key] = self._mark_text(message[key], marks, self._special)
        return marked

    def _mark_text(self, text: str, marks: _Marks, control: re.Pattern[str] | None = None) -> str:
        # Templates trim: the edges are those of the trimmed text.
        start, stop = len(text) - len(text.lstrip()), len(text.rstrip())
        core = text[start:stop]
        if not core:
            return text
        longest = min(self._longest, len(core) + 1)
        opens = any(core[:k] in self._tails for k in range(1, longest))
        closes = any(core[-k:] in self._heads for k in range(1, longest))
        core = (control or self._control).sub(lambda m: f"{marks.begin}{m[0]}{marks.end}", core)
        if opens:
            core = marks.edge + core
        if closes:
            core += marks.edge
        return text[:start] + core + text[stop:]

    def _segments(self, text: str, marks: _Marks) -> Iterator[str]:
        begin, end, edge, _ = marks
        at = 0
        for match in re.finditer(f"{begin}({self._controls}){end}|[{begin}{end}{edge}]", text):
            if match.start() > at:
                yield text[at : match.start()]
            at = match.end()
            token = match[1]
            if token is None:
                continue
            if self._control.search(token, 1):
                yield from token
            else:
                yield token[0]
                if len(token) > 1:
                    yield token[1:]
        if at < len(text):
            yield text[at:]


def load_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a model folder in transformers' form, or None for a model without one.

    chat_template.jinja wins over tokenizer_config.json; that may name several, of which "default"
    and "tool_use" are used. Raises ValueError for files that cannot be understood, OSError for
    those that cannot be read.
    """
    config: dict[str, Any] = {}
    config_file = folder / "tokenizer_config.json"
    if config_file.is_file():
        config = json.loads(config_file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("tokenizer_config.json is not an object")
    found = config.get("chat_template")
    tool_source: str | None = None
    if isinstance(found, list):
        named = {t["name"]: t["template"] for t in found if isinstance(t, dict) and "name" in t}
        found, tool_source = named.get("default"), named.get("tool_use")
    file = folder / "chat_template.jinja"
    if file.is_file():
        found = file.read_text(encoding="utf-8")
    extra = folder / "additional_chat_templates" / "tool_use.jinja"
    if extra.is_file():
        tool_source = extra.read_text(encoding="utf-8")
    if not isinstance(found, str) or not found.strip():
        return None
    told = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token")
    }
    constants = {key: text for key, text in told.items() if isinstance(text, str)}
    return ChatTemplate(found, tokenizer, constants=constants, tool_source=tool_source)
