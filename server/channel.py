"""The channel between the API process and an engine: plain ints, floats, strings and bytes.

Both sides hold one end of a `multiprocessing.Pipe`; whether the engine lives in its own process
or in a thread makes no difference. A message is a tuple whose first item names it, marshalled:
nothing that arrives can run code, and a 2,000-token prompt costs microseconds.

API to engine:   ("submit", request) ("abort", request_id) ("drain",) ("stop",)
                 ("control", call_id, name, payload)      e.g. reload a task's corpus
Engine to API:   ("ready", info) ("deltas", [delta, ...], stats) ("stats", stats)
                 ("control", call_id, payload)            the answer
                 ("failed", message, final)               the engine is about to exit; final: it
                                                          would fail again if it were restarted
"""

from __future__ import annotations

import marshal
from array import array
from dataclasses import fields
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any, Protocol

from server.types import (
    Delta,
    EngineStats,
    GrammarSpec,
    ModelInfo,
    Request,
    SamplingParams,
    SpeculationParams,
    StepCounts,
    TokenLogprob,
    VocabularyCounts,
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
    spec = {f.name: getattr(request.speculation, f.name) for f in fields(request.speculation)}
    spec["prediction_ids"] = array("i", request.speculation.prediction_ids).tobytes()
    plain = {f.name: getattr(request, f.name) for f in fields(request)}
    plain["prompt_ids"] = array("i", request.prompt_ids).tobytes()
    plain["sampling"] = _plain(request.sampling)
    plain["speculation"] = tuple(spec.values())
    plain["vocabulary"] = _plain(request.vocabulary)
    plain["grammar"] = None if request.grammar is None else _plain(request.grammar)
    return tuple(plain.values())


def unpack_request(plain: tuple[Any, ...]) -> Request:
    """The inverse of pack_request."""
    values = dict(zip((f.name for f in fields(Request)), plain, strict=True))
    values["prompt_ids"] = _ids(values["prompt_ids"])
    values["sampling"] = SamplingParams(*values["sampling"])
    spec = dict(
        zip((f.name for f in fields(SpeculationParams)), values["speculation"], strict=True)
    )
    spec["prediction_ids"] = _ids(spec["prediction_ids"])
    values["speculation"] = SpeculationParams(**spec)
    values["vocabulary"] = VocabularyParams(*values["vocabulary"])
    if values["grammar"] is not None:
        values["grammar"] = GrammarSpec(*values["grammar"])
    return Request(**values)


def _ids(data: bytes) -> tuple[int, ...]:
    ids = array("i")
    ids.frombytes(data)
    return tuple(ids)


# Compiled once: these run for every choice of every step, on the engine's critical path.
_delta_values = attrgetter(*(f.name for f in fields(Delta)))
_counts_values = attrgetter(*(f.name for f in fields(StepCounts)))
_vocabulary_values = attrgetter(*(f.name for f in fields(VocabularyCounts)))
_logprob_values = attrgetter(*(f.name for f in fields(TokenLogprob)))
_stats_values = attrgetter(*(f.name for f in fields(EngineStats)))
_DELTA_NAMES = [f.name for f in fields(Delta)]
_LOGPROBS = _DELTA_NAMES.index("logprobs")
_PROMPT_LOGPROBS = _DELTA_NAMES.index("prompt_logprobs")
_COUNTS = _DELTA_NAMES.index("counts")
_VOCABULARY = _DELTA_NAMES.index("vocabulary")


def pack_delta(delta: Delta) -> tuple[Any, ...]:
    """A Delta as plain values."""
    plain = list(_delta_values(delta))
    plain[_LOGPROBS] = tuple(_logprob_values(lp) for lp in delta.logprobs)
    plain[_PROMPT_LOGPROBS] = tuple(
        None if lp is None else _logprob_values(lp) for lp in delta.prompt_logprobs
    )
    plain[_COUNTS] = _counts_values(delta.counts)
    if delta.vocabulary is not None:
        plain[_VOCABULARY] = _vocabulary_values(delta.vocabulary)
    return tuple(plain)


def unpack_delta(plain: tuple[Any, ...]) -> Delta:
    """The inverse of pack_delta."""
    values = list(plain)
    values[_LOGPROBS] = tuple(TokenLogprob(*lp) for lp in values[_LOGPROBS])
    values[_PROMPT_LOGPROBS] = tuple(
        None if lp is None else TokenLogprob(*lp) for lp in values[_PROMPT_LOGPROBS]
    )
    values[_COUNTS] = StepCounts(*values[_COUNTS])
    if values[_VOCABULARY] is not None:
        values[_VOCABULARY] = VocabularyCounts(*values[_VOCABULARY])
    return Delta(*values)


def pack_stats(stats: EngineStats) -> tuple[Any, ...]:
    """EngineStats as plain values."""
    values: tuple[Any, ...] = _stats_values(stats)
    return values


def unpack_stats(plain: tuple[Any, ...]) -> EngineStats:
    """The inverse of pack_stats."""
    return EngineStats(*plain)


def pack_info(info: ModelInfo) -> tuple[Any, ...]:
    """ModelInfo as plain values."""
    return _plain(info)


def unpack_info(plain: tuple[Any, ...]) -> ModelInfo:
    """The inverse of pack_info."""
    return ModelInfo(*plain)
