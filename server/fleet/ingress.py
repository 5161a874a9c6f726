"""IngressApp: the HTTP application of a single server, with a fleet where its engines were."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial

from starlette.types import Receive, Scope, Send

from server.api.app import create_app
from server.api.engines.client import EngineClient
from server.api.engines.slot import EngineSpec
from server.api.serving import serve
from server.config import ServerConfig
from server.errors import ConfigError
from server.fleet.far_engine import FleetHandle, FleetState
from server.fleet.parts import Front
from server.metrics.series import Metrics
from server.tracing import TraceSink, open_tracer

StartFleet = Callable[[str, Callable[[FleetState], None]], FleetHandle]
"""(model, who is told how its replicas are) -> its fleet. Called in a thread."""


class IngressApp:
    """The application, to be run by `run` on a socket of its own, or as an ASGI application, whose
    engines are there between the lifespan's start and its end.

    start: starts the fleet of a model. The metrics of each replica are told under its engine's
    name, `model/rank`, so that dashboards and alerts of a single server hold for a fleet.
    """

    def __init__(self, config: ServerConfig, front: Front, start: StartFleet) -> None:
        self._config = config
        self._stop = asyncio.Event()
        self._metrics = Metrics(vllm_aliases=config.metrics.vllm_aliases)
        self._known: dict[str, set[str]] = {}
        self.client = EngineClient(
            [
                EngineSpec(
                    f"{name}/fleet", name, "fleet", partial(start, name, partial(self._note, name))
                )
                for name in front.models
            ],
            metrics=self._metrics,
            max_queued_requests=config.limits.max_queued_requests,
            max_queued_tokens=config.limits.max_queued_tokens,
        )
        self._traces: TraceSink | None = None
        if config.tracing.endpoint is not None:
            self._traces = open_tracer(
                config.tracing.endpoint,
                service_name=config.tracing.service_name,
                sample_ratio=config.tracing.sample_ratio,
            )
        self._app = create_app(
            config,
            tasks=front.tasks,
            models=front.models,
            client=self.client,
            metrics=self._metrics,
            drafters=front.drafters,
            task_admin=front.task_admin,
            traces=self._traces,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. The engines are started with the lifespan and stopped at its end."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await self.client.start()
        try:
            await self._app(scope, receive, send)
        finally:
            await self.client.stop()
            if self._traces is not None:
                self._traces.close()

    async def run(self, listener: socket.socket) -> None:
        """Serve, with a single server's bounds on connections, until `stop`, and then drain."""
        try:
            await serve(
                self._app,
                self.client,
                limits=self._config.limits,
                sockets=[listener],
                stop=self._stop,
            )
        finally:
            if self._traces is not None:
                self._traces.close()

    def stop(self) -> None:
        """End `run`: /ready turns 503, what is open goes on for limits.drain_s seconds."""
        self._stop.set()

    def _note(self, model: str, state: FleetState) -> None:
        """Tell each replica's figures in /metrics, and which are gone."""
        before = self._known.get(model, set())
        if state.info is not None:
            for name in state.stats.keys() - before:
                self._metrics.engine_ready(name, model, state.info)
        for name, stats in state.stats.items():
            self._metrics.engine_stats(name, model, stats)
        for name in before - state.stats.keys():
            self._metrics.engine_down(name, model, restarted=False)
        self._known[model] = set(state.stats)


def shared_port(host: str, port: int) -> socket.socket:
    """A listening socket of a port that the ingresses of a machine share; the kernel deals out
    connections. Raises ConfigError."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            taken.bind(address)
            taken.listen(2048)
        except OSError:
            taken.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    taken.setblocking(False)
    return taken
