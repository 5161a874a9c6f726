"""One engine that should run, and the handle of the process that does, if there is one.

The life of a slot:

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
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

from server import channel
from server.api.engines.submission import Submission
from server.channel import EngineHandle, LoopHandle, PipedHandle
from server.types import ModelInfo, Request

_SAME_S = 0.5
"""Progress that is told later by less than this is the same one, told again."""


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
        key, more, more_tokens = requests[0].tenant, len(requests), 0
        for request in requests:
            more_tokens += len(request.prompt_ids)
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


class EngineSlot:
    """One engine that should run, and its handle while it does.

    on_message: gets what its engines send, on the loop, with the generation of the handle that sent
    it; ("died", reason, whether it reported that it cannot be built) is the last one. on_idle:
    called when no Request is open any more.
    """

    def __init__(
        self,
        spec: EngineSpec,
        waiting: WaitingRoom,
        pulse: Pulse,
        *,
        on_message: Callable[[EngineSlot, int, channel.Message], None],
        on_idle: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.pulse = pulse
        self.state: SlotState = "loading"
        self.info: ModelInfo | None = None
        self.handle: EngineHandle | None = None
        self.generation = 0
        self.was_ready = False
        self.deaths_s: list[float] = []
        self.num_restarts = 0
        self.retry_at_s = 0.0
        self.told_s = 0.0  # when it told its figures, in this life or an earlier one
        self.open: dict[str, tuple[Submission, int]] = {}  # with its number of choices
        self.load = 0
        self._on_message = on_message
        self._on_idle = on_idle
        self._waiting = waiting
        self._send: Callable[[channel.Message], None] | None = None
        self._outbox: queue.SimpleQueue[channel.Message | None] | None = None
        self.reader: threading.Thread | None = None

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

    def hold(self, submission: Submission, request: Request) -> None:
        """Serve a Request from now on."""
        self.open[request.request_id] = (submission, request.num_choices)
        self.load += request.num_choices
        self._waiting.add(request)
        submission.placed(request.request_id, self)

    def forget(self, request_id: str) -> None:
        """Stop serving a Request. Idempotent."""
        held = self.open.pop(request_id, None)
        if held is not None:
            self.load -= held[1]
        self._waiting.remove(request_id)
        if not self.open:
            self._on_idle()

    # Its threads.

    def attach(self, handle: EngineHandle, loop: asyncio.AbstractEventLoop) -> None:
        """Start to read from and write to an engine that runs."""
        self.handle = handle
        self.generation += 1
        if isinstance(handle, LoopHandle):
            self._send = handle.send
            handle.open(partial(self._on_message, self, self.generation))
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
                    loop.call_soon_threadsafe(self._on_message, self, generation, message)
        except (EOFError, OSError):
            pass
        except RuntimeError:
            return  # the loop is closed: the server is gone
        except Exception as error:  # not a message: treat the engine as broken
            reason = f"it sent a message that cannot be read ({type(error).__name__})"
        try:
            loop.call_soon_threadsafe(self._on_message, self, generation, ("died", reason, final))
        except RuntimeError:
            return


def _write(handle: PipedHandle, outbox: queue.SimpleQueue[channel.Message | None]) -> None:
    """Writer thread: one message at a time, in order. The reader reports a broken channel."""
    while (message := outbox.get()) is not None:
        try:
            channel.send(handle.connection, message)
        except (OSError, ValueError):
            return
