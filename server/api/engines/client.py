"""EngineClient: the engines as the API sees them. Routing, streams, aborts, restarts, drain.

The life of an engine slot:

    loading ──ready──> ready ──died──> restarting ──ready──> ready ...
       │  └──died without a word, or for lack of memory──> loading again, after a pause
       │                                   │
       └──cannot be built: said so───────┬─┘ too many restarts in the window
                                         v
                                      failed

A slot has at most one handle at a time. Each handle gets a reader thread (blocking receive; one
hop into the event loop per step, with all Deltas of that step) and a writer thread (so that a full
pipe never blocks the loop). A handle that died fails the Requests that it held and no others.

All state below is touched from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server import channel
from server.api.usage import RequestAccount
from server.channel import EngineHandle
from server.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineDiedError,
    LoadingError,
    NoEngineError,
    QueueFullError,
    TailorError,
    UnavailableError,
    error_for_engine_code,
)
from server.metrics.series import Metrics
from server.types import Delta, EngineStats, ModelInfo, Request

__all__ = ["EngineClient", "EngineFactory", "EngineSpec", "RestartPolicy", "Submission"]

EngineFactory = Callable[[], EngineHandle]
"""Starts an engine and returns its handle. Called in a thread; may block."""

SlotState = Literal["loading", "ready", "restarting", "failed", "stopped"]

log = logging.getLogger("tailor.client")

BOUNDED_LOAD = 1.25
"""A task leaves its home engine when that has more than this times the mean load."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine that should run: its name (unique), its model's name, its device, its factory."""

    name: str
    model: str
    device: str
    factory: EngineFactory


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most max_restarts in window_s; the n-th waits first_delay_s * 2^(n-1) s, capped."""

    max_restarts: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0


class Submission:
    """The open Requests of one HTTP request, as one stream of Deltas.

        async for arrived in submission:      # a list of (index of the Request, Delta)
            ...

    Ends after the last choice of the last Request. Raises the error of the first choice that fails
    (the others are aborted then). `abort` may be called at any time, any number of times; the
    iteration then raises `error`, or ends if none was given.
    """

    def __init__(self, requests: Sequence[Request], metrics: Metrics) -> None:
        self.accounts = [RequestAccount(request, metrics) for request in requests]
        self._open = {
            request.request_id: (i, request.num_choices) for i, request in enumerate(requests)
        }
        self._slots: dict[str, _Slot] = {}
        self._arrived: list[tuple[int, Delta]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: TailorError | None = None
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def answered(cls, requests: Sequence[Request], metrics: Metrics) -> Submission:
        """One that needs no engine: every choice ended at once with no token (max_tokens 0)."""
        submission = cls(requests, metrics)
        now_s = time.monotonic()
        for i, request in enumerate(requests):
            for choice_id in range(request.num_choices):
                delta = Delta(request.request_id, choice_id, (), finish_reason="length")
                submission.accounts[i].observe(delta, now_s)
                submission._arrived.append((i, delta))
            submission.accounts[i].close("ok")
        submission._open.clear()
        return submission

    def __aiter__(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived, self._arrived = self._arrived, []
        return arrived

    def abort(self, error: TailorError | None = None) -> None:
        """Free what the engines hold for this; idempotent. What already arrived is dropped."""
        if not self._open:
            return
        for request_id, (i, _) in self._open.items():
            slot = self._slots[request_id]
            slot.forget(request_id)
            slot.send(("abort", request_id))
            self.accounts[i].close("abort" if error is None else "error")
        self._open.clear()
        self._error = error
        self._arrived.clear()
        self._wake()

    def expire_after(self, seconds: float) -> None:
        """Abort with DeadlineExceededError when it is still open after so many seconds."""
        error = DeadlineExceededError(
            "The request took longer than its task allows.",
            headers=(("x-should-retry", "false"),),  # which OpenAI's clients heed
        )
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort, error)

    def _wake(self) -> None:
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def account_of(self, request_id: str) -> RequestAccount:
        """The account of one of its open Requests."""
        return self.accounts[self._open[request_id][0]]

    # Called by the slots.

    def _placed(self, request_id: str, slot: _Slot) -> None:
        self._slots[request_id] = slot

    def _take(self, delta: Delta, now_s: float) -> None:
        i, num_left = self._open[delta.request_id]
        account = self.accounts[i]
        account.observe(delta, now_s)
        if delta.finish_reason in ("error", "abort"):
            slot = self._slots[delta.request_id]
            slot.forget(delta.request_id)
            slot.send(("abort", delta.request_id))  # its other choices
            del self._open[delta.request_id]
            account.close(delta.finish_reason)
            error = (
                UnavailableError("The request was aborted by the engine.", retry_after_s=1.0)
                if delta.finish_reason == "abort"
                else error_for_engine_code(
                    delta.error_code, delta.error or "The engine could not finish this request."
                )
            )
            self.abort(error)
            self._error = error
            self._arrived.clear()
            self._wake()
            return
        self._arrived.append((i, delta))
        if delta.finish_reason is not None:
            num_left -= 1
            if num_left:
                self._open[delta.request_id] = (i, num_left)
            else:
                del self._open[delta.request_id]
                self._slots[delta.request_id].forget(delta.request_id)
                account.close("ok")

    def _fail(self, request_id: str, error: TailorError) -> None:
        i, _ = self._open.pop(request_id)
        self.accounts[i].close("error")
        self.abort(error)
        self._error = error
        self._arrived.clear()
        self._wake()


class _Slot:
    """One engine that should run, and the handle that does if there is one."""

    def __init__(self, spec: EngineSpec, client: EngineClient) -> None:
        self.spec = spec
        self.state: SlotState = "loading"
        self.info: ModelInfo | None = None
        self.stats = EngineStats()
        self.handle: EngineHandle | None = None
        self.generation = 0
        self.was_ready = False
        self.deaths_s: list[float] = []
        self.num_restarts = 0
        self.retry_at_s = 0.0
        self.open: dict[str, tuple[Submission, int, int]] = {}
        self.load = 0
        self.last_message = ""
        self._client = client
        self._outbox: queue.SimpleQueue[channel.Message | None] | None = None
        self.reader: threading.Thread | None = None

    # What it holds.

    def hold(self, submission: Submission, request: Request) -> None:
        self.open[request.request_id] = (
            submission,
            request.num_choices,
            len(request.prompt_ids),
        )
        self.load += request.num_choices
        self._client.queued[request.request_id] = len(request.prompt_ids)
        self._client.num_queued_tokens += len(request.prompt_ids)
        submission._placed(request.request_id, self)

    def forget(self, request_id: str) -> None:
        held = self.open.pop(request_id, None)
        if held is not None:
            self.load -= held[1]
        self._client.dequeue(request_id)
        if not self.open:
            self._client.note_idle()

    # Its threads.

    def attach(self, handle: EngineHandle, loop: asyncio.AbstractEventLoop) -> None:
        self.handle = handle
        self.generation += 1
        outbox: queue.SimpleQueue[channel.Message | None] = queue.SimpleQueue()
        self._outbox = outbox
        self.reader = threading.Thread(
            target=self._read,
            args=(handle, self.generation, loop),
            name=f"read-{self.spec.name}",
            daemon=True,
        )
        self.reader.start()
        threading.Thread(
            target=_write, args=(handle, outbox), name=f"write-{self.spec.name}", daemon=True
        ).start()

    def send(self, message: channel.Message) -> None:
        if self._outbox is not None:
            self._outbox.put(message)

    def close_outbox(self) -> None:
        if self._outbox is not None:
            self._outbox.put(None)
            self._outbox = None

    def _read(self, handle: EngineHandle, generation: int, loop: asyncio.AbstractEventLoop) -> None:
        """Reader thread. Everything it learns is posted to the loop."""
        reason, final = "its channel closed", False
        try:
            while True:
                message = channel.receive(handle.connection)
                kind = message[0]
                if kind == "deltas":
                    loop.call_soon_threadsafe(
                        self._client.on_deltas, self, generation, message[1], message[2]
                    )
                elif kind == "stats":
                    loop.call_soon_threadsafe(self._client.on_stats, self, generation, message[1])
                elif kind == "ready":
                    loop.call_soon_threadsafe(self._client.on_ready, self, generation, message[1])
                elif kind == "control":
                    loop.call_soon_threadsafe(
                        self._client.on_control, self, generation, message[1], message[2]
                    )
                elif kind == "failed":
                    reason, final = str(message[1]), bool(message[2])
        except (EOFError, OSError):
            pass
        except RuntimeError:
            return  # the loop is closed: the server is gone
        except Exception as error:  # a message that is none: treat the engine as broken
            reason = f"it sent a message that cannot be read ({type(error).__name__})"
        try:
            loop.call_soon_threadsafe(self._client.on_death, self, generation, reason, final)
        except RuntimeError:
            return


def _write(handle: EngineHandle, outbox: queue.SimpleQueue[channel.Message | None]) -> None:
    """Writer thread: one message at a time, in order. The reader reports a broken channel."""
    while (message := outbox.get()) is not None:
        try:
            channel.send(handle.connection, message)
        except (OSError, ValueError):
            return


class EngineClient:
    """All engines of the server.

        client = EngineClient(specs, metrics=metrics, ...)
        await client.start()           # engines load in the background; is_ready tells
        submission = client.submit([request, ...])
        await client.drain(30.0); await client.stop()

    max_queued_requests, max_queued_tokens: Requests (and their prompt tokens) that wait for their
    first token; above that `submit` raises QueueFullError. `gave_up` is set when no engine is left
    and none will be restarted.
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
        self.gave_up = asyncio.Event()
        self.queued: dict[str, int] = {}
        self.num_queued_tokens = 0
        self._slots = [_Slot(spec, self) for spec in specs]
        self._restart = restart or RestartPolicy()
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._stop_timeout_s = stop_timeout_s
        self._draining = False
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._idle = asyncio.Event()

    # --- life ---

    async def start(self) -> None:
        """Start every engine in the background and return at once."""
        for slot in self._slots:
            self.metrics.engine_down(slot.spec.name, slot.spec.model, restarted=False)
            self._spawn(self._launch(slot, 0.0))
        self._spawn(self._watch())

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
        self._draining = True
        finished = True
        if self.num_open:
            self._idle.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    while self.num_open:
                        self._idle.clear()
                        await self._idle.wait()
            except TimeoutError:
                finished = False
                self.abort_all(DrainingError("The server is shutting down.", retry_after_s=5.0))
        return finished

    def abort_all(self, error: TailorError) -> None:
        """Abort every open Request; their clients get `error`."""
        for slot in self._slots:
            for submission, _, _ in list(slot.open.values()):
                submission.abort(error)

    async def stop(self) -> None:
        """Stop all engines. Idempotent."""
        if self._stopping:
            return
        self._draining = self._stopping = True
        self.abort_all(DrainingError("The server is shutting down."))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop_slot(slot) for slot in self._slots))

    async def _stop_slot(self, slot: _Slot) -> None:
        handle, reader = slot.handle, slot.reader
        slot.state = "stopped"
        if handle is None:
            return
        slot.send(("stop",))
        slot.close_outbox()
        if reader is not None:
            await asyncio.to_thread(reader.join, self._stop_timeout_s)
        await self._reap(slot, handle)
        self.metrics.engine_down(slot.spec.name, slot.spec.model, restarted=False)
        slot.handle = None

    async def _reap(self, slot: _Slot, handle: EngineHandle) -> None:
        """Make an engine end and free what its handle holds; a failure to do so is logged."""
        try:
            await asyncio.to_thread(handle.stop, self._stop_timeout_s)
        except Exception as error:
            log.error("engine %s does not stop: %s", slot.spec.name, error)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _launch(self, slot: _Slot, delay_s: float) -> None:
        slot.retry_at_s = time.monotonic() + delay_s
        await asyncio.sleep(delay_s)
        try:
            handle = await asyncio.to_thread(slot.spec.factory)
        except Exception as error:
            log.error("engine %s could not be started: %s", slot.spec.name, error)
            self._died(slot)
            return
        if self._stopping:
            await self._reap(slot, handle)
            return
        slot.attach(handle, asyncio.get_running_loop())

    async def _watch(self) -> None:
        """Find engines that died without closing their channel."""
        while True:
            await asyncio.sleep(1.0)
            for slot in self._slots:
                handle = slot.handle
                if handle is not None and not handle.is_alive():
                    await asyncio.sleep(0.2)  # let the reader empty the channel first
                    if slot.handle is handle:
                        self.on_death(slot, slot.generation, "it is not alive")

    # --- what the API asks ---

    @property
    def models(self) -> list[str]:
        """Names of the models, in order."""
        return list(dict.fromkeys(slot.spec.model for slot in self._slots))

    @property
    def num_open(self) -> int:
        """Requests that an engine works for."""
        return sum(len(slot.open) for slot in self._slots)

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def is_ready(self) -> bool:
        """Whether traffic may come: every model has an engine, and none is on its first way up.

        So a server with many devices gets its load when all of them can share it, and keeps it
        while some engine of each model lives. Requests are taken as soon as their model has one.
        """
        return (
            not self._draining
            and not any(slot.state == "loading" for slot in self._slots)
            and all(any(slot.state == "ready" for slot in self._of(m)) for m in self.models)
        )

    @property
    def is_alive(self) -> bool:
        """Whether an engine is there or still on its first way up."""
        return any(slot.state in ("ready", "loading") for slot in self._slots)

    def info(self, model: str) -> ModelInfo | None:
        """What an engine of the model told when it was ready; None before that."""
        return next((s.info for s in self._of(model) if s.info is not None), None)

    def engines(self) -> list[dict[str, Any]]:
        """The engines' state for /health. Nothing about files or errors: /health needs no key."""
        return [
            {
                "name": slot.spec.name,
                "model": slot.spec.model,
                "device": slot.spec.device,
                "state": slot.state,
                "restarts": slot.num_restarts,
                "open_requests": len(slot.open),
            }
            for slot in self._slots
        ]

    def open_requests(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """The open Requests, oldest first, for the dashboard: numbers and names, no text.

        tenant: only those of this API key's id; None is all.
        """
        now_s = time.monotonic()
        accounts = [
            (submission.account_of(request_id), slot.spec.name)
            for slot in self._slots
            for request_id, (submission, _, _) in slot.open.items()
        ]
        if tenant is not None:
            accounts = [pair for pair in accounts if pair[0].request.tenant == tenant]
        accounts.sort(key=lambda pair: pair[0].request.arrival_s)
        return [
            {
                "task": account.request.task,
                "model": account.request.model,
                "engine": engine,
                "drafter": account.request.speculation.drafter,
                "state": "waiting" if account.request.request_id in self.queued else "running",
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

        total_timeout_s: counts from the arrival of the first one.
        Raises QueueFullError, LoadingError, DrainingError or NoEngineError.
        """
        if self._draining:
            raise DrainingError("The server is shutting down.", retry_after_s=5.0)
        num_tokens = sum(len(request.prompt_ids) for request in requests)
        if (
            len(self.queued) + len(requests) > self._max_queued_requests
            or self.num_queued_tokens + num_tokens > self._max_queued_tokens
        ):
            raise QueueFullError(
                "Too many requests are waiting. Try again later.",
                retry_after_s=self._retry_after_s(),
            )
        targets = [self._route(request) for request in requests]
        submission = Submission(requests, self.metrics)
        for request, first in zip(requests, targets, strict=True):
            # Loads change as the prompts of one list are placed: choose again.
            slot = self._route(request) if len(requests) > 1 else first
            slot.hold(submission, request)
            slot.send(("submit", request))
        if total_timeout_s is not None:
            elapsed_s = time.monotonic() - requests[0].arrival_s if requests[0].arrival_s else 0.0
            submission.expire_after(max(0.0, total_timeout_s - elapsed_s))
        return submission

    async def control(self, engine: str, name: str, payload: Any, timeout_s: float = 60.0) -> Any:
        """Call an engine (e.g. reload a corpus) and wait for its answer. Raises TimeoutError,
        NoEngineError."""
        slot = next((s for s in self._slots if s.spec.name == engine), None)
        if slot is None or slot.state != "ready":
            raise NoEngineError(f"The engine {engine} is not ready.")
        self._next_call += 1
        call_id = self._next_call
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        slot.send(("control", call_id, name, payload))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._calls.pop(call_id, None)

    def _of(self, model: str) -> list[_Slot]:
        return [slot for slot in self._slots if slot.spec.model == model]

    def _retry_after_s(self) -> float:
        seats = sum(s.info.max_num_seqs for s in self._slots if s.info is not None) or 1
        return float(min(30, 1 + len(self.queued) // (4 * seats)))

    def _route(self, request: Request) -> _Slot:
        """Rendezvous hashing by task with bounded load, then least load.

        The home engine of a task is the one with the highest hash of (task, engine). It is left
        while it holds more than BOUNDED_LOAD times the mean number of choices.
        """
        slots = self._of(request.model)
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
        if len(ready) == 1:
            return ready[0]
        ranked = sorted(ready, key=lambda slot: _affinity(request.task, slot.spec.name))
        mean = (sum(slot.load for slot in ready) + request.num_choices) / len(ready)
        home = ranked[-1]
        if home.load + request.num_choices <= max(BOUNDED_LOAD * mean, request.num_choices):
            return home
        return min(reversed(ranked), key=lambda slot: slot.load)

    # --- what the slots report (on the loop) ---

    def dequeue(self, request_id: str) -> None:
        """A Request got its first Delta, or is over."""
        self.num_queued_tokens -= self.queued.pop(request_id, 0)

    def note_idle(self) -> None:
        """A slot holds nothing any more: drain may go on."""
        self._idle.set()

    def on_ready(self, slot: _Slot, generation: int, info: ModelInfo) -> None:
        """An engine loaded its model."""
        if generation != slot.generation or slot.handle is None or self._stopping:
            return
        slot.info, slot.state, slot.was_ready = info, "ready", True
        self.metrics.engine_ready(slot.spec.name, slot.spec.model, info)
        log.info(
            "engine %s is ready: %s on %s, %d blocks of %d",
            slot.spec.name, info.name, info.device, info.num_blocks, info.block_size,
        )  # fmt: skip

    def on_deltas(
        self, slot: _Slot, generation: int, deltas: list[Delta], stats: EngineStats | None
    ) -> None:
        """One step of an engine."""
        if generation != slot.generation:
            return
        now_s = time.monotonic()
        touched: dict[int, Submission] = {}
        for delta in deltas:
            held = slot.open.get(delta.request_id)
            if held is None:
                continue  # aborted meanwhile
            submission = held[0]
            if delta.request_id in self.queued:
                self.dequeue(delta.request_id)
            submission._take(delta, now_s)
            touched[id(submission)] = submission
        for submission in touched.values():
            submission._wake()
        if stats is not None:
            slot.stats = stats
            self.metrics.engine_stats(slot.spec.name, slot.spec.model, stats)

    def on_stats(self, slot: _Slot, generation: int, stats: EngineStats) -> None:
        """A snapshot without Deltas."""
        if generation == slot.generation:
            slot.stats = stats
            self.metrics.engine_stats(slot.spec.name, slot.spec.model, stats)

    def on_control(self, slot: _Slot, generation: int, call_id: int, payload: Any) -> None:
        """The answer to `control`."""
        answer = self._calls.get(call_id)
        if generation == slot.generation and answer is not None and not answer.done():
            answer.set_result(payload)

    def on_death(self, slot: _Slot, generation: int, reason: str, final: bool = False) -> None:
        """An engine's channel closed: fail what it held, restart it.

        final: it said that it cannot be built. That ends a slot that was never ready; one that
        was is tried again, because what it needs was there before.
        """
        if generation != slot.generation or slot.handle is None or self._stopping:
            return
        handle, slot.handle = slot.handle, None
        slot.generation += 1
        slot.close_outbox()
        log.error("engine %s died: %s", slot.spec.name, reason)
        self._spawn(self._reap(slot, handle))
        error = EngineDiedError("The engine died while it worked on this request.")
        for request_id, (submission, _, _) in list(slot.open.items()):
            if request_id in slot.open:  # an earlier failure may have aborted its siblings
                slot.forget(request_id)
                submission._fail(request_id, error)
        self._died(slot, final)

    def _died(self, slot: _Slot, final: bool = False) -> None:
        """Restart the slot, or give it up."""
        slot.handle = None
        slot.stats = EngineStats()
        now_s = time.monotonic()
        policy = self._restart
        slot.deaths_s = [t for t in slot.deaths_s if now_s - t < policy.window_s]
        hopeless = final and not slot.was_ready
        again = not hopeless and len(slot.deaths_s) < policy.max_restarts and not self._draining
        self.metrics.engine_down(slot.spec.name, slot.spec.model, restarted=again)
        if again:
            slot.state = "restarting" if slot.was_ready else "loading"
            slot.deaths_s.append(now_s)
            slot.num_restarts += 1
            delay_s = min(policy.max_delay_s, policy.first_delay_s * 2 ** (len(slot.deaths_s) - 1))
            log.warning("engine %s restarts in %.1f s", slot.spec.name, delay_s)
            self._spawn(self._launch(slot, delay_s))
            return
        slot.state = "failed"
        if all(s.state == "failed" for s in self._slots):
            log.critical("no engine is left")
            self.gave_up.set()


def _affinity(task: str, engine: str) -> bytes:
    return hashlib.blake2b(f"{task}\0{engine}".encode(), digest_size=8).digest()
