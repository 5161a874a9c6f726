"""Reading tool calls from a text, in pieces of any size; forcing them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.tools import (
    MARKERS,
    ArgumentsPiece,
    CallStart,
    ToolEvent,
    ToolFormat,
    ToolReader,
    force_call,
    format_of,
    tell_tools,
)
from server.grammar_text import grammar_problem
from server.types import GrammarSpec
from tests.api.chat_models import CHATML, HERMES, LLAMA, MISTRAL
from tests.profiles import examples

NAMES = frozenset({"f", "g"})


def joined(events: list[ToolEvent]) -> list[Any]:
    """Content as a string, each call as (name, arguments), in order."""
    shown: list[Any] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.call_id and event.index == sum(not isinstance(s, str) for s in shown)
            shown.append((event.name, ""))
        elif isinstance(event, ArgumentsPiece):
            assert event.text
            name, text = shown[-1]
            shown[-1] = (name, text + event.text)
        elif shown and isinstance(shown[-1], str):
            shown[-1] += event
        else:
            assert event
            shown.append(event)
    return shown


def read(style: ToolFormat, text: str, cuts: list[int] | int, **options: Any) -> list[Any]:
    reader = ToolReader(style, NAMES, **options)
    if isinstance(cuts, int):
        cuts = list(range(cuts, len(text), cuts))
    events: list[ToolEvent] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += reader.feed(text[start:end])
    events += reader.finish()
    return joined(events)


F = '{"name": "f", "arguments": {"a": "x}\\"]", "b": [1, {"c": null}]}}'
F_ARGS = '{"a": "x}\\"]", "b": [1, {"c": null}]}'
L = F.replace("arguments", "parameters")
CASES: list[tuple[ToolFormat, str, dict[str, Any], list[Any]]] = [
    ("hermes", f"<tool_call>\n{F}\n</tool_call>", {}, [("f", F_ARGS)]),
    (
        "hermes",
        f'Sure. \n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{{"name":"g"}}\n</tool_call>\n',
        {},
        ["Sure.", ("f", F_ARGS), ("g", "{}")],
    ),
    ("hermes", 'if a < b <tool and "name"', {}, ['if a < b <tool and "name"']),
    ("hermes", " spaces are kept \n ", {}, [" spaces are kept \n "]),
    (
        "hermes",
        'a <tool_call>{"name": "other", "arguments": {}}</tool_call> b',
        {},
        ['a <tool_call>{"name": "other", "arguments": {}}</tool_call> b'],
    ),
    ("hermes", "<tool_call>hello", {}, ["<tool_call>hello"]),
    ("hermes", '<tool_call>{"name": 5}', {}, ['<tool_call>{"name": 5}']),
    ("hermes", "<tool_call>{}", {}, ["<tool_call>{}"]),
    (
        "hermes",
        '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call> bye ',
        {},
        [("f", '{"x": 1}'), "bye"],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        {},
        [("f", '{"a": 1}')],
    ),
    ("hermes", f"<tool_call>{F}</tool_call>\n\n and then, two words", {},
     [("f", F_ARGS), "and then, two words"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', {},
     ['<tool_call>{"name": "f", "arguments": [1]}']),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', {}, [("f", '{"a": 1')]),
    ("hermes", 'x <tool_call>{"name": "f", "argum', {}, ['x <tool_call>{"name": "f", "argum']),
    ("hermes", f"<tool_call>{F}</tool_call><tool_call>{F}</tool_call> more", {"max_calls": 1},
     [("f", F_ARGS)]),
    ("hermes", '{"name": "f", "id": 1.5e3, "arguments": {}}', {"begun": True}, [("f", "{}")]),
    ("hermes", '{"a": 1}', {"forced": "g"}, [("g", '{"a": 1}')]),
    ("hermes", "", {"forced": "g"}, [("g", "")]),
    ("mistral", f'[TOOL_CALLS] [{F}, {{"name": "g", "arguments": {{}}, "id": "1"}}]', {},
     [("f", F_ARGS), ("g", "{}")]),
    ("mistral", f"[TOOL_CALLS][{F}] done", {}, [("f", F_ARGS), "done"]),
    ("mistral", f"ok [TOOL_CALLS]{F}", {}, ["ok", ("f", F_ARGS)]),
    ("mistral", f" [{F},{F}]", {"begun": True, "max_calls": 1}, [("f", F_ARGS)]),
    ("mistral", "[TOOL_CALLS] [none]", {}, ["[TOOL_CALLS] [none]"]),
    ("mistral", "[a] list [TOOL", {}, ["[a] list [TOOL"]),
    ("llama3", L, {}, [("f", F_ARGS)]),
    ("llama3", f"<|python_tag|>{L}; {L}", {}, [("f", F_ARGS), ("f", F_ARGS)]),
    ("llama3", f"\n{L}\n{L}", {}, [("f", F_ARGS), ("f", F_ARGS)]),
    ("llama3", f"{L} done", {}, [("f", F_ARGS), "done"]),
    ("llama3", f"Hello {L}", {}, [f"Hello {L}"]),
    ("llama3", '{"answer": 1}', {}, ['{"answer": 1}']),
    ("llama3", ' {"name": "f", "parameters": 5} x', {}, [' {"name": "f", "parameters": 5} x']),
    ("llama3", "<|python", {}, ["<|python"]),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "options", "expected"), CASES, ids=range(len(CASES)))
def test_calls_are_read_alike_in_pieces_of_any_size(
    style: ToolFormat, text: str, options: dict[str, Any], expected: list[Any]
) -> None:
    ways: list[Any] = [1, 2, 3, 5, 8, 13, 1000, *([cut] for cut in range(1, len(text)))]
    for cuts in ways:
        assert read(style, text, cuts, **options) == expected


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
_ARGUMENTS = st.dictionaries(st.text(max_size=4), _JSON, max_size=3)


@settings(max_examples=examples(1000), deadline=None)
@given(
    style=st.sampled_from(["hermes", "mistral", "llama3"]),
    calls=st.lists(st.tuples(st.sampled_from(["f", "g"]), _ARGUMENTS), min_size=1, max_size=3),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    data=st.data(),
)
def test_any_arguments_come_back(
    style: ToolFormat, calls: list[Any], indent: int | None, ascii_only: bool, data: Any
) -> None:
    key = "parameters" if style == "llama3" else "arguments"
    written = [
        json.dumps({"name": name, key: arguments}, indent=indent, ensure_ascii=ascii_only)
        for name, arguments in calls
    ]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written),
        "mistral": f"[TOOL_CALLS] [{', '.join(written)}]",
        "llama3": "; ".join(written),
    }[style]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)))
    found = read(style, text, cuts)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@settings(max_examples=examples(1000), deadline=None)
@given(
    style=st.sampled_from(["hermes", "mistral", "llama3"]),
    pieces=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", F, L, "{", "}", "[",
             "]", '"', "\\", '"name"', ":", ",", '"f"', '"arguments"', " ", "\n", "text", "<", ";"]
        ),
        max_size=12,
    ),
    data=st.data(),
)  # fmt: skip
def test_no_text_breaks_the_reader_and_cuts_never_matter(
    style: ToolFormat, pieces: list[str], data: Any
) -> None:
    text = "".join(pieces)
    whole = read(style, text, [])
    if len(text) > 1:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)))
        assert read(style, text, cuts) == whole
    if all(isinstance(event, str) for event in whole):
        assert "".join(whole) == text


def test_formats_are_known_by_their_templates() -> None:
    assert [format_of(t) for t in (HERMES, MISTRAL, LLAMA)] == ["hermes", "mistral", "llama3"]
    assert format_of(CHATML) is None
    assert format_of("{{ '<tool_call><function=' }}") is None
    assert format_of("[TOOL_CALLS]f[ARGS]{}") is None


def test_call_ids_are_what_the_templates_take() -> None:
    def call_id(style: ToolFormat) -> str:
        [start, _] = ToolReader(style, NAMES, forced="f").feed("{}")
        assert isinstance(start, CallStart)
        return start.call_id

    ids = {call_id("mistral") for _ in range(50)}
    assert len(ids) == 50 and all(len(i) == 9 and i.isalnum() and i.isascii() for i in ids)
    assert call_id("hermes").startswith("call_")


PERSON = {
    "type": "object",
    "properties": {"who": {"$ref": "#/$defs/person"}, "next": {"$ref": "#"}},
    "$defs": {"person": {"type": "object", "properties": {"name": {"type": "string"}}}},
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("style", ["hermes", "mistral", "llama3"])
def test_one_of_several_tools_is_forced_by_a_schema(style: ToolFormat, parallel: bool) -> None:
    forced = force_call(style, {"f": PERSON, "g": CITY}, parallel=parallel)
    schema = json.dumps(forced.schema)
    assert grammar_problem(GrammarSpec("json_schema", schema, " ?")) == ""
    assert "#/$defs/tool0/$defs/person" in schema and '"#/$defs/tool0"' in schema
    assert forced.name is None and forced.begun == (style != "llama3")
    assert forced.schema.get("maxItems") == (1 if style == "mistral" and not parallel else None)
    key = "parameters" if style == "llama3" else "arguments"
    call = json.dumps({"name": "g", key: {"city": "Rome"}})
    text = f"[{call}]" if style == "mistral" else call
    assert read(style, text, 4, begun=forced.begun) == [("g", '{"city": "Rome"}')]


def test_what_is_broken_behind_known_arguments_changes_nothing_at_any_cut() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1} x y'
    for size in (1, 5, 1000):
        assert read("hermes", text, size) == [("f", '{"a": 1}'), "y"]


@pytest.mark.parametrize("style", ["hermes", "mistral", "llama3"])
def test_white_space_without_end_is_read_once(style: ToolFormat) -> None:
    spaces = " \n" * 30_000
    call = MARKERS[style][0] + '{"name": "f", "arguments": {}}'
    began_s = time.process_time()
    assert read(style, spaces, 3) == [spaces]
    assert read(style, call + spaces, 3) == [("f", "{}")]
    assert time.process_time() - began_s < 5.0


def test_results_that_follow_each_other_are_joined_once() -> None:
    results = [{"role": "tool", "content": f"{i:4000}"} for i in range(4096)]
    began_s = time.process_time()
    (told,) = tell_tools(results, None)
    assert time.process_time() - began_s < 2.0
    assert told["content"].count("<tool_response>") == len(results)
