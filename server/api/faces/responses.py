"""POST /v1/responses: OpenAI's Responses API. A chat in another form. Between requests the last
items of answers are kept, in memory; other references to stored things are refused.

One ResponseWriter makes the whole answer and OpenAI's events, so they agree.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, UnsetType, field
from pydantic import Field, WithJsonSchema

from server.api.answer import choices_of, joined, speculation_of, token_usage
from server.api.bodies import (
    BodyPart,
    GenerationBody,
    JsonSchemaBody,
    Neutral,
    Path,
    aliases,
    content_schema,
    one_by_type,
)
from server.api.chats import Chat, ChatFace, Turn
from server.api.engines.submission import Submission
from server.api.faces.items import TEXTS, Item, Items
from server.api.grammars import ANY_OBJECT
from server.api.order import Order, Target
from server.api.route_context import RouteContext, StreamWriter, encode_ascii
from server.api.shapes import Count, Shape, Speculation, TokenUsage
from server.api.tools import (
    MAX_TOOLS,
    ArgumentsPiece,
    CallStart,
    FunctionBody,
    Mode,
    ToolChoice,
    ToolEvent,
)
from server.errors import InvalidRequestError, TailorError, UnsupportedFieldError
from server.types import INT31, Delta

# --- the body -------------------------------------------------------------------------------------

_ITEMS = Items({"function_call": "arguments"}, ("item_reference", "reasoning"))
_NOT_STORED = "conversations are not stored here; send the whole one as input"
_ONE = "a response is one message"


class FormatBody(JsonSchemaBody):
    """text.format."""

    type: Literal["text", "json_object", "json_schema"]


class TextBody(BodyPart):
    """text."""

    format: FormatBody | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionToolBody(FunctionBody):
    """A function that the model may call, by itself and while the client waits."""

    type: Literal["function"]
    allowed_callers: list[Literal["direct"]] | None = Field(None, min_length=1)
    defer_loading: Literal[False] | None = None
    runs_apart: Literal[False] | None = Field(None, alias="async")


_TOOL = one_by_type({"function": FunctionToolBody})


class ChosenFunctionBody(BodyPart):
    """A tool_choice of one function, and one of allowed_tools."""

    type: Literal["function"]
    name: str


class ChosenAllowedBody(BodyPart):
    """A tool_choice of several functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunctionBody] = Field(min_length=1, max_length=MAX_TOOLS)


_TOOL_CHOICE = one_by_type(
    {"function": ChosenFunctionBody, "allowed_tools": ChosenAllowedBody}, other=Mode
)


class ReasoningBody(BodyPart):
    """reasoning. There are no summaries; auto is accepted and gives none."""

    effort: str | None = Field(None, max_length=64)
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


_WITHOUT_SUCH = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip


class ResponsesBody(GenerationBody):
    """POST /v1/responses."""

    NEUTRAL: ClassVar[Mapping[str, Neutral]] = {
        **GenerationBody.NEUTRAL,
        "background": ((False,), "requests are answered while the client waits"),
        "previous_response_id": ((), _NOT_STORED),
        "conversation": ((), _NOT_STORED),
        "prompt": ((), "prompt templates are not stored here; use a task"),
        "access_programs": (({}, {"cyber": "standard"}), "there are no such programs here"),
        "image": (({}, {"context_compression": "auto"}), "this model reads text only"),
        "top_logprobs": ((0,), "use /v1/chat/completions"),
        "truncation": (("disabled",), "conversations are never cut"),
        "context_management": (([],), "conversations are never cut"),
        "response_format": ((), "use text.format"),
        "n": ((1,), _ONE),
        "prompt_logprobs": ((), _ONE),
        "logprob_token_ids": (([],), _ONE),
        "return_token_ids": ((False,), _ONE),
        "return_tokens_as_token_ids": ((False,), _ONE),
        "include_token_sources": ((False,), _ONE),
        "include_rejected_drafts": ((False,), _ONE),
    }  # fmt: skip
    NAMES: ClassVar[Mapping[str, str]] = {
        "prompt": "input", "logprobs": "top_logprobs", "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort", "response_format": "text.format",
    }  # fmt: skip
    ALIASES: ClassVar[Mapping[str, Path]] = aliases(NAMES)

    input: Annotated[Any, WithJsonSchema(_ITEMS.schema(content_schema(*TEXTS)))]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT31)
    include: list[_WITHOUT_SUCH] | None = Field(
        None, max_length=64, description="of what no answer here has; changes nothing"
    )
    max_tool_calls: int | None = Field(
        None, ge=1, le=INT31, description="of tools that a server runs; there are none here"
    )
    tools: list[Annotated[Any, _TOOL]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, _TOOL_CHOICE] = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    service_tier: Literal["auto", "default"] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)


