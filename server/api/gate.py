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
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.engines.submission import RequestAccount
from server.api.http_answers import encode_ascii
from server.api.keys import Caller, Keyring, check_admin
from server.api.shapes import error_answer
from server.config import TracingConfig
from server.errors import ClientGoneError, ConfigError, ServerError, TailorError
from server.metrics import Metrics

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider


log = logging.getLogger("tailor.http")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})


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
    where no route was found (a client cannot make series by inventing paths). open_paths: need no
    key and are not logged. browser_paths: need one, which a browser may ask for by itself (see
    Keyring.find), but are neither logged nor counted against its limits. admin_paths: need an admin
    key, beside those that always do. traces: where spans go, None is nowhere."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keyring,
        open_paths: frozenset[str] = OPEN_PATHS,
        browser_paths: frozenset[str] = frozenset(),
        admin_paths: frozenset[str] = frozenset(),
        metrics: Metrics,
        routes: Set[str],
        traces: TraceSink | None = None,
    ) -> None:
        self.app = app
        self._keys = keys
        self._open = open_paths
        self._browser = browser_paths
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
            if scope["path"] not in self._open:
                from_browser = scope["path"] in self._browser
                key = self._keys.find(scope, from_browser) if self._keys else None
                check_admin(scope["path"], key, self._admin)
                if key is not None and from_browser:
                    caller.key = key
                elif key is not None:
                    await self._keys.enter(caller, key)
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
        known: str = path if path in self._routes else "other"
        route: str = getattr(scope.get("route"), "path_format", known)
        self._metrics.count_response(route, status, code)
        if path in self._open or path in self._browser:
            return
        ended_s = time.monotonic()
        fields = request_fields(caller, ended_s)
        fields.update(method=scope["method"], path=path[:128], status=status)
        if code:
            fields["code"] = code
        if scope.get("client"):
            fields["client"] = scope["client"][0]
        if self._traces is not None:
            span = request_span(caller, ended_s, scope["method"], route, status, code)
            parents = [value for name, value in scope["headers"] if name == b"traceparent"]
            parent = parents[0].decode("latin-1") if parents else ""
            fields["trace_id"] = self._traces.send(span, parent)
        is_fault = status == ServerError.status
        log.log(logging.ERROR if is_fault else logging.INFO, "request", extra=fields)


def _request_id(scope: Scope) -> str:
    """The client's x-request-id if it is harmless in logs and headers, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(text):
                return text
            break
    return f"req-{secrets.token_hex(12)}"


# --- what is told of a request --------------------------------------------------------------------


MAX_PROMPT_SPANS = 64
"""Prompts of one request that get spans of their own."""


def request_fields(caller: Caller, ended_s: float) -> dict[str, Any]:
    """The log line's fields of a request: who, what, how long, how many tokens; no content."""
    fields: dict[str, Any] = {
        "request_id": caller.request_id,
        "duration_ms": round((ended_s - caller.started_s) * 1e3, 1),
    }
    if caller.key is not None:
        fields["key"] = caller.key.key_id
    if caller.task:
        fields["task"], fields["model"] = caller.task, caller.model
    accounts = _accounts(caller)
    if accounts:
        first_s = min((s for a in accounts if (s := a.first_token_s) is not None), default=None)
        fields["prompt_tokens"] = sum(a.num_prompt_tokens for a in accounts)
        fields["completion_tokens"] = sum(a.num_completion_tokens for a in accounts)
        fields["queue_ms"] = round(max(a.queue_s for a in accounts) * 1e3, 1)
        if first_s is not None:
            fields["first_token_ms"] = round((first_s - caller.started_s) * 1e3, 1)
    return fields


def request_span(
    caller: Caller, ended_s: float, method: str, route: str, status: int, code: str
) -> Span:
    """The tree of spans of a request."""
    offset_ns = time.time_ns() - time.monotonic_ns()

    def at(seconds: float) -> int:
        return offset_ns + int(seconds * 1e9)

    attributes: dict[str, Attribute] = {
        "http.request.method": method if method.isascii() and method.isalpha() else "_OTHER",
        "http.route": route,
        "http.response.status_code": status,
        "tailor.request_id": caller.request_id,
    }
    if caller.key is not None:
        attributes["tailor.key"] = caller.key.key_id
    return Span(
        f"{attributes['http.request.method']} {route}",
        at(caller.started_s),
        at(ended_s),
        attributes,
        [_generate(a, ended_s, at) for a in _accounts(caller)[:MAX_PROMPT_SPANS]],
        error=code if status >= 500 else "",
        is_server=True,
    )


