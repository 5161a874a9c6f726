"""The routes about the server's state: /health, /ready, /ping, /load, /version, /metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from msgspec import UNSET, UnsetType
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from server import __version__
from server.api.engines.client import EngineClient
from server.api.http_answers import AnswerResponse
from server.api.openapi import described
from server.api.shapes import Count, Shape
from server.metrics.series import Metrics

HealthStatus = Literal["ok", "degraded", "loading", "stuck", "dead"]
ReadyStatus = Literal["ready", "loading", "stuck", "draining"]


class EngineState(Shape, kw_only=True):
    name: str
    model: str
    device: str
    state: Literal["loading", "ready", "stuck", "restarting", "failed", "stopped"]
    restarts: Count
    open_requests: Count


class Health(Shape, kw_only=True):
    status: HealthStatus
    engines: list[EngineState]


class Ready(Shape, kw_only=True):
    status: ReadyStatus
    stuck: list[str] | UnsetType = UNSET


class Load(Shape, kw_only=True):
    """Requests that engines work for, or that wait for one."""

    server_load: Count


class Version(Shape, kw_only=True):
    version: str


class StateRoutes:
    """`add_to` puts the routes into an app."""

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics

    def health(self) -> Response:
        """GET /health, as load balancers read it: 200 while an engine serves and none hangs."""
        client = self._client
        engines = [EngineState(**engine) for engine in client.engines()]
        states = [engine.state for engine in engines]
        status: HealthStatus = "degraded"
        if not client.is_alive:
            status = "dead"
        elif client.stuck:
            status = "stuck"
        elif "ready" not in states:
            status = "loading"
        elif set(states) == {"ready"}:
            status = "ok"
        answer = Health(status=status, engines=engines)
        if status in ("ok", "degraded"):
            return AnswerResponse(answer)
        return AnswerResponse(answer, 503, {"retry-after": "1"})

    def ready(self) -> Response:
        """GET /ready: 200 while requests are taken."""
        client, stuck = self._client, self._client.stuck
        status: ReadyStatus = "stuck" if stuck else "loading"
        if client.is_draining:
            status = "draining"
        elif client.is_ready:
            status = "ready"
        answer = Ready(status=status, stuck=stuck or UNSET)
        if status == "ready":
            return AnswerResponse(answer)
        return AnswerResponse(answer, 503, {"retry-after": "1"})

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""

        @app.get("/health", **described("The state of every engine", Health, own_503=True))
        async def health() -> Response:
            return self.health()

        @app.get("/ready", **described("Whether requests are taken", Ready, own_503=True))
        async def ready() -> Response:
            return self.ready()

        @app.get("/ping", response_class=Response)
        async def ping() -> Response:
            """For who ends a process that will not recover: 200 while it serves or loads."""
            client = self._client
            return Response(status_code=200 if client.is_alive and not client.stuck else 503)

        @app.get("/load", **described("Open requests", Load))
        async def load() -> Response:
            return AnswerResponse(Load(server_load=self._client.num_open))

        @app.get("/version", **described("The server's version", Version))
        async def version() -> Response:
            return AnswerResponse(Version(version=__version__))

        @app.get("/metrics", response_class=PlainTextResponse, summary="Prometheus metrics")
        async def get_metrics() -> Response:
            await self._client.ask_figures()
            return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
