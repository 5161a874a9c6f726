"""Section: the base of every part of a file, and how its errors name file, line and key."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from server.config.yaml_file import Document, Path_
from server.errors import ConfigError


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
    data = document.data if document.data is not None else {}
    if not isinstance(data, dict):
        raise ConfigError(document.error((), "must be a mapping of keys to values"))
    data = _without_empty_sections(data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_problems(model, document, error)) from None


def _without_empty_sections(data: dict[str, Any]) -> dict[str, Any]:
    """A key without a value ("sampling:" and nothing below it) is the default, not null."""
    return {
        key: _without_empty_sections(value) if isinstance(value, dict) else value
        for key, value in data.items()
        if value is not None
    }


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
            near = difflib.get_close_matches(str(path[-1]), known, n=1)
            if near:
                message += f"; did you mean {near[0]}?"
            elif known:
                message += f"; known keys: {', '.join(known)}"
        elif kind == "missing":
            message = "is missing"
        elif kind == "tuple_type":
            message = _a_list(problem["input"])
        message = document.error(path, message[:1].lower() + message[1:])
        told.append((document.line(path), message))
    return "\n".join(message for _, message in sorted(told))


def _a_list(value: object) -> str:
    """What to write where a list belongs and one value stands."""
    if isinstance(value, str | int | float):
        return f"must be a list, such as [{json.dumps(value, ensure_ascii=False)[:60]}]"
    return "must be a list"


def _known_keys(model: type[BaseModel], path: Path_) -> list[str]:
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = None if field is None else _section_of(field.annotation)
        if inner is None:
            return []
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _section_of(argument)
        if found is not None:
            return found
    return None


def from_folder(base: Path, value: str) -> str:
    return str(base / Path(value).expanduser())
