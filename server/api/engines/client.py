"""EngineClient: submits requests to the engines and starts and stops them.

A route gets a Submission (submission.py); EngineSlot (slot.py) is one engine and its threads;
Supervisor (supervisor.py) starts, restarts and stops them; `route` chooses among them.
All state is touched from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from typing import Any

from server.api.engines.slot import EngineSlot, EngineSpec
from server.api.engines.submission import Submission
from server.api.engines.supervisor import RestartPolicy, Supervisor
from server.errors import DrainingError, LoadingError, NoEngineError, QueueFullError, TailorError
from server.metrics.series import Metrics
from server.types import ModelInfo, Request


class EngineClient:
    """All engines of the server.

        client = EngineClient(specs, metrics=metrics, ...)
        await client.start()           # engines load in the background; is_ready tells
        submission = client.submit([request, ...])
        await client.drain(30.0); await client.stop()

    max_queued_requests, max_queued_tokens: Requests (and their prompt tokens) that wait for their
    first token; above that `submit` raises QueueFullError.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        *,
        metrics: Metrics,
        restart: RestartPolicy | None = None,
        max_queued_requests: int = 1024,
        max_queued_tokens: int = 1 << 21,
        stop_timeout_s: float = 10.0,
    ) -> None:
        if not specs:
            raise ValueError("no engine")
        if len({spec.name for spec in specs}) != len(specs):
            raise ValueError("two engines have the same name")
        self.metrics = metrics
        self._supervisor = Supervisor(
            specs,
            metrics=metrics,
            restart=restart or RestartPolicy(),
            stop_timeout_s=stop_timeout_s,
        )
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens

    # --- life ---

    @property
    def gave_up(self) -> asyncio.Event:
        """Set when no engine is left and none will be restarted."""
        return self._supervisor.gave_up

    async def start(self) -> None:
        """Start every engine in the background and return at once."""
        await self._supervisor.start()

    async def wait_ready(self) -> None:
        """Return when is_ready, or raise NoEngineError when a model never will have an engine."""
        while not self.is_ready:
            if self.gave_up.is_set() or any(
                all(s.state == "failed" for s in self._of(model)) for model in self.models
            ):
                raise NoEngineError("An engine could not be started.")
            await asyncio.sleep(0.02)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, wait for what is open up to the timeout, then abort the rest.

        Returns whether everything finished by itself.
        """
        return await self._supervisor.drain(timeout_s)

    def abort_all(self, error: TailorError) -> None:
        """Abort every open Request; their clients get `error`."""
        self._supervisor.abort_all(error)

    async def stop(self) -> None:
        """Stop all engines. Idempotent."""
        await self._supervisor.stop()

    # --- what the API asks ---

    @property
    def slots(self) -> Sequence[EngineSlot]:
        """The engines, in the order of their specs."""
        return self._supervisor.slots

    @property
    def models(self) -> list[str]:
        """Names of the models, in order."""
        return self._supervisor.models

    @property
    def num_open(self) -> int:
        """Requests that an engine works for."""
        return self._supervisor.num_open

    @property
    def num_queued(self) -> int:
        """Requests that wait for their first token."""
        return len(self._supervisor.waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Their prompt tokens."""
        return self._supervisor.waiting.num_tokens

    @property
    def is_draining(self) -> bool:
        return self._supervisor.is_draining

    @property
    def is_ready(self) -> bool:
        """Whether traffic may come; see Supervisor."""
        return self._supervisor.is_ready

    @property
    def is_alive(self) -> bool:
        """Whether some engine serves or is starting for the first time."""
        return self._supervisor.is_alive

    @property
    def stuck(self) -> list[str]:
        """Names of the engines that hang."""
        return [slot.spec.name for slot in self.slots if slot.is_stuck]

    def info(self, model: str) -> ModelInfo | None:
        """What an engine of the model reported when it was ready; None before that."""
        return next((s.info for s in self._of(model) if s.info is not None), None)

    def engines(self) -> list[dict[str, Any]]:
        """The engines' state for /health, without files or errors: /health needs no key."""
        return [
            {
                "name": slot.spec.name,
                "model": slot.spec.model,
                "device": slot.spec.device,
                "state": "stuck" if slot.is_stuck else slot.state,
                "restarts": slot.num_restarts,
                "open_requests": len(slot.open),
            }
            for slot in self._supervisor.slots
        ]

    def open_requests(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """The open Requests, oldest first, for the dashboard: numbers and names, no text.

        tenant: only those of this API key's id; None is all.
        """
        now_s = time.monotonic()
        accounts = [
            (submission.account_of(request_id), slot.spec.name)
            for slot in self._supervisor.slots
            for request_id, (submission, _, _) in slot.open.items()
        ]
        if tenant is not None:
            accounts = [pair for pair in accounts if pair[0].request.tenant == tenant]
        accounts.sort(key=lambda pair: pair[0].request.arrival_s)
        waiting = self._supervisor.waiting
        return [
            {
                "task": account.request.task,
                "model": account.request.model,
                "engine": engine,
                "drafter": account.request.speculation.drafter,
                "state": "waiting" if account.request.request_id in waiting else "running",
                "age_s": round(now_s - account.request.arrival_s, 3),
                "choices": account.request.num_choices,
                "prompt_tokens": account.num_prompt_tokens,
                "tokens": account.num_completion_tokens,
                "max_tokens": account.request.sampling.max_tokens * account.request.num_choices,
                "steps": account.num_steps,
                "drafted": account.num_drafted,
                "accepted": account.num_accepted,
            }
            for account, engine in accounts
        ]

    def submit(
        self, requests: Sequence[Request], *, total_timeout_s: float | None = None
    ) -> Submission:
        """Hand Requests to engines; all of them are taken or none.

        total_timeout_s: counts from the arrival of the first one. Raises QueueFullError,
        LoadingError, DrainingError or NoEngineError.
        """
        if self.is_draining:
            raise DrainingError("The server is shutting down.", retry_after_s=5.0)
        num_tokens = sum(len(request.prompt_ids) for request in requests)
        if (
            self.num_queued + len(requests) > self._max_queued_requests
            or self.num_queued_tokens + num_tokens > self._max_queued_tokens
        ):
            raise QueueFullError(
                "Too many requests are waiting. Try again later.",
                retry_after_s=self._retry_after_s(),
            )
        targets = [route(self._of(request.model), request) for request in requests]
        submission = Submission(requests, self.metrics)
        for request, first in zip(requests, targets, strict=True):
            # Loads change as the prompts of one list are placed: choose again.
            slot = route(self._of(request.model), request) if len(requests) > 1 else first
            slot.hold(submission, request)
            slot.send(("submit", request))
        if total_timeout_s is not None:
            elapsed_s = time.monotonic() - requests[0].arrival_s if requests[0].arrival_s else 0.0
            submission.expire_after(max(0.0, total_timeout_s - elapsed_s))
        return submission

    async def control(self, engine: str, name: str, payload: Any, timeout_s: float = 60.0) -> Any:
        """Call an engine (e.g. reload a corpus) and wait for its answer. Raises TimeoutError,
        NoEngineError."""
        return await self._supervisor.control(engine, name, payload, timeout_s)

    async def ask_figures(self, timeout_s: float = 1.0) -> None:
        """Have the engines tell the metrics how they are; see Supervisor."""
        await self._supervisor.ask_figures(timeout_s)

    def _of(self, model: str) -> list[EngineSlot]:
        return self._supervisor.of(model)

    def _retry_after_s(self) -> float:
        seats = sum(s.info.max_num_seqs for s in self._supervisor.slots if s.info is not None) or 1
        return float(min(30, 1 + self.num_queued // (4 * seats)))


# --- which engine serves a request ---------------------------------------------------------------


BOUNDED_LOAD = 1.25
"""A task leaves its home engine when that has more than this times the mean load."""


def route(slots: Sequence[EngineSlot], request: Request) -> EngineSlot:
    """Rendezvous hashing by task with bounded load, then least load.

    The home engine of a task is the one with the highest hash of (task, engine). It is left
    while it holds more than BOUNDED_LOAD times the mean number of choices.
    slots: those of the Request's model. Raises LoadingError and NoEngineError.
    """
    ready = [slot for slot in slots if slot.state == "ready"]
    if not ready:
        if any(slot.state == "loading" for slot in slots):
            raise LoadingError("The model is still being loaded.", retry_after_s=2.0)
        back_s = min((s.retry_at_s for s in slots if s.state == "restarting"), default=None)
        raise NoEngineError(
            "No engine of this model is running.",
            retry_after_s=None
            if back_s is None
            else max(1.0, math.ceil(back_s - time.monotonic())),
        )
    # A hanging engine may recover: it gets Requests only when its model has no other.
    ready = [slot for slot in ready if slot.serves] or ready
    if len(ready) == 1:
        return ready[0]
    ranked = sorted(ready, key=lambda slot: _affinity(request, slot.spec.name))
    mean = (sum(slot.load for slot in ready) + request.num_choices) / len(ready)
    home = ranked[-1]
    if home.load + request.num_choices <= max(BOUNDED_LOAD * mean, request.num_choices):
        return home
    return min(reversed(ranked), key=lambda slot: slot.load)


def _affinity(request: Request, engine: str) -> bytes:
    own = f"{request.task}\0{engine}{request.adapter and chr(0)}{request.adapter}"
    return hashlib.blake2b(own.encode(), digest_size=8).digest()