def _accounts(caller: Caller) -> list[RequestAccount]:
    return [account for submission in caller.submissions for account in submission.accounts]


def _generate(account: RequestAccount, ended_s: float, at: Any) -> Span:
    request = account.request
    arrival_s = request.arrival_s
    first_s, last_s = account.first_token_s, account.last_token_s
    begun_s = arrival_s + account.queue_s if account.started else None
    children = [Span("queue", at(arrival_s), at(ended_s if begun_s is None else begun_s))]
    if begun_s is not None:
        prompt = {
            "gen_ai.usage.input_tokens": account.num_prompt_tokens,
            "tailor.cached_tokens": account.num_cached_tokens,
        }
        end_s = ended_s if first_s is None else first_s
        children.append(Span("prefill", at(begun_s), at(end_s), prompt))
    if first_s is not None and last_s is not None:
        drafting = {
            "tailor.steps": account.num_steps,
            "tailor.drafted_tokens": account.num_drafted,
            "tailor.accepted_tokens": account.num_accepted,
        }
        verify = []
        if account.verify_s > 0:
            end_s = min(last_s, first_s + account.verify_s)
            seconds = {"tailor.aggregate": True, "tailor.seconds": account.verify_s}
            verify.append(Span("verify", at(first_s), at(end_s), {**drafting, **seconds}))
        children.append(Span("decode", at(first_s), at(last_s), drafting, verify))
    return Span(
        "generate",
        at(arrival_s),
        at(ended_s if last_s is None else last_s),
        {
            "gen_ai.request.model": request.model,
            "gen_ai.usage.input_tokens": account.num_prompt_tokens,
            "gen_ai.usage.output_tokens": account.num_completion_tokens,
            "tailor.task": request.task,
            "tailor.drafter": request.speculation.drafter,
            "tailor.choices": request.num_choices,
        },
        children,
    )


# --- spans, sent to a collector -------------------------------------------------------------------

# By OpenTelemetry, over OTLP/HTTP. Once a request has ended, a tree of `Span`s with their times
# describes it; no token waits for this. `open_traces` alone imports the opentelemetry packages
# (extra `tracing`).

Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """What happened from start_ns to end_ns (Unix nanoseconds), and its parts.

    error: a code when it failed. is_server: it answers a request from outside.
    """

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    children: Sequence[Span] = ()
    error: str = ""
    is_server: bool = False


class TraceSink(Protocol):
    """Where the API puts its spans."""

    def send(self, span: Span, traceparent: str) -> str:
        """Queue a tree of spans; returns its trace id (32 hex digits), "" when not sampled.

        traceparent: the caller's W3C header, or "": the spans join the caller's trace, and its
        decision whether to sample holds. A malformed header is ignored.
        """

    def close(self) -> None:
        """Send what is queued and end the threads. May block for some seconds."""


def open_traces(config: TracingConfig) -> TraceSink | None:
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
    return _Tracer(provider)


class _Tracer:
    """TraceSink over an OpenTelemetry provider."""

    def __init__(self, provider: TracerProvider) -> None:
        from server import __version__

        self._provider = provider
        self._tracer = provider.get_tracer("tailor", __version__)

    def send(self, span: Span, traceparent: str) -> str:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        return self._emit(span, context)

    def _emit(self, span: Span, context: Context) -> str:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        made = self._tracer.start_span(
            span.name,
            context=context,
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            start_time=span.start_ns,
            attributes=dict(span.attributes),
        )
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        identity = made.get_span_context()
        if identity.trace_flags.sampled:
            within = set_span_in_context(made, context)
            for child in span.children:
                self._emit(child, within)
        made.end(end_time=max(span.start_ns, span.end_ns))
        return format(identity.trace_id, "032x") if identity.trace_flags.sampled else ""

    def close(self) -> None:
        self._provider.shutdown()
