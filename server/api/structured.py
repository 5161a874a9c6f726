"""Structured outputs: vLLM's `structured_outputs` and OpenAI's `response_format` as a GrammarSpec.

For routes:

    wanted = await intake.grammars.of(body.structured_outputs, body.response_format, scope)
    check_with_sampling(spec, sampling)

Every fault is a 400 that names the field, before a request is admitted: both fields at once, more
than one form in a field, a schema or expression that llguidance does not support, one that nothing
matches, one that is too large or takes too long to compile. Grammars are checked in threads
(llguidance lets go of the interpreter lock), so a large one never stalls the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from server.api.body_part import BodyPart
from server.api.closing import close_all, close_described
from server.errors import (
    ConstraintUnsatisfiableError,
    InvalidRequestError,
    LimitExceededError,
    QueueFullError,
    UnsupportedFieldError,
)
from server.grammar_text import MAX_SOURCE_CHARS, grammar_problem
from server.types import NO_SCOPE, GrammarSpec, SamplingParams

WHITESPACE = r" |\n[ \t]{0,24}"
"""White space between JSON tokens: a space, or a line break and its indentation. Small models that
may write any amount of it sometimes write nothing else."""

MAX_SCHEMA_DEPTH = 32
MAX_CHOICES = 4096
_GBNF = re.compile(r"^\s*[A-Za-z_][A-Za-z0-9_-]*\s*::=", re.MULTILINE)
_ANY_OBJECT: dict[str, Any] = {"type": "object"}

_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}


class StructuredOutputsBody(BodyPart):
    """vLLM's structured_outputs: exactly one of json, regex, choice, grammar and json_object."""

    json_value: Annotated[Any, WithJsonSchema(_SCHEMA)] = Field(
        None, alias="json", description="a JSON schema, as an object or as its text"
    )
    regex: str | None = Field(None, min_length=1, max_length=MAX_SOURCE_CHARS)
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = Field(
        None, min_length=1, max_length=MAX_SOURCE_CHARS, description="Lark, as llguidance reads it"
    )
    json_object: bool | None = None
    whitespace_pattern: str | None = Field(
        None,
        max_length=1000,
        description='regular expression of the white space between two JSON tokens; "" is none',
    )
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = Field(
        None,
        description="whether objects that do not say allow no other members; default: only objects "
        "that describe their members",
    )


