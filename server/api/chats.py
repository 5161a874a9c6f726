"""From a conversation to a prompt: the model's template turns messages and tools into ids, and what
the answer must be is known.

Every route that chats makes a Chat of its body, in the words of no route; places in the body travel
with what lies there (`at`), so that errors name the route's own fields. Without any max_tokens an
answer may fill the context.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from server.api.bodies import GenerationBody, parse_object
from server.api.chat_template import ChatTemplate, RenderedChat
from server.api.grammars import Wanted, grammar_of_prepared
from server.api.order import Generation, Orders, Target, rules_of
from server.api.route_context import TextFace
from server.api.tools import (
    FUNCTION_NAME,
    ChosenTools,
    ForcedCall,
    ToolChoice,
    ToolReader,
    Tools,
    chosen_tools,
    force_call,
    tell_tools,
)
from server.errors import (
    InvalidBodyError,
    InvalidRequestError,
    LimitExceededError,
    RequestError,
    UnsupportedFieldError,
    echoed,
)
from server.types import scope_of

_B = TypeVar("_B", bound=GenerationBody)

MAX_MESSAGES = 4096
TEMPLATE_KWARGS: Mapping[str, type] = {
    "date_string": str,
    "enable_thinking": bool,
    "preserve_thinking": bool,
    "reasoning_effort": str,
    "thinking": bool,
    "tools_in_user_message": bool,
}
"""What chat_template_kwargs may set, where the model's template reads it."""

THINKING = frozenset({"enable_thinking", "preserve_thinking", "thinking"})
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that an assistant has made. arguments: JSON text. at: of its function."""

    call_id: str
    name: str
    arguments: str
    at: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation. at: where it lies in the body."""

    role: str
    content: str
    at: str
    name: str | None = None
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(Generation):
    """A Generation whose prompt is a conversation, which a template turns into ids. text: the
    conversation as the model gets it, once it is rendered, with control tokens.

    variables: chat_template_kwargs.
    """

    prompts: Sequence[str | list[int]] = ()
    fills_context: bool = True
    text: str = ""
    turns: Sequence[Turn]
    tools: Tools
    tool_choice: ToolChoice = ("auto", {})
    parallel: bool = True
    effort: str | None = None
    variables: Mapping[str, Any] | None = None
    continues: bool = False
    adds_prompt: bool | None = None


async def generation_of(
    make: Callable[[], Chat], num_bytes: int, target: Target, orders: Orders
) -> Chat:
    """What `make` makes of a body of so many bytes, with its prompt, and with what its answer must
    be. Raises the client's errors (4xx)."""
    chat = await orders.work(make, num_bytes)
    model, body, template = target.model, chat.body, target.model.chat
    if template is None:
        raise UnsupportedFieldError(
            f"{echoed(model.name)} has no chat template: it continues text, it does not "
            "chat. Use /v1/completions.",
            at="model",
        )
    if chat.continues and chat.adds_prompt:
        raise InvalidRequestError(
            "this and add_generation_prompt contradict each other.", at="continue_final_message"
        )
    rules = rules_of(body, target.task)
    tools = await orders.work(lambda: chosen_tools(chat.tools, chat.tool_choice, rules), num_bytes)
    if tools.shown is not None and model.call_style is None:
        raise UnsupportedFieldError(
            "this model's chat template writes calls in a way that is not read here.",
            at="tools",
        )
    forced, grammar = await _forced(chat, tools, target, orders)
    # Templates may repeat messages; they hardly ever leave one out.
    num_chars = sum(len(turn.content) for turn in chat.turns)
    orders.check_size(num_chars, target, chat.max_tokens, body)
    num_chars += tools.num_chars + sum(
        64 + sum(len(call.arguments) for call in turn.calls) for turn in chat.turns
    )
    with_tools = tools.shown is not None and template.has_tools
    variables = _variables(chat, template.reads(with_tools=with_tools))
    if chat.continues and (chat.turns[-1].role != "assistant" or chat.turns[-1].calls):
        raise InvalidRequestError(
            "the last message must be an assistant's text.", at="continue_final_message"
        )
    adds = not chat.continues if chat.adds_prompt is None else chat.adds_prompt
    opening = "" if forced is None else forced.opening
    try:
        shown = await orders.work(
            lambda: rendered(
                template,
                chat.turns,
                tools.shown,
                add_generation_prompt=adds,
                continue_final_message=chat.continues,
                variables=variables,
                opening=opening,
            ),
            num_chars,
        )
        orders.check_size(shown.num_bytes, target, chat.max_tokens, body)
        ids = await orders.work(lambda: model.prompt_ids(template.encode(shown)), shown.num_bytes)
    except RequestError as error:
        raise (error.moved(body.called("prompt")) if error.at == "messages" else error) from None
    if not ids:
        raise InvalidRequestError("they have no tokens.", at=body.called("prompt"))

    def new_reader() -> ToolReader:
        assert model.call_style is not None
        return ToolReader(
            model.call_style,
            frozenset(tools.callable),
            strict=tools.strict,
            max_calls=None if chat.parallel else 1,
            begun=forced is not None and forced.begun,
            forced=None if forced is None else forced.name,
        )

    can_call = bool(tools.callable)
    return replace(
        chat,
        prompts=[ids],
        text=shown.text,
        grammar=grammar,
        new_reader=new_reader if can_call else None,
        forces_call=forced is not None,
        table=model.call_table if can_call else None,
        token_names=model.table.chat_names,
    )


