"""The gate every HTTP request passes: request id, API key, errors in one shape, one log line, one
tree of spans.

A pure ASGI middleware: nothing is buffered, a disconnect reaches the route at once. Keys are
checked before routing, on the same path string that the router matches, so no spelling of a path
gets around them; unknown paths need a key too.

A client that leaves before the last byte of its answer is no fault: its request is logged and
counted with nginx's 499, whatever had begun.

    POST /v1/completions                      the HTTP request
    └── generate                              one prompt, all its choices
        ├── queue       arrival to first step
        ├── prefill     first step to first token
        └── decode      first token to last token
            └── verify  the forward passes that carried drafts, as one stretch from decode's begin

All times of spans come from the Deltas. `verify` is a sum of steps that lie apart, so it has the
attribute tailor.aggregate.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
import traceback
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.keys import Caller, Keyring, check_admin
from server.api.route_context import encode_ascii
from server.api.shapes import error_answer
from server.config.server import TracingConfig
from server.errors import (
    ClientGoneError,
    ConfigError,
    InvalidRequestError,
    ServerError,
    TailorError,
    UnknownFieldError,
    echoed,
)
from server.metrics import Metrics

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider


log = logging.getLogger("tailor.http")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
_ANY_QUERY = OPEN_PATHS | {"/metrics", "/"}
"""Browsers and monitors add query keys of their own to pages and probes."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """app: what is behind it. keys: empty lets everyone in. routes: paths that metrics may name
    where no route was found (a client cannot make series by inventing paths). open_paths: need no
    key and are not logged. browser_paths: need one, which a browser may ask for by itself (see
    Keyring.find), but are neither logged nor counted against its limits. admin_paths: need an admin
    key, beside those that always do. traces: where spans go, None is nowhere."""

    app: ASGIApp
    keys: Keyring
    metrics: Metrics
    routes: Set[str]
    open_paths: Set[str] = OPEN_PATHS
    browser_paths: Set[str] = frozenset()
    admin_paths: frozenset[str] = frozenset()
    traces: Traces | None = None

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
        caller = state["caller"] = Caller(request_id)
        status, code, has_ended, has_left = 0, "", False, False

        async def receive_on() -> Message:
            nonlocal has_left
            message = await receive()
            if message["type"] == "http.disconnect" and not has_ended:
                has_left = True
            return message

        async def send_on(message: Message) -> None:
            nonlocal status, code, has_ended
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                headers.append((b"x-request-id", request_id.encode()))
                code = state.get("error_code", "")
                message = {**message, "headers": headers}
            elif not message.get("more_body"):
                has_ended = True
            await send(message)

        try:
            if scope["path"] not in self.open_paths:
                from_browser = scope["path"] in self.browser_paths
                key = self.keys.find(scope, from_browser) if self.keys else None
                check_admin(scope["path"], key, self.admin_paths)
                if key is not None and from_browser:
                    caller.key = key
                elif key is not None:
                    await self.keys.enter(caller, key)
            await self.app(scope, receive_on, send_on)
        except (ClientDisconnect, ClientGoneError):
            has_left = True
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
            caller.leave()
            if has_left and status < ServerError.status:
                status, code = ClientGoneError.status, ""
            self._tell(scope, caller, status or ClientGoneError.status, code)

    def _tell(self, scope: Scope, caller: Caller, status: int, code: str) -> None:
        """Count, trace and log a request that has ended, without its prompt and output."""
        path = scope["path"]
        known: str = path if path in self.routes else "other"
        route: str = getattr(scope.get("route"), "path_format", known)
        self.metrics.count_response(route, status, code)
        if path in self.open_paths or path in self.browser_paths:
            return
        ended_s = time.monotonic()
        fields: dict[str, Any] = {
            "request_id": caller.request_id,
            "duration_ms": round((ended_s - caller.started_s) * 1e3, 1),
        }
        if caller.key is not None:
            fields["key"] = caller.key.key_id
        if caller.task:
            fields["task"], fields["model"] = caller.task, caller.model
        if accounts := caller.accounts:
            first_s = min((s for a in accounts if (s := a.first_token_s) is not None), default=None)
            fields["prompt_tokens"] = sum(a.num_prompt_tokens for a in accounts)
            fields["completion_tokens"] = sum(a.num_completion_tokens for a in accounts)
            fields["queue_ms"] = round(max(a.queue_s for a in accounts) * 1e3, 1)
            if first_s is not None:
                fields["first_token_ms"] = round((first_s - caller.started_s) * 1e3, 1)
        fields |= {"method": scope["method"], "path": path[:128], "status": status}
        if code:
            fields["code"] = code
        if scope.get("client"):
            fields["client"] = scope["client"][0]
        if self.traces is not None:
            fields["trace_id"] = self.traces.send(caller, ended_s, scope, route, status, code)
        is_fault = status == ServerError.status
        log.log(logging.ERROR if is_fault else logging.INFO, "request", extra=fields)


def _request_id(scope: Scope) -> str:
    """The client's x-request-id if it is harmless in logs and headers, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


