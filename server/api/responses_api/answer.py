"""From Deltas to the answer of POST /v1/responses: whole, or as OpenAI's events.

One ResponseWriter makes both, so they agree.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from msgspec import UNSET

from server.api.chat import ChoiceReader
from server.api.engines.submission import Submission
from server.api.responses import DecisionUsage, InputDetails, OutputDetails, encode_ascii
from server.api.responses_api.intake import ResponsesOrder
from server.api.responses_api.shapes import (
    CallItem,
    ErrorEvent,
    IncompleteDetails,
    MessageItem,
    OutputItem,
    ResponseAnswer,
    ResponseEvent,
    TextPart,
    TextSettings,
)
from server.api.tools.reader import ArgumentsPiece, CallStart, ToolEvent
from server.errors import TailorError
from server.types import Delta


class ResponseWriter:
    """The response as it grows; every method returns the events of what changed."""

    def __init__(self, order: ResponsesOrder, submission: Submission) -> None:
        self.answer = _begun(order)
        self._submission = submission
        self._choice = ChoiceReader(order.chat, 0)
        self._num_events = 0

    def begin(self) -> list[ResponseEvent]:
        """The events before any output."""
        return [
            self._event("response.created", response=self.answer),
            self._event("response.in_progress", response=self.answer),
        ]

    def take(self, delta: Delta) -> list[ResponseEvent]:
        """Add one Delta."""
        events: list[ResponseEvent] = []
        for event in self._choice.take(delta).events:
            events += self._add(event)
        return events

    def finish(self) -> list[ResponseEvent]:
        """End the last item and the response."""
        was_cut = self._choice.finish_reason == "length"
        events = self._close(was_cut=was_cut)
        answer = self.answer
        answer.status = "incomplete" if was_cut else "completed"
        answer.incomplete_details = IncompleteDetails() if was_cut else None
        answer.usage = _usage(self._submission)
        return [*events, self._event(f"response.{answer.status}", response=answer)]

    def error(self, error: TailorError) -> bytes:
        """The event of an error after other events were sent."""
        self._num_events += 1
        return error_written(error, self._num_events - 1)

    def _add(self, event: ToolEvent) -> list[ResponseEvent]:
        """A piece of text, the start of a call or more of its arguments."""
        if isinstance(event, CallStart):
            item = CallItem(
                id=f"fc_{secrets.token_hex(12)}",
                call_id=event.call_id,
                name=event.name,
                arguments="",
                status="in_progress",
            )
            return [*self._close(was_cut=False), self._open(item)]
        last = self.answer.output[-1] if self.answer.output else None
        if isinstance(event, ArgumentsPiece):
            assert isinstance(last, CallItem)
            last.arguments += event.text
            kind = "response.function_call_arguments.delta"
            return [self._event(kind, **self._at(last), delta=event.text)]
        events: list[ResponseEvent] = []
        if not isinstance(last, MessageItem) or last.status != "in_progress":
            events = self._close(was_cut=False)
            last = MessageItem(id=f"msg_{secrets.token_hex(12)}", status="in_progress", content=[])
            events.append(self._open(last))
            last.content.append(TextPart(text=""))
            kind = "response.content_part.added"
            events.append(self._event(kind, **self._at(last, 0), part=last.content[0]))
        last.content[0].text += event
        kind = "response.output_text.delta"
        return [*events, self._event(kind, **self._at(last, 0), delta=event, logprobs=[])]

    def _open(self, item: OutputItem) -> ResponseEvent:
        self.answer.output.append(item)
        index = len(self.answer.output) - 1
        return self._event("response.output_item.added", output_index=index, item=item)

    def _close(self, *, was_cut: bool) -> list[ResponseEvent]:
        """End the last item, if it is open."""
        output = self.answer.output
        if not output or output[-1].status != "in_progress":
            return []
        item = output[-1]
        item.status = "incomplete" if was_cut else "completed"
        if isinstance(item, CallItem):
            kind = "response.function_call_arguments.done"
            done = [self._event(kind, **self._at(item), arguments=item.arguments, name=item.name)]
        else:
            [part] = item.content
            at = self._at(item, 0)
            kind = "response.output_text.done"
            done = [
                self._event(kind, **at, text=part.text, logprobs=[]),
                self._event("response.content_part.done", **at, part=part),
            ]
        index = len(output) - 1
        return [*done, self._event("response.output_item.done", output_index=index, item=item)]

    def _at(self, item: OutputItem, content_index: int | None = None) -> dict[str, Any]:
        at: dict[str, Any] = {"item_id": item.id, "output_index": len(self.answer.output) - 1}
        if content_index is not None:
            at["content_index"] = content_index
        return at

    def _event(self, kind: str, **members: Any) -> ResponseEvent:
        self._num_events += 1
        return ResponseEvent(type=kind, sequence_number=self._num_events - 1, **members)


def _begun(order: ResponsesOrder) -> ResponseAnswer:
    body, inner = order.body, order.chat.order
    [request] = inner.requests
    form: dict[str, Any] = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        form = body.text.format.model_dump(by_alias=True, exclude_none=True)
    tools = [tool.model_dump() for tool in body.tools or ()]
    effort = None if body.reasoning is None else body.reasoning.effort
    return ResponseAnswer(
        id=inner.request_id,
        created_at=int(time.time()),
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=inner.label,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning={"effort": effort, "summary": None},
        service_tier="default",
        temperature=request.sampling.temperature,
        text=TextSettings(format=form),
        tool_choice=body.tool_choice or "auto",
        tools=tools,
        top_p=request.sampling.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )


def _usage(submission: Submission) -> DecisionUsage:
    [account] = submission.accounts
    num_in, num_out = account.num_prompt_tokens, account.num_completion_tokens
    return DecisionUsage(
        input_tokens=num_in,
        input_tokens_details=InputDetails(cached_tokens=account.num_cached_tokens),
        output_tokens=num_out,
        output_tokens_details=OutputDetails(base_tokens=account.num_base_tokens or UNSET),
        total_tokens=num_in + num_out,
    )


async def response_object(order: ResponsesOrder, submission: Submission) -> ResponseAnswer:
    """The whole response, once it ended. Raises the TailorError that ended it early."""
    writer = ResponseWriter(order, submission)
    async for arrived in submission:
        for _, delta in arrived:
            writer.take(delta)
    writer.finish()
    return writer.answer


async def response_events(
    order: ResponsesOrder, submission: Submission
) -> AsyncGenerator[bytes, None]:
    """The response as server-sent events, one byte string for all that arrived together. An error
    before the first event is raised; later it becomes an event."""
    writer, begun = ResponseWriter(order, submission), False
    try:
        async for arrived in submission:
            events = [] if begun else [_written(event) for event in writer.begin()]
            begun = True
            for _, delta in arrived:
                events += [_written(event) for event in writer.take(delta)]
            if events:
                yield b"".join(events)
    except TailorError as error:
        if not begun:
            raise
        yield writer.error(error)
        return
    yield b"".join([_written(event) for event in writer.finish()])


def error_written(error: TailorError, sequence_number: int = 0) -> bytes:
    """The event of an error after the status was sent."""
    return _written(
        ErrorEvent(
            sequence_number=sequence_number,
            code=error.code,
            message=error.message,
            param=error.param,
        )
    )


def _written(event: ResponseEvent | ErrorEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), encode_ascii(event))
