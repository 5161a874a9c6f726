"""Continuation: a request continues on another replica where it stopped, with the same text.

A draw depends on the request's seed, the choice and the position alone, and every Request has a
seed. So a request whose replica is lost is run again from its prompt, and the tokens that its
client has already are left out; they must be the same, token for token, or the request fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from server.types import Delta, Request, StepCounts


class TextChangedError(Exception):
    """Another replica wrote another text: its model or its arithmetic differs."""


class _Choice:
    """What the client has of one choice, and how much of it this run has repeated."""

    __slots__ = ("has_first", "is_over", "num_repeated", "sent")

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.num_repeated = 0
        self.has_first = False
        self.is_over = False


class Continuation:
    """The Deltas of one Request over any number of runs of it, each passed on once.

        continuation = Continuation(request)
        deltas = continuation.pass_on(deltas)     # of a run, in order
        continuation.run_again()                  # the replica is lost: the next run begins

    Not thread-safe.
    """

    def __init__(self, request: Request) -> None:
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
    return msgspec.structs.replace(
        delta,
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