async def check_query(request: Request) -> None:
    """A dependency of every route: a GET route honours the query keys that it declares as its own
    parameters; others are refused by name, and so is one that is given twice. Queries of POST
    routes are ignored: some clients put a version there."""
    route = request.scope["route"]
    if request.method not in ("GET", "HEAD") or route.path in _ANY_QUERY:
        return
    known = {field.alias for field in route.dependant.query_params}
    for key in request.query_params:
        if key not in known:
            name = echoed(key, 64).strip("'")
            raise UnknownFieldError(f"Unknown query key: {name}.", param=name)
        if len(request.query_params.getlist(key)) > 1:
            raise InvalidRequestError(f"{key}: may be given once.", param=key)


# --- spans, sent to a collector -------------------------------------------------------------------

# By OpenTelemetry, over OTLP/HTTP, once a request has ended: no token waits for this. Only what is
# below imports the opentelemetry packages (extra `tracing`).

MAX_PROMPT_SPANS = 64
"""Prompts of one request that get spans of their own."""


class Traces:
    """Where the gate puts its spans: an OpenTelemetry provider."""

    def __init__(self, provider: TracerProvider) -> None:
        from server import __version__

        self._provider = provider
        self._tracer = provider.get_tracer("tailor", __version__)

    def send(
        self, caller: Caller, ended_s: float, scope: Scope, route: str, status: int, code: str
    ) -> str:
        """Queue a request's tree of spans; returns its trace id (32 hex digits), "" when not
        sampled.

        With the W3C header `traceparent` they join the caller's trace, and its decision whether to
        sample holds. A malformed one is ignored.
        """
        from opentelemetry.trace import (
            SpanKind,
            Status,
            StatusCode,
            get_current_span,
            set_span_in_context,
        )
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        offset_ns = time.time_ns() - time.monotonic_ns()

        def span(
            name: str,
            within: Context,
            start_s: float,
            end_s: float,
            attributes: Mapping[str, str | int | float | bool] = {},
            *,
            kind: SpanKind = SpanKind.INTERNAL,
            error: str = "",
        ) -> Context:
            start_ns = offset_ns + int(start_s * 1e9)
            made = self._tracer.start_span(name, within, kind, attributes, start_time=start_ns)
            if error:
                made.set_status(Status(StatusCode.ERROR, error))
            made.end(end_time=max(start_ns, offset_ns + int(end_s * 1e9)))
            return set_span_in_context(made, within)

        method = scope["method"]
        known = method if method.isascii() and method.isalpha() else "_OTHER"
        parent = Headers(scope=scope).get("traceparent", "")
        attributes: dict[str, str | int] = {
            "http.request.method": known,
            "http.route": route,
            "http.response.status_code": status,
            "tailor.request_id": caller.request_id,
        }
        if caller.key is not None:
            attributes["tailor.key"] = caller.key.key_id
        root = span(
            f"{known} {route}",
            TraceContextTextMapPropagator().extract({"traceparent": parent}),
            caller.started_s,
            ended_s,
            attributes,
            kind=SpanKind.SERVER,
            error=code if status >= 500 else "",
        )
        identity = get_current_span(root).get_span_context()
        if not identity.trace_flags.sampled:
            return ""
        for account in caller.accounts[:MAX_PROMPT_SPANS]:
            request, first_s, last_s = account.request, account.first_token_s, account.last_token_s
            prompt = {"gen_ai.usage.input_tokens": account.num_prompt_tokens}
            generate = span(
                "generate",
                root,
                request.arrival_s,
                ended_s if last_s is None else last_s,
                {
                    "gen_ai.request.model": request.model,
                    **prompt,
                    "gen_ai.usage.output_tokens": account.num_completion_tokens,
                    "tailor.task": request.task,
                    "tailor.drafter": request.speculation.drafter,
                    "tailor.choices": request.num_choices,
                },
            )
            begun_s = request.arrival_s + account.queue_s if account.started else ended_s
            span("queue", generate, request.arrival_s, begun_s)
            if account.started:
                end_s = ended_s if first_s is None else first_s
                cached = {"tailor.cached_tokens": account.num_cached_tokens}
                span("prefill", generate, begun_s, end_s, {**prompt, **cached})
            if first_s is None or last_s is None:
                continue
            drafted = account.drafted
            drafting = {
                "tailor.steps": account.num_steps,
                "tailor.drafted_tokens": drafted.num_drafted,
                "tailor.accepted_tokens": drafted.num_accepted,
            }
            decode = span("decode", generate, first_s, last_s, drafting)
            if drafted.verify_s > 0:
                seconds = {"tailor.aggregate": True, "tailor.seconds": drafted.verify_s}
                end_s = min(last_s, first_s + drafted.verify_s)
                span("verify", decode, first_s, end_s, {**drafting, **seconds})
        return format(identity.trace_id, "032x")

    def close(self) -> None:
        """Send what is queued and end the threads. May block for some seconds."""
        self._provider.shutdown()


def open_traces(config: TracingConfig) -> Traces | None:
    """A sink for a collector, None without one. An endpoint without a path gets OTLP's own,
    /v1/traces.

    Raises ConfigError when the extra is not installed.
    """
    endpoint = config.endpoint
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigError(
            "tracing.endpoint needs `pip install opentelemetry-sdk "
            f"opentelemetry-exporter-otlp-proto-http`: {error.name} is missing"
        ) from None
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
        resource=Resource.create({"service.name": config.service_name}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
    return Traces(provider)
