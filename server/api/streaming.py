"""Server-sent chunks of one response: what /v1/completions and /v1/chat/completions share."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable

from server.api.engines.client import Submission
from server.api.intake import CompletionOrder
from server.api.sse import DONE, event
from server.api.usage import speculation_report, usage_report
from server.errors import TailorError
from server.types import Delta

__all__ = ["LOWEST_LOGPROB", "ChunkFrame", "quote", "shown_stop_reason", "stream_events"]

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have (as vLLM does)."""

quote = json.encoder.encode_basestring_ascii


def shown_stop_reason(stop_reason: int | bytes | None) -> int | str | None:
    """A choice's stop_reason as JSON has it."""
    if isinstance(stop_reason, bytes):
        return stop_reason.decode() or None  # b"" is a grammar's end
    return stop_reason


class ChunkFrame:
    """What is around the choice in every chunk. What never changes is encoded once.

    kind: the `object` member. extra: members that come before `choices`, as JSON text that ends in
    a comma. num_sent, the tokens of the chunks so far, is written by the chunks' writer.
    """

    def __init__(
        self, order: CompletionOrder, submission: Submission, kind: str, extra: str = ""
    ) -> None:
        self._order = order
        self._submission = submission
        fingerprint = order.model.fingerprint
        self._head = (
            f'data: {{"id":{quote(order.request_id)},"object":{quote(kind)},'
            f'"created":{order.created},"model":{quote(order.label)},"system_fingerprint":'
            f'{quote(fingerprint) if fingerprint else "null"},{extra}"choices":['
        )
        self.num_sent = 0

    def chunk(self, choice: str, *, is_last: bool) -> str:
        """The event of one choice (JSON text). is_last: no further one with a choice comes."""
        order = self._order
        usage = ""
        if order.continuous_usage:
            # The accounts may be ahead: several Deltas can have arrived before this chunk.
            sums = usage_report(self._submission.accounts)
            sums["completion_tokens"] = self.num_sent
            sums["total_tokens"] = sums["prompt_tokens"] + self.num_sent
            usage = f',"usage":{json.dumps(sums)}'
        elif order.include_usage:
            usage = ',"usage":null'
        report = self._report() if is_last and not order.include_usage else ""
        return f"{self._head}{choice}]{usage}{report}}}\n\n"

    def closing(self) -> str:
        """The chunk without choices that has the sums; "" unless include_usage."""
        if not self._order.include_usage:
            return ""
        usage = json.dumps(usage_report(self._submission.accounts))
        return f'{self._head}],"usage":{usage}{self._report()}}}\n\n'

    def _report(self) -> str:
        if not self._order.include_speculation:
            return ""
        return f',"speculation":{json.dumps(speculation_report(self._submission.accounts))}'


async def stream_events(
    submission: Submission,
    write: Callable[[list[tuple[int, Delta]]], str],
    frame: ChunkFrame,
) -> AsyncGenerator[bytes, None]:
    """The response as server-sent events, one byte string for all that arrived together.

    write: the events of what arrived, "" for none. An error before the first event is raised; later
    it becomes an event, as there is no status left to set. [DONE] is always last.
    """
    started = False
    try:
        async for arrived in submission:
            if data := write(arrived):
                started = True
                yield data.encode()
    except TailorError as error:
        if not started:
            raise
        yield event(error.body()) + DONE
        return
    yield frame.closing().encode() + DONE