async def _forced(
    chat: Chat, tools: ChosenTools, target: Target, orders: Orders
) -> tuple[ForcedCall | None, Wanted | None]:
    """How a call is forced, and its checked grammar."""
    body = chat.body
    if tools.callable:
        at = "structured_outputs" if body.structured_outputs else "response_format"
        if body.structured_outputs or chat.form is not None:
            raise UnsupportedFieldError(
                "cannot be combined with tools that may be called: it says what the whole "
                "answer must match.",
                at=body.called(at),
            )
    if not tools.must_call:
        return None, None
    if chat.continues:
        raise InvalidRequestError(
            "cannot be combined with a tool_choice that forces a call.",
            at="continue_final_message",
        )
    style = target.model.call_style
    assert style is not None
    forced = force_call(style, tools.callable, parallel=chat.parallel)
    grammar = grammar_of_prepared(forced.schema, "tools")
    scope = scope_of(target.tenant, body.cache_salt or "")
    try:
        await orders.grammars.check(grammar, "tools", scope)
    except LimitExceededError:
        raise  # it may be theirs together, and looking took its time
    except InvalidRequestError:
        for place, tool in chat.tools.items():  # whose schema is it?
            if tool.name in tools.callable:
                at = f"{place}.parameters"
                alone = grammar_of_prepared(tools.callable[tool.name], at)
                await orders.grammars.check(alone, at, scope)
        raise
    return forced, (grammar, "tools")


def rendered(
    template: ChatTemplate,
    turns: Sequence[Turn],
    tools: Sequence[Mapping[str, Any]] | None,
    **how: Any,
) -> RenderedChat:
    """A conversation as the model gets it. Content is a string for templates, arguments of calls
    are objects. A developer is the system for one that does not know the role; one that reads no
    tools is told of them as text. tools: ChosenTools.shown. how: of ChatTemplate.render. Raises
    InvalidRequestError and UnsupportedFieldError, naming the field."""
    source = template.source if tools is None else template.tool_source
    messages = []
    for turn in turns:
        is_system = turn.role == "developer" and "developer" not in source
        shown: dict[str, Any] = {
            "role": "system" if is_system else turn.role,
            "content": turn.content,
        }
        if turn.name is not None:
            shown["name"] = turn.name
        if turn.reasoning is not None:
            if "reasoning_content" not in source:
                raise UnsupportedFieldError(
                    "this model's chat template does not read it.",
                    at=f"{turn.at}.reasoning_content",
                )
            shown["reasoning_content"] = turn.reasoning
        if turn.calls:
            shown["tool_calls"] = [_shown_call(call) for call in turn.calls]
        if turn.call_id is not None:
            shown["tool_call_id"] = turn.call_id
        messages.append(shown)
    if not template.has_tools:
        messages, tools = tell_tools(messages, tools), None
    return template.render(messages, tools=tools, **how)


