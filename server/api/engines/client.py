"""EngineClient: starts the engines, hands requests to them, takes their messages, restarts those
that die, drains and stops them.

A route gets a Submission (submission.py). EngineSlot is one engine that should run, and the handle
of the process that does, if there is one; `route` chooses among them. The life of a slot, whose
state the client alone writes:

    loading ──ready──> ready ──died──> restarting ──ready──> ready ...
       │  └──died without a report, or for lack of memory──> loading again, after a pause
       │                                   │
       └──reports: cannot be built───────┬─┘ too many restarts in window_s
                                         v
                                      failed

A slot has at most one handle at a time. Each handle of a pipe gets a reader thread (blocking
receive; one hop into the event loop per step, with all Deltas of that step) and a writer thread (so
that a full pipe never blocks the loop). Everything but these threads is on the event loop; a handle
that is there, too (channel.LoopHandle), needs none.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

from server import channel
from server.api.engines.submission import RequestAccount, Submission
from server.channel import EngineHandle, LoopHandle, PipedHandle
from server.config import LimitsConfig, RestartConfig
from server.errors import (
    DrainingError,
    EngineDiedError,
    EngineError,
    LoadingError,
    NoEngineError,
    QueueFullError,
    TailorError,
)
from server.machine import core_waits
from server.metrics import Metrics
from server.types import Delta, ModelInfo, Request

log = logging.getLogger("tailor.client")

_SAME_S = 0.5
"""Progress that is told later by less than this is the same one, told again."""
_LOOK_S = 1.0
_QUIET_S = 2.0
"""From this age on an engine's threads are asked how long they have waited for a core."""
_FRESH_S = 0.01
"""What engines told so shortly ago is not asked again."""
_FIGURES_S = 1.0
_TOLD_S = 10.0
"""An engine that has not done what it was told after so long did not do it."""
_STOP_S = 10.0
"""An engine that was told to end is killed after so long."""


class Pulse:
    """When one engine made progress last. Clock: time.monotonic().

    Every message is a sign of progress; a beat says how old the last progress is. Between messages
    the age grows, so a silent engine looks like one that hangs. What an engine waits for a core, on
    a machine that is busy with something else, is no hang: `look` takes it from the age.
    """

    def __init__(self, stuck_after_s: float) -> None:
        """stuck_after_s: seconds without progress after which the engine counts as stuck."""
        self._stuck_after_s = stuck_after_s
        self._progress_s = time.monotonic()
        self._starved_s = 0.0  # of the time since then
        self._waits: Mapping[str, float] = {}

    def heard(self, age_s: float = 0.0) -> None:
        """A message arrived. age_s: seconds since the loop last made progress, as the engine
        reports."""
        progress_s = time.monotonic() - age_s
        if progress_s > self._progress_s + _SAME_S:
            self._starved_s = 0.0
        self._progress_s = progress_s

    def look(self, late_s: float, waits: Mapping[str, float]) -> None:
        """Called now and then. late_s: how much later than it should this process comes to look.
        waits: seconds that each thread of the engine has waited for a core (machine.core_waits),
        since whenever: what the one that waited most has waited since the last look counts."""
        starved_s = max(
            (waits[name] - self._waits[name] for name in waits.keys() & self._waits.keys()),
            default=0.0,
        )
        self._waits = waits
        self._starved_s += max(late_s, starved_s, 0.0)

    @property
    def age_s(self) -> float:
        """Seconds since the last sign of progress in which it could have made some."""
        return max(0.0, time.monotonic() - self._progress_s - self._starved_s)

    @property
    def is_late(self) -> bool:
        """Whether that is longer than stuck_after_s."""
        return self.age_s > self._stuck_after_s


EngineFactory = Callable[[], EngineHandle]
"""Starts an engine and returns its handle. Called in a thread; may block."""

