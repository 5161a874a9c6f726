"""Fields of task files and requests that are declared elsewhere: the sampling parameters of
server.types and the options of drafters.catalog.

The decorators give a pydantic model its fields: `parameters` one a sampling parameter,
`task_sections` and `request_sections` one a drafter that has options.

Importing this module imports neither torch nor numpy, nor any drafter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, create_model, model_validator

from drafters.catalog import DrafterSpec, catalog
from drafters.options import Option
from server.config.yaml_file import FilePath
from server.types import PARAMETERS, Parameter

MAX_TEXT = 4096

_Model = TypeVar("_Model", bound=BaseModel)


def parameters(
    is_wanted: Callable[[Parameter], bool],
) -> Callable[[type[_Model]], type[_Model]]:
    """Give a model the sampling parameters that are wanted; None: nothing is said of them."""
    fields: dict[str, Any] = {
        one.name: (one.kind | None, Field(None, ge=one.ge, le=one.le, description=one.help))
        for one in PARAMETERS
        if is_wanted(one)
    }
    return lambda model: _extended(model, fields)


@functools.cache
def sections() -> tuple[DrafterSpec, ...]:
    """The drafters that have options, in the catalog's order."""
    return tuple(spec for spec in catalog().values() if spec.fields)


def task_sections(base: type[BaseModel]) -> Callable[[type[_Model]], type[_Model]]:
    """Give a model a section a drafter with all its options. base: what sections derive from."""
    fields: dict[str, Any] = {}
    for spec in sections():
        doc = f"{_title(spec)}. None: the drafter's default, in parentheses."
        section = _section(spec, base, spec.fields, doc, with_defaults=True)
        fields[spec.name] = (section, Field(default_factory=section))
    return lambda model: _extended(model, fields)


def request_sections(base: type[BaseModel]) -> Callable[[type[_Model]], type[_Model]]:
    """Give a model a section a drafter with the options that requests may set, or None."""
    fields: dict[str, Any] = {}
    for spec in sections():
        if options := tuple(one for one in spec.fields if one.in_requests):
            doc = f"{_title(spec)}, for requests drafted by `{spec.name}`. None: the task's."
            section = _section(spec, base, options, doc, with_defaults=False)
            fields[spec.name] = (section | None, None)
    return lambda model: _extended(model, fields)


def _title(spec: DrafterSpec) -> str:
    return (spec.options.__doc__ or f"Parameters of {spec.name}.").split("\n")[0].rstrip(".")


def _extended(model: type[_Model], fields: dict[str, Any]) -> type[_Model]:
    made: type[_Model] = create_model(
        model.__name__,
        __base__=model,
        __module__=model.__module__,
        __doc__=model.__doc__,
        **fields,
    )
    return made


def _section(
    spec: DrafterSpec,
    base: type[BaseModel],
    options: tuple[Option, ...],
    doc: str,
    *,
    with_defaults: bool,
) -> type[BaseModel]:
    def fits(self: BaseModel) -> BaseModel:
        # What a request sets is put together with its task's before it is checked.
        if with_defaults:
            spec.options(**self.model_dump(exclude_none=True))
        return self

    name = "".join(part.title() for part in spec.name.split("_"))
    fields: dict[str, Any] = {
        one.name: (
            (Literal[one.choices] if one.choices else one.kind if one.file is None else FilePath)
            | None,
            _field(one, with_defaults),
        )
        for one in options
    }
    validators: dict[str, Any] = {"fits": model_validator(mode="after")(fits)}
    made: type[BaseModel] = create_model(
        f"{name}Options" if with_defaults else f"{name}OptionsBody",
        __base__=base,
        __module__=__name__,
        __doc__=doc,
        __validators__=validators,
        **fields,
    )
    return made


def _field(one: Option, with_default: bool) -> Any:
    shown = one.help
    if with_default and one.default is not None and not one.choices:
        shown += f" ({one.default:g})" if one.kind is float else f" ({one.default})"
    given: dict[str, Any] = {} if one.key == one.name else {"alias": one.key}
    if one.kind is str and not one.choices:
        given.update(min_length=1, max_length=MAX_TEXT)
    return Field(None, ge=one.ge, le=one.le, description=shown, **given)
