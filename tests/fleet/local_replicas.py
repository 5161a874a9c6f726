"""Replicas without Ray: EngineReplicas in this process, behind the same routing and the same seam.

They can be killed, as a machine that loses its power is: what they were sending never arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from server.api.engines.client import EngineSpec
from server.config import RestartConfig
from server.fleet.desk import FleetState
from server.fleet.far_engine import FleetHandle, ReplicaLostError
from server.fleet.replica import EngineReplica
from server.fleet.routing import Job, ReplicaView, TaskRouting
from tests.waiting import until


class LocalReplicas:
    """far_engine.Replicas over EngineReplicas of `specs`, made on the loop of the first call."""

    def __init__(
        self,
        specs: list[EngineSpec],
        *,
        max_messages_per_s: float = 1e6,
        restart: RestartConfig | None = None,
    ) -> None:
        self.specs = specs
        self.routing = TaskRouting()
        self.there: dict[str, EngineReplica] = {}
        self.num_open: dict[str, int] = {}
        self.num_streams = 0
        self._max_messages_per_s = max_messages_per_s
        self._restart = restart
        self._starting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def _start(self) -> None:
        for spec in self.specs:
            await self._add(spec)

    async def _add(self, spec: EngineSpec) -> None:
        replica = EngineReplica(
            spec, restart=self._restart, max_messages_per_s=self._max_messages_per_s
        )
        await replica.start()
        self.there[spec.name] = replica
        self.num_open[spec.name] = 0
        self.routing.set_replicas(self.there)

    async def state(self) -> FleetState:
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)  # who asks may have no time
        info = next((r.info for r in self.there.values()), None)
        for replica in list(self.there.values()):
            await replica.look()
        return FleetState(info, {name: r.figures for name, r in self.there.items()})

    async def stream(self, request: bytes, age_s: float, job: Job) -> AsyncGenerator[bytes, None]:
        await until(lambda: self.there, 3600.0, pause_s=0.01)
        views = {name: ReplicaView(self.num_open[name]) for name in self.there}
        name = self.routing.choose(job, views.get)[0]
        self.routing.routed(job, name)
        self.num_streams += 1
        self.num_open[name] += 1
        replica = self.there[name]
        stream = replica.stream(request, age_s)
        try:
            async for message in stream:
                if self.there.get(name) is not replica:
                    raise ReplicaLostError(f"{name} was killed")
                yield message
        finally:
            self.num_open[name] -= 1
            await stream.aclose()

    async def control(self, name: str, payload: Any) -> list[dict[str, Any]]:
        return [await replica.control(name, payload, 5.0) for replica in self.there.values()]

    async def stop(self) -> None:
        """End all of them."""
        while self.there:
            _, replica = self.there.popitem()
            await replica.stop()

    # --- from any thread ---

    def kill(self, name: str) -> None:
        """The replica is gone with all that it was sending."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._kill, name)

    def add(self, spec: EngineSpec) -> None:
        """A new replica comes up."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._add(spec), self._loop).result(10)

    def _kill(self, name: str) -> None:
        replica = self.there.pop(name)
        self.routing.set_replicas(self.there)
        self._ending = asyncio.create_task(replica.stop())


class _Fleet(FleetHandle):
    """It ends its replicas when it ends, as an engine's handle does."""

    def stop(self, timeout_s: float) -> None:
        super().stop(timeout_s)
        assert isinstance(self._replicas, LocalReplicas)
        asyncio.run_coroutine_threadsafe(self._replicas.stop(), self._loop).result(timeout_s)


def fleet_spec(
    replicas: LocalReplicas,
    loop: Callable[[], asyncio.AbstractEventLoop],
    name: str = "tiny/fleet",
    **options: Any,
) -> EngineSpec:
    """An ingress's one engine: the whole fleet. loop: the ingress's, asked for at the start."""

    def start() -> FleetHandle:
        return _Fleet(replicas, name=name, loop=loop(), **{"first_pause_s": 0.01, **options})

    return EngineSpec(name, replicas.specs[0].model, "fleet", start)