class ChatFace(TextFace[_B]):
    """A TextFace whose bodies are chats."""

    @abstractmethod
    def chat(self, body: _B, target: Target) -> Chat:
        """The Chat of a body. Raises the client's errors (4xx)."""

    async def generation(self, body: _B, target: Target) -> Generation:
        orders = self.context.orders
        return await generation_of(lambda: self.chat(body, target), body.num_bytes, target, orders)


def _shown_call(call: Call) -> dict[str, Any]:
    if not re.fullmatch(FUNCTION_NAME, call.name):
        raise InvalidRequestError(
            f"no function has such a name: {echoed(call.name)}.", at=f"{call.at}.name"
        )
    arguments: dict[str, Any] = {}
    if call.arguments.strip():  # some clients send "" for a call without arguments
        try:
            arguments = parse_object(call.arguments.encode())
        except InvalidBodyError:
            raise InvalidRequestError(
                "must be the text of a JSON object.", at=f"{call.at}.arguments"
            ) from None
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _variables(chat: Chat, reads: Set[str]) -> dict[str, Any]:
    """The template's variables that the client sets. Raises UnsupportedFieldError for one that the
    template does not read."""
    variables: dict[str, Any] = {}
    for name, value in (chat.variables or {}).items():
        if value is None or (value is False and name in THINKING - reads):
            continue  # without that variable in the template, the model does not think anyway
        at = chat.body.called("chat_template_kwargs", echoed(name, 40).strip(chr(39)))
        kind = TEMPLATE_KWARGS.get(name)
        if kind is None or name not in reads:
            known = [n for n in TEMPLATE_KWARGS if n in reads]
            raise UnsupportedFieldError(
                f"this model's chat template takes {', '.join(known) or 'no arguments'}.", at=at
            )
        if not isinstance(value, kind) or (isinstance(value, str) and len(value) > 256):
            told = "true or false" if kind is bool else "a string of at most 256 characters"
            raise InvalidRequestError(f"must be {told}; got {echoed(value)}.", at=at)
        variables[name] = value
    if chat.effort is not None:
        for name, value in _effort(chat, chat.effort, reads).items():
            if variables.setdefault(name, value) != value:
                other = chat.body.called("chat_template_kwargs", name)
                raise InvalidRequestError(
                    f"this and {other} contradict each other.",
                    at=chat.body.called("reasoning_effort"),
                )
    return variables


def _effort(chat: Chat, effort: str, reads: Set[str]) -> dict[str, Any]:
    """The template's variables for reasoning_effort.

    A template that reads it gets it. One that can only switch thinking gets it off for none and
    minimal, and on for more. A model whose template has no thinking never thinks: efforts that ask
    for little change nothing, the others are refused.
    """
    if "reasoning_effort" in reads:
        return {"reasoning_effort": effort}
    if "enable_thinking" in reads:
        if effort not in EFFORTS:
            raise InvalidRequestError(
                f"must be one of {', '.join(EFFORTS)}; got {echoed(effort, 40)}.",
                at=chat.body.called("reasoning_effort"),
            )
        return {"enable_thinking": effort not in ("none", "minimal")}
    if effort in ("none", "minimal", "low"):
        return {}
    raise UnsupportedFieldError(
        f"this model's chat template does not think; {echoed(effort, 40)} is not available, only "
        "none, minimal and low.",
        at=chat.body.called("reasoning_effort"),
    )
