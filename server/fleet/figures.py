"""FleetMetrics: /metrics of an ingress, so that sums over all that are scraped count nothing twice.

An ingress knows the figures of every engine replica, and has their sum as an engine of its own,
MODEL/fleet, for its page. The sum is not told. Where each ingress is scraped alone, on a port of
its own, one of them tells the engines' figures, and the others those of their requests.
"""

from __future__ import annotations

import re
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from server.metrics.series import Metrics

_ENGINES = re.compile(rb'^[^#\n]*[{,]engine="[^\n]*\n', re.MULTILINE)
_SUMS = re.compile(rb'^[^#\n]*[{,]engine="(?:[^"\\\n]|\\.)*/fleet"[^\n]*\n', re.MULTILINE)

_without_engines: ContextVar[bool] = ContextVar("_without_engines", default=False)


class FleetMetrics(Metrics):
    """See the top of this file."""

    def exposition(self) -> bytes:
        """As Metrics.exposition, of one request to /metrics."""
        hidden = _ENGINES if _without_engines.get() else _SUMS
        return hidden.sub(b"", super().exposition())


class WithoutEngines:
    """ASGI middleware: /metrics has no figures of engines where it is asked on `port`."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["path"] == "/metrics":
            _without_engines.set((scope.get("server") or ("", 0))[1] == self._port)
        await self._app(scope, receive, send)