class KeptItems:
    """The last items of each key's answers, as its next input may have them, for clients that send
    an item's id in place of it (`item_reference`). In memory, and bounded by number and characters
    per key: no key's items make another's go."""

    def __init__(self, max_items: int = 512, max_chars: int = 1 << 20) -> None:
        self._max_items = max_items
        self._max_chars = max_chars
        self._of: dict[str, OrderedDict[str, tuple[Item, int]]] = {}
        self._num_chars: Counter[str] = Counter()

    def keep(self, tenant: str, item: OutputItem) -> None:
        """Keep one; the key's oldest go."""
        if isinstance(item, CallItem):
            said = item.arguments
            sent = {"type": "function_call", "call_id": item.call_id, "name": item.name,
                    "arguments": said}  # fmt: skip
        else:
            said = "".join(part.text for part in item.content)
            sent = {"role": "assistant", "content": said}
        size = len(said)
        items = self._of.setdefault(tenant, OrderedDict())
        items[item.id] = sent, size
        self._num_chars[tenant] += size
        while len(items) > self._max_items or self._num_chars[tenant] > self._max_chars:
            _, (_, oldest) = items.popitem(last=False)
            self._num_chars[tenant] -= oldest

    def find(self, tenant: str, item_id: Any) -> Item | None:
        """The item of an answer to this key, None where it is not kept."""
        kept = self._of.get(tenant) if isinstance(item_id, str) else None
        return None if kept is None else kept.get(item_id, (None, 0))[0]


def chat_of(body: ResponsesBody, kept: Callable[[Any], Item | None] = lambda _: None) -> Chat:
    """The Chat of a body. kept: the item that an id names. Raises the client's errors (4xx)."""
    if body.store:
        raise UnsupportedFieldError(
            "responses are not stored, and only the last items are kept in memory; only false is "
            "taken, got true.",
            at="store",
        )
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise UnsupportedFieldError(
            "a response's usage is told with its end.", at="stream_options.continuous_usage_stats"
        )
    turns = (
        [Turn("user", body.input, "input")]
        if isinstance(body.input, str)
        else _ITEMS.turns(body.input, kept)
    )
    if body.instructions is not None:
        turns.insert(0, Turn("system", body.instructions, "instructions"))
    text = body.text or TextBody()
    if text.verbosity not in (None, "medium"):
        raise UnsupportedFieldError(
            f"{text.verbosity} is not available here, only medium.", at="text.verbosity"
        )
    form, output = text.format, None
    if form is not None:
        schema, at = form.schema_value, "text.format.schema"
        if schema is not None and form.type == "text":
            raise InvalidRequestError(
                "allowed only with the types json_schema and json_object.", at=at
            )
        if schema is None and form.type == "json_object":
            schema, at = ANY_OBJECT, "text.format"
        if form.type != "text":
            output = schema, at
    return Chat(
        body=body,
        turns=turns,
        max_tokens=body.max_output_tokens,
        tools={f"tools[{i}]": tool for i, tool in enumerate(body.tools or ())},
        tool_choice=_choice_of(body.tool_choice),
        parallel=body.parallel_tool_calls is not False,
        form=output,
        effort=None if body.reasoning is None else body.reasoning.effort,
        variables=body.chat_template_kwargs,
    )


