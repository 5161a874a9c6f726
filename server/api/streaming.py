"""Server-sent chunks of one response: what /v1/completions and /v1/chat/completions share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from msgspec import UNSET, UnsetType

from server.api.chunks import ChatChunk, CompletionChunk
from server.api.engines.submission import Submission
from server.api.intake import CompletionOrder
from server.api.responses import (
    FinishReason,
    PromptLogprobs,
    PromptTokenLogprob,
    Speculation,
)
from server.api.sse import DONE, error_event, event
from server.api.text import TokenIdNames, TokenNames
from server.api.usage import speculation_report, usage_report
from server.errors import TailorError
from server.types import Delta, TokenLogprob

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have (as vLLM does)."""


def shown_stop_reason(stop_reason: int | bytes | None) -> int | str | None:
    """A choice's stop_reason as JSON has it."""
    if isinstance(stop_reason, bytes):
        return stop_reason.decode() or None  # b"" is a grammar's end
    return stop_reason


def shown_prompt_logprobs(
    entries: Sequence[TokenLogprob | None], num_top: int, names: TokenNames | TokenIdNames
) -> PromptLogprobs:
    """A prompt's logprobs in vLLM's shape, with the num_top likeliest of each position."""

    def of(entry: TokenLogprob) -> dict[str, PromptTokenLogprob]:
        ranked = [(token_id, value, k + 1) for k, (token_id, value) in enumerate(entry.top)]
        own = (entry.token_id, entry.logprob, entry.rank)
        return {
            str(token_id): PromptTokenLogprob(
                logprob=max(value, LOWEST_LOGPROB), rank=rank, decoded_token=names[token_id]
            )
            for token_id, value, rank in [own, *ranked[:num_top]]
        }

    return [None if entry is None else of(entry) for entry in entries]


def shown_finish(reason: str | None) -> FinishReason:
    """A choice's finish_reason once it ended well."""
    if reason in ("stop", "length", "tool_calls"):
        return cast(FinishReason, reason)
    raise ValueError(f"no choice that is shown ends with {reason}")


_Chunk = TypeVar("_Chunk", CompletionChunk, ChatChunk)


class ChunkFrame(Generic[_Chunk]):
    """What is around the choice in every chunk.

    kind: the chunk's type. extra: further members of it. num_sent, the tokens of the chunks so far,
    is written by the chunks' writer.
    """

    def __init__(
        self, order: CompletionOrder, submission: Submission, kind: type[_Chunk], **extra: Any
    ) -> None:
        self._order = order
        self._submission = submission
        # One object for all chunks: what never changes is set once.
        self._chunk: _Chunk = kind(
            id=order.request_id,
            created=order.created,
            model=order.label,
            system_fingerprint=order.model.fingerprint or None,
            choices=[],
            **extra,
        )
        self.num_sent = 0

    def chunk(self, choice: Any, *, is_last: bool) -> bytes:
        """The event of one choice. is_last: no further one with a choice comes."""
        order, chunk = self._order, self._chunk
        chunk.choices = [choice]
        if order.include_usage:
            chunk.usage = None
            if order.continuous_usage:
                # The accounts may be ahead: several Deltas can have arrived before this chunk.
                chunk.usage = usage_report(self._submission.accounts, self.num_sent)
        elif is_last:
            chunk.speculation = self._report()
        return event(chunk)

    def closing(self) -> bytes:
        """The chunk without choices that has the sums; b"" unless include_usage."""
        if not self._order.include_usage:
            return b""
        chunk = self._chunk
        chunk.choices = []
        chunk.usage = usage_report(
            self._submission.accounts, num_truncated=self._order.num_truncated
        )
        chunk.speculation = self._report()
        return event(chunk)

    def _report(self) -> Speculation | UnsetType:
        if not self._order.include_speculation:
            return UNSET
        return speculation_report(self._submission.accounts)


async def stream_events(
    submission: Submission,
    write: Callable[[list[tuple[int, Delta]]], bytes],
    frame: ChunkFrame[CompletionChunk] | ChunkFrame[ChatChunk],
) -> AsyncGenerator[bytes, None]:
    """The response as server-sent events, one byte string for all that arrived together.

    write: the events of what arrived, b"" for none. An error before the first event is raised;
    after the status was sent it becomes an event. [DONE] is always last.
    """
    started = False
    try:
        async for arrived in submission:
            if data := write(arrived):
                started = True
                yield data
    except TailorError as error:
        if not started:
            raise
        yield error_event(error)
        return
    yield frame.closing() + DONE
