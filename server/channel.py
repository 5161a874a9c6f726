"""The channel between the API process and an engine: the words of types.py as MessagePack.

Both sides hold one end of a `multiprocessing.Pipe`; whether the engine lives in its own process
or in a thread makes no difference. A message is a tuple whose first item names it. msgspec encodes
and checks the classes as they are declared: no message can run code, and a Delta takes
0.7 microseconds to encode and decode.

API to engine:   ("submit", request) ("abort", request_id) ("stop",)
                 ("control", call_id, name, payload)      e.g. reload a task's corpus
Engine to API:   ("ready", info) ("deltas", [delta, ...])
                 ("beat", age_s)                          seconds since the loop made progress
                 ("control", call_id, payload)            the answer
                 ("failed", message, final)               the engine is about to exit; final: it
                                                          would fail again if it were restarted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

import msgspec

from server.types import Delta, ModelInfo, Request

Message = tuple[Any, ...]


class EngineHandle(Protocol):
    """One engine, seen from the API process. server.wiring gives the factory that makes it.

    A handle is used once: an engine that died is replaced by a new handle.
    """

    def is_alive(self) -> bool:
        """Whether the process or thread still runs."""

    def stop(self, timeout_s: float) -> None:
        """Ask it to stop, then make it stop. Idempotent; closes the channel."""


class PipedHandle(EngineHandle, Protocol):
    """An engine in another process or thread, at the other end of a pipe."""

    connection: Connection


@runtime_checkable
class LoopHandle(EngineHandle, Protocol):
    """An engine whose channel is on the API's own event loop: messages are passed as they are,
    with no pipe, thread or encoding between."""

    def open(self, deliver: Callable[[Message], None]) -> None:
        """On the loop, once: from now on it tells `deliver` what it sends."""

    def send(self, message: Message) -> None:
        """On the loop: takes a message to the engine; never blocks."""


_ENCODER = msgspec.msgpack.Encoder()
_PARTS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_KIND = msgspec.msgpack.Decoder(str)
_ANYTHING: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_TYPED: dict[str, tuple[msgspec.msgpack.Decoder[Any], ...]] = {
    "submit": (msgspec.msgpack.Decoder(Request),),
    "ready": (msgspec.msgpack.Decoder(ModelInfo),),
    "deltas": (msgspec.msgpack.Decoder(list[Delta]),),
    "beat": (msgspec.msgpack.Decoder(float),),
}
"""What follows the name of a message; of other messages, plain values (tuples become lists)."""


def encode(message: Message) -> bytes:
    """A message as bytes. Raises ValueError for anything but plain values and types.py's
    classes."""
    try:
        return _ENCODER.encode(message)
    except TypeError as error:
        raise ValueError(str(error)) from None


def decode(data: bytes) -> Message:
    """The inverse of `encode`. Raises msgspec.ValidationError for values of the wrong type."""
    name, *parts = _PARTS.decode(data)
    kind = _KIND.decode(name)
    decoders = _TYPED.get(kind) or (_ANYTHING,) * len(parts)
    return (kind, *(one.decode(part) for one, part in zip(decoders, parts, strict=True)))


def send(connection: Connection, message: Message) -> None:
    """Send one message. Raises OSError or BrokenPipeError when the other side is gone."""
    connection.send_bytes(encode(message))


def receive(connection: Connection) -> Message:
    """Receive one message, blocking. Raises EOFError when the other side is gone."""
    return decode(connection.recv_bytes())


def merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer of several engines to a control: a failure of one fails it; of tables, numbers are
    summed and lists put together; of lists of what has an `id`, each once, with the first `problem`
    and as `pending` as any. Of no engine it is an empty table."""
    failed = next((answer for answer in answers if not answer.get("ok")), None)
    if failed is not None:
        return failed
    values: list[Any] = [answer.get("value") for answer in answers]
    found: dict[str, Any] = {}
    if values and all(isinstance(value, list) for value in values):  # engine.adapters' states
        for state in (state for value in values for state in value):
            same = found.setdefault(state["id"], dict(state))
            same["pending"] |= state["pending"]
            same["problem"] = same["problem"] or state["problem"]
        return {"ok": True, "value": list(found.values())}
    if not all(isinstance(value, dict) for value in values):
        return {"ok": True, "value": values[0]}
    for key, part in (item for value in values for item in value.items()):
        old = found.get(key)
        adds = isinstance(part, int | float | list) and not isinstance(part, bool)
        found[key] = part if old is None else old + part if adds else old
    return {"ok": True, "value": found}
