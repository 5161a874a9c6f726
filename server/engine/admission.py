"""Admission: which requests may be served, and which have to wait before they are queued.

    refusal(request)   why a request cannot be served, or None
    open(request)      its sequences, one per choice
    hold(leader)       a request with a grammar waits here until that is compiled
    compiled()         who waits no longer: ready to be queued, or failed
    expired()          who has waited too long for a first step

Nothing here touches the queues: the engine enqueues and fails.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from server.engine.blocks import root_key
from server.engine.drafting import DrafterRegistry
from server.engine.grammar import GrammarState
from server.engine.grammar_compiler import GrammarCompiler, GrammarTemplate
from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence, Status
from server.engine.settings import EngineSettings
from server.engine.slices import SliceBook
from server.engine.stops import StopTable
from server.types import ModelInfo, Request

__all__ = ["Admission", "Failure", "Refusal"]

_log = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """Why a request cannot be served."""

    message: str
    code: str


class Failure(NamedTuple):
    """Why a request that was admitted fails before its first step. leader: its first choice."""

    leader: Sequence
    message: str
    code: str


@dataclass(frozen=True, slots=True)
class _Compiling:
    """A request that waits for its grammar, at most until deadline_s (time.monotonic())."""

    leader: Sequence
    template: Future[GrammarTemplate]
    deadline_s: float


class Admission:
    """The gate before the queue. Reads the scheduler's queue and the open requests; writes only
    what waits for a grammar and when requests expire."""

    def __init__(
        self,
        info: ModelInfo,
        settings: EngineSettings,
        scheduler: Scheduler,
        slices: SliceBook,
        drafters: DrafterRegistry,
        open_requests: Mapping[str, list[Sequence]],
        *,
        stop_table: StopTable | None,
        grammars: GrammarCompiler | None,
    ) -> None:
        """open_requests: the engine's, by id."""
        self._info = info
        self._settings = settings
        self._scheduler = scheduler
        self._slices = slices
        self._drafters = drafters
        self._open_requests = open_requests
        self._stop_table = stop_table
        self._grammars = grammars
        self._eos = frozenset(info.eos_token_ids)
        self._compiling: list[_Compiling] = []
        self._expiries: list[tuple[float, str]] = []  # a heap of (monotonic seconds, request id)
        self._num_arrived = 0

    # -- requests that come -----------------------------------------------------------------

    def refusal(self, request: Request) -> Refusal | None:
        """Why a request cannot be served, or None."""
        return (
            self._bad_ids(request)
            or self._no_room(request)
            or self._unavailable(request)
            or self._bad_drafter(request)
        )

    def _bad_ids(self, request: Request) -> Refusal | None:
        """A sampler's compiled code does not look at the bounds of its arrays."""
        if request.request_id in self._open_requests:
            return Refusal("this request id is open already", "invalid_value")
        if not request.prompt_ids or request.num_choices < 1:
            return Refusal("a request needs a prompt and at least one choice", "invalid_value")
        size, sampling = self._info.vocab_size, request.sampling
        for name, ids in (
            ("a prompt id", request.prompt_ids),
            ("logit_bias: an id", [token for token, _ in sampling.logit_bias]),
            ("allowed_token_ids: an id", sampling.allowed_token_ids or ()),
            ("stop_token_ids: an id", sampling.stop_token_ids),
            ("a label id", request.label_ids),
        ):
            if ids and (min(ids) < 0 or max(ids) >= size):
                return Refusal(f"{name} lies outside the vocabulary", "invalid_value")
        if request.label_ids and (sampling.max_tokens > 0 or request.num_choices > 1):
            return Refusal("label ids go with max_tokens 0 and one choice", "invalid_value")
        return None

    def _no_room(self, request: Request) -> Refusal | None:
        num_prompt, limit = len(request.prompt_ids), self._info.max_model_len
        settings, scheduler = self._settings, self._scheduler
        if num_prompt > limit or (num_prompt == limit and request.sampling.max_tokens > 0):
            return Refusal(
                f"the prompt has {num_prompt} tokens, the model {limit}", "context_length_exceeded"
            )
        if -(-num_prompt // self._info.block_size) > self._info.num_blocks:
            return Refusal("the KV cache is too small for this prompt", "context_length_exceeded")
        if len(scheduler.waiting) + len(self._compiling) >= settings.max_waiting_requests:
            return Refusal("too many requests are waiting", "queue_full")
        if scheduler.waiting and (
            scheduler.num_waiting_tokens + num_prompt > settings.max_waiting_tokens
        ):
            return Refusal("too many tokens are waiting", "queue_full")
        return None

    def _unavailable(self, request: Request) -> Refusal | None:
        sampling = request.sampling
        if sampling.stop and (self._stop_table is None or not all(sampling.stop)):
            return Refusal("stop strings are not available", "unsupported_parameter")
        if request.grammar is not None:
            if self._grammars is None or not self._eos:
                return Refusal("structured outputs are not available", "unsupported_parameter")
            if sampling.ignore_eos:
                return Refusal(
                    "ignore_eos cannot be combined with a grammar", "unsupported_parameter"
                )
        refusal = self._slices.refusal(request)
        return None if refusal is None else Refusal(*refusal)

    def _bad_drafter(self, request: Request) -> Refusal | None:
        try:
            self._drafters.resolve(request.task, request.speculation)
        except ValueError as error:
            return Refusal(str(error)[:200], "invalid_value")
        except Exception as error:  # a factory's own failure: drafts are off, see DraftSessions
            _log.debug("a drafter factory failed", exc_info=error)
        return None

    def open(self, request: Request) -> list[Sequence]:
        """The choices of a request that was not refused; the first leads the others."""
        key = root_key(self._info.fingerprint, request.scope)
        self._num_arrived += 1
        sequences = [
            Sequence(
                request,
                choice_id,
                self._num_arrived,
                max_model_len=self._info.max_model_len,
                block_size=self._info.block_size,
                eos_token_ids=self._eos,
                stop_table=self._stop_table,
                root_key=key,
            )
            for choice_id in range(request.num_choices)
        ]
        for sequence in sequences:
            sequence.head = self._slices.open(request)
        sequences[0].siblings = sequences[1:]
        return sequences

    # -- requests that wait -----------------------------------------------------------------

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    @property
    def has_compiled(self) -> bool:
        """Whether compiled() has something to say."""
        return any(
            wait.template.done() or time.monotonic() > wait.deadline_s for wait in self._compiling
        )

    def hold(self, leader: Sequence) -> bool:
        """Begin the waits of an opened request. False: it waits for nothing, and can be queued."""
        request = leader.request
        if request.queue_timeout_s > 0.0:
            heapq.heappush(
                self._expiries, (request.arrival_s + request.queue_timeout_s, request.request_id)
            )
            if len(self._expiries) > 2 * len(self._open_requests) + 1024:  # most are over
                self._expiries = [e for e in self._expiries if e[1] in self._open_requests]
                heapq.heapify(self._expiries)
        if request.grammar is None:
            return False
        assert self._grammars is not None
        template = self._grammars.compile(request.grammar, request.scope)
        deadline_s = time.monotonic() + self._grammars.timeout_s
        self._compiling.append(_Compiling(leader, template, deadline_s))
        return True

    def compiled(self) -> tuple[list[Sequence], list[Failure]]:
        """(requests whose grammar is there, those whose grammar will not be)."""
        ready: list[Sequence] = []
        failed: list[Failure] = []
        waiting, self._compiling = self._compiling, []
        now = time.monotonic()
        for wait in waiting:
            leader = wait.leader
            if leader.status is Status.FINISHED:  # aborted meanwhile
                continue
            if not wait.template.done():
                if now > wait.deadline_s:
                    text = "the grammar takes too long to compile"
                    failed.append(Failure(leader, text, "limit_exceeded"))
                else:
                    self._compiling.append(wait)
                continue
            error = wait.template.exception()
            if error is None:
                for sequence in (leader, *leader.siblings):
                    sequence.grammar = GrammarState(wait.template.result())
                ready.append(leader)
            elif isinstance(error, ValueError):
                text = f"the grammar cannot be used: {error}"[:200]
                failed.append(Failure(leader, text, "invalid_value"))
            else:
                _log.error("a grammar could not be compiled", exc_info=error)
                failed.append(Failure(leader, "the grammar could not be compiled", "engine_error"))
        return ready, failed

    def expired(self) -> list[Failure]:
        """Requests that have waited too long for their first step."""
        failed: list[Failure] = []
        now = time.monotonic()
        while self._expiries and self._expiries[0][0] <= now:
            _, request_id = heapq.heappop(self._expiries)
            for leader in self._open_requests.get(request_id, ())[:1]:
                if leader.first_step_s == 0.0:
                    text = "the request waited too long in the queue"
                    failed.append(Failure(leader, text, "queue_timeout"))
        return failed
