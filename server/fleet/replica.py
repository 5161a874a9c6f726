"""EngineReplica: one engine of the fleet, served to any number of ingresses.

It holds an EngineClient with one engine, exactly as a single server does: the engine starts and
starts again, tells its pulse, and aborts reach it before its next step. This module does not import
Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, replace
from typing import Any

from server import channel
from server.api.engines.client import EngineClient, EngineSpec
from server.api.engines.submission import GRAMMAR_FIELD
from server.config import LimitsConfig, RestartConfig
from server.errors import (
    DrainingError,
    EngineDiedError,
    ModelNotFoundError,
    NoEngineError,
    QueueFullError,
    TailorError,
    UnavailableError,
)
from server.fleet.scaling import CostMeter
from server.metrics import Metrics
from server.types import AdapterOrder, Delta, FigureValue, ModelInfo, Request

LOST = "lost"
"""("lost", replica_id, taken): the last message of a stream that broke off; the request may be run
again elsewhere. taken: whether this replica's engine had begun to work for it."""

CONTROL_S = 8.0
"""The time that an engine has to answer a control."""
_LOOK_S = 1.0
_ELSEWHERE = (EngineDiedError, NoEngineError, DrainingError)
"""Errors after which another replica may serve the request: this one's engine is gone, starts
again, or is about to end."""


