"""Answers over HTTP: whole, as server-sent events, and noticing that a client left.

`encode` writes a body, `encode_ascii` one that travels in an event.

An EventStream is an ASGI response. It sends its headers with the first event, so that an error
before that still has its status, or after `HEADER_WAIT_S`, so that a client behind a proxy sees
that it is served.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Callable

import msgspec
from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.shapes import error_answer
from server.errors import TailorError

_encoder = msgspec.json.Encoder()
_WIDE = re.compile(r"[^\x00-\x7f]+")


def encode(answer: Struct) -> bytes:
    """The answer as JSON in UTF-8."""
    return _encoder.encode(answer)


def encode_ascii(answer: Struct) -> bytes:
    """The same in ASCII: some clients of event streams split lines at U+2028 or U+0085 too."""
    data = _encoder.encode(answer)
    if data.isascii():
        return data
    return _WIDE.sub(lambda wide: json.dumps(wide[0])[1:-1], data.decode()).encode()


class AnswerResponse(Response):
    """An answer as an HTTP response."""

    media_type = "application/json"

    def __init__(
        self, answer: Struct, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(encode(answer), status, headers)


DONE = b"data: [DONE]\n\n"
HEADER_WAIT_S = 1.0
COMMENT = b": keep-alive\n\n"


def event(data: Struct) -> bytes:
    """One event, its data in ASCII."""
    return b"data: " + encode_ascii(data) + b"\n\n"


def error_event(error: TailorError) -> bytes:
    """The event of an error after the status was sent, and the stream's end."""
    return event(error_answer(error)) + DONE


class DisconnectWatch:
    """Calls `on_gone` as soon as the client leaves. The body must have been read.

    async with DisconnectWatch(receive, submission.abort):
        ...
    """

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self._receive = receive
        self._on_gone = on_gone
        self._task: asyncio.Task[None] | None = None
        self.gone = False

    async def _run(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._on_gone()

    async def __aenter__(self) -> DisconnectWatch:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        try:
            await self._task
        except asyncio.CancelledError:
            if self._task.cancelled():
                return
            raise


class EventStream(Response):
    """Sends the byte strings of a generator as they come.

    events: yields complete events. on_gone: called at once when the client leaves, also while no
    event comes. late_error: the events of an error before the first event, if the headers are sent.
    keep_alive_s: after so many seconds without an event a comment is sent, which clients skip and
    which keeps proxies from closing the connection; 0 is off. The generator is closed in every
    case.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_gone: Callable[[], None],
        *,
        late_error: Callable[[TailorError], bytes] = error_event,
        keep_alive_s: float = 15.0,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_gone = on_gone
        self._late_error = late_error
        self._keep_alive_s = keep_alive_s
        self._last_s = 0.0
        # Without Response.__init__ there is no body whose length would be told.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        keeper: asyncio.Task[None] | None = None
        try:
            async with DisconnectWatch(receive, self._on_gone) as watch:
                first = asyncio.ensure_future(anext(self._events, None))
                done, _ = await asyncio.wait({first}, timeout=HEADER_WAIT_S)
                if not done:
                    await send(start)
                    keeper = self._keep(send)
                try:
                    data = await first
                except TailorError as error:
                    if done:
                        raise  # its status can still be told
                    data = self._late_error(error)
                if done:
                    await send(start)
                    keeper = self._keep(send)
                while data is not None and not watch.gone:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._last_s = time.monotonic()
                    data = await anext(self._events, None)
                if keeper is not None:
                    keeper.cancel()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if keeper is not None:
                keeper.cancel()
            self._on_gone()
            await self._events.aclose()

    def _keep(self, send: Send) -> asyncio.Task[None] | None:
        return asyncio.create_task(self._keep_alive(send)) if self._keep_alive_s > 0 else None

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for keep_alive_s. Events are sent whole, so a
        comment never falls into one."""
        self._last_s = time.monotonic()
        while True:
            await asyncio.sleep(max(0.01, self._last_s + self._keep_alive_s - time.monotonic()))
            if time.monotonic() - self._last_s >= self._keep_alive_s:
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
                self._last_s = time.monotonic()