def _choice_of(choice: Any) -> ToolChoice:
    if isinstance(choice, ChosenFunctionBody):
        return "required", {choice.name: "tool_choice.name"}
    if isinstance(choice, ChosenAllowedBody):
        tools = enumerate(choice.tools)
        return choice.mode, {tool.name: f"tool_choice.tools[{i}].name" for i, tool in tools}
    return choice or "auto", {}


# --- the answer -----------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class TextPart(Shape, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class MessageItem(Shape, kw_only=True, tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[TextPart]


class CallItem(Shape, kw_only=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = MessageItem | CallItem


class IncompleteDetails(Shape, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class TextSettings(Shape, kw_only=True):
    format: dict[str, Any]


class ResponseAnswer(Shape, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete"]
    background: Literal[False] = False
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: Count | None
    max_tool_calls: Count | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    service_tier: str
    store: Literal[False] = False
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: TokenUsage | None = None
    user: str | None
    metadata: dict[str, Any]
    speculation: Speculation | UnsetType = UNSET


class ResponseEvent(Shape, kw_only=True):
    """One event of a stream; its type determines its members."""

    type: str
    sequence_number: Count
    response: ResponseAnswer | UnsetType = UNSET
    output_index: Count | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: Count | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: TextPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class ErrorEvent(Shape, kw_only=True):
    """An error after the status was sent."""

    type: Literal["error"] = "error"
    sequence_number: Count
    code: str | None
    message: str
    param: str | None


class Responses(ChatFace[ResponsesBody]):
    """The route."""

    path = "/v1/responses"
    summary = "A response"
    body = ResponsesBody
    answer = ResponseAnswer
    chunks = (ResponseEvent, ErrorEvent)
    id_prefix = "resp_"

    def __init__(self, context: RouteContext) -> None:
        super().__init__(context)
        self._kept = KeptItems()

    def chat(self, body: ResponsesBody, target: Target) -> Chat:
        return chat_of(body, partial(self._kept.find, target.tenant))

    async def whole(self, order: Order, submission: Submission) -> ResponseAnswer:
        deltas = await submission.rest()
        writer = self.writer(order, submission)
        for _ in itertools.chain(writer.take(joined(deltas[0, 0])), writer.finish()):
            pass
        return writer.answer

    def writer(self, order: Order, submission: Submission) -> ResponseWriter:
        return ResponseWriter(order, submission, self._kept)


class ResponseWriter(StreamWriter):
    """The response as it grows, and the events of what changed. kept: gets its items, unless the
    client says store: false."""

    def __init__(self, order: Order, submission: Submission, kept: KeptItems) -> None:
        self.answer = _begun(order)
        self._order = order
        self._submission = submission
        self._kept = kept
        [[self._choice]] = choices_of(order)
        self._num_events = 0

    def written(self, arrived: list[tuple[int, Delta]]) -> bytes:
        kinds = () if self._num_events else ("response.created", "response.in_progress")
        written = [_written(self._event(kind, response=self.answer)) for kind in kinds]
        for _, delta in arrived:  # each event is written before the next one changes its items
            written += map(_written, self.take(delta))
        return b"".join(written)

    def end(self) -> bytes:
        return b"".join(map(_written, self.finish()))

    def error(self, error: TailorError) -> bytes:
        return _written(
            ErrorEvent(
                sequence_number=self._num_events,
                code=error.code,
                message=error.message,
                param=error.param,
            )
        )

    def take(self, delta: Delta) -> Iterator[ResponseEvent]:
        """Add one Delta."""
        for event in self._choice.take(delta).events:
            yield from self._add(event)

    def finish(self) -> Iterator[ResponseEvent]:
        """End the last item and the response, and keep what it says."""
        reason = self._choice.finish_reason
        was_cut = reason == "length"
        lacks = self._order.generation.forces_call and reason != "tool_calls"
        yield from self._close(was_cut=was_cut or lacks)
        answer = self.answer
        answer.status = "incomplete" if was_cut else "completed"
        answer.incomplete_details = IncompleteDetails() if was_cut else None
        answer.usage = token_usage(self._submission.accounts)
        answer.speculation = speculation_of(self._order, self._submission)
        if self._order.body.store is not False:
            for item in answer.output:
                self._kept.keep(self._order.target.tenant, item)
        yield self._event(f"response.{answer.status}", response=answer)

    def _add(self, event: ToolEvent) -> Iterator[ResponseEvent]:
        """A piece of text, the start of a call or more of its arguments."""
        if isinstance(event, CallStart):
            yield from self._close(was_cut=False)
            yield self._open(
                CallItem(
                    id=f"fc_{secrets.token_hex(12)}",
                    call_id=event.call_id,
                    name=event.name,
                    arguments="",
                    status="in_progress",
                )
            )
            return
        last = self.answer.output[-1] if self.answer.output else None
        if isinstance(event, ArgumentsPiece):
            assert isinstance(last, CallItem)
            last.arguments += event.text
            kind = "response.function_call_arguments.delta"
            yield self._event(kind, **self._at(last), delta=event.text)
            return
        if not isinstance(last, MessageItem) or last.status != "in_progress":
            yield from self._close(was_cut=False)
            last = MessageItem(id=f"msg_{secrets.token_hex(12)}", status="in_progress", content=[])
            yield self._open(last)
            last.content.append(TextPart(text=""))
            kind = "response.content_part.added"
            yield self._event(kind, **self._at(last), part=last.content[0])
        last.content[0].text += event
        kind = "response.output_text.delta"
        yield self._event(kind, **self._at(last), delta=event, logprobs=[])

    def _open(self, item: OutputItem) -> ResponseEvent:
        self.answer.output.append(item)
        index = len(self.answer.output) - 1
        return self._event("response.output_item.added", output_index=index, item=item)

    def _close(self, *, was_cut: bool) -> Iterator[ResponseEvent]:
        """End the last item, if it is open."""
        output = self.answer.output
        if not output or output[-1].status != "in_progress":
            return
        item = output[-1]
        item.status = "incomplete" if was_cut else "completed"
        if isinstance(item, CallItem):
            kind = "response.function_call_arguments.done"
            yield self._event(kind, **self._at(item), arguments=item.arguments, name=item.name)
        else:
            [part] = item.content
            at = self._at(item)
            yield self._event("response.output_text.done", **at, text=part.text, logprobs=[])
            yield self._event("response.content_part.done", **at, part=part)
        yield self._event("response.output_item.done", output_index=len(output) - 1, item=item)

    def _at(self, item: OutputItem) -> dict[str, Any]:
        at = {"item_id": item.id, "output_index": len(self.answer.output) - 1}
        return at if isinstance(item, CallItem) else {**at, "content_index": 0}

    def _event(self, kind: str, **members: Any) -> ResponseEvent:
        self._num_events += 1
        return ResponseEvent(type=kind, sequence_number=self._num_events - 1, **members)


def _begun(order: Order) -> ResponseAnswer:
    body = order.body
    assert isinstance(body, ResponsesBody)
    [request] = order.requests
    form: dict[str, Any] = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        form = body.text.format.model_dump(by_alias=True, exclude_none=True)
    effort = None if body.reasoning is None else body.reasoning.effort
    choice = body.tool_choice
    return ResponseAnswer(
        id=order.request_id,
        created_at=int(time.time()),
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=order.target.label,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning={"effort": effort, "summary": None},
        service_tier="default",
        temperature=request.sampling.temperature,
        text=TextSettings(format=form),
        tool_choice=choice.model_dump() if isinstance(choice, BodyPart) else choice or "auto",
        tools=[tool.model_dump(by_alias=True) for tool in body.tools or ()],
        top_p=request.sampling.top_p if body.top_p is None else body.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )


def _written(event: ResponseEvent | ErrorEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), encode_ascii(event))