class EngineReplica:
    """One engine and the streams that are open on it.

    spec: the engine. replica_id: what the router calls it. max_messages_per_s: the most messages
    that it sends in a second over all streams: with many streams, each sends what several steps
    gave at once, because a message costs the same whatever it holds. All methods belong to one
    event loop.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        replica_id: str | None = None,
        restart: RestartConfig | None = None,
        limits: LimitsConfig | None = None,
        max_messages_per_s: float = 2000.0,
    ) -> None:
        self.spec = spec
        self.replica_id = replica_id or spec.name
        self.client = EngineClient([spec], metrics=Metrics(), restart=restart, limits=limits)
        self.costs = CostMeter()
        self._pause_s = 1.0 / max_messages_per_s
        self.figures: list[FigureValue] = []
        self._named: dict[str, Any] = {}
        self._counted: tuple[float, ...] = (0.0, 0.0, 0.0)
        self._known: dict[str, int] = {}  # adapters that `know` told: in which life of the engine

    async def start(self) -> ModelInfo:
        """Start the engine and return when it is ready. Raises NoEngineError when it never is."""
        await self.client.start()
        await self.client.wait_ready()
        return self.info

    @property
    def info(self) -> ModelInfo:
        """What the engine told. Raises NoEngineError before that."""
        info = self.client.info(self.spec.model)
        if info is None:
            raise NoEngineError("The engine is not ready.")
        return info

    async def look(self) -> None:
        """Have the engine tell its figures; one that is busy for longer keeps what it told, and one
        that is gone holds nothing."""
        try:
            answer = await self.control("figures", None, _LOOK_S)
        except NoEngineError:
            self.figures, self._named = [], {}
            return
        except TailorError:
            return
        self.figures = answer["value"]
        names = (figure.name for figure in self.info.figures)
        named: dict[str, Any] = dict(zip(names, self.figures, strict=False))
        self._named = named
        # Steps, rows and seconds since the engine's start.
        (_, rows), (_, seconds) = named["step_rows"], named["step_time_seconds"]
        now = (named["engine_steps"], rows, seconds)
        steps, rows, seconds = (a - b for a, b in zip(now, self._counted, strict=True))
        self._counted = now
        if steps > 0:
            self.costs.observe(rows / steps, seconds / steps)

    @property
    def serves(self) -> bool:
        """Whether its engine is ready and makes progress."""
        return self.client.slots[0].serves

    @property
    def work(self) -> dict[str, float]:
        """What the autoscaler needs to know of it, by name; 0 for what is not known yet. steps: of
        an output. prompt_tokens: of a request that waits."""
        info = self.info
        costs = self.costs.costs(info.max_num_seqs)
        habits = self.costs.habits().values()
        waiting = self._named.get("num_requests_waiting", 0.0)
        waiting_rows = self._named.get("num_tokens_waiting", 0.0)
        return {
            "num_running": self._named.get("num_requests_running", 0.0),
            "num_waiting": waiting,
            "waiting_rows": waiting_rows,
            "base_s": 0.0 if costs is None else costs.base_s,
            "row_s": 0.0 if costs is None else costs.row_s,
            "seats": float(info.max_num_seqs),
            "max_rows": float(info.max_num_batched_tokens),
            "steps": sum(habit.steps for habit in habits) / max(1, len(habits)),
            "prompt_tokens": waiting_rows / max(1.0, waiting),
        }

    def check_health(self) -> None:
        """Raises NoEngineError when its engine was given up: the replica is to be replaced.

        One that died or hung is started again here, and is given its time.
        """
        if self.client.gave_up.is_set():
            raise NoEngineError(f"{self.spec.name}: its engine is gone")

    async def stream(
        self, request: bytes, age_s: float, job: object = None
    ) -> AsyncGenerator[bytes, None]:
        """The messages of one Request: ("deltas", deltas), and LOST where it broke off. No deltas
        tell that its queue time-out is over, of which the engine is the judge: it has begun.

        request: channel.encode(("submit", request)). age_s: seconds since it arrived at the
        ingress, whose clock is another one. job: for the router, which has chosen by it. Closing
        the stream aborts the Request.
        """
        message = channel.decode(request)
        order: Request = message[1]
        order = replace(order, arrival_s=time.monotonic() - age_s)
        try:
            submission = self.client.submit([order])
        except TailorError as error:
            yield channel.encode(self._broken(order, error, taken=False))
            return
        sent_s = 0.0
        left_s = order.queue_timeout_s - age_s if order.queue_timeout_s else None
        try:
            while True:
                try:
                    async with asyncio.timeout(left_s):
                        arrived = await anext(submission)
                except TimeoutError:
                    arrived = []
                except StopAsyncIteration:
                    return
                left_s = None
                deltas = [delta for _, delta in arrived]
                for delta in deltas:
                    self.costs.count(order.task, delta)
                yield channel.encode(("deltas", deltas))
                wait_s = sent_s + self._pause_s * self.client.num_open - time.monotonic()
                if wait_s > 0.0:
                    await asyncio.sleep(wait_s)
                sent_s = time.monotonic()
        except TailorError as error:
            yield channel.encode(self._broken(order, error, taken=True))
        finally:
            submission.abort()

    async def control(
        self, name: str, payload: Any, timeout_s: float = CONTROL_S, replica: str = ""
    ) -> Any:
        """What the engine answers to ("control", name, payload); see EngineHost. replica: for the
        router."""
        return await self.client.control(self.spec.name, name, payload, timeout_s)

    async def know(self, orders: Sequence[AdapterOrder]) -> None:
        """The engine knows these adapters, and none of which this said so before and now does not.

        An ingress tells those that run when an adapter is loaded; this is for an engine that starts
        afterwards. Raises NoEngineError while there is none.
        """
        life = self.client.slots[0].generation
        wanted = {order.adapter_id for order in orders}
        for gone in self._known.keys() - wanted:
            if self._known.pop(gone) == life:
                await self.control("adapter_forget", gone)
        for order in orders:
            if self._known.get(order.adapter_id) != life:
                await self.control("adapter_register", asdict(order))
                self._known[order.adapter_id] = life

    async def stop(self) -> None:
        """Stop the engine; what is open on it may be run again elsewhere."""
        await self.client.stop()

    def _broken(self, request: Request, error: TailorError, *, taken: bool) -> channel.Message:
        """What a stream ends with after an error: LOST, or a Delta that tells it."""
        # The ingress has let it in: it waits there, for a seat or until `know` told an engine that
        # has started again of the adapter.
        if isinstance(error, QueueFullError | ModelNotFoundError):
            return (LOST, self.replica_id, False)
        if isinstance(error, _ELSEWHERE) or type(error) is UnavailableError:
            return (LOST, self.replica_id, taken)
        # Without the field: the ingress puts it in front, with the route's own name.
        code = error.code
        if error.at == GRAMMAR_FIELD:
            code = {"invalid_value": "grammar_invalid", "limit_exceeded": "grammar_limit"}.get(
                code or "", code
            )
        delta = Delta(
            request.request_id, 0, (), finish_reason="error", error=error.text, error_code=code
        )
        return ("deltas", [delta])