class JsonSchemaBody(BodyPart):
    """response_format.json_schema. Name and `strict` change nothing: a schema always holds."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = Field(None, max_length=1 << 16)
    schema_value: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormatBody(BodyPart):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None
    schema_value: dict[str, Any] | None = Field(
        None,
        alias="schema",
        description="of json_object or json_schema, as llama.cpp and Together take it",
    )


def grammar_of(
    structured_outputs: StructuredOutputsBody | None,
    response_format: ResponseFormatBody | None,
    *,
    close: bool = True,
) -> tuple[GrammarSpec, str] | None:
    """(what the output must match, the field that says so), or None for any text.

    close: whether objects without additionalProperties have no further members. Reads the fields
    and compiles nothing. Raises InvalidRequestError or LimitExceededError.
    """
    formatted = response_format is not None and response_format.type != "text"
    if response_format is not None:
        if response_format.type != "json_schema" and response_format.json_schema is not None:
            raise InvalidRequestError(
                "response_format.json_schema is allowed only with the type json_schema.",
                param="response_format.json_schema",
            )
        if response_format.schema_value is not None and (
            response_format.type == "text" or response_format.json_schema is not None
        ):
            raise InvalidRequestError(
                "response_format.schema is allowed only with the types json_object and "
                "json_schema, and not beside json_schema.",
                param="response_format.schema",
            )
    if structured_outputs is not None:
        wanted = _structured(structured_outputs, close)
        if formatted:
            raise InvalidRequestError(
                "response_format and structured_outputs cannot be combined: each says what the "
                "whole output must match.",
                param="response_format",
            )
        return wanted
    if response_format is None or not formatted:
        return None
    if response_format.schema_value is not None:
        beside, where = response_format.schema_value, "response_format.schema"
        return _json_schema(_closed(beside, where) if close else beside, WHITESPACE, where), where
    if response_format.type == "json_object":
        return _json_schema(_ANY_OBJECT, WHITESPACE, "response_format"), "response_format"
    if response_format.json_schema is None:
        raise InvalidRequestError(
            "response_format.json_schema is required with the type json_schema.",
            param="response_format.json_schema",
        )
    where = "response_format.json_schema.schema"
    schema = response_format.json_schema.schema_value
    if schema is None:
        schema = _ANY_OBJECT
    elif close:
        schema = _closed(schema, where)
    return _json_schema(schema, WHITESPACE, where), where


def _closed(schema: Any, where: str) -> Any:
    """The schema with its objects closed; its depth is checked before it is walked."""
    _check_depth(schema, where)
    return close_described(schema)


def grammar_of_schema(schema: Any, where: str) -> GrammarSpec:
    """The grammar of a JSON schema of another field. Raises LimitExceededError."""
    return _json_schema(schema, WHITESPACE, where)


def check_with_sampling(spec: GrammarSpec | None, sampling: SamplingParams) -> None:
    """Raise UnsupportedFieldError for sampling that cannot be combined with a grammar."""
    if spec is None:
        return
    if sampling.min_tokens:
        raise UnsupportedFieldError(
            f"min_tokens ({sampling.min_tokens}) cannot be combined with structured outputs: the "
            "output ends where it is complete. Leave it out or send 0.",
            param="min_tokens",
        )
    if sampling.ignore_eos:
        raise UnsupportedFieldError(
            "ignore_eos cannot be combined with structured outputs: the output ends where it is "
            "complete.",
            param="ignore_eos",
        )


_FORMS = ("json", "regex", "choice", "grammar", "json_object")


def _structured(body: StructuredOutputsBody, close: bool) -> tuple[GrammarSpec, str]:
    given = {
        "json": body.json_value is not None,
        "regex": body.regex is not None,
        "choice": body.choice is not None,
        "grammar": body.grammar is not None,
        "json_object": bool(body.json_object),
    }
    named = [name for name in _FORMS if given[name]]
    if len(named) != 1:
        raise InvalidRequestError(
            f"structured_outputs: give exactly one of {', '.join(_FORMS)}; got "
            f"{', '.join(named) or 'none'}.",
            param="structured_outputs",
        )
    where = f"structured_outputs.{named[0]}"
    is_json = body.json_value is not None or bool(body.json_object)
    for option in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        if not is_json and getattr(body, option) not in (None, False):
            raise InvalidRequestError(
                f"structured_outputs.{option} is allowed only with json and json_object.",
                param=f"structured_outputs.{option}",
            )
    if is_json:
        whitespace = WHITESPACE if body.whitespace_pattern is None else body.whitespace_pattern
        if body.disable_any_whitespace:
            if body.whitespace_pattern:
                raise InvalidRequestError(
                    "structured_outputs.whitespace_pattern and disable_any_whitespace contradict "
                    "each other.",
                    param="structured_outputs.whitespace_pattern",
                )
            whitespace = ""
        schema = _ANY_OBJECT if body.json_value is None else _schema_of(body.json_value, where)
        if body.disable_additional_properties:
            _check_depth(schema, where)
            schema = close_all(schema)
        elif close and body.disable_additional_properties is None:
            schema = _closed(schema, where)
        return _json_schema(schema, whitespace, where), where
    if body.regex is not None:
        return GrammarSpec("regex", body.regex), where
    if body.choice is not None:
        # A JSON string is a literal of Lark, too.
        literals = [json.dumps(text) for text in dict.fromkeys(body.choice)]
        source = "start: " + " | ".join(literals)
        if len(source) > MAX_SOURCE_CHARS:
            raise _too_long(where, len(source))
        return GrammarSpec("lark", source), where
    assert body.grammar is not None
    if _GBNF.search(body.grammar):
        raise UnsupportedFieldError(
            f"{where}: this is a GBNF grammar (llama.cpp's); only Lark as llguidance reads it is "
            'taken: `rule: "text" other` instead of `rule ::= "text" other`, the first rule is '
            "called start.",
            param=where,
        )
    return GrammarSpec("lark", body.grammar), where


def _schema_of(value: Any, where: str) -> Any:
    if isinstance(value, str):
        if len(value) > MAX_SOURCE_CHARS:
            raise _too_long(where, len(value))
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"{where}: the text is not JSON.", param=where) from None
    if not isinstance(value, (dict, bool)):
        raise InvalidRequestError(f"{where}: a schema is an object.", param=where)
    return value


def _check_depth(schema: Any, where: str) -> None:
    if _depth(schema, MAX_SCHEMA_DEPTH + 1) > MAX_SCHEMA_DEPTH:
        raise LimitExceededError(
            f"{where}: nested more than {MAX_SCHEMA_DEPTH} levels deep.", param=where
        )


def _json_schema(schema: Any, whitespace: str, where: str) -> GrammarSpec:
    _check_depth(schema, where)
    try:
        source = json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise InvalidRequestError(f"{where}: holds a number that is none.", param=where) from None
    if len(source) > MAX_SOURCE_CHARS:
        raise _too_long(where, len(source))
    return GrammarSpec("json_schema", source, whitespace)


def _depth(value: Any, most: int) -> int:
    """Levels of objects and lists, at most `most` (where it stops looking)."""
    if most == 0 or not isinstance(value, (dict, list)):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(item, most - 1) for item in inner), default=0)


def _too_long(where: str, num_chars: int) -> LimitExceededError:
    return LimitExceededError(
        f"{where}: at most {MAX_SOURCE_CHARS} characters; it has {num_chars}.", param=where
    )


class GrammarChecker:
    """Checks grammars in two threads and keeps the results; `close` ends them.

    Results are kept per scope: an immediate answer would tell a client that another has asked
    with the same grammar.

    timeout_s: how long a grammar may take to compile; then it is refused. max_waiting: grammars
    waiting for a thread; then 429. max_known: results that are kept.
    """

    def __init__(
        self, *, timeout_s: float = 5.0, max_waiting: int = 64, max_known: int = 512
    ) -> None:
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._max_known = max_known
        self._known: OrderedDict[bytes, str] = OrderedDict()  # by digest: sources are large
        self._open: dict[tuple[str, GrammarSpec], Future[str]] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        # Loading the library holds the interpreter lock: better now than under open streams.
        self._threads.submit(grammar_problem, GrammarSpec("regex", "a"))

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def of(
        self,
        structured_outputs: StructuredOutputsBody | None,
        response_format: ResponseFormatBody | None,
        scope: str,
        *,
        close: bool = True,
    ) -> tuple[GrammarSpec, str] | None:
        """The checked grammar of a body's two fields and the field's name, or None for any text.
        scope: whose it is (types.scope_of).

        Raises InvalidRequestError and its kin, or QueueFullError.
        """
        wanted = grammar_of(structured_outputs, response_format, close=close)
        if wanted is not None:
            await self.check(*wanted, scope)
        return wanted

    async def check(self, spec: GrammarSpec, where: str, scope: str = NO_SCOPE) -> None:
        """Return when the grammar can be compiled. `where` names the field in what is raised:
        InvalidRequestError, ConstraintUnsatisfiableError, LimitExceededError, QueueFullError."""
        named = f"{scope}\0{spec!r}"
        digest = hashlib.sha256(named.encode("utf-8", "backslashreplace")).digest()
        problem = self._known.get(digest)
        if problem is None:
            problem = (await self._find(spec, where, scope))[:200]
            self._known[digest] = problem
            if len(self._known) > self._max_known:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(digest)
        if not problem:
            return
        text = f"{where}: {problem[:160].rstrip('. ')}."
        if problem.startswith("Unsatisfiable"):
            raise ConstraintUnsatisfiableError(text, param=where)
        if "too large" in problem or "too big" in problem or "fuel" in problem:
            raise LimitExceededError(text, param=where)
        raise InvalidRequestError(text, param=where)

    async def _find(self, spec: GrammarSpec, where: str, scope: str) -> str:
        key = (scope, spec)
        work = self._open.get(key)
        if work is None:
            if len(self._open) >= self._max_waiting:
                raise QueueFullError("Too many grammars are waiting.", retry_after_s=1.0)
            work = self._threads.submit(grammar_problem, spec)
            self._open[key] = work
            loop = asyncio.get_running_loop()
            work.add_done_callback(lambda _: _on_loop(loop, self._open, key))
        waiting = asyncio.wrap_future(work)
        done, _ = await asyncio.wait({waiting}, timeout=self._timeout_s)
        if done:
            return waiting.result()
        if not work.running():
            raise QueueFullError("Too many grammars are waiting.", retry_after_s=1.0)
        raise LimitExceededError(
            f"{where}: takes longer than {self._timeout_s:g} seconds to compile.", param=where
        )


def _on_loop(
    loop: asyncio.AbstractEventLoop,
    open_work: dict[tuple[str, GrammarSpec], Future[str]],
    key: tuple[str, GrammarSpec],
) -> None:
    try:
        loop.call_soon_threadsafe(open_work.pop, key, None)
    except RuntimeError:  # the loop is closed: the server is gone
        pass
