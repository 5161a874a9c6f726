"""Admission: which requests may be served, and which have to wait before they are queued.

    refusal(request)   why a request cannot be served, or None
    open(request)      its sequences, one per choice
    hold(leader)       a request waits here until its adapter is read and its grammar compiled
    prepared()         the requests whose wait is over: ready to be queued, or failed
    expired()          the requests that have waited too long for a first step

This module does not touch the queues: the engine enqueues and fails.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.engine.adapters import Adapter, AdapterShelf, Vocabulary
from server.engine.blocks import root_key
from server.engine.draft import DrafterRegistry
from server.engine.grammar import GrammarState
from server.engine.plan import Scheduler
from server.engine.sequence import Sequence, Status
from server.engine.slices import SliceBook
from server.types import ModelInfo, Request

if TYPE_CHECKING:
    from server.engine.grammar_library import Matcher

_log = logging.getLogger(__name__)


Refusal = tuple[str, str]
"""(message, code): why a request cannot be served."""
Failure = tuple[Sequence, Refusal]
"""(first choice of a request that was admitted, why it fails before its first step)"""


@dataclass(slots=True)
class _Preparing:
    """A request that waits for its adapter, if it names one, and then for its grammar, if it has
    one. deadline_s: time.monotonic() at which it fails; set when the grammar begins to compile."""

    leader: Sequence
    adapter: Adapter | None = None
    grammar: Future[Matcher] | None = None
    deadline_s: float = math.inf

    @property
    def is_over(self) -> bool:
        """Whether its adapter or grammar is ready or has failed, or nobody waits any more."""
        if self.leader.status is Status.FINISHED:
            return True
        if self.grammar is not None:
            return self.grammar.done() or time.monotonic() > self.deadline_s
        return self.adapter is None or self.adapter.has_news


class Admission:
    """Decides before the queue. Reads the scheduler's queue and the open requests; writes only
    which requests wait for adapters and grammars, and when requests expire."""

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        slices: SliceBook,
        drafters: DrafterRegistry,
        open_requests: Mapping[str, list[Sequence]],
        *,
        adapters: AdapterShelf,
        vocabulary: Vocabulary,
    ) -> None:
        """open_requests: the engine's, by id. vocabulary: the base model's."""
        self._adapters = adapters
        self._info = info
        self._scheduler = scheduler
        self._slices = slices
        self._drafters = drafters
        self._open_requests = open_requests
        self._stop_table = vocabulary.stop_table
        self._grammars = vocabulary.grammars
        self._eos = frozenset(info.eos_token_ids)
        self.preparing: list[_Preparing] = []  # requests that wait for their adapter or grammar
        self.expiries: list[tuple[float, str]] = []  # a heap of (monotonic seconds, request id)
        self._num_arrived = 0

    # -- requests that come -----------------------------------------------------------------

    def refusal(self, request: Request) -> Refusal | None:
        """Why a request cannot be served, or None."""
        return (
            (self._adapters.refusal(request.adapter) if request.adapter else None)
            or self._bad_head(request)
            or self._bad_ids(request)
            or self._no_room(request)
            or self._unavailable(request)
            or self._bad_drafter(request)
        )

    def _bad_head(self, request: Request) -> Refusal | None:
        vocabulary = self._adapters.vocabulary(request.adapter)
        if request.vocabulary.mode == "full" or vocabulary is None or not vocabulary.own_head:
            return None
        text = "vocabulary slices are of the base's LM head, and this adapter has rows of its own"
        return text, "unsupported_parameter"

    def _bad_ids(self, request: Request) -> Refusal | None:
        """Why ids of a request lie outside the vocabulary, or None. Compiled code does not check
        them."""
        if request.request_id in self._open_requests:
            return "this request id is open already", "invalid_value"
        if not request.prompt_ids or request.num_choices < 1:
            return "a request needs a prompt and at least one choice", "invalid_value"
        adapter, sampling = self._adapters.known.get(request.adapter), request.sampling
        size = self._info.vocab_size if adapter is None else adapter.order.vocab_size
        for name, ids in (
            ("a prompt id", request.prompt_ids),
            ("logit_bias: an id", [token for token, _ in sampling.logit_bias]),
            ("allowed_token_ids: an id", sampling.allowed_token_ids or ()),
            ("stop_token_ids: an id", sampling.stop_token_ids),
            ("a label id", request.label_ids),
        ):
            if ids and (min(ids) < 0 or max(ids) >= size):
                return f"{name} lies outside the vocabulary", "invalid_value"
        if request.label_ids and (sampling.max_tokens > 0 or request.num_choices > 1):
            return "label ids go with max_tokens 0 and one choice", "invalid_value"
        return None

    def _no_room(self, request: Request) -> Refusal | None:
        num_prompt, limit = len(request.prompt_ids), self._info.max_model_len
        if num_prompt > limit or (num_prompt == limit and request.sampling.max_tokens > 0):
            text = f"the prompt has {num_prompt} tokens, the model {limit}"
            return text, "context_length_exceeded"
        if -(-num_prompt // self._info.block_size) > self._info.num_blocks:
            return "the KV cache is too small for this prompt", "context_length_exceeded"
        return None

    def _unavailable(self, request: Request) -> Refusal | None:
        sampling = request.sampling
        if sampling.stop and (self._stop_table is None or not all(sampling.stop)):
            return "stop strings are not available", "unsupported_parameter"
        if request.grammar is not None:
            if self._grammars is None or not self._eos:
                return "structured outputs are not available", "unsupported_parameter"
            if sampling.ignore_eos:
                return "ignore_eos cannot be combined with a grammar", "unsupported_parameter"
        return self._slices.refusal(request)

    def _bad_drafter(self, request: Request) -> Refusal | None:
        if request.adapter and self._adapters.vocabulary(request.adapter) is None:
            return None  # not read yet: an error of the drafter's will cost the drafts alone
        try:
            self._drafters.check(request.task, request.speculation)
        except ValueError as error:
            return str(error)[:200], "invalid_value"
        except Exception as error:  # a factory's own failure: drafts are off, see Drafts
            _log.debug("a drafter factory failed", exc_info=error)
        return None

    def open(self, request: Request) -> list[Sequence]:
        """The choices of a request that was not refused; the first leads the others."""
        key = root_key(self._info.fingerprint, request.scope)
        self._num_arrived += 1
        adapter = self._adapters.use(request.adapter) if request.adapter else None
        stops = self._stop_table
        if adapter is not None and adapter.vocabulary is not None:  # else once it was read
            stops = adapter.vocabulary.stop_table or stops
        sequences = [
            Sequence(
                request,
                choice_id,
                self._num_arrived,
                max_model_len=self._info.max_model_len,
                table=self._scheduler.table,
                eos_ids=self._eos,
                root_key=key,
            )
            for choice_id in range(request.num_choices)
        ]
        for sequence in sequences:
            sequence.adapter = adapter
            sequence.head = self._slices.open(request)
            if request.sampling.stop and stops is not None:
                sequence.match_stops(stops)
        sequences[0].siblings = sequences[1:]
        return sequences

    # -- requests that wait -----------------------------------------------------------------

    @property
    def has_prepared(self) -> bool:
        """Whether prepared() or expired() has something to do."""
        has_expired = bool(self.expiries) and self.expiries[0][0] <= time.monotonic()
        return has_expired or any(wait.is_over for wait in self.preparing)

    def hold(self, leader: Sequence) -> bool:
        """Begin the waits of an opened request. False: it waits for nothing and can be queued."""
        request = leader.request
        if request.queue_timeout_s > 0.0:
            heapq.heappush(
                self.expiries, (request.arrival_s + request.queue_timeout_s, request.request_id)
            )
            if len(self.expiries) > 2 * len(self._open_requests) + 1024:  # most are over
                self.expiries = [e for e in self.expiries if e[1] in self._open_requests]
                heapq.heapify(self.expiries)
        adapter = leader.adapter
        if request.grammar is None and (adapter is None or adapter.is_ready):
            return False
        self.preparing.append(_Preparing(leader, adapter))
        return True

    def prepared(self) -> tuple[list[Sequence], list[Failure]]:
        """(requests that are ready, requests that failed) since the last call."""
        ready: list[Sequence] = []
        failed: list[Failure] = []
        waiting, self.preparing = self.preparing, []
        for wait in waiting:
            if wait.leader.status is Status.FINISHED:  # aborted meanwhile
                continue
            take = self._take_adapter if wait.grammar is None else self._take_grammar
            problem, leader, adapter = take(wait), wait.leader, wait.adapter
            if problem is not None:
                failed.append((leader, problem))
            elif (adapter is not None and not adapter.is_ready) or (
                leader.request.grammar is not None and leader.grammar is None
            ):
                self.preparing.append(wait)
            else:
                ready.append(leader)
        return ready, failed

    def _take_adapter(self, wait: _Preparing) -> Refusal | None:
        """Begin to compile the grammar once the adapter is in memory. Returns why it failed, or
        None."""
        leader, adapter = wait.leader, wait.adapter
        grammars = self._grammars
        if adapter is not None:
            if adapter.problem:
                return "the adapter could not be read", "engine_error"
            if not adapter.is_ready:
                return None
            vocabulary = adapter.vocabulary
            assert vocabulary is not None
            if vocabulary.stop_table is not None and leader.request.sampling.stop:
                for sequence in (leader, *leader.siblings):
                    sequence.match_stops(vocabulary.stop_table)
            grammars = vocabulary.grammars or grammars
            late = self._bad_head(leader.request)  # it was not read when the request came
            if late is not None:
                return late
        if leader.request.grammar is not None:
            assert grammars is not None
            wait.grammar = grammars.compile(leader.request.grammar, leader.request.scope)
            wait.deadline_s = time.monotonic() + grammars.timeout_s
            return self._take_grammar(wait)
        return None

    def _take_grammar(self, wait: _Preparing) -> Refusal | None:
        """Give the choices their grammar once it is compiled. Returns why it failed, or None."""
        grammar, leader = wait.grammar, wait.leader
        assert grammar is not None
        if not grammar.done():
            if time.monotonic() <= wait.deadline_s:
                return None
            if grammar.running():
                return "the grammar takes too long to compile", "grammar_limit"
            return "Too many grammars are waiting.", "queue_full"
        error = grammar.exception()
        if error is None:
            for sequence in (leader, *leader.siblings):
                sequence.grammar = GrammarState(grammar.result())
            return None
        if isinstance(error, ValueError):
            return f"the grammar cannot be used: {error}"[:200], "grammar_invalid"
        _log.error("a grammar could not be compiled", exc_info=error)
        return "the grammar could not be compiled", "engine_error"

    def expired(self) -> list[Failure]:
        """Requests that have waited too long for their first step."""
        failed: list[Failure] = []
        now = time.monotonic()
        while self.expiries and self.expiries[0][0] <= now:
            _, request_id = heapq.heappop(self.expiries)
            for leader in self._open_requests.get(request_id, ())[:1]:
                if leader.first_step_s == 0.0:
                    why = "the request waited too long in the queue", "queue_timeout"
                    failed.append((leader, why))
        return failed
