"""YAML with line numbers; Section, the base of every part of a file, whose errors name file, line
and key; and the values that parts share. YAML is 1.2's core schema, bounded in size and depth:

`off` is a string and not False, `010` is ten, there are no tags, no anchors and no dates, and a
repeated key is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)

from server.errors import ConfigError, nearest

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32
Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file: plain values, and the line (from 1) of every key path in it. A key without a
    value ("sampling:" and nothing below it) is the default, not null: it has a line alone."""

    source: str
    data: Any
    lines: Mapping[Path_, int]

    def line(self, path: Path_) -> int:
        """The line of `path`, or of the nearest thing around it that the file has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def error(self, path: Path_, message: str) -> ConfigError:
        """One line with the place and the message."""
        where = f"{self.source}:{self.line(path)}"
        key = dotted(path)
        return ConfigError(f"{where}: {key}: {message}" if key else f"{where}: {message}")


def dotted(path: Path_) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


class _CoreLoader(yaml.SafeLoader):
    """YAML 1.2's core schema, without tags, anchors, aliases, merge keys and bottomless nesting."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own way to start from none)

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        problem = ""
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            problem = "anchors and aliases are not read"
        elif getattr(event, "tag", None):
            problem = "tags are not read"
        elif self.depth == MAX_DEPTH:
            problem = "nested too deeply"
        if problem:
            raise yaml.MarkedYAMLError(None, None, problem, event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag, _regex, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,30}", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_regex})$"), _first
    )
_CoreLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def read_yaml(path: Path) -> Document:
    """Read one file. Raises ConfigError for what is not plain YAML of at most 1 MiB."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or 'cannot be read'}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Document:
    """Parse YAML text; `source`: its name in error messages."""
    lines: dict[Path_, int] = {}
    try:
        loader = _CoreLoader(text)
        loader.name = source
        node = loader.get_single_node()
        data = None if node is None else _plain(loader, node, (), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            f"{source}:{mark.line + 1 if mark else 1}: {error.problem or error.context}"
        ) from None
    except yaml.YAMLError as error:
        reason = getattr(error, "reason", None) or "not YAML"
        raise ConfigError(f"{source}:1: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{source}:1: nested too deeply") from None
    return Document(source, data, lines)


def _plain(loader: _CoreLoader, node: yaml.Node, path: Path_, lines: dict[Path_, int]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return tuple(_plain(loader, item, (*path, i), lines) for i, item in enumerate(node.value))
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{loader.name}:{line}: a key must be a plain word")
            key = str(key_node.value)
            if first := lines.get((*path, key)):
                raise ConfigError(
                    f"{loader.name}:{line}: {dotted((*path, key))}: is there twice (first in line "
                    f"{first})"
                )
            lines[(*path, key)] = line
            if (value := _plain(loader, value_node, (*path, key), lines)) is not None:
                values[key] = value
        return values
    return loader.construct_object(node)


# --- sections -------------------------------------------------------------------------------------


class Section(BaseModel):
    """A part of a file: frozen, strict, no unknown keys, finite numbers only."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=False,
        validate_by_name=True,
        validate_by_alias=True,
        hide_input_in_errors=True,
        arbitrary_types_allowed=True,
    )


_Model = TypeVar("_Model", bound=Section)


def validate(model: type[_Model], document: Document) -> _Model:
    """What a file says. Paths in it count from its own folder (FilePath). Raises
    ConfigError with one line a problem."""
    data = document.data if document.data is not None else {}
    if not isinstance(data, dict):
        raise document.error((), "must be a mapping of keys to values")
    try:
        folder = Path(document.source).resolve().parent
        return model.model_validate(data, context={"folder": folder})
    except ValidationError as error:
        raise ConfigError(_problems(model, document, error)) from None


_PLAIN = {"missing": "is missing", "model_type": "must be a mapping of keys to values"}


