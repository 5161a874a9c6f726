"""The routes about the server's state: /health, /ready, /ping, /load, /version, /metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from msgspec import UNSET
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from server import __version__
from server.api.engines.client import EngineClient
from server.api.responses import AnswerResponse
from server.api.state_responses import EngineState, Health, Load, Ready, Version
from server.metrics.series import Metrics


class StateRoutes:
    """`add_to` puts the routes into an app."""

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics

    def health(self) -> Response:
        """GET /health: 200 while an engine serves or starts for the first time, and none hangs."""
        client = self._client
        states = [engine["state"] for engine in client.engines()]
        status: Literal["ok", "degraded", "loading", "stuck", "dead"]
        if not client.is_alive:
            status = "dead"
        elif client.stuck:
            status = "stuck"
        elif "ready" not in states:
            status = "loading"
        else:
            status = "ok" if all(state == "ready" for state in states) else "degraded"
        engines = [EngineState(**engine) for engine in client.engines()]
        answer = Health(status=status, engines=engines)
        return AnswerResponse(answer, 503 if status in ("dead", "stuck") else 200)

    def ready(self) -> Response:
        """GET /ready: 200 while requests are taken."""
        client = self._client
        stuck = client.stuck
        status: Literal["ready", "loading", "stuck", "draining"]
        if client.is_draining:
            status = "draining"
        elif client.is_ready:
            status = "ready"
        else:
            status = "stuck" if stuck else "loading"
        answer = Ready(status=status, stuck=stuck or UNSET)
        if status == "ready":
            return AnswerResponse(answer)
        return AnswerResponse(answer, 503, {"retry-after": "1"})

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""

        @app.get("/health")
        async def health() -> Response:
            return self.health()

        @app.get("/ready")
        async def ready() -> Response:
            return self.ready()

        @app.get("/ping", response_class=Response)
        async def ping() -> Response:
            return Response(status_code=200 if self._client.is_alive else 503)

        @app.get("/load")
        async def load() -> Response:
            return AnswerResponse(Load(server_load=self._client.num_open))

        @app.get("/version")
        async def version() -> Response:
            return AnswerResponse(Version(version=__version__))

        @app.get("/metrics", response_class=PlainTextResponse, summary="Prometheus metrics")
        async def get_metrics() -> Response:
            return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
