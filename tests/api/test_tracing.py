"""Spans of requests, as a collector receives them; and that nothing is sent without an endpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from server.api.gate import open_traces
from server.api.keys import Caller
from server.config.server import TracingConfig
from server.errors import ConfigError
from tests.api.live import LiveServer, encode
from tests.fakes.scripted_engine import ScriptedEngine, saying
from tests.small_server import Handler, serving
from tests.waiting import wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """An OTLP/HTTP receiver; `spans` holds what came, as protobuf messages."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: list[str] = []
        self.resources: list[dict[str, Any]] = []
        collector = self

        class Receiver(Handler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
                    ExportTraceServiceRequest,
                )

                message = ExportTraceServiceRequest.FromString(self.body())
                collector.paths.append(self.path)
                for resource in message.resource_spans:
                    collector.resources.append(values(resource.resource.attributes))
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.reply(b"")

        self.handler = Receiver
        self.url = ""


def values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    with serving(made.handler) as made.url:
        yield made


@contextmanager
def traced(collector: Collector, engine: ScriptedEngine, **options: Any) -> Iterator[LiveServer]:
    """A server that traces; the spans are sent when it ends."""
    traces = open_traces(TracingConfig(endpoint=collector.url, **options))
    assert traces is not None
    try:
        with LiveServer([engine], traces=traces) as live:
            yield live
    finally:
        traces.close()


def test_a_request_is_a_tree_of_spans(collector: Collector) -> None:
    engine = ScriptedEngine(saying(encode(" over the lazy dog"), per_step=2), step_s=0.02)
    with traced(collector, engine, service_name="mine") as live:
        answer = httpx.post(
            live.url + "/v1/completions",
            json={"model": "tiny", "prompt": ["the secret", "two"], "max_tokens": 6},
            headers={"traceparent": PARENT, "x-request-id": "asked-1"},
        )
        assert answer.status_code == 200
        httpx.get(live.url + "/health")  # probes are not traced
    assert collector.paths == ["/v1/traces"]
    assert collector.resources[0]["service.name"] == "mine"
    spans = {s.span_id: s for s in collector.spans}
    names = sorted(s.name for s in spans.values())
    each = ["decode", "generate", "prefill", "queue", "verify"]
    assert names == sorted(["POST /v1/completions", *each, *each])
    root = next(s for s in spans.values() if s.name == "POST /v1/completions")
    assert root.trace_id.hex() == PARENT.split("-")[1]
    assert root.parent_span_id.hex() == PARENT.split("-")[2]
    told = values(root.attributes)
    assert told["http.response.status_code"] == 200 and told["tailor.request_id"] == "asked-1"
    parents = {"generate": "POST /v1/completions", "queue": "generate", "prefill": "generate"}
    parents |= {"decode": "generate", "verify": "decode"}
    for span in spans.values():
        assert span.trace_id == root.trace_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span is not root:
            outer = spans[span.parent_span_id]
            assert outer.name == parents[span.name]
            assert outer.start_time_unix_nano - 1_000_000 <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= outer.end_time_unix_nano + 1_000_000
    decode = next(s for s in spans.values() if s.name == "decode")
    lasted_s = (decode.end_time_unix_nano - decode.start_time_unix_nano) / 1e9
    assert 0.02 < lasted_s < 1  # three steps: two gaps
    generate = values(next(s for s in spans.values() if s.name == "generate").attributes)
    assert generate["gen_ai.usage.output_tokens"] == 6
    assert "secret" not in str(collector.spans)


@pytest.mark.server_error
def test_failures_and_refusals_are_told(collector: Collector) -> None:
    engine = ScriptedEngine(saying([5]))
    with traced(collector, engine) as live:
        assert live.post(n=0).status_code == 400
        wait_until(lambda: live.client.is_ready)
        engine.gate.clear()
        thread = threading.Thread(target=lambda: live.post())
        thread.start()
        wait_until(lambda: live.client.num_open == 1)
        engine.die()
        thread.join()
    by_status = {values(s.attributes).get("http.response.status_code"): s for s in collector.spans}
    assert by_status[400].status.code == 0
    assert by_status[500].status.code == 2 and by_status[500].status.message == "engine_died"
    queue = next(s for s in collector.spans if s.name == "queue")
    assert queue.end_time_unix_nano > queue.start_time_unix_nano


def test_sampling_follows_the_caller(collector: Collector) -> None:
    engine = ScriptedEngine(saying([5]))
    with traced(collector, engine, sample_ratio=0.0) as live:
        for parent in ("", "nonsense\x00", PARENT[:-1] + "0", "00-" + "0" * 32 + "-1-01"):
            headers = {b"traceparent": parent.encode("latin-1")}
            with suppress(httpx.LocalProtocolError):
                httpx.get(live.url + "/v1/models", headers=headers)
        httpx.get(live.url + "/v1/models", headers={"traceparent": PARENT})
    assert [s.trace_id.hex() for s in collector.spans] == [PARENT.split("-")[1]]


@pytest.mark.slow
def test_a_collector_that_is_not_there_costs_nothing() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_EXPORT_TIMEOUT", "200")
        traces = open_traces(TracingConfig(endpoint="http://127.0.0.1:9/else/where"))
        assert traces is not None
        with LiveServer([ScriptedEngine(saying([5]))], traces=traces) as live:
            for _ in range(20):
                assert live.post(max_tokens=2).status_code == 200
        scope = {"method": "GET", "headers": []}
        assert len(traces.send(Caller("x"), 2.0, scope, "/", 200, "")) == 32
        traces.close()  # its thread would go on, and draw its pauses in the midst of other tests


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk"):
        open_traces(TracingConfig(endpoint="http://127.0.0.1:4318"))
