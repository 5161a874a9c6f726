"""POST /v1/chat/completions: messages and tools in, messages and tool calls out, in OpenAI's shape.

Fields of OpenAI's that this server cannot honour are in NEUTRAL, so that they are refused with a
reason and not as unknown fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import FailFast, Field, WithJsonSchema, model_validator

from server.api.answer import (
    LOWEST_LOGPROB,
    Choice,
    ChunkWriter,
    Piece,
    add_extras,
    around,
    choices_of,
    joined,
    shown_prompt_logprobs,
    sums_of,
)
from server.api.bodies import (
    BodyPart,
    GenerationBody,
    Neutral,
    Path,
    aliases,
    content_schema,
    joined_texts,
    one_by_type,
    required,
    says_nothing,
)
from server.api.chats import MAX_MESSAGES, Call, Chat, ChatFace, Turn
from server.api.engines.submission import Submission
from server.api.grammars import format_of
from server.api.order import Order, Target
from server.api.route_context import StreamWriter
from server.api.shapes import (
    Chunk,
    Count,
    ErrorAnswer,
    Extras,
    FinishReason,
    GenerationAnswer,
    PromptLogprobs,
    Shape,
)
from server.api.tools import MAX_TOOLS, CallStart, FunctionBody, Mode, ToolChoice, ToolEvent
from server.errors import InvalidRequestError, UnsupportedFieldError
from server.types import INT31, Delta, TokenLogprob

MAX_CALLS = 128

# --- the body -------------------------------------------------------------------------------------

_CONTENT = {
    **content_schema("text", "refusal"),
    "description": "text, or text parts, which are joined with line breaks",
}


class FunctionNameBody(BodyPart):
    """The function that a tool_choice names."""

    name: str


class ChosenFunctionBody(BodyPart):
    """A tool_choice of one function, and one of allowed_tools."""

    type: Literal["function"]
    function: FunctionNameBody


class AllowedToolsBody(BodyPart):
    """tool_choice.allowed_tools: the functions that may be called."""

    mode: Literal["auto", "required"]
    tools: list[ChosenFunctionBody] = Field(min_length=1, max_length=MAX_TOOLS)


class ChosenAllowedBody(BodyPart):
    """A tool_choice of several functions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsBody


_TOOL_CHOICE = one_by_type(
    {"function": ChosenFunctionBody, "allowed_tools": ChosenAllowedBody}, other=Mode
)


class CalledFunctionBody(BodyPart):
    """Name and arguments (JSON text) of a call that was made."""

    name: str
    arguments: str
    parsed_arguments: Any = Field(None, description="of OpenAI's helpers; changes nothing")


class ToolCallBody(BodyPart):
    """A call in an assistant's message. index: as it is in chunks; changes nothing here."""

    index: int | None = None
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunctionBody


class MessageBody(BodyPart):
    """One message; `turns_of` checks which fields a role has.

    Members that are empty count as absent: clients send answers back with members of their own
    (`provider_specific_fields: {"refusal": null}`, `images: []`).
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Any, WithJsonSchema(_CONTENT)] = None
    name: str | None = Field(None, max_length=256, description="goes to the template")
    refusal: str | None = None
    reasoning_content: str | None = Field(None, description="for templates that read it")
    tool_calls: list[ToolCallBody] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = Field(None, min_length=1, max_length=256)
    annotations: list[Any] | None = Field(
        None, max_length=0, description="empty, as answers have it: clients send them back whole"
    )
    audio: Any = None
    function_call: Any = None
    id: str | None = Field(None, max_length=256, description="changes nothing")
    cache_control: Any = Field(None, description="of other vendors' prompt caches; changes nothing")
    parsed: Any = Field(None, description="of OpenAI's helpers; changes nothing")

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = ("role", "content", "tool_call_id", "name", "refusal", "audio", "function_call")
        return {
            name: item for name, item in value.items() if name in kept or not says_nothing(item)
        }


class ToolBody(BodyPart):
    """One tool."""

    type: Literal["function"] = "function"
    function: FunctionBody
    cache_control: Any = Field(None, description="of other vendors' prompt caches; changes nothing")


_OLD_FORM = "it is OpenAI's old form; use "
_THINKS = ("chat_template_kwargs", "enable_thinking")


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    NEUTRAL: ClassVar[Mapping[str, Neutral]] = {
        **GenerationBody.NEUTRAL,
        "echo": ((False,), "an answer holds the message alone"),
        "add_special_tokens": ((False,), "the chat template writes all control tokens"),
        "verbosity": (("medium",), "answers are as long as they are"),
        "modalities": ((["text"], []), "this model writes text only"),
        "audio": ((), "this model writes text only"),
        "chat_template": (
            (), "a chat is rendered by the model's own template, never by a client's",
        ),
        "documents": (([],), "put them into the messages"),
        "function_call": (("none",), f"{_OLD_FORM}tool_choice"),
        "functions": (([],), f"{_OLD_FORM}tools"),
        "truncate_prompt_tokens": ((), "a rendered chat is not cut; leave out messages"),
        "web_search_options": ((), "this server searches nothing"),
    }  # fmt: skip
    NAMES: ClassVar[Mapping[str, str]] = {
        "prompt": "messages", "logprobs": "top_logprobs", "max_tokens": "max_completion_tokens",
    }  # fmt: skip
    ALIASES: ClassVar[Mapping[str, Path]] = aliases(
        NAMES, {"enable_thinking": _THINKS, "think": _THINKS}
    )
    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **GenerationBody.ELSEWHERE,
        "thinking": "Send chat_template_kwargs.enable_thinking.",
    }

    messages: Annotated[list[MessageBody], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, le=INT31)
    best_of: int | None = Field(None, description="must equal n: every choice is returned")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, _TOOL_CHOICE] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=64)
    service_tier: Literal["auto", "default"] | None = None

    # vLLM's.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)


def chat_of(body: ChatBody) -> Chat:
    """The Chat of a body. Raises the client's errors (4xx)."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UnsupportedFieldError(
            f"every choice is returned; it must equal n, {body.n or 1}.", at="best_of"
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("allowed only with logprobs true.", at="top_logprobs")
    return Chat(
        body=body,
        turns=turns_of(body.messages),
        max_tokens=body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tools={f"tools[{i}].function": tool.function for i, tool in enumerate(body.tools or ())},
        tool_choice=_choice_of(body.tool_choice),
        parallel=body.parallel_tool_calls is not False,
        form=format_of(body.response_format),
        effort=body.reasoning_effort,
        variables=body.chat_template_kwargs,
        continues=bool(body.continue_final_message),
        adds_prompt=body.add_generation_prompt,
    )


def _choice_of(choice: Any) -> ToolChoice:
    if isinstance(choice, ChosenFunctionBody):
        return "required", {choice.function.name: "tool_choice.function.name"}
    if isinstance(choice, ChosenAllowedBody):
        at, inner = "tool_choice.allowed_tools.tools", choice.allowed_tools
        return inner.mode, {
            tool.function.name: f"{at}[{i}].function.name" for i, tool in enumerate(inner.tools)
        }
    return choice or "auto", {}


_OF_ALL_ROLES = frozenset({"role", "id", "cache_control"})
_FIELDS_OF_ROLE: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("system", "developer", "user"), frozenset({"content", "name"})),
    "assistant": frozenset(
        {"content", "name", "refusal", "reasoning_content", "tool_calls", "annotations", "parsed"}
    ),
    "tool": frozenset({"content", "tool_call_id", "name"}),
}


def turns_of(messages: Sequence[MessageBody]) -> list[Turn]:
    """The messages as Turns. Raises InvalidRequestError and UnsupportedFieldError, naming message
    and field."""
    turns = []
    for i, message in enumerate(messages):
        at, role = f"messages[{i}]", message.role
        fields = _FIELDS_OF_ROLE.get(role)
        if fields is None:
            raise UnsupportedFieldError(f"function is {_OLD_FORM}tool.", at=f"{at}.role")
        for name, value in message:
            if value is not None and name not in _OF_ALL_ROLES and name not in fields:
                raise UnsupportedFieldError(
                    f"a message of the role {role} cannot have it.", at=f"{at}.{name}"
                )
        if role == "tool" and message.tool_call_id is None:
            raise required(f"{at}.tool_call_id")
        turns.append(
            Turn(
                role,
                _content(message, at),
                at,
                message.name,
                message.reasoning_content,
                tuple(
                    Call(
                        call.id,
                        call.function.name,
                        call.function.arguments,
                        f"{at}.tool_calls[{k}].function",
                    )
                    for k, call in enumerate(message.tool_calls or ())
                ),
                message.tool_call_id,
            )
        )
    return turns


