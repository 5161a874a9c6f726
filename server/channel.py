"""The channel between the API process and an engine: plain ints, floats, strings and bytes.

Both sides hold one end of a `multiprocessing.Pipe`; whether the engine lives in its own process
or in a thread makes no difference. A message is a tuple whose first item names it, marshalled:
nothing that arrives can run code, and a 2,000-token prompt costs microseconds.

API to engine:   ("submit", request) ("abort", request_id) ("drain",) ("stop",)
                 ("control", call_id, name, payload)      e.g. reload a task's corpus
Engine to API:   ("ready", info) ("deltas", [delta, ...], stats) ("stats", stats)
                 ("control", call_id, payload)            the answer
                 ("failed", message)                      the engine is about to exit
"""

from __future__ import annotations

import marshal
from array import array
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any, Protocol

from server.types import (
    Delta,
    EngineStats,
    ModelInfo,
    Request,
    SamplingParams,
    SpeculationParams,
    StepCounts,
    TokenLogprob,
    VocabularyParams,
)

Message = tuple[Any, ...]


class EngineHandle(Protocol):
    """One engine, seen from the API process. Made by a factory that the composition root gives.

    A handle is used once: an engine that died is replaced by a new handle.
    """

    name: str
    device: str
    connection: Connection

    def is_alive(self) -> bool:
        """Whether the process or thread still runs."""

    def exit_code(self) -> int | None:
        """The exit status, None while it runs (threads: 0 or 1)."""

    def stop(self, timeout_s: float) -> None:
        """Ask it to stop, then make it stop. Idempotent; closes the connection."""


def send(connection: Connection, message: Message) -> None:
    """Send one message. Raises OSError or BrokenPipeError when the other side is gone."""
    connection.send_bytes(marshal.dumps(message))


def receive(connection: Connection) -> Message:
    """Receive one message, blocking. Raises EOFError when the other side is gone."""
    message: Message = marshal.loads(connection.recv_bytes())
    return message


def _plain(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, f.name) for f in fields(value))


def pack_request(request: Request) -> tuple[Any, ...]:
    """A Request as plain values; ids travel as bytes of int32."""
    spec = list(_plain(request.speculation))
    spec[3] = array("i", request.speculation.prediction_ids).tobytes()
    plain = {f.name: getattr(request, f.name) for f in fields(request)}
    plain["prompt_ids"] = array("i", request.prompt_ids).tobytes()
    plain["sampling"] = _plain(request.sampling)
    plain["speculation"] = tuple(spec)
    plain["vocabulary"] = _plain(request.vocabulary)
    return tuple(plain.values())


def unpack_request(plain: tuple[Any, ...]) -> Request:
    """The inverse of pack_request."""
    values = dict(zip((f.name for f in fields(Request)), plain, strict=True))
    values["prompt_ids"] = _ids(values["prompt_ids"])
    values["sampling"] = SamplingParams(*values["sampling"])
    spec = list(values["speculation"])
    spec[3] = _ids(spec[3])
    values["speculation"] = SpeculationParams(*spec)
    values["vocabulary"] = VocabularyParams(*values["vocabulary"])
    return Request(**values)


def _ids(data: bytes) -> tuple[int, ...]:
    ids = array("i")
    ids.frombytes(data)
    return tuple(ids)


def pack_delta(delta: Delta) -> tuple[Any, ...]:
    """A Delta as plain values."""
    plain = {f.name: getattr(delta, f.name) for f in fields(delta)}
    plain["logprobs"] = tuple(_plain(lp) for lp in delta.logprobs)
    plain["prompt_logprobs"] = tuple(
        None if lp is None else _plain(lp) for lp in delta.prompt_logprobs
    )
    plain["counts"] = _plain(delta.counts)
    return tuple(plain.values())


def unpack_delta(plain: tuple[Any, ...]) -> Delta:
    """The inverse of pack_delta."""
    values = dict(zip((f.name for f in fields(Delta)), plain, strict=True))
    values["logprobs"] = tuple(TokenLogprob(*lp) for lp in values["logprobs"])
    values["prompt_logprobs"] = tuple(
        None if lp is None else TokenLogprob(*lp) for lp in values["prompt_logprobs"]
    )
    values["counts"] = StepCounts(*values["counts"])
    return Delta(**values)


def pack_stats(stats: EngineStats) -> tuple[Any, ...]:
    """EngineStats as plain values."""
    return _plain(stats)


def unpack_stats(plain: tuple[Any, ...]) -> EngineStats:
    """The inverse of pack_stats."""
    return EngineStats(*plain)


def pack_info(info: ModelInfo) -> tuple[Any, ...]:
    """ModelInfo as plain values."""
    return _plain(info)


def unpack_info(plain: tuple[Any, ...]) -> ModelInfo:
    """The inverse of pack_info."""
    return ModelInfo(*plain)
