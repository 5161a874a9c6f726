"""What an output must match: `structured_outputs`, `response_format` and the schemas of tools as a
GrammarSpec, checked before a request is admitted.

Every fault is a 400 that names the field: two fields that say what the whole output must match,
more than one form in a field, a schema or expression that llguidance does not support, one that
nothing matches, one that is too large or takes too long to compile. Grammars are checked in threads
(llguidance lets go of the interpreter lock), so a large one never stalls the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from server.api.bodies import (
    GenerationBody,
    ResponseFormatBody,
    StructuredOutputsBody,
    parse_object,
)
from server.api.schemas import SchemaRules, close_all, prepared
from server.errors import (
    ConstraintUnsatisfiableError,
    InvalidBodyError,
    InvalidRequestError,
    LimitExceededError,
    QueueFullError,
    UnsupportedFieldError,
)
from server.grammar_text import MAX_SOURCE_CHARS, grammar_problem
from server.types import NO_SCOPE, GrammarSpec

WHITESPACE = r" |\n[ \t]{0,24}"
"""White space between JSON tokens: a space, or a line break and its indentation. Small models that
may write any amount of it sometimes write nothing else."""

_GBNF = re.compile(r"^[^\S\n]*[A-Za-z_][A-Za-z0-9_-]*\s*::=", re.MULTILINE)
ANY_OBJECT: dict[str, Any] = {"type": "object"}

Wanted = tuple[GrammarSpec, str]
"""What the output must match, and the field that says so."""


OutputFormat = tuple[Any, str]
"""OpenAI's format of an output that is JSON, as every route has it: the schema, None where it is
missing, and where it lies."""


def format_of(body: ResponseFormatBody | None) -> OutputFormat | None:
    """The format of a response_format, None for text. Raises InvalidRequestError."""
    if body is None:
        return None
    inner, beside = body.json_schema, body.schema_value
    if body.type != "json_schema" and inner is not None:
        raise InvalidRequestError(
            "allowed only with the type json_schema.", at="response_format.json_schema"
        )
    if beside is not None and (body.type == "text" or inner is not None):
        raise InvalidRequestError(
            "allowed only with the types json_object and json_schema, and not beside json_schema.",
            at="response_format.schema",
        )
    if beside is not None:
        return beside, "response_format.schema"
    if body.type != "json_schema":
        return (ANY_OBJECT, "response_format") if body.type == "json_object" else None
    if inner is None:
        return None, "response_format.json_schema"
    return inner.schema_value, "response_format.json_schema.schema"


def grammar_of(body: GenerationBody, form: OutputFormat | None, rules: SchemaRules) -> Wanted:
    """What the output of a body must match that has structured_outputs or a form.

    Compiles nothing. Raises InvalidRequestError and its kin.
    """
    if body.structured_outputs is not None:
        wanted = _structured(body, body.structured_outputs, rules)
        if form is not None:
            raise InvalidRequestError(
                f"cannot be combined with {wanted[1].partition('.')[0]}: each says what the whole "
                "output must match.",
                at=body.called("response_format"),
            )
        return wanted
    assert form is not None
    schema, at = form
    if schema is None:
        raise InvalidRequestError("required with the type json_schema.", at=at)
    return grammar_of_schema(schema, at, rules), at


def grammar_of_schema(
    schema: Any, at: str, rules: SchemaRules, whitespace: str = WHITESPACE
) -> GrammarSpec:
    """The grammar of a JSON schema as it came. Raises UnsupportedFieldError and
    LimitExceededError."""
    grammar_of_prepared(schema, at)  # one that is too long is not walked
    return grammar_of_prepared(prepared(schema, at, rules), at, whitespace)


ENDS = {"min_tokens": 0, "ignore_eos": False}
"""Sampling that says where an output ends, and what it is beside a grammar, which says it, too."""


def check_with_sampling(body: GenerationBody) -> None:
    """Raise UnsupportedFieldError for sampling that cannot be combined with a grammar."""
    for name in ENDS:
        if getattr(body, name):
            raise UnsupportedFieldError(
                "cannot be combined with structured outputs: the output ends where it is "
                "complete. Leave it out.",
                at=body.called(name),
            )


_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_OF_JSON = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def _structured(body: GenerationBody, given: StructuredOutputsBody, rules: SchemaRules) -> Wanted:
    def called(name: str) -> str:
        return body.called("structured_outputs", name)

    values = (given.json_value, given.regex, given.choice, given.grammar, given.json_object or None)
    named = [name for name, value in zip(_FORMS, values, strict=True) if value is not None]
    if len(named) != 1:
        is_alone = not named and given.whitespace_pattern is not None
        raise InvalidRequestError(
            f"give exactly one of {', '.join(_FORMS)}; got "
            f"{', '.join(map(called, named)) or 'none'}.",
            at=called("whitespace_pattern") if is_alone else "structured_outputs",
        )
    at = called(named[0])
    if named[0] in ("json", "json_object"):
        return _structured_json(given, at, called, rules), at
    for option in _OF_JSON:
        if getattr(given, option) not in (None, False):
            raise InvalidRequestError("allowed only with json and json_object.", at=called(option))
    if given.regex is not None:
        return GrammarSpec("regex", given.regex), at
    if given.choice is not None:
        # A JSON string is a literal of Lark, too.
        literals = [json.dumps(text) for text in dict.fromkeys(given.choice)]
        source = "start: " + " | ".join(literals)
        if len(source) > MAX_SOURCE_CHARS:
            raise _too_long(at, len(source))
        return GrammarSpec("lark", source), at
    assert given.grammar is not None
    return GrammarSpec("gbnf" if _GBNF.search(given.grammar) else "lark", given.grammar), at


def _structured_json(
    given: StructuredOutputsBody, at: str, called: Callable[[str], str], rules: SchemaRules
) -> GrammarSpec:
    whitespace = WHITESPACE if given.whitespace_pattern is None else given.whitespace_pattern
    if given.disable_any_whitespace:
        if given.whitespace_pattern:
            raise InvalidRequestError(
                "this and disable_any_whitespace contradict each other.",
                at=called("whitespace_pattern"),
            )
        whitespace = ""
    schema = ANY_OBJECT if given.json_value is None else _schema_of(given.json_value, at)
    if given.disable_additional_properties is None:
        return grammar_of_schema(schema, at, rules, whitespace)
    grammar_of_prepared(schema, at)
    schema = prepared(schema, at, replace(rules, closes=False))
    if given.disable_additional_properties:
        schema = close_all(schema)
    return grammar_of_prepared(schema, at, whitespace)


def _schema_of(value: Any, at: str) -> Any:
    if isinstance(value, str):
        if len(value) > MAX_SOURCE_CHARS:
            raise _too_long(at, len(value))
        try:
            return parse_object(value.encode())
        except InvalidBodyError:
            raise InvalidRequestError("the text is not that of a JSON object.", at=at) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("a schema is an object.", at=at)
    return value


def grammar_of_prepared(schema: Any, at: str, whitespace: str = WHITESPACE) -> GrammarSpec:
    """The grammar of a schema that is as a grammar holds it. Raises LimitExceededError."""
    source = json.dumps(schema, separators=(",", ":"))
    if len(source) > MAX_SOURCE_CHARS:
        raise _too_long(at, len(source))
    return GrammarSpec("json_schema", source, whitespace)


def _too_long(at: str, num_chars: int) -> LimitExceededError:
    return LimitExceededError(f"at most {MAX_SOURCE_CHARS} characters; it has {num_chars}.", at=at)


class GrammarChecker:
    """Checks grammars in two threads and keeps the results; `close` ends them.

    Results are kept per scope: an immediate answer would tell a client that another has asked
    with the same grammar.

    timeout_s: how long a grammar may take to compile; then it is refused. max_waiting: grammars
    waiting for a thread; then 429 for keys that have their share. max_known: results that are kept.
    """

    def __init__(
        self, *, timeout_s: float = 5.0, max_waiting: int = 64, max_known: int = 512
    ) -> None:
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._max_known = max_known
        self._known: OrderedDict[bytes, str] = OrderedDict()  # by digest: sources are large
        self._open: dict[_Job, asyncio.Task[str]] = {}
        self._num_open: Counter[str] = Counter()  # by key
        self._compiling: set[_Job] = set()
        # A key waits for its own turn first, so the keys' jobs take turns at the threads.
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._free = asyncio.Semaphore(_NUM_THREADS)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        # Loading the library holds the interpreter lock: better now than under open streams.
        self._threads.submit(grammar_problem, GrammarSpec("regex", "a"))

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, spec: GrammarSpec, at: str, scope: str = NO_SCOPE) -> None:
        """Return when the grammar can be compiled. `at` names the field in what is raised:
        InvalidRequestError, ConstraintUnsatisfiableError, LimitExceededError, QueueFullError."""
        named = f"{scope}\0{spec!r}"
        digest = hashlib.sha256(named.encode("utf-8", "backslashreplace")).digest()
        problem = self._known.get(digest)
        if problem is None:
            problem = (await self._find(spec, at, scope))[:200]
            self._known[digest] = problem
            if len(self._known) > self._max_known:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(digest)
        if not problem:
            return
        text = f"{problem[:160].rstrip('. ')}."
        if problem.startswith("Unsatisfiable"):
            raise ConstraintUnsatisfiableError(text, at=at)
        if "too large" in problem or "too big" in problem or "fuel" in problem:
            raise LimitExceededError(text, at=at)
        raise InvalidRequestError(text, at=at)

    async def _find(self, spec: GrammarSpec, at: str, scope: str) -> str:
        job, key = (scope, spec), scope.partition("\0")[0]
        work = self._open.get(job)
        if work is None:
            waiting = {k: n - _num_threads(k) for k, n in self._num_open.items()}
            waiting = {k: n for k, n in waiting.items() if n > 0}
            share = self._max_waiting // len(waiting.keys() | {key})
            if sum(waiting.values()) >= self._max_waiting and waiting.get(key, 0) >= share:
                raise _full()
            self._num_open[key] += 1
            work = self._open[job] = asyncio.create_task(self._compile(job, key))
        done, _ = await asyncio.wait({work}, timeout=self._timeout_s)
        if done:
            return work.result()
        if job not in self._compiling:
            raise _full()
        raise LimitExceededError(
            f"takes longer than {self._timeout_s:g} seconds to compile.", at=at
        )

    async def _compile(self, job: _Job, key: str) -> str:
        turn = self._turns.setdefault(key, asyncio.Semaphore(_num_threads(key)))
        try:
            async with turn, self._free:
                self._compiling.add(job)
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, grammar_problem, job[1])
        finally:
            self._compiling.discard(job)
            self._num_open[key] -= 1
            del self._open[job]


_Job = tuple[str, GrammarSpec]
"""What is compiled, and in which scope."""
_NUM_THREADS = 2


def _full() -> QueueFullError:
    return QueueFullError("Too many grammars are waiting.", retry_after_s=1.0)


def _num_threads(key: str) -> int:
    """How many a key may have at once; without keys all are everybody's."""
    return 1 if key else _NUM_THREADS