def _content(message: MessageBody, at: str) -> str:
    if message.content is not None:
        # A line break between parts, as vLLM and llama.cpp put it.
        return joined_texts(message.content, f"{at}.content", "\n")
    if message.role == "assistant":
        if message.refusal is not None:
            return message.refusal
        if message.tool_calls:
            return ""
    raise required(f"{at}.content")


# --- the answer -----------------------------------------------------------------------------------


class TokenChance(Shape, kw_only=True):
    token: str
    logprob: float
    bytes: list[Count]


class TokenLogprobs(TokenChance, kw_only=True):
    top_logprobs: list[TokenChance]


class ChatLogprobs(Shape, kw_only=True):
    content: list[TokenLogprobs]
    refusal: None = None


class CallPart(Shape, kw_only=True):
    name: str
    arguments: str


class ToolCall(Shape, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CallPart


class ChatMessage(Shape, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: list[Any] = msgspec.field(default_factory=list)
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Extras, kw_only=True):
    """With vLLM's members, which are null where they were not asked for."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: tuple[Count, ...] | None = None


class ChatAnswer(GenerationAnswer, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    service_tier: Literal["default"] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: tuple[Count, ...] | None = None


class CallDelta(Shape, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Shape, kw_only=True):
    index: Count
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CallDelta


class MessageDelta(Shape, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChunkChoice(Extras, kw_only=True):
    index: Count
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Chunk, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    service_tier: Literal["default"] | UnsetType = UNSET
    prompt_token_ids: tuple[Count, ...] | UnsetType = UNSET


class ChatCompletions(ChatFace[ChatBody]):
    """The route."""

    path = "/v1/chat/completions"
    summary = "A chat completion"
    body = ChatBody
    answer = ChatAnswer
    chunks = (ChatChunk, ErrorAnswer)
    id_prefix = "chatcmpl-"

    def chat(self, body: ChatBody, target: Target) -> Chat:
        return chat_of(body)

    async def whole(self, order: Order, submission: Submission) -> ChatAnswer:
        deltas = await submission.rest()
        [choices] = choices_of(order)
        shown = []
        prompt_logprobs: Sequence[TokenLogprob | None] = ()
        for choice in choices:
            delta = joined(deltas[0, choice.index])
            prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
            shown.append(_shown(order, choice, choice.take(delta)))
        body = order.body
        return ChatAnswer(
            choices=shown,
            **around(order),
            **sums_of(order, submission),
            service_tier=None if body.service_tier is None else "default",
            prompt_logprobs=shown_prompt_logprobs(order, prompt_logprobs),
            prompt_token_ids=order.requests[0].prompt_ids if body.return_token_ids else None,
        )

    def writer(self, order: Order, submission: Submission) -> StreamWriter:
        return _Chunks(order, submission)


def _shown(order: Order, choice: Choice, piece: Piece) -> ChatChoice:
    """A choice of a whole answer. A forced call that max_tokens or a stop string cut is shown as
    text, because its arguments are not complete JSON."""
    content: list[str] = []
    calls: list[ToolCall] = []
    for event in piece.events:
        if isinstance(event, str):
            content.append(event)
        elif isinstance(event, CallStart):
            function = CallPart(name=event.name, arguments="")
            calls.append(ToolCall(id=event.call_id, function=function))
        else:
            calls[event.index].function.arguments += event.text
    was_cut = order.generation.forces_call and choice.finish_reason != "tool_calls"
    if was_cut and calls and not _is_object(calls[-1].function.arguments):
        content.append(calls.pop().function.arguments)
    text = "".join(content)
    message = ChatMessage(content=text if text or not calls else None)
    if calls:
        message.tool_calls = calls
    shown = ChatChoice(
        index=choice.index,
        message=message,
        logprobs=_logprobs(order, piece),
        finish_reason="stop",
    )
    shown.finish_reason = choice.end(shown)
    add_extras(order, shown, piece)
    return shown


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _logprobs(order: Order, piece: Piece) -> ChatLogprobs | None:
    """Logprobs of the message's tokens, without that of an id that only ends it."""
    if order.generation.logprobs is None:
        return None
    content = []
    for entry in piece.logprobs[: piece.num_shown]:
        token_id, top = entry.token_id, entry.top
        # Where the client named ids, the one that was drawn is told with them.
        if order.body.logprob_token_ids and token_id not in [other for other, _ in top]:
            top = ((token_id, entry.logprob), *top)
        drawn = _chance(order, token_id, entry.logprob)
        content.append(
            TokenLogprobs(
                token=drawn.token,
                logprob=drawn.logprob,
                bytes=drawn.bytes,
                top_logprobs=[_chance(order, top_id, value) for top_id, value in top],
            )
        )
    return ChatLogprobs(content=content)


def _chance(order: Order, token_id: int, logprob: float) -> TokenChance:
    return TokenChance(
        token=order.token_names[token_id],
        logprob=max(logprob, LOWEST_LOGPROB),
        bytes=list(order.table.bytes_of(token_id)),
    )


class _Chunks(ChunkWriter[ChatChunk]):
    """Of a Delta: the role first, a chunk for each piece of content and of a call, and one with an
    empty delta and the finish_reason."""

    def __init__(self, order: Order, submission: Submission) -> None:
        tier = UNSET if order.body.service_tier is None else "default"
        super().__init__(order, submission, ChatChunk, service_tier=tier)
        self._begun: set[int] = set()
        if order.body.return_token_ids:
            self.of_first["prompt_token_ids"] = order.requests[0].prompt_ids

    def chunks(self, i: int, delta: Delta) -> bytes:
        order, body, choice = self.order, self.order.body, self.choices[i][delta.choice_id]
        piece = choice.take(delta)
        ended = delta.finish_reason is not None
        deltas = [_delta_of(event) for event in piece.events]
        has_ids = body.return_token_ids and bool(piece.token_ids)
        logprobs = _logprobs(order, piece)
        has_logprobs = logprobs is not None and bool(logprobs.content)
        if not deltas and (has_logprobs or has_ids or piece.sources or piece.rejected):
            deltas.append(MessageDelta(content=""))
        # A message may begin with content or with a call: the role waits for the first of them.
        waits = order.generation.new_reader is not None and not deltas and not ended
        chunks: list[bytes] = []
        if choice.index not in self._begun and not waits:
            # OpenAI's client for Python takes choices only if they begin in their order.
            blank = "" if order.generation.new_reader is None else None  # it may be a call
            for index in sorted({*range(choice.index)} - self._begun):
                role = MessageDelta(role="assistant", content=blank, refusal=None)
                chunks.append(self.chunk(ChatChunkChoice(index=index, delta=role)))
            self._begun.update(range(choice.index + 1))
            if deltas and deltas[0].tool_calls is not UNSET:
                deltas[0].role, deltas[0].content, deltas[0].refusal = "assistant", None, None
            else:
                role = MessageDelta(role="assistant", content="", refusal=None)
                chunks.append(self.chunk(ChatChunkChoice(index=choice.index, delta=role)))
        self.num_sent += len(delta.token_ids)
        for i, part in enumerate(deltas):
            shown = ChatChunkChoice(index=choice.index, delta=part)
            if i == 0:
                shown.logprobs = logprobs
                if has_ids:
                    shown.token_ids = piece.token_ids
                if piece.sources:
                    shown.token_sources = piece.sources
                if piece.rejected:
                    shown.rejected_drafts = piece.rejected
            chunks.append(self.chunk(shown))
        if ended:
            shown = ChatChunkChoice(index=choice.index, delta=MessageDelta())
            shown.finish_reason = choice.end(shown)
            chunks.append(self.chunk(shown))
        return b"".join(chunks)


def _delta_of(event: ToolEvent) -> MessageDelta:
    """A chunk's delta."""
    if isinstance(event, str):
        return MessageDelta(content=event)
    if isinstance(event, CallStart):
        start = CallDelta(name=event.name, arguments="")
        call = ToolCallDelta(index=event.index, id=event.call_id, type="function", function=start)
    else:
        call = ToolCallDelta(index=event.index, function=CallDelta(arguments=event.text))
    return MessageDelta(tool_calls=[call])
