"""The options of a drafter: a frozen dataclass whose fields are made by `option`.

    @dataclass(frozen=True)
    class EchoOptions:
        reach: int = option(8, ge=1, le=64, help="tokens looked back at")

A field's name is the parameter of the drafter's class, its default is the drafter's default. From
such a class come the section of task files, the field of requests, `--option` of the replay and the
table in docs/drafting.md. Fields are int, float, str or a Literal of strings; `| None` where the
default is None. `__post_init__` may raise OptionError for values that do not fit together.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


class OptionError(ValueError):
    """A value that an option refuses. option: its key. problem: what is wrong with it."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option} {problem}")
        self.option = option
        self.problem = problem


@dataclass(frozen=True, slots=True)
class OptionFile:
    """An option whose value in a task file is a file's name, and for the drafter what is in it.

    kind: "module:Class"; the class has `load(path, *, fingerprint)`. what: its name in error
    messages. made_by: the command that makes one. of: whose fingerprint it must have.
    """

    kind: str
    what: str
    made_by: str
    of: Literal["tokenizer", "model"] = "tokenizer"


@dataclass(frozen=True, slots=True)
class Option:
    """One option, read from its dataclass.

    name: the parameter. key: what files and requests call it. kind: its type. choices: of a
    Literal, else (). ge, le: bounds, None without. in_requests: whether a request may set it.
    counts_nodes: whether `limits.max_draft_tokens` bounds it in requests.
    """

    name: str
    key: str
    kind: type
    default: Any
    choices: tuple[str, ...]
    ge: float | None
    le: float | None
    help: str
    in_requests: bool
    counts_nodes: bool
    file: OptionFile | None

    def check(self, value: Any) -> None:
        """Raise OptionError for a value of another type or out of bounds. None is the default."""
        if value is None and self.default is None:
            return
        if self.file is not None:
            return
        if self.choices:
            if value not in self.choices:
                raise OptionError(self.key, f"must be {' or '.join(self.choices)}, not {value!r}")
            return
        kinds: tuple[type, ...] = (int, float) if self.kind is float else (self.kind,)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise OptionError(self.key, f"must be {_NOUNS[self.kind]}, not {value!r}")
        if self.kind is str:
            return
        low = self.ge if self.ge is not None else float("-inf")
        high = self.le if self.le is not None else float("inf")
        number: Any = value
        if not low <= number <= high:
            raise OptionError(self.key, f"must be in {self.bounds}, not {value}")

    @property
    def bounds(self) -> str:
        """The bounds as text: 2..64, or one end of it."""
        low = "" if self.ge is None else f"{self.ge:g}"
        high = "" if self.le is None else f"{self.le:g}"
        return f"{low}..{high}"


_NOUNS = {int: "an integer", float: "a number", str: "a string"}


@dataclass(frozen=True)
class NoOptions:
    """The drafter has no parameters in task files and requests."""


def option(
    default: Any,
    *,
    help: str,
    key: str | None = None,
    ge: float | None = None,
    le: float | None = None,
    in_requests: bool = True,
    counts_nodes: bool = False,
    file: OptionFile | None = None,
) -> Any:
    """A field of an options dataclass; see Option. A file is never an option of requests."""
    in_requests = in_requests and file is None
    told = Option("", key or "", str, default, (), ge, le, help, in_requests, counts_nodes, file)
    return dataclasses.field(default=default, metadata={"option": told})


@functools.cache
def options_of(kind: type) -> tuple[Option, ...]:
    """The options of a dataclass, in their order. Raises TypeError for what cannot be one."""
    hints = typing.get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            parts = [part for part in typing.get_args(hint) if part is not type(None)]
            hint = parts[0] if len(parts) == 1 and field.default is None else None
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        told: Option | None = field.metadata.get("option")
        value = str if choices or (told is not None and told.file is not None) else hint
        if told is None or value not in _NOUNS:
            raise TypeError(
                f"{kind.__name__}.{field.name} is not an option: use drafters.options.option() on "
                "an int, a float, a str or a Literal of strings"
            )
        key = told.key or field.name
        found.append(
            dataclasses.replace(told, name=field.name, key=key, kind=value, choices=choices)
        )
    return tuple(found)


def check_options(kind: type, values: Mapping[str, Any]) -> None:
    """Raise OptionError unless `values` (by parameter) are ones of `kind` that fit together.

    What is left out is the default.
    """
    for one in options_of(kind):
        if one.name in values:
            one.check(values[one.name])
    kind(**values)
