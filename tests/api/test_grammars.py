"""structured_outputs and response_format: what is refused, and what a check costs others.

test_structured_end_to_end.py has what they mean.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from server.api import grammars
from server.api.bodies import validate
from server.api.faces.completions import CompletionBody
from server.api.grammars import GrammarChecker, format_of, grammar_of
from server.api.schemas import SchemaRules
from server.errors import (
    ConstraintUnsatisfiableError,
    InvalidRequestError,
    LimitExceededError,
    QueueFullError,
    RequestError,
    UnknownFieldError,
)
from server.grammar_text import grammar_problem
from server.types import GrammarSpec
from tests.api.fixtures import noted

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def _check(**body: Any) -> None:
    async def run() -> None:
        parsed = validate(CompletionBody, {"model": "m", "prompt": "p", **body})
        checker = GrammarChecker()
        try:
            wanted = grammar_of(parsed, format_of(parsed.response_format), SchemaRules())
            assert wanted is not None
            await checker.check(*wanted)
        finally:
            checker.close()

    asyncio.run(run())


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def product(num: int, of: int = 4) -> dict[str, Any]:
    """of^num alternatives once allOf is multiplied out."""
    return {
        "allOf": [
            {"anyOf": [{"properties": {f"k{i}_{j}": {"type": "string"}}} for j in range(of)]}
            for i in range(num)
        ]
    }


STRUCTURED: list[tuple[str, dict[str, Any], type[RequestError]]] = [
    ("", {}, InvalidRequestError),
    ("", {"json_object": False}, InvalidRequestError),
    ("", {"regex": "a", "choice": ["a"]}, InvalidRequestError),
    (".structural_tag", {"structural_tag": "a"}, UnknownFieldError),
    (".regex", {"regex": "(a"}, InvalidRequestError),
    (".regex", {"regex": "(?=a)b"}, InvalidRequestError),
    (".whitespace_pattern", {"regex": "a", "whitespace_pattern": " "}, InvalidRequestError),
    (".json", {"json": SCHEMA, "whitespace_pattern": "[ "}, InvalidRequestError),
    (".choice", {"choice": []}, InvalidRequestError),
    (".grammar", {"grammar": "start: nothing"}, InvalidRequestError),
    (".json", {"json": "{"}, InvalidRequestError),
    (".json", {"json": True}, InvalidRequestError),
    (".json", {"json": "false"}, InvalidRequestError),
    (".json", {"json": '{"$ref": "#/\\ud800"}'}, InvalidRequestError),
    (".json", {"json": '{"enum": ["a\\udc00\\ud800b"]}'}, InvalidRequestError),
    (".json", {"json": '{"type": "null", "type": "null"}'}, InvalidRequestError),
    (".json", {"json": {"not": {"type": "string"}}}, InvalidRequestError),
    (".json", {"json": {"$ref": "http://127.0.0.1:9/schema"}}, InvalidRequestError),
    (
        ".json", {"json": {"type": "integer", "minimum": 2, "maximum": 1}},
        ConstraintUnsatisfiableError,
    ),
    (".json", {"json": nested(33)}, LimitExceededError),
    (".json", {"json": product(8)}, LimitExceededError),
    (".json", {"json": {"enum": ["x" * 300_000]}}, LimitExceededError),
]  # fmt: skip
FORMATS: list[tuple[str, dict[str, Any]]] = [
    (".type", {"type": "xml"}),
    (".json_schema.name", {"type": "json_schema", "json_schema": {"name": "x y"}}),
    (".json_schema", {"type": "json_schema"}),
    (".json_schema", {"type": "text", "json_schema": {"name": "x"}}),
    (".json_schema.schema", {"type": "json_schema", "json_schema": {"name": "x"}}),
    (
        ".json_schema.schema",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}},
    ),
]
BOTH = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}


@pytest.mark.parametrize(
    ("param", "body", "error"),
    [
        *((f"structured_outputs{at}", {"structured_outputs": x}, e) for at, x, e in STRUCTURED),
        *(
            (f"response_format{at}", {"response_format": x}, InvalidRequestError)
            for at, x in FORMATS
        ),
        ("response_format", BOTH, InvalidRequestError),
    ],
)
def test_what_is_refused_names_its_field(
    param: str, body: dict[str, Any], error: type[RequestError]
) -> None:
    with pytest.raises(error) as caught:
        _check(**body)
    assert caught.value.param == param
    assert caught.value.status == 400
    assert caught.value.message.isprintable() and len(caught.value.message) < 300
    assert "Expecting object schema" not in caught.value.message, "the library's own words"


def test_an_empty_grammar_of_many_lines_is_soon_refused() -> None:
    began_s = time.process_time()
    with pytest.raises(InvalidRequestError):
        _check(structured_outputs={"grammar": "\n" * 200_000})
    assert time.process_time() - began_s < 2.0


async def test_a_slow_grammar_does_not_stall_the_loop() -> None:
    """While grammars that take long are compiled the loop goes on, and others get their turn."""
    checker = GrammarChecker()
    await checker.check(GrammarSpec("regex", "a"), "regex")  # the library is loaded now
    slow = [
        checker.check(
            GrammarSpec("json_schema", json.dumps({**product(6), "title": f"{i}"})), "json"
        )
        for i in range(8)
    ]
    work = asyncio.gather(*slow, return_exceptions=True)
    longest, num = 0.0, 0
    while not work.done():
        began = time.thread_time()
        await asyncio.sleep(0.001)
        longest, num = max(longest, time.thread_time() - began), num + 1
    checker.close()
    # A loop that stalled would turn once a grammar at most, or compile in its own thread. How
    # often it turns, and how long it waits for a core, is the machine's.
    assert num > 8 and longest < 0.5


async def test_a_key_that_fills_the_threads_and_the_queue_leaves_another_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()

    def hang(spec: GrammarSpec) -> str:
        if spec.source.startswith("slow"):
            released.wait(60.0)
        return ""

    def spec(i: int) -> GrammarSpec:
        return GrammarSpec("regex", f"slow{i}")

    monkeypatch.setattr(grammars, "grammar_problem", hang)
    checker = GrammarChecker(timeout_s=30.0, max_waiting=8)
    flood = [asyncio.create_task(checker.check(spec(i), "regex", "a\0")) for i in range(20)]
    done, waiting = await asyncio.wait(flood, timeout=0.0)
    while not done:
        done, waiting = await asyncio.wait(flood, timeout=0.01)
    assert len(waiting) == 9  # one thread and the queue
    assert all(isinstance(task.exception(), QueueFullError) for task in done)
    for i in range(8):
        await checker.check(GrammarSpec("regex", f"b{i}"), "regex", "b\0")
    released.set()
    await asyncio.gather(*waiting)
    checker.close()


async def test_what_was_found_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last eight; of a refusal, the words but not the field that it stood in."""
    compiled = noted(monkeypatch, grammars, "grammar_problem", lambda spec: spec.source)
    sources = [f"a{{{i}}}" for i in range(40)]

    checker = GrammarChecker(max_known=8)
    for source in sources:
        await checker.check(GrammarSpec("regex", source), "regex")
    with pytest.raises(InvalidRequestError):
        await checker.check(GrammarSpec("regex", "("), "first")
    compiled.clear()
    with pytest.raises(InvalidRequestError, match="second"):
        await checker.check(GrammarSpec("regex", "("), "second")
    for source in sources[-7:]:
        await checker.check(GrammarSpec("regex", source), "regex")
    assert not compiled
    for source in sources[:33]:
        await checker.check(GrammarSpec("regex", source), "regex")
    checker.close()
    assert compiled == sources[:33]


async def test_a_grammar_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(spec: GrammarSpec) -> str:
        if spec.kind == "json_schema":
            released.wait(60.0)
        return grammar_problem(spec)

    monkeypatch.setattr(grammars, "grammar_problem", hang)
    checker = GrammarChecker(timeout_s=1.0)  # a thread has this long to begin
    try:
        await checker.check(GrammarSpec("regex", "a"), "regex")
        with pytest.raises(LimitExceededError, match="json: takes longer than 1 seconds"):
            await checker.check(GrammarSpec("json_schema", "{}"), "json")
    finally:
        released.set()
        checker.close()
