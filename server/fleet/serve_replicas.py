"""What an ingress reaches through Ray Serve handles: the replicas of a model (far_engine.Replicas),
and the parts of the desk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from server.fleet.desk import Standing
from server.fleet.far_engine import FleetState, ReplicaLostError
from server.fleet.routing import Job

CONTROL_TIMEOUT_S = 8.0
_LOST = (RayError, RayServeException)


class ServeReplicas:
    """model: its name. engines: the handle of its deployment. desk: of the fleet's desk."""

    def __init__(self, model: str, engines: DeploymentHandle, desk: DeploymentHandle) -> None:
        self._model = model
        # By value: a message is some hundred bytes, and an object in Ray's store costs more.
        self._streams = engines.options(stream=True, _by_reference=False)
        self._calls = engines.options(_by_reference=False)
        self._desk = DeskLine(desk, "desk")

    async def stream(self, request: bytes, age_s: float, job: Job) -> AsyncGenerator[bytes, None]:
        """One run of a Request on the replica that the router chose."""
        response = self._streams.stream.remote(request, age_s, job)
        over = False
        try:
            async for message in response:
                yield message
            over = True
        except _LOST as error:
            over = True
            raise ReplicaLostError(f"{type(error).__name__}: {str(error)[:120]}") from None
        finally:
            if not over:
                response.cancel()

    async def state(self) -> FleetState:
        """What the desk knows of the replicas now."""
        return FleetState(*await self._desk.state(self._model))

    async def control(self, name: str, payload: Any) -> list[dict[str, Any]]:
        """The answers of all replicas to one control."""
        there: list[Standing] = await self._desk.standings(self._model)
        return await asyncio.gather(*(self._ask(standing, name, payload) for standing in there))

    async def _ask(self, standing: Standing, name: str, payload: Any) -> dict[str, Any]:
        response = self._calls.control.remote(name, payload, replica=standing.replica_id)
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                answer: dict[str, Any] = await response
                return answer
        except (TimeoutError, *_LOST):
            with contextlib.suppress(Exception):
                response.cancel()
            raise ReplicaLostError(f"{standing.name} does not answer") from None


class DeskLine:
    """The methods of a part of the desk (app.DeskDeployment), as coroutines. desk: the handle of
    its deployment. Each may raise whatever Ray does while the desk is away."""

    def __init__(self, desk: DeploymentHandle, part: str) -> None:
        # By value, as a request is: see ServeReplicas.
        self._ask = partial(desk.options(_by_reference=False).ask.remote, part)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._call, method)

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._ask(method, *args)
