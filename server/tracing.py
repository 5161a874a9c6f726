"""OpenTelemetry traces of requests, sent to a collector over OTLP/HTTP.

    tracer = open_tracer("http://127.0.0.1:4318", service_name="tailor", sample_ratio=1.0)
    trace_id = tracer.send(span, traceparent)
    tracer.close()

Once a request has ended, a tree of `Span`s with their times describes it; no token waits for this.
`open_tracer` alone imports the opentelemetry packages (extra `tracing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from server.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

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


def open_tracer(
    endpoint: str, *, service_name: str = "tailor", sample_ratio: float = 1.0
) -> TraceSink:
    """A sink for a collector. An endpoint without a path gets OTLP's own, /v1/traces.

    Raises ConfigError when the extra is not installed.
    """
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
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        resource=Resource.create({"service.name": service_name}),
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
