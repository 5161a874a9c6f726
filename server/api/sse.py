"""Server-sent events, and noticing that a client left.

An EventStream is an ASGI response. It sends its headers with the first event, so that an error
before that still has its status, or after `HEADER_WAIT_S`, so that a client behind a proxy sees
that it is served.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "DisconnectWatch", "EventStream", "event"]

DONE = b"data: [DONE]\n\n"
HEADER_WAIT_S = 1.0

_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


def event(data: Any) -> bytes:
    """One event. ASCII only: some clients split lines at U+2028 or U+0085 too."""
    return b"data: " + _encode(data).encode() + b"\n\n"


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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
    event comes. The generator is closed in every case.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_gone: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_gone = on_gone
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
        )
        # init_headers counts an empty body; the length of a stream is not known.
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        try:
            async with DisconnectWatch(receive, self._on_gone) as watch:
                first = asyncio.ensure_future(anext(self._events, None))
                done, _ = await asyncio.wait({first}, timeout=HEADER_WAIT_S)
                if not done:
                    await send(start)
                data = await first
                if done:
                    await send(start)
                while data is not None and not watch.gone:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    data = await anext(self._events, None)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_gone()
            await self._events.aclose()
