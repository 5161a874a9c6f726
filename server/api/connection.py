"""One HTTP/1.1 connection: uvicorn's, with bounds on what a client may hold and for how long.

It adds to uvicorn's:

- the request line and headers have a size and a time (431, 408), however slowly they drip, and
  so have trailers and chunk extensions;
- HTTP that the parser refuses (smuggling, bad lengths, raw TLS) answers in OpenAI's error shape,
  and so does what it takes and HTTP/1.1 forbids: another version, no Host or two, an Expect that
  nobody knows;
- a client that does not read its answer is cut off, so that it cannot hold what it asked for.

An error is never written into an answer that is under way: the connection is closed instead.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from server.api.gate import error_response
from server.errors import BodyTimeoutError, HeadersTooLargeError, InvalidHttpError, TailorError

log = logging.getLogger("tailor.http")
_parser_log = logging.getLogger("tailor.http.parser")
_parser_log.setLevel(logging.ERROR)  # uvicorn warns of every byte that is no HTTP: see _refuse

CHUNK_OVERHEAD = 32
"""Bytes around a chunk's data that the limit does not count."""


class Connection(HttpToolsProtocol):
    """uvicorn makes one per connection.

    max_header_bytes: of the request line and headers. header_timeout_s: for them to be complete,
    from the connection's start or a request's first byte. send_timeout_s: how long a client may
    leave its answer unread. on_refused: called with (status, code) of each refusal made here.
    is_leaving: whether answers end their connection, so that clients come back elsewhere.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        max_header_bytes: int = 65536,
        header_timeout_s: float = 15.0,
        send_timeout_s: float = 60.0,
        on_refused: Callable[[int, str], None] = lambda status, code: None,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _parser_log
        self._max_header_bytes = max_header_bytes
        self._header_timeout_s = header_timeout_s
        self._send_timeout_s = send_timeout_s
        self._on_refused = on_refused
        self._is_leaving = is_leaving
        self._in_head = True  # a request's head is awaited or being read
        self._num_head_bytes = 0
        self._num_extra_bytes = 0  # of chunk sizes, chunk extensions and trailers
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._refusal: TailorError | None = None
        self._open: list[RequestResponseCycle] = []  # uvicorn itself knows the last one only

    # --- what uvicorn and the transport call ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_send_timer()
        self._tell_that_it_left()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._in_head:
            self._num_head_bytes += len(data)
            self._start_head_timer()
        else:
            self._num_extra_bytes += len(data)
        super().data_received(data)
        num_bytes = self._num_head_bytes if self._in_head else self._num_extra_bytes
        if num_bytes > self._max_header_bytes:
            self._refuse(self._too_large())

    def on_body(self, body: bytes) -> None:
        self._num_extra_bytes -= len(body) + CHUNK_OVERHEAD
        super().on_body(body)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._max_header_bytes:
            self._refusal = self._too_large()
            raise ValueError("too large")  # ends the parser's work; send_400_response follows
        problem = self._problem_of_head()
        if problem:
            self._refusal = InvalidHttpError(problem)
            raise ValueError("forbidden")
        self._in_head = False
        self._num_head_bytes = self._num_extra_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()
        if self._is_leaving() and self.cycle is not None:
            self.cycle.keep_alive = False
        self._open = [cycle for cycle in self._open if not cycle.response_complete]
        self._open.append(self.cycle)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that the parser refused."""
        refusal, self._refusal = self._refusal, None
        self._refuse(refusal or InvalidHttpError("The request is not valid HTTP/1.1."))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self._send_timeout_s, self._not_read)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore upgrades, as HTTP allows, and log nothing: a client could fill the log."""

    # --- inside ---

    def _problem_of_head(self) -> str:
        """What HTTP/1.1 (RFC 9112, 2.3 and 3.2; RFC 9110, 10.1.1) forbids in a head, "" if it is
        right."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return f"HTTP/{version} is not spoken on this port; send HTTP/1.1."
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            return f"A request has one Host header; this one has {len(hosts)}."
        expected = [value.strip().lower() for name, value in self.headers if name == b"expect"]
        if any(value != b"100-continue" for value in expected):
            return "Expect: 100-continue is the only expectation that is known."
        return ""

    def _too_large(self) -> TailorError:
        return HeadersTooLargeError(
            f"The request's headers are larger than {self._max_header_bytes} bytes."
        )

    def _refuse(self, error: TailorError) -> None:
        """Answer with an error and close; once."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        self._stop_head_timer()
        self._on_refused(error.status, error.code or "")
        log.info("refused", extra={"status": error.status, "code": error.code})
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self._can_answer():
            status, body, headers = error_response(error)
            headers += [
                (b"x-request-id", f"req-{secrets.token_hex(12)}".encode()),
                (b"connection", b"close"),
            ]
            head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[status] + head + b"\r\n" + body)
        if cycle is not None:
            cycle.disconnected = True  # whoever reads this request's body learns that it ends here
            cycle.message_event.set()
        self.transport.close()

    def _can_answer(self) -> bool:
        """Whether no byte of the open request's answer was sent."""
        return not self.pipeline and not self.cycle.response_started

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._header_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_head_timer()  # the next request may take its time while this one runs
        elif self._num_head_bytes:
            self._refuse(
                BodyTimeoutError(
                    f"The headers did not arrive within {self._header_timeout_s:g} seconds."
                )
            )
        else:
            self.transport.close()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _not_read(self) -> None:
        self._send_timer = None
        log.info("cut off: the client does not read its answer")
        self._tell_that_it_left()
        self.transport.abort()

    def _tell_that_it_left(self) -> None:
        """Nothing more is written for the open requests, and who works for them learns it."""
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
