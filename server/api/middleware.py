"""The gate every HTTP request passes: request id, API key, errors in one shape, one log line.

A pure ASGI middleware: nothing is buffered, a disconnect reaches the route at once. Keys are
checked before routing, on the same path string that the router matches, so no spelling of a path
gets around them; unknown paths need a key too.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
import traceback
from collections.abc import Mapping

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.keys import Keyring, Visit, check_admin
from server.api.responses import encode_ascii, error_answer
from server.api.spans import request_fields, request_span
from server.errors import ServerError, TailorError
from server.metrics.series import Metrics
from server.tracing import TraceSink

log = logging.getLogger("tailor.http")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
CLIENT_GONE = 499
"""nginx's status for a client that left; it is only ever logged and counted."""


def error_response(
    error: TailorError,
) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    """(status, body, headers) of an error in OpenAI's shape."""
    body = encode_ascii(error_answer(error))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    headers += [(name.encode(), value.encode()) for name, value in error.headers]
    return error.status, body, headers


class Gate:
    """app: what is behind it. keys: empty lets everyone in. routes: paths that metrics may name
    (a client cannot make series by inventing paths). open_paths: need no key and are not
    logged. quiet_paths: need one, but are neither logged nor counted against its limits.
    admin_paths: need an admin key, beside those that always do.
    traces: where spans go, None is nowhere."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keyring,
        open_paths: frozenset[str] = OPEN_PATHS,
        quiet_paths: frozenset[str] = frozenset(),
        admin_paths: frozenset[str] = frozenset(),
        metrics: Metrics,
        routes: Mapping[str, str],
        traces: TraceSink | None = None,
    ) -> None:
        self.app = app
        self._keys = keys
        self._open = open_paths
        self._quiet = quiet_paths
        self._admin = admin_paths
        self._metrics = metrics
        self._routes = routes
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        visit = state["visit"] = Visit(request_id)
        status, code = 0, ""

        async def send_on(message: Message) -> None:
            nonlocal status, code
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                headers.append((b"x-request-id", request_id.encode()))
                code = state.get("error_code", "")
                message = {**message, "headers": headers}
            await send(message)

        try:
            if scope["path"] not in self._open:
                key = self._keys.find(scope) if self._keys else None
                check_admin(scope["path"], key, self._admin)
                if key is not None and scope["path"] in self._quiet:
                    visit.key = key
                elif key is not None:
                    await self._keys.enter(visit, key)
            await self.app(scope, receive, send_on)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception as error:
            if not isinstance(error, TailorError):
                # Log where it happened, but not its message, which may hold a prompt.
                frames = traceback.extract_tb(error.__traceback__)[-8:]
                log.error(
                    "error",
                    extra={
                        "request_id": request_id,
                        "error": type(error).__name__,
                        "at": " < ".join(f"{f.name}:{f.lineno}" for f in reversed(frames)),
                    },
                )
                error = ServerError("The server had an internal error.")
            if status == 0:
                state["error_code"] = error.code or ""
                answer, body, headers = error_response(error)
                await send_on({"type": "http.response.start", "status": answer, "headers": headers})
                await send_on({"type": "http.response.body", "body": body})
            else:
                raise ConnectionResetError("an error after the response began") from None
        finally:
            visit.leave()
            self._tell(scope, visit, status or CLIENT_GONE, code)

    def _tell(self, scope: Scope, visit: Visit, status: int, code: str) -> None:
        """Count, trace and log a request that has ended, without its prompt and output."""
        path = scope["path"]
        route = self._routes.get(path, "other")
        if route == "other" and path.startswith("/v1/models/"):
            route = "/v1/models/{model}"
        elif route == "other" and path.startswith("/v1/tasks/"):
            is_corpus = path.endswith("/corpus")
            route = "/v1/tasks/{task}/corpus" if is_corpus else "/v1/tasks/{task}"
        self._metrics.count_response(route, status, code)
        if path in self._open or path in self._quiet:
            return
        ended_s = time.monotonic()
        fields = request_fields(visit, ended_s)
        fields.update(method=scope["method"], path=path[:128], status=status)
        if code:
            fields["code"] = code
        if scope.get("client"):
            fields["client"] = scope["client"][0]
        if self._traces is not None:
            span = request_span(visit, ended_s, scope["method"], route, status, code)
            fields["trace_id"] = self._traces.send(span, _traceparent(scope))
        log.info("request", extra=fields)


def _traceparent(scope: Scope) -> str:
    return next((v.decode("latin-1") for n, v in scope["headers"] if n == b"traceparent"), "")


def _request_id(scope: Scope) -> str:
    """The client's x-request-id if it is harmless in logs and headers, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(text):
                return text
            break
    return f"req-{secrets.token_hex(12)}"
