"""What all objects that clients send have in common: strict types, no unknown members, no NaN.

The rule of every body: a member that is null counts as absent, known or not. Any other member is
honoured, or refused by name, or holds the value that applies anyway.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class BodyPart(BaseModel):
    """Base of every object that a client sends."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        frozen=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {name: item for name, item in value.items() if item is not None}
        return value


def says_nothing(value: Any) -> bool:
    """Whether a value is null or empty, or holds nothing but such values."""
    if isinstance(value, dict):
        return all(says_nothing(item) for item in value.values())
    return value is None or value == "" or value == []