def _problems(model: type[Section], document: Document, error: ValidationError) -> str:
    """One line a problem, in the order of the file."""
    told: list[tuple[int, str]] = []
    problems = error.errors(include_url=False, include_context=False)
    for problem in problems:
        path, kind = tuple(problem["loc"]), problem["type"]
        if kind == "too_short" and any(
            len(other["loc"]) > len(path) and other["loc"][: len(path)] == path
            for other in problems
        ):
            continue  # items that are wrong themselves are not counted
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if kind == "extra_forbidden":
            message = "unknown key"
            known = _known_keys(model, path[:-1])
            if near := nearest(str(path[-1]), known):
                message += f"; did you mean {near}?"
            elif known:
                message += f"; known keys: {', '.join(known)}"
        elif kind in _PLAIN:
            message = _PLAIN[kind]
        elif kind == "tuple_type":
            message, one = "must be a list", problem["input"]
            if isinstance(one, str | int | float):
                message += f", such as [{json.dumps(one, ensure_ascii=False)[:60]}]"
        error_at = document.error(path, message[:1].lower() + message[1:])
        told.append((document.line(path), error_at.message))
    return "\n".join(message for _, message in sorted(told))


def _known_keys(model: type[BaseModel], path: Path_) -> list[str]:
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = None if field is None else section_of(field.annotation)
        if inner is None:
            return []
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds: itself, many of them, or by name; None for none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = section_of(argument)
        if found is not None:
            return found
    return None


# --- values that files and the command line share -------------------------------------------------


_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B?|B)?", re.IGNORECASE)
_UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KB": 10**3, "KI": 1 << 10, "KIB": 1 << 10,
    "M": 1 << 20, "MB": 10**6, "MI": 1 << 20, "MIB": 1 << 20,
    "G": 1 << 30, "GB": 10**9, "GI": 1 << 30, "GIB": 1 << 30,
    "T": 1 << 40, "TB": 10**12, "TI": 1 << 40, "TIB": 1 << 40,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemorySize:
    """An amount of memory: a fraction of what is free once the weights are loaded, or bytes.

    Exactly one of the two is set.
    """

    fraction: float | None = None
    num_bytes: int | None = None


def parse_memory(value: object) -> MemorySize:
    """0.4, "40%", "2GiB", "500MB" or 2000000000 as a MemorySize.

    A number up to 1 is a fraction, a larger one is bytes. Raises ValueError for anything else.
    """
    if isinstance(value, MemorySize):
        return value
    problem = 'must be a fraction (0.4 or "40%") or an amount ("2GiB", or a number of bytes)'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(problem)
    text = str(value).strip()
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ValueError(problem)
    number, unit = float(match[1]), (match[2] or "").upper()
    if unit == "%":
        number, unit = number / 100, ""
        if number > 1:
            raise ValueError("a share of memory is at most 100%")
    if not unit and 0 < number <= 1:
        return MemorySize(fraction=number)
    num_bytes = int(number * _UNITS[unit])
    if num_bytes < 1 << 20:
        raise ValueError("must be at least 1MiB")
    if num_bytes > 1 << 50:
        raise ValueError("must be at most 1024TiB")
    return MemorySize(num_bytes=num_bytes)


def parse_device_list(text: str) -> tuple[str, ...]:
    """ "cuda:0,cuda:1" as ("cuda:0", "cuda:1"). One engine a device; "cpu,cpu" is two engines.

    Raises ValueError for anything but cpu, cuda and cuda:N.
    """
    devices = tuple(part.strip() for part in text.split(","))
    for device in devices:
        check_device(device)
    return devices


def check_device(device: str) -> str:
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"{device[:40]!r} is no device: use cpu, cuda or cuda:N")
    return device


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            "a name has 1 to 128 letters, digits and . _ : - and starts with a letter or digit"
        )
    return name


def _from_folder(value: str, info: ValidationInfo) -> str:
    folder: Path | None = (info.context or {}).get("folder")
    return value if folder is None else str(folder / Path(value).expanduser())


def _place(value: str, info: ValidationInfo) -> str:
    return value if "://" in value else _from_folder(value, info)


def _model_path(value: str, info: ValidationInfo) -> str:
    folder: Path | None = (info.context or {}).get("folder")
    is_path = value.startswith((".", "~", "/")) or value.endswith(".gguf")
    is_path = is_path or (folder is not None and (folder / value).exists())
    return _from_folder(value, info) if is_path else value


FilePath = Annotated[str, AfterValidator(_from_folder)]
"""A path that counts from the folder of the file that says it."""
FilePlace = Annotated[str, AfterValidator(_place)]
"""The same, or a URL, which stays as it is."""
ModelPath = Annotated[str, AfterValidator(_model_path)]
"""The same, or a built-in name or a hub's id, which stay as they are."""
Memory = Annotated[MemorySize, BeforeValidator(parse_memory)]
Device = Annotated[str, AfterValidator(check_device)]
Name = Annotated[str, AfterValidator(check_name)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
