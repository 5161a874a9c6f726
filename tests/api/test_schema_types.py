"""The types that pydantic and zod write as JSON schemas: each is taken, with a value of it, or is
refused by name. docs/json-schemas.md has the table.

    TAILOR_WRITE_README=1 python -m pytest tests/api/test_schema_types.py

writes it anew.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import TypeAdapter

from server.api.grammars import grammar_of_schema
from server.api.schemas import SchemaRules
from server.errors import UnsupportedFieldError
from server.grammar_text import grammar_problem, grammar_text
from tests.api import pydantic_types

PAGE = Path(__file__).parents[2] / "docs" / "json-schemas.md"
BEGIN = "| library | taken | refused, by the keyword |\n|---|---|---|\n"
BYTES = LLTokenizer("byte")

PYDANTIC = """
str | "a"
int | 3
float | 1.5
bool | true
None | null
Any | {"a": [1]}
bytes | "a"
Decimal | "1.5"
Fraction | "1/2"
complex | "1+2j"
date | "2026-01-31"
datetime | "2026-01-31T12:30:00Z"
time | "12:30:00Z"
timedelta | "P1DT2H"
AwareDatetime | "2026-01-31T12:30:00Z"
NaiveDatetime | "2026-01-31T12:30:00Z"
PastDate | "2020-01-31"
FutureDate | "2090-01-31"
UUID | "123e4567-e89b-42d3-a456-426614174000"
UUID1 | "123e4567-e89b-12d3-a456-426614174000"
UUID4 | "123e4567-e89b-42d3-a456-426614174000"
UUID7 | "0190b5a2-7a3b-7000-8000-000000000000"
Path | "/a/b"
PurePath | "/a/b"
FilePath | "setup.py"
NewPath | "/tmp/none/x"
IPv4Address | "10.0.0.1"
IPv6Address | "::1"
IPv4Network | "10.0.0.0/8"
IPv4Interface | "10.0.0.1/8"
IPvAnyAddress | "10.0.0.1"
IPvAnyNetwork | "10.0.0.0/8"
AnyUrl | "https://example.org/"
HttpUrl | "https://example.org/"
FileUrl | "file:///a"
WebsocketUrl | "wss://example.org/"
PostgresDsn | "postgres://user:pass@localhost:5432/app"
RedisDsn | "redis://localhost:6379/0"
KafkaDsn | "kafka://localhost:9092"
SecretStr | "a"
SecretBytes | "a"
Base64Str | "aGk="
Base64Bytes | "aGk="
Base64UrlStr | "aGk="
ByteSize | 1024
Json | "[1]"
Json[list[int]] | "[1]"
PositiveInt | 3
NegativeInt | -3
NonNegativeInt | 0
NonPositiveFloat | -0.5
PositiveFloat | 1.5
FiniteFloat | 1.5
StrictInt | 3
StrictStr | "a"
StrictBool | true
Even | 4
conint(ge=0, le=150) | 36
confloat(gt=0, lt=1) | 0.5
condecimal(max_digits=5, decimal_places=2) | "1.25"
constr(min_length=2, max_length=4) | "abc"
constr(pattern=r'^[A-Z]{2}\\d+$') | "AB12"
conlist(int, min_length=1, max_length=3) | [1, 2]
conset(int, max_length=1) | [1]
Annotated[str, StringConstraints(to_lower=True)] | "a"
Literal['a', 'b'] | "b"
Literal[1, 'a', None, True] | null
Color | "red"
Level | 2
Mixed | 2
int | str | "a"
str | None | null
Optional[list[int]] | [1]
list | [1, "a"]
list[str] | ["a"]
list[list[int]] | [[1], [2, 3]]
tuple[int, str] | [1, "a"]
tuple[int, ...] | [1, 2]
tuple[()] | []
Sequence[int] | [1]
Iterable[int] | [1]
deque[int] | [1]
set[str] | ["a"]
frozenset[int] | [1]
dict | {"a": 1}
dict[str, int] | {"a": 1}
dict[int, str] | {"1": "a"}
dict[Literal['a', 'b'], int] | {"b": 1}
dict[Color, Person] | {"red": {"name": "Ada", "age": 36}}
dict[constr(min_length=2), int] | {"ab": 1}
dict[constr(pattern='^x_'), int] | {"x_a": 1}
dict[UUID, int] | {"123e4567-e89b-42d3-a456-426614174000": 1}
dict[date, int] | {"2026-01-31": 1}
Mapping[str, list[int]] | {"a": [1]}
defaultdict[str, int] | {"a": 1}
OrderedDict[str, int] | {"a": 1}
Counter[str] | {"a": 1}
Person | {"name": "Ada", "age": 36}
list[Person] | [{"name": "Ada", "age": 36}]
Tree | {"value": "a", "children": [{"value": "b", "children": []}]}
Open | {"a": "b", "c": 1}
Shut | {"a": "b"}
Defaults | {}
Cat | Dog | {"kind": "dog"}
Tagged | {"kind": "cat", "lives": 9}
Pets | [{"kind": "dog"}]
Point | {"x": 1.5, "y": 2}
Movie | {"title": "M"}
Pair | [1, "a"]
"""


def _pydantic_types() -> list[tuple[str, Any, Any]]:
    """Without their schemas, which take a while and are made as they are needed."""
    lines = [line.rpartition(" | ") for line in PYDANTIC.strip().splitlines()]
    return [(code, None, json.loads(text)) for code, _, text in lines]


def _zod_types() -> list[tuple[str, Any, Any]]:
    rows = json.loads(Path(__file__).with_name("zod_types.json").read_text())
    return [(row["type"], row["schema"], row["value"]) for row in rows]


LIBRARIES = {"pydantic": _pydantic_types(), "zod": _zod_types()}
ROWS = [pytest.param(*row, id=row[0]) for rows in LIBRARIES.values() for row in rows]

REFUSED = {
    "set[str]": "uniqueItems",
    "frozenset[int]": "uniqueItems",
    "dict[UUID, int]": "propertyNames",
    "dict[date, int]": "propertyNames",
    "z.emoji()": "pattern",
    "z.never()": "not",
}
"""The keyword that each refusal names."""

problem_of = functools.cache(grammar_problem)  # most are asked for twice, strict and lenient


def refusal(schema: Any, *, is_lenient: bool = False) -> str:
    """The keyword that a refusal names, "" where the schema is taken."""
    try:
        spec = grammar_of_schema(schema, "schema", SchemaRules(is_lenient=is_lenient))
    except UnsupportedFieldError as error:
        return error.text.partition(" ")[0]
    assert problem_of(spec) == ""
    return ""


def matches(schema: Any, value: Any, *, is_lenient: bool = False) -> bool:
    spec = grammar_of_schema(schema, "schema", SchemaRules(is_lenient=is_lenient))
    matcher = LLMatcher(BYTES, grammar_text(spec))
    tokens = BYTES.tokenize_str(json.dumps(value, ensure_ascii=False))
    return bool(matcher.consume_tokens(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(("code", "schema", "value"), ROWS)
def test_a_type_is_taken_with_its_value_or_refused_by_name(
    code: str, schema: Any, value: Any
) -> None:
    if schema is None:
        schema = TypeAdapter(eval(code, vars(pydantic_types))).json_schema()
    assert refusal(schema) == REFUSED.get(code, "")
    if code == "z.never()":
        return  # it has no value
    assert refusal(schema, is_lenient=True) == ""
    assert matches(schema, value, is_lenient=code in REFUSED)


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    told = ""
    for library, rows in LIBRARIES.items():
        types = [code for code, _, _ in rows]
        refused = ", ".join(f"`{code}` (`{REFUSED[code]}`)" for code in types if code in REFUSED)
        num = sum(code not in REFUSED for code in types)
        told += f"| {library} | {num} of {len(types)} | {refused} |\n"
    begin = text.index(BEGIN) + len(BEGIN)
    if os.environ.get("TAILOR_WRITE_README"):
        PAGE.write_text(f"{text[:begin]}{told}")
    assert PAGE.read_text()[begin:] == told, "run this test once with TAILOR_WRITE_README=1"
