"""The open Requests of one HTTP request, as one stream of Deltas, and the account of each: what
usage and metrics are made of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from server import channel
from server.errors import (
    ClientGoneError,
    ConstraintUnsatisfiableError,
    DeadlineExceededError,
    RequestError,
    TailorError,
    UnavailableError,
    error_for_engine_code,
)
from server.metrics import Metrics
from server.types import Delta, Request, StepCounts, VocabularyCounts


class RequestAccount:
    """Sums over the Deltas of one Request. Written by `observe` alone."""

    def __init__(self, request: Request, metrics: Metrics) -> None:
        self.request = request
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0
        self.num_base_tokens = 0
        self.own_ids: Mapping[int, int] = {}  # ServedModel.own_ids; set before the first Delta
        self.num_steps = 0
        self.drafted = StepCounts()  # of the steps that carried drafts
        self.vocabulary = VocabularyCounts()
        self.queue_s = 0.0
        self.started = False
        self._metrics = metrics
        self._series = metrics.task(request.task, request.speculation.drafter, request.model)
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def observe(self, delta: Delta, now_s: float) -> None:
        """Count one Delta of this request. now_s: time.monotonic() at its arrival."""
        request = self.request
        series = self._series
        if not self.started and delta.finish_reason not in ("error", "abort"):
            self.started = True
            self.num_cached_tokens = delta.num_cached_tokens
            self.queue_s = delta.queue_s
            series.prompt_tokens.inc(self.num_prompt_tokens)
            series.prompt_size.observe(self.num_prompt_tokens)
            if delta.num_cached_tokens:
                series.cached_tokens.inc(delta.num_cached_tokens)
            series.queue.observe(delta.queue_s)
        choice, num_tokens, counts = delta.choice_id, len(delta.token_ids), delta.counts
        if num_tokens:
            last_s = self._last_s.get(choice)
            if not self._first_s:
                since_s = now_s - request.arrival_s
                series.time_to_first_token.observe(since_s)
                series.prefill.observe(max(0.0, since_s - self.queue_s))
            if last_s is None:
                self._first_s[choice] = now_s
            else:
                gap_s = (now_s - last_s) / num_tokens
                for _ in range(num_tokens):
                    series.inter_token.observe(gap_s)
            self._last_s[choice] = now_s
            self._tokens[choice] = self._tokens.get(choice, 0) + num_tokens
            self.num_completion_tokens += num_tokens
            if self.own_ids:
                self.num_base_tokens += sum(self.own_ids.get(i, 1) for i in delta.token_ids)
        self._metrics.count_step(series, num_tokens, counts)
        self.num_steps += counts.num_steps
        if counts.num_drafts:
            self.drafted = self.drafted.plus(counts)
        if delta.vocabulary is not None:
            self._metrics.count_vocabulary(
                request.task, request.vocabulary.mode, request.model, delta.vocabulary
            )
            self.vocabulary = self.vocabulary.plus(delta.vocabulary)
        if delta.finish_reason is not None:
            self._metrics.count_choice(request.task, request.model, delta.finish_reason)
            total = self._tokens.get(choice, 0)
            series.generation_size.observe(total)
            series.end_to_end.observe(now_s - request.arrival_s)
            if total > 1:
                decode_s = self._last_s[choice] - self._first_s[choice]
                series.decode.observe(decode_s)
                series.per_output_token.observe(decode_s / (total - 1))

    @property
    def num_begun(self) -> int:
        """Choices that have a token."""
        return len(self._first_s)

    @property
    def first_token_s(self) -> float | None:
        """time.monotonic() of the first token of any choice; None before that."""
        return min(self._first_s.values(), default=None)

    @property
    def last_token_s(self) -> float | None:
        """time.monotonic() of the latest token; None before the first."""
        return max(self._last_s.values(), default=None)

    def close(self, outcome: str) -> None:
        """The request has ended. outcome: "ok" or of `_outcome_of`. Called once."""
        self._metrics.count_outcome(self.request.task, self.request.model, outcome)


GRAMMAR_FIELD = "structured_outputs"
"""The field at fault of an error about a grammar, where no route has named another."""


class Holder(Protocol):
    """The engine slot that serves a Request."""

    def forget(self, request_id: str) -> None: ...

    def send(self, message: channel.Message) -> None: ...


class Submission:
    """The open Requests of one HTTP request, as one stream of Deltas.

        async for arrived in submission:      # a list of (index of the Request, Delta)
            ...

    Ends after the last choice of the last Request. Raises the error of the first choice that fails
    (the others are aborted then). `abort` may be called at any time, any number of times; while
    something is open, the iteration then raises the error: ClientGoneError where none was given.

    grammar_field: what brought the grammar, for errors of the engine; written by the route.
    holders: the slots that work for its Requests, by their ids; each writes itself.
    """

    def __init__(self, requests: Sequence[Request], metrics: Metrics) -> None:
        self.accounts = [RequestAccount(request, metrics) for request in requests]
        self._open = {
            request.request_id: (i, request.num_choices) for i, request in enumerate(requests)
        }
        self.holders: dict[str, Holder] = {}
        self._arrived: list[tuple[int, Delta]] = []
        self._news = asyncio.Event()
        self._error: TailorError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for_all = False
        self.grammar_field = ""

    @classmethod
    def answered(cls, requests: Sequence[Request], metrics: Metrics) -> Submission:
        """A Submission that needs no engine: every choice ended at once with no token (max_tokens
        0)."""
        submission, now_s = cls(requests, metrics), time.monotonic()
        for request in requests:
            for choice_id in range(request.num_choices):
                delta = Delta(request.request_id, choice_id, (), finish_reason="length")
                submission.take(delta, now_s)
        return submission

    def __aiter__(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        arrived, self._arrived = self._arrived, []
        return arrived

    async def rest(self) -> dict[tuple[int, int], list[Delta]]:
        """All Deltas that are still to come, by (index of the Request, choice), once the last
        choice has ended. Raises as the iteration does."""
        self._waits_for_all = True
        deltas: dict[tuple[int, int], list[Delta]] = {}
        async for arrived in self:
            for i, delta in arrived:
                deltas.setdefault((i, delta.choice_id), []).append(delta)
        return deltas

    def abort(self, error: TailorError | None = None) -> None:
        """Free what the engines hold for this. Idempotent. Deltas that arrived are dropped.

        error: for the client; None where that has left.
        """
        if not self._open:
            return
        for request_id, (i, _) in self._open.items():
            holder = self.holders[request_id]
            holder.forget(request_id)
            holder.send(("abort", request_id))
            self.accounts[i].close(_outcome_of(error))
        self._open.clear()
        self._error = error or ClientGoneError("The client left before its answer was complete.")
        self._arrived.clear()
        self.wake()

    def expire_after(self, seconds: float) -> None:
        """Abort with DeadlineExceededError when it is still open after so many seconds, soon where
        they are over."""
        error = DeadlineExceededError(
            "The request took longer than its task allows.",
            headers=(("x-should-retry", "false"),),  # which OpenAI's clients heed
        )
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort, error)

    def wake(self) -> None:
        """Let the iteration read what arrived. Called after `take`, once for all Deltas of a
        step."""
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._news.set()

    def take(self, delta: Delta, now_s: float) -> bool:
        """One Delta of an open Request arrived at its slot. now_s: time.monotonic(). Returns
        whether the iteration may go on with it: then `wake` follows."""
        i, num_left = self._open[delta.request_id]
        account = self.accounts[i]
        account.observe(delta, now_s)
        if delta.finish_reason in ("error", "abort"):
            self.abort(  # its other choices and Requests, too
                UnavailableError("The request was aborted by the engine.", retry_after_s=1.0)
                if delta.finish_reason == "abort"
                else _engine_error(delta, account.request, self.grammar_field)
            )
            return True
        self._arrived.append((i, delta))
        if delta.finish_reason is not None:
            num_left -= 1
            if num_left:
                self._open[delta.request_id] = (i, num_left)
            else:
                del self._open[delta.request_id]
                if holder := self.holders.get(delta.request_id):
                    holder.forget(delta.request_id)
                account.close("ok")
        return not (self._waits_for_all and self._open)


def _outcome_of(error: TailorError | None) -> str:
    """What a request without its answer counts as: left by its client, refused (4xx) or failed."""
    if error is None:
        return "abort"
    return "refused" if isinstance(error, RequestError) else "error"


def _engine_error(delta: Delta, request: Request, grammar_field: str) -> TailorError:
    """The error of a Delta, with the field at fault where there is one."""
    message = delta.error or "The engine could not finish this request."
    error = error_for_engine_code(delta.error_code, message)
    sampling, at = request.sampling, ""
    if isinstance(error, ConstraintUnsatisfiableError):
        given = {
            "allowed_token_ids": sampling.allowed_token_ids is not None,
            grammar_field or GRAMMAR_FIELD: request.grammar is not None,
            "logit_bias": bool(sampling.logit_bias),
            "min_tokens": bool(sampling.min_tokens),
        }
        at = next((name for name, is_given in given.items() if is_given), "")
    elif (delta.error_code or "").startswith("grammar_"):
        at = grammar_field or GRAMMAR_FIELD
    return error.moved(at) if at else error
