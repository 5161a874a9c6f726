"""The routes about the server's state: /health, /ready, /version, /metrics."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.responses import Response

from server import __version__
from server.api.engines.client import EngineClient
from server.metrics.series import CONTENT_TYPE_LATEST, Metrics

__all__ = ["StateRoutes"]


class StateRoutes:
    """`add_to` puts the routes into an app."""

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics

    def health(self) -> Response:
        """GET /health: 200 while an engine is there or on its first way up."""
        client = self._client
        states = [engine["state"] for engine in client.engines()]
        if not client.is_alive:
            status = "dead"
        elif "ready" not in states:
            status = "loading"
        else:
            status = "ok" if all(state == "ready" for state in states) else "degraded"
        return JSONResponse(
            {"status": status, "engines": client.engines()},
            status_code=200 if client.is_alive else 503,
        )

    def ready(self) -> Response:
        """GET /ready: 200 while requests are taken."""
        client = self._client
        status = "draining" if client.is_draining else "ready" if client.is_ready else "loading"
        return JSONResponse(
            {"status": status},
            status_code=200 if status == "ready" else 503,
            headers={} if status == "ready" else {"retry-after": "1"},
        )

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""

        @app.get("/health")
        async def health() -> Response:
            return self.health()

        @app.get("/ready")
        async def ready() -> Response:
            return self.ready()

        @app.get("/version")
        async def version() -> Response:
            return JSONResponse({"version": __version__})

        @app.get("/metrics", response_class=PlainTextResponse, summary="Prometheus metrics")
        async def get_metrics() -> Response:
            return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
