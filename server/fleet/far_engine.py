"""FleetHandle: all replicas of a model as one engine, for the EngineClient of an ingress.

It is a channel.LoopHandle: each ("submit", request) becomes one stream of a replica
(Replicas.stream), ("abort", id) closes it, ("control", ...) asks every replica. So the code in
front of the EngineClient is that of a single server.

A stream that breaks off because its replica is gone is begun again on another one, and continues
where it stopped (Continuation). Tokens that a client has are never sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from server import channel
from server.errors import EngineDiedError, NoEngineError, QueueTimeoutError, TailorError
from server.fleet.desk import FleetState
from server.fleet.replica import LOST
from server.fleet.routing import Job, prefix_chain
from server.types import Delta, Request, StepCounts

log = logging.getLogger("tailor.fleet")

_POLL_S = 1.0
_STATE_S = 5.0  # an ingress is alive, too, while nobody knows how its replicas are
_DIED = "The engine died while it worked on this request."
_MAX_PAUSE_S = 2.0  # between two runs of a request
_QUEUE_GRACE_S = 0.5  # the replica's own queue time-out comes first


class ReplicaLostError(Exception):
    """The replica that served a request is gone, or could not take it.

    replica_id: which one, where that is known. taken: whether it may have begun to work for it.
    """

    def __init__(self, message: str, *, replica_id: str = "", taken: bool = True) -> None:
        super().__init__(message)
        self.replica_id = replica_id
        self.taken = taken


class Replicas(Protocol):
    """The replicas of one model (app.ServeReplicas with Ray)."""

    def stream(self, request: bytes, age_s: float, job: Job) -> AsyncGenerator[bytes, None]:
        """EngineReplica.stream of one that the router chose. Raises ReplicaLostError."""

    async def control(self, name: str, payload: Any) -> list[dict[str, Any]]:
        """The answers of all replicas. Raises ReplicaLostError when one does not answer."""

    async def state(self) -> FleetState:
        """What is known of them now."""


class FleetHandle:
    """See the top of this file.

    loop: that `open` and `send` are called on. max_runs: of a request that replicas have begun,
    before it fails. max_wait_s: how long it may find none that takes it. first_pause_s: before its
    second run; doubles each time. on_state: told what is known of the replicas, each time it was
    asked for.
    """

    def __init__(
        self,
        replicas: Replicas,
        *,
        name: str,
        loop: asyncio.AbstractEventLoop,
        max_runs: int = 4,
        max_wait_s: float = 60.0,
        first_pause_s: float = 0.05,
        on_state: Callable[[FleetState], None] = lambda _: None,
    ) -> None:
        self.name = name
        self._replicas = replicas
        self._max_runs = max_runs
        self._max_wait_s = max_wait_s
        self._first_pause_s = first_pause_s
        self._loop = loop
        self._on_state = on_state
        self._alive = True
        self._deliver: Callable[[channel.Message], None] | None = None
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()

    # --- channel.LoopHandle ---

    def is_alive(self) -> bool:
        """Whether `stop` was not called."""
        return self._alive

    def stop(self, timeout_s: float) -> None:
        """End all streams; from any thread but the loop's. Idempotent."""
        if self._alive:
            self._alive = False
            done = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            with contextlib.suppress(TimeoutError):
                done.result(timeout_s)

    def open(self, deliver: Callable[[channel.Message], None]) -> None:
        """From now on, what replicas send goes to `deliver`."""
        self._deliver = deliver
        self._spawn(self._watch())

    def send(self, message: channel.Message) -> None:
        """Take a message of the EngineClient."""
        kind = message[0]
        if kind == "submit":
            request: Request = message[1]
            run = self._loop.create_task(self._answer(request))
            self._runs[request.request_id] = run
            run.add_done_callback(lambda _: self._runs.pop(request.request_id, None))
        elif kind == "abort":
            run_of = self._runs.pop(message[1], None)
            if run_of is not None:
                run_of.cancel()
        elif kind == "control":
            self._spawn(self._control(message[1], message[2], message[3]))

    async def _end(self) -> None:
        self._deliver = None
        tasks = [*self._runs.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def _tell(self, message: channel.Message) -> None:
        """One message to the EngineClient; after the end it goes nowhere."""
        if self._deliver is not None:
            self._deliver(message)

    async def _watch(self) -> None:
        """Tell that the fleet is there once one replica is, then every second how it is."""
        announced = False
        while True:
            state = None
            try:
                async with asyncio.timeout(_STATE_S):
                    state = await self._replicas.state()
            except Exception as error:
                log.warning("%s: its replicas do not tell how they are: %r", self.name, error)
            if state is not None:
                self._on_state(state)
                if not announced and state.info is not None:
                    announced = True
                    self._tell(("ready", state.info))
            if announced:
                self._tell(("beat", 0.0))
            await asyncio.sleep(_POLL_S if announced else 0.1)

    async def _control(self, call_id: int, name: str, payload: Any) -> None:
        try:
            answer = channel.merged(await self._replicas.control(name, payload))
        except Exception as error:
            answer = {"ok": False, "is_lost": True, "error": str(error)[:300] or repr(error)}
        self._tell(("control", call_id, answer))

    # --- a request ---

    async def _answer(self, request: Request) -> None:
        """Run a Request to its end, or tell why it has none."""
        failure: TailorError
        try:
            await self._run_to_the_end(request)
            return
        except TailorError as error:
            failure = error
        except Exception:  # a replica of another version, say: nobody waits for ever
            log.exception("a request could not go on")
            failure = EngineDiedError(_DIED)
        delta = Delta(
            request.request_id, 0, (), finish_reason="error",
            error=failure.text, error_code=failure.code,
        )  # fmt: skip
        self._tell(("deltas", [delta]))

    async def _run_to_the_end(self, request: Request) -> None:
        """On as many replicas as it takes. Raises EngineDiedError, QueueTimeoutError,
        NoEngineError."""
        continuation = Continuation(request)
        data = channel.encode(("submit", request))
        job = Job(
            task=request.task,
            num_prompt_tokens=len(request.prompt_ids),
            max_tokens=request.sampling.max_tokens,
            num_choices=request.num_choices,
            chain=prefix_chain(request.scope, request.prompt_ids),
        )
        num_begun = num_lost = 0
        wait_until_s = time.monotonic() + self._max_wait_s
        while True:
            try:
                await self._run(request, data, job, continuation)
                lost = ReplicaLostError("its stream ended early")
            except ReplicaLostError as error:
                lost = error
            except TextChangedError as error:
                log.error("a request could not go on: %s", error)
                raise EngineDiedError(_DIED) from None
            except TimeoutError:
                text = "The request waited too long for its first step."
                raise QueueTimeoutError(text) from None
            if continuation.is_over:  # also where its replica was lost behind the last token
                return
            num_lost += 1
            num_begun += lost.taken
            if lost.taken:
                wait_until_s = time.monotonic() + self._max_wait_s
                log.warning(
                    "%s: a request of task %s lost its replica after %d tokens: %s",
                    self.name, request.task, continuation.num_sent, lost,
                )  # fmt: skip
            if num_begun >= self._max_runs:
                raise EngineDiedError(_DIED)
            if time.monotonic() > wait_until_s:
                raise NoEngineError("No replica of the model can take this request now.")
            continuation.run_again()
            if continuation.has_begun:
                data = channel.encode(("submit", replace(request, queue_timeout_s=0.0)))
            if lost.replica_id:
                job = replace(job, avoid=(lost.replica_id,))
            await asyncio.sleep(min(_MAX_PAUSE_S, self._first_pause_s * 2.0 ** (num_lost - 1)))

    async def _run(
        self, request: Request, data: bytes, job: Job, continuation: Continuation
    ) -> None:
        """One run on one replica. Raises ReplicaLostError, TextChangedError, and TimeoutError when
        no replica has taken the Request within its queue time-out."""
        age_s = time.monotonic() - request.arrival_s if request.arrival_s else 0.0
        left_s = None
        if request.queue_timeout_s > 0.0 and not continuation.has_begun:
            left_s = max(0.0, request.queue_timeout_s - age_s) + _QUEUE_GRACE_S
        stream = self._replicas.stream(data, age_s, job)
        async with contextlib.aclosing(stream), asyncio.timeout(left_s) as limit:
            async for message in stream:
                limit.reschedule(None)
                told = channel.decode(message)
                if told[0] == LOST:
                    raise ReplicaLostError(
                        "its engine died", replica_id=told[1], taken=bool(told[2])
                    )
                new = continuation.pass_on(told[1])
                if new:
                    self._tell(("deltas", new))


# --- a request on another replica -----------------------------------------------------------------

# A draw depends on the request's seed, the choice and the position alone, and every Request has a
# seed. So a request whose replica is lost is run again from its prompt, and the tokens that its
# client has already are left out; they must be the same, token for token, or the request fails.


class TextChangedError(Exception):
    """Another replica wrote another text: its model or its arithmetic differs."""


@dataclass(slots=True)
class _Choice:
    """What the client has of one choice, and how much of it this run has repeated."""

    sent: list[int] = field(default_factory=list)
    num_repeated: int = 0
    has_first: bool = False
    is_over: bool = False


class Continuation:
    """The Deltas of one Request over any number of runs of it, each passed on once.

        continuation = Continuation(request)
        deltas = continuation.pass_on(deltas)     # of a run, in order
        continuation.run_again()                  # the replica is lost: the next run begins

    Not thread-safe. has_begun: whether the Request has had its first step.
    """

    def __init__(self, request: Request) -> None:
        self.has_begun = False
        self._request_id = request.request_id
        self._choices = [_Choice() for _ in range(request.num_choices)]

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.is_over for choice in self._choices)

    @property
    def num_sent(self) -> int:
        """Tokens that the client has, of all choices."""
        return sum(len(choice.sent) for choice in self._choices)

    def run_again(self) -> None:
        """A new run begins at the prompt."""
        for choice in self._choices:
            choice.num_repeated = 0

    def pass_on(self, deltas: Sequence[Delta]) -> list[Delta]:
        """What is new in a run's next Deltas.

        Raises TextChangedError when a token differs from what was sent at its place. A Delta with
        finish_reason "error" or "abort" is passed on as it is and ends the Request.
        """
        self.has_begun = True
        new: list[Delta] = []
        for delta in deltas:
            if delta.finish_reason in ("error", "abort"):
                for choice in self._choices:
                    choice.is_over = True
                return [*new, delta]
            told = self._new_of(delta)
            if told is not None:
                new.append(told)
        return new

    def _new_of(self, delta: Delta) -> Delta | None:
        choice = self._choices[delta.choice_id]
        ids = delta.token_ids
        num_old = min(len(ids), len(choice.sent) - choice.num_repeated)
        at = choice.num_repeated
        if list(ids[:num_old]) != choice.sent[at : at + num_old]:
            raise TextChangedError(f"{self._request_id}: a token differs after {at}")
        choice.num_repeated += len(ids)
        choice.sent.extend(ids[num_old:])
        if delta.finish_reason is not None and choice.num_repeated < len(choice.sent):
            raise TextChangedError(f"{self._request_id}: the text ends after {choice.num_repeated}")
        if choice.is_over:
            return None
        if num_old or choice.has_first:
            delta = _without_start(delta, num_old, choice.has_first)
        choice.has_first = True
        choice.is_over = delta.finish_reason is not None
        if not delta.token_ids and delta.finish_reason is None:
            return None
        return delta


def _without_start(delta: Delta, num_old: int, has_first: bool) -> Delta:
    """A Delta without its first tokens, which were sent before, and without what only the first
    Delta of a choice tells. Steps that only repeated are not counted again."""
    only_old = num_old > 0 and num_old == len(delta.token_ids)
    return delta._replace(
        token_ids=delta.token_ids[num_old:],
        logprobs=delta.logprobs[num_old:],
        sources=delta.sources[num_old:],
        rejected_drafts=tuple(
            (i - num_old, source, ids) for i, source, ids in delta.rejected_drafts if i >= num_old
        ),
        prompt_logprobs=() if has_first else delta.prompt_logprobs,
        num_cached_tokens=0 if has_first else delta.num_cached_tokens,
        queue_s=0.0 if has_first else delta.queue_s,
        counts=StepCounts() if only_old else delta.counts,
        vocabulary=None if only_old else delta.vocabulary,
    )
