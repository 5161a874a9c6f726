"""IngressApp: the HTTP application of a single server, with a fleet where its engines were."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from drafters import DRAFTER_NAMES
from server.api.app import create_app
from server.api.engines.client import EngineClient, EngineSpec
from server.api.gate import open_traces
from server.api.serving import serve
from server.errors import DrainingError
from server.fleet.budgets import FleetUses
from server.fleet.changes import SharedTasks
from server.fleet.desk import FleetState
from server.fleet.far_engine import FleetHandle, Replicas
from server.metrics import Metrics

if TYPE_CHECKING:
    from server.wiring.server import ServerPlan

_FOLLOWED_S = 5.0
"""So long it waits for what was changed before it came, adapters that were loaded for example."""
_DRAIN_S = 7 * 86400.0  # `stop` says how long it is


class IngressApp:
    """The application, to be run by `run` on a socket of its own, or as an ASGI application, whose
    engines are there between the lifespan's start and its end.

    plan: of a single server. replicas: of each model. max_runs: of a request, as FleetHandle's.
    uses, shared: keys' limits and changes of tasks, which it has in common with the other
    ingresses. The metrics of each replica have its engine's name, `model/rank`, so that dashboards
    and alerts of a single server hold for a fleet.
    requests_only_port: where /metrics leaves engines to another ingress (FleetMetrics).
    """

    def __init__(
        self,
        plan: ServerPlan,
        replicas: Mapping[str, Replicas],
        max_runs: int,
        uses: FleetUses,
        shared: SharedTasks,
        requests_only_port: int | None = None,
    ) -> None:
        config = self._config = plan.config
        self._uses = uses
        self._shared = shared
        self._stop = asyncio.Event()
        self._leave_s = 0.0
        self._metrics = FleetMetrics(requests_only_port, config.metrics.vllm_aliases)
        self._known: dict[str, set[str]] = {}
        fleet = partial(FleetHandle, loop=asyncio.get_running_loop(), max_runs=max_runs)
        specs = []
        for model in plan.models:
            name, told = f"{model}/fleet", partial(self.note, model)
            start = partial(fleet, replicas[model], name=name, on_state=told)
            specs.append(EngineSpec(name, model, "fleet", start))
        self.client = EngineClient(specs, metrics=self._metrics, limits=config.limits)
        self._traces = open_traces(config.tracing)
        self._app = create_app(
            config,
            tasks=plan.tasks,
            models=plan.models,
            client=self.client,
            drafters=DRAFTER_NAMES,
            task_admin=self._shared,
            traces=self._traces,
            key_use=self._uses.of,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. The engines are started with the lifespan and stopped at its end."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await self.client.start()
        async with self._beside():
            try:
                await self._app(scope, receive, send)
            finally:
                await self.client.stop()

    async def start(self, timeout_s: float) -> None:
        """Return when the fleet has told its models, or after so long: one that sleeps has none."""
        await self.client.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.client.wait_ready()

    async def run(self, *listeners: socket.socket) -> None:
        """Serve, with a single server's bounds on connections, until `stop`, and then drain."""
        async with self._beside():
            await serve(
                self._app,
                self.client,
                limits=self._config.limits.model_copy(update={"drain_s": _DRAIN_S}),
                sockets=listeners,
                certificate=self._config.listen.certificate,
                leave_s=lambda: self._leave_s,
                stop=self._stop,
            )

    def stop(self, drain_s: float, *, is_replaced: bool) -> None:
        """End `run`: what is open goes on for so many seconds. On the loop.

        is_replaced: others listen on the port. Then the connections that are open are served until
        they end, each after one answer more; else /ready turns 503 and new requests are refused.
        """
        self._leave_s = drain_s if is_replaced else 0.0
        self._stop.set()
        error = DrainingError("The server is shutting down.")
        asyncio.get_running_loop().call_later(drain_s, self.client.abort_all, error)

    @contextlib.asynccontextmanager
    async def _beside(self) -> AsyncIterator[None]:
        """What runs while it serves: what it has in common with the other ingresses."""
        state = self._app.state
        follow = self._shared.run(state.follow_tasks, state.follow_adapter)
        tasks = [asyncio.create_task(run) for run in (self._uses.run(), follow)]
        try:
            with contextlib.suppress(TimeoutError):  # the desk is away
                async with asyncio.timeout(_FOLLOWED_S):
                    await self._shared.has_followed.wait()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._traces is not None:
                self._traces.close()

    def note(self, model: str, state: FleetState) -> None:
        """Tell each replica's figures in /metrics, and which are gone, or whose engine is."""
        if (info := state.info) is None:  # nobody knows
            return
        before = self._known.get(model, set())
        there = {name: values for name, values in state.figures.items() if values}
        for name in there.keys() - before:
            self._metrics.engine_ready(name, model, info)
        for name, values in there.items():
            self._metrics.engine_told(name, values)
        self._metrics.engine_told(f"{model}/fleet", *there.values())
        for name in {*before, *state.left} - there.keys():
            if name in state.figures:
                self._metrics.engine_down(name, model, restarted=True)
            else:
                self._metrics.engine_gone(name, model, has_left=name in state.left)
        self._known[model] = set(there)


_ENGINES = re.compile(rb'^[^#\n]*[{,]engine="[^\n]*\n', re.MULTILINE)
_SUMS = re.compile(rb'^[^#\n]*[{,]engine="(?:(?:[^"\\\n]|\\.)*/)?fleet"[^\n]*\n', re.MULTILINE)


class FleetMetrics(Metrics):
    """/metrics of an ingress, so that sums over all that are scraped count nothing twice.

    An ingress knows the figures of every engine replica, and has their sum as an engine of its own,
    MODEL/fleet, for its page. The sum is not told. Where each ingress is scraped alone, on a port
    of its own, one of them tells the engines' figures, and the others those of their requests.
    """

    def __init__(self, requests_only_port: int | None, vllm_aliases: bool) -> None:
        super().__init__(vllm_aliases=vllm_aliases)
        self._requests_only_port = requests_only_port

    def exposition(self, port: int = 0) -> bytes:
        """As Metrics.exposition."""
        hidden = _ENGINES if port == self._requests_only_port else _SUMS
        return hidden.sub(b"", super().exposition())
