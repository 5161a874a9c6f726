"""What the lines of tests/api/test_schema_types.py name: pydantic's types, and some of our own."""

# ruff: noqa: F401, F403, F405, RUF012

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from ipaddress import *
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NamedTuple, Optional, Required
from uuid import UUID

from pydantic import *
from pydantic.networks import IPvAnyNetwork
from typing_extensions import TypedDict


class Person(BaseModel):
    name: str
    age: int


class Tree(BaseModel):
    value: str
    children: list["Tree"] = []


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: str


class Shut(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: str


class Defaults(BaseModel):
    a: str = "x"
    b: int | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]


class Pets(RootModel[list[Cat | Dog]]):
    pass


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(Enum):
    A = "a"
    B = 2


@dataclass
class Point:
    x: float
    y: float = 0.0


class Movie(TypedDict, total=False):
    title: Required[str]
    year: int


class Pair(NamedTuple):
    a: int
    b: str


Even = Annotated[int, Field(multiple_of=2)]
Tagged = Annotated[Cat | Dog, Field(discriminator="kind")]
