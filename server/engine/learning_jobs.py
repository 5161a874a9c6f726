"""What the engine's thread asks of the thread that learns (server/engine/task_store.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.engine.exchange import Arrival, Int32, Key


@dataclass(frozen=True, slots=True)
class Open:
    """The layer of this key is wanted over this corpus. persist: its outputs may be on disk."""

    key: Key
    generation: int
    corpus: str | None
    max_tokens: int
    persist: bool


@dataclass(frozen=True, slots=True)
class Example:
    """A finished request's output, on its way to the worker. rests: nothing is drafted in its
    scope, because that does not pay."""

    to: Open
    prompt_ids: Int32
    output_ids: Int32
    rests: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop all that a task has learned, from memory and disk."""

    task: str


class Refresh:
    """Every layer is to be built anew."""


@dataclass(frozen=True, slots=True)
class Save:
    """Run this; it writes a file."""

    write: Callable[[], None]


class End:
    """Write everything, then end."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A version came from other engines."""

    arrival: Arrival