SlotState = Literal["loading", "ready", "restarting", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine that should run: its name (unique), its model's name, its device, its factory."""

    name: str
    model: str
    device: str
    factory: EngineFactory


class WaitingRoom:
    """The Requests that wait for their first Delta, and their prompt tokens, by key."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._held: dict[str, tuple[int, int]] = {}  # (Requests, tokens), of keys that have some
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def has_room(self, requests: Sequence[Request], most: tuple[int, int]) -> bool:
        """Whether these Requests of one key may wait too. most: (Requests, tokens) of all keys.

        One that has less than its share of `most` may even where others have taken it all: none
        that was let in is turned out for it. So n keys hold `most` times 1 + 1/2 + ... + 1/n.
        """
        key, more = requests[0].tenant, len(requests)
        more_tokens = sum(len(request.prompt_ids) for request in requests)
        share = len(self._held) + (key not in self._held)
        num, num_tokens = self._held.get(key, (0, 0))
        return (len(self._requests) + more <= most[0] or num + more <= most[0] // share) and (
            self.num_tokens + more_tokens <= most[1] or num_tokens + more_tokens <= most[1] // share
        )

    def add(self, request: Request) -> None:
        """A Request was handed to an engine."""
        self._requests[request.request_id] = request
        self._count(request, 1)

    def remove(self, request_id: str) -> None:
        """A Request got its first Delta, or has ended. Idempotent."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        num, num_tokens = self._held.pop(request.tenant, (0, 0))
        more = sign * len(request.prompt_ids)
        self.num_tokens += more
        if num + sign:
            self._held[request.tenant] = (num + sign, num_tokens + more)


@dataclass(eq=False, slots=True)
class EngineSlot:
    """One engine that should run, and its handle while it does.

    on_message: gets what its engines send, on the loop, with the generation of the handle that sent
    it; ("died", reason, whether it reported that it cannot be built) is the last one. on_idle:
    called when no Request is open any more.
    """

    spec: EngineSpec
    waiting: WaitingRoom
    pulse: Pulse
    on_message: Callable[[EngineSlot, int, channel.Message], None]
    on_idle: Callable[[], None]
    state: SlotState = "loading"
    info: ModelInfo | None = None  # since it was ready for the first time
    handle: EngineHandle | None = None
    generation: int = 0
    deaths_s: list[float] = field(default_factory=list)
    num_restarts: int = 0
    retry_at_s: float = 0.0
    told_s: float = 0.0  # when it told its figures, in this life or an earlier one
    open: dict[str, tuple[Submission, RequestAccount]] = field(default_factory=dict)
    load: int = 0
    reader: threading.Thread | None = None
    _send: Callable[[channel.Message], None] | None = None
    _outbox: queue.SimpleQueue[channel.Message | None] | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether an engine that should serve has made no progress for too long."""
        return self.state == "ready" and self.pulse.is_late

    @property
    def serves(self) -> bool:
        """Whether requests should go to it: it is ready, and makes progress."""
        return self.state == "ready" and not self.pulse.is_late

    @property
    def is_on_loop(self) -> bool:
        """Whether it is a fleet, whose engines' figures somebody else knows."""
        return isinstance(self.handle, LoopHandle)

    # What it holds.

    def hold(self, submission: Submission, account: RequestAccount) -> None:
        """Serve a Request of a Submission from now on."""
        request = account.request
        self.open[request.request_id] = (submission, account)
        self.load += request.num_choices
        self.waiting.add(request)
        submission.holders[request.request_id] = self

    def forget(self, request_id: str) -> None:
        """Stop serving a Request. Idempotent."""
        held = self.open.pop(request_id, None)
        if held is not None:
            self.load -= held[1].request.num_choices
        self.waiting.remove(request_id)
        if not self.open:
            self.on_idle()

    # Its threads.

    def attach(self, handle: EngineHandle, loop: asyncio.AbstractEventLoop) -> None:
        """Start to read from and write to an engine that runs."""
        self.handle = handle
        self.generation += 1
        if isinstance(handle, LoopHandle):
            self._send = handle.send
            handle.open(partial(self.on_message, self, self.generation))
            return
        piped = cast(PipedHandle, handle)
        outbox: queue.SimpleQueue[channel.Message | None] = queue.SimpleQueue()
        self._outbox = outbox
        self._send = outbox.put
        self.reader = threading.Thread(
            target=self._read,
            args=(piped, self.generation, loop),
            name=f"read-{self.spec.name}",
            daemon=True,
        )
        self.reader.start()
        threading.Thread(
            target=_write, args=(piped, outbox), name=f"write-{self.spec.name}", daemon=True
        ).start()

    def send(self, message: channel.Message) -> None:
        """Hand a message to the engine, if there is one; never blocks."""
        if self._send is not None:
            self._send(message)

    def close_outbox(self) -> None:
        """Let the writer thread end behind what was sent."""
        self._send = None
        if self._outbox is not None:
            self._outbox.put(None)
            self._outbox = None

    def _read(self, handle: PipedHandle, generation: int, loop: asyncio.AbstractEventLoop) -> None:
        """Reader thread. It posts every message to the loop."""
        reason, final = "its channel closed", False
        try:
            while True:
                message = channel.decode(handle.connection.recv_bytes())
                if message[0] == "failed":
                    reason, final = str(message[1]), bool(message[2])
                else:
                    loop.call_soon_threadsafe(self.on_message, self, generation, message)
        except (EOFError, OSError):
            pass
        except RuntimeError:
            return  # the loop is closed: the server is gone
        except Exception as error:  # not a message: treat the engine as broken
            reason = f"it sent a message that cannot be read ({type(error).__name__})"
        try:
            loop.call_soon_threadsafe(self.on_message, self, generation, ("died", reason, final))
        except RuntimeError:
            return


def _write(handle: PipedHandle, outbox: queue.SimpleQueue[channel.Message | None]) -> None:
    """Writer thread: one message at a time, in order. The reader reports a broken channel."""
    while (message := outbox.get()) is not None:
        try:
            channel.send(handle.connection, message)
        except (OSError, ValueError):
            return


# --- all of them ----------------------------------------------------------------------------------


class EngineClient:
    """All engines of the server.

        client = EngineClient(specs, metrics=metrics, ...)
        await client.start()           # engines load in the background; is_ready tells
        submission = client.submit([request, ...])
        await client.drain(30.0); await client.stop()

    slots: the engines, in the order of their specs. gave_up: set when no engine is left and none
    will be restarted. waiting: the Requests that wait for their first token. An engine that died
    fails the Requests that it held and no others.

    restart: how often engines are started again, and when one counts as stuck.
    limits: max_queued_requests and max_queued_tokens (of prompts) may wait; above that `submit`
    raises QueueFullError for keys that have their share of them.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        *,
        metrics: Metrics,
        restart: RestartConfig | None = None,
        limits: LimitsConfig | None = None,
    ) -> None:
        if not specs:
            raise ValueError("no engine")
        if len({spec.name for spec in specs}) != len(specs):
            raise ValueError("two engines have the same name")
        self.metrics = metrics
        self.gave_up = asyncio.Event()
        self.waiting = WaitingRoom()
        self._restart = restart or RestartConfig()
        stuck_after_s = self._restart.stuck_after_s
        self._idle = asyncio.Event()
        self.slots = [
            EngineSlot(spec, self.waiting, Pulse(stuck_after_s), self._on_message, self._idle.set)
            for spec in specs
        ]
        limits = limits or LimitsConfig()
        self._max_queued = (limits.max_queued_requests, limits.max_queued_tokens)
        self.is_draining = False
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[int, tuple[EngineSlot, asyncio.Future[Any]]] = {}
        self._next_call = 0
        self._asking: asyncio.Future[None] | None = None

    # --- what the API asks ---

    def of(self, model: str) -> list[EngineSlot]:
        """The slots of one model."""
        return [slot for slot in self.slots if slot.spec.model == model]

    @property
    def models(self) -> list[str]:
        """Names of the models, in order."""
        return list(dict.fromkeys(slot.spec.model for slot in self.slots))

    @property
    def num_open(self) -> int:
        """Requests that an engine works for."""
        return sum(len(slot.open) for slot in self.slots)

    @property
    def is_ready(self) -> bool:
        """Whether traffic may come: every model has an engine, and none starts for the first time.

        So a server with many devices gets traffic when all of them can share it, and keeps it while
        some engine of each model runs. Requests are taken as soon as their model has one.
        """
        return (
            not self.is_draining
            and not any(slot.state == "loading" for slot in self.slots)
            and all(any(slot.serves for slot in self.of(m)) for m in self.models)
        )

    @property
    def stuck(self) -> list[str]:
        """Names of the engines that hang."""
        return [slot.spec.name for slot in self.slots if slot.is_stuck]

    def info(self, model: str) -> ModelInfo | None:
        """What an engine of the model reported when it was ready; None before that."""
        return next((s.info for s in self.of(model) if s.info is not None), None)

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
            for slot in self.slots
        ]

    def open_requests(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """The open Requests, oldest first, for the dashboard: numbers and names, no text.

        tenant: only those of this API key's id; None is all.
        """
        now_s = time.monotonic()
        accounts = [
            (account, slot.spec.name)
            for slot in self.slots
            for _, account in slot.open.values()
            if tenant is None or account.request.tenant == tenant
        ]
        accounts.sort(key=lambda pair: pair[0].request.arrival_s)
        waiting = self.waiting
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
                "drafted": account.drafted.num_drafted,
                "accepted": account.drafted.num_accepted,
            }
            for account, engine in accounts
        ]

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Hand Requests to engines; all of them are taken or none. Raises QueueFullError,
        LoadingError, DrainingError or NoEngineError."""
        if self.is_draining:
            raise DrainingError("The server is shutting down.", retry_after_s=5.0)
        if not self.waiting.has_room(requests, self._max_queued):
            seats = sum(s.info.max_num_seqs for s in self.slots if s.info is not None)
            raise QueueFullError(
                "Too many requests are waiting. Try again later.",
                retry_after_s=min(30.0, 1.0 + len(self.waiting) // (4 * (seats or 1))),
            )
        targets = [route(self.of(request.model), request) for request in requests]
        submission = Submission(requests, self.metrics)
        for account, first in zip(submission.accounts, targets, strict=True):
            request = account.request
            # Loads change as the prompts of one list are placed: choose again.
            slot = route(self.of(request.model), request) if len(requests) > 1 else first
            slot.hold(submission, account)
            slot.send(("submit", request))
        return submission

    # --- life ---

    async def start(self) -> None:
        """Start every engine in the background and return at once. Idempotent."""
        if self._tasks:
            return
        for slot in self.slots:
            self.metrics.engine_down(slot.spec.name, slot.spec.model, restarted=False)
            self._spawn(self._launch(slot, 0.0))
        self._spawn(self._watch())

    async def wait_ready(self) -> None:
        """Return when is_ready, or raise NoEngineError when a model never will have an engine."""
        while not self.is_ready:
            if self.gave_up.is_set() or any(
                all(s.state == "failed" for s in self.of(model)) for model in self.models
            ):
                raise NoEngineError("An engine could not be started.")
            await asyncio.sleep(0.02)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, wait for what is open up to the timeout, then abort the rest.

        Returns whether everything finished by itself.
        """
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_open:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            self.abort_all(DrainingError("The server is shutting down.", retry_after_s=5.0))
            return False
        return True

    def abort_all(self, error: TailorError) -> None:
        """Abort every open Request; their clients get `error`."""
        for slot in self.slots:
            for submission, _ in list(slot.open.values()):
                submission.abort(error)

    async def stop(self) -> None:
        """Stop all engines. Idempotent."""
        if self._stopping:
            return
        self.is_draining = self._stopping = True
        self.abort_all(DrainingError("The server is shutting down."))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop_slot(slot) for slot in self.slots))

    async def _stop_slot(self, slot: EngineSlot) -> None:
        handle = slot.handle
        # One that loads reads no message: its handle ends it.
        reader = slot.reader if slot.state == "ready" else None
        slot.state = "stopped"
        if handle is None:
            return
        slot.send(("stop",))
        slot.close_outbox()
        if reader is not None:
            await asyncio.to_thread(reader.join, _STOP_S)
        await self._reap(slot, handle)
        self.metrics.engine_down(slot.spec.name, slot.spec.model, restarted=False)
        slot.handle = None

    async def _reap(
        self, slot: EngineSlot, handle: EngineHandle, timeout_s: float = _STOP_S
    ) -> None:
        """Make an engine end and free what its handle holds; a failure to do so is logged.

        timeout_s: after which it is killed.
        """
        try:
            await asyncio.to_thread(handle.stop, timeout_s)
        except Exception as error:
            log.error("engine %s does not stop: %s", slot.spec.name, error)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _launch(self, slot: EngineSlot, delay_s: float) -> None:
        slot.retry_at_s = time.monotonic() + delay_s
        await asyncio.sleep(delay_s)
        starting = asyncio.ensure_future(asyncio.to_thread(slot.spec.factory))
        try:
            handle = await asyncio.shield(starting)
        except asyncio.CancelledError:  # `stop`: what has begun comes all the same
            await self._reap(slot, await starting)
            return
        except Exception as error:
            log.error("engine %s could not be started: %s", slot.spec.name, error)
            self._died(slot)
            return
        slot.attach(handle, asyncio.get_running_loop())

    async def _watch(self) -> None:
        """Find engines that died without closing their channel, and those that hang."""
        # How late a look is tells that nobody had a core, or that this process was stopped.
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            late_s = time.monotonic() - looked_s - _LOOK_S
            looked_s += _LOOK_S + late_s
            for slot in self.slots:
                pid = getattr(slot.handle, "pid", None)
                is_quiet = slot.state == "ready" and slot.pulse.age_s > _QUIET_S
                slot.pulse.look(late_s, core_waits(pid) if is_quiet and pid is not None else {})
                age_s = slot.pulse.age_s if slot.state == "ready" else 0.0
                self.metrics.engine_heartbeat(slot.spec.name, slot.spec.model, age_s)
                # A fleet that is silent is not killed: its replicas look after their engines.
                if slot.is_stuck and not slot.is_on_loop:
                    self._lost(slot, f"it is stuck: no progress for {age_s:.0f} s", hangs=True)
                handle = slot.handle
                if handle is not None and not handle.is_alive():
                    await asyncio.sleep(0.2)  # let the reader empty the channel first
                    if slot.handle is handle:
                        self._lost(slot, "it is not alive")

    # --- what is asked of engines ---

    async def control(self, engine: str, name: str, payload: Any, timeout_s: float = 60.0) -> Any:
        """Call an engine (e.g. reload a corpus) and wait for its answer. Raises NoEngineError, and
        EngineError after timeout_s, or where a replica of a fleet does not answer."""
        slot = next((s for s in self.slots if s.spec.name == engine), None)
        if slot is None or slot.state != "ready":
            raise NoEngineError(f"The engine {engine} is not ready.")
        self._next_call += 1
        call_id = self._next_call
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = slot, answer
        slot.send(("control", call_id, name, payload))
        try:
            async with asyncio.timeout(timeout_s):
                found = await answer
        except TimeoutError:
            raise EngineError(f"The engine {engine} does not answer. Try again.") from None
        finally:
            self._calls.pop(call_id, None)
        if found.get("is_lost"):
            raise EngineError(f"{found['error']}. Try again.")
        return found

    async def ask(
        self, engines: Sequence[str], name: str, payload: Any, timeout_s: float
    ) -> dict[str, Any]:
        """What these engines answer to one call, all at once, by engine; see `problem_of`."""

        async def one(engine: str) -> Any:
            try:
                return await self.control(engine, name, payload, timeout_s)
            except TailorError as error:
                return {"ok": False, "error": error.message}

        answers = await asyncio.gather(*map(one, engines))
        return dict(zip(engines, answers, strict=True))

    async def tell(self, name: str, payload: Any, model: str | None = None) -> bool:
        """Whether all engines did it, of a model or of all. An engine that is not ready will read
        the new state, and so will one that dies meanwhile."""
        slots = self.slots if model is None else self.of(model)
        ready = {slot.spec.name: slot for slot in slots if slot.state == "ready"}
        answers = await self.ask([*ready], name, payload, _TOLD_S)
        problems = {e: problem_of(a) for e, a in answers.items() if ready[e].state == "ready"}
        for engine, problem in problems.items():
            if problem:
                log.warning("engine %s did not do %s: %s", engine, name, problem)
        return not any(problems.values())

    async def ask_figures(self) -> None:
        """Have the engines tell the metrics how they are; those that are busy for longer keep what
        they told last. Whoever asks at the same time is answered with one question, and so is
        whoever asks again at once: a flood of scrapes takes no steps' time."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask_figures())
        await asyncio.shield(self._asking)

    async def _ask_figures(self) -> None:
        now_s = time.monotonic()
        slots = [
            slot
            for slot in self.slots
            if slot.state == "ready" and not slot.is_on_loop and now_s > slot.told_s + _FRESH_S
        ]
        answers = await self.ask([s.spec.name for s in slots], "figures", None, _FIGURES_S)
        for slot in slots:
            answer = answers[slot.spec.name]
            if slot.state == "ready" and not problem_of(answer):
                self.metrics.engine_told(slot.spec.name, answer["value"])
                slot.told_s = time.monotonic()

    # --- what the slots tell (on the loop) ---

    def _on_message(self, slot: EngineSlot, generation: int, message: channel.Message) -> None:
        """What an engine sent; nothing is taken of one that is gone."""
        if generation != slot.generation:
            return
        kind = message[0]
        if kind == "deltas":
            self._take(slot, message[1])
        elif kind == "beat":  # its loop went on so many seconds ago
            slot.pulse.heard(message[1])
        elif kind == "ready":
            self._ready(slot, message[1])
        elif kind == "control":
            _, answer = self._calls.get(message[1], (None, None))
            if answer is not None and not answer.done():
                answer.set_result(message[2])
        elif kind == "died":
            self._lost(slot, message[1], message[2])

    def _ready(self, slot: EngineSlot, info: ModelInfo) -> None:
        """An engine loaded its model."""
        if slot.handle is None or self._stopping:
            return
        slot.pulse.heard()
        slot.info, slot.state = info, "ready"
        self.metrics.engine_ready(slot.spec.name, slot.spec.model, info)
        log.info(
            "engine %s is ready: %s on %s, %d blocks of %d",
            slot.spec.name, info.name, info.device, info.num_blocks, info.block_size,
        )  # fmt: skip

    def _take(self, slot: EngineSlot, deltas: list[Delta]) -> None:
        """One step of an engine."""
        slot.pulse.heard()
        now_s = time.monotonic()
        touched: dict[int, Submission] = {}
        for delta in deltas:
            held = slot.open.get(delta.request_id)
            if held is None:
                continue  # aborted meanwhile
            submission = held[0]
            self.waiting.remove(delta.request_id)
            if submission.take(delta, now_s):
                touched[id(submission)] = submission
        for submission in touched.values():
            submission.wake()

    def _lost(
        self, slot: EngineSlot, reason: str, final: bool = False, *, hangs: bool = False
    ) -> None:
        """An engine's channel closed: fail what it held, restart it.

        final: it reported that it cannot be built. A slot that was never ready then fails; one
        that was ready is tried again, because what it needs was there before. hangs: it is not
        asked to end, but killed.
        """
        if slot.handle is None or self._stopping:
            return
        handle, slot.handle = slot.handle, None
        slot.generation += 1
        slot.close_outbox()
        log.error("engine %s died: %s", slot.spec.name, reason)
        self._spawn(self._reap(slot, handle, 0.0 if hangs else _STOP_S))
        for called, answer in self._calls.values():
            if called is slot and not answer.done():
                answer.set_exception(NoEngineError(f"The engine {slot.spec.name} died."))
        error = EngineDiedError("The engine died while it worked on this request.")
        for submission, _ in list(slot.open.values()):
            submission.abort(error)
        self._died(slot, final)

    def _died(self, slot: EngineSlot, final: bool = False) -> None:
        """Restart the slot, or give it up."""
        now_s = time.monotonic()
        policy = self._restart
        slot.deaths_s = [t for t in slot.deaths_s if now_s - t < policy.window_s]
        hopeless = final and slot.info is None
        again = not hopeless and len(slot.deaths_s) < policy.max_restarts and not self.is_draining
        self.metrics.engine_down(slot.spec.name, slot.spec.model, restarted=again)
        if again:
            slot.state = "loading" if slot.info is None else "restarting"
            slot.deaths_s.append(now_s)
            slot.num_restarts += 1
            delay_s = min(policy.max_delay_s, policy.first_delay_s * 2 ** (len(slot.deaths_s) - 1))
            log.warning("engine %s restarts in %.1f s", slot.spec.name, delay_s)
            self._spawn(self._launch(slot, delay_s))
            return
        slot.state = "failed"
        if all(s.state == "failed" for s in self.slots):
            log.critical("no engine is left")
            self.gave_up.set()


def problem_of(answer: Any) -> str:
    """Why an engine did not do what a call asks, "" if it did: then `value` is what it tells."""
    return "" if answer.get("ok") else str(answer.get("error", "an engine refused it"))


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
