"""From a validated chat to an order: the model's template turns messages and tools into ids, and
server.api.intake takes the rest.

A chat is a completion of its rendered prompt. Tasks, limits, sampling, drafting, structured outputs
and seeds are those of server.api.intake. Only fields' names differ, and without any max_tokens an
answer may fill the context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.api.chat_protocol import (
    ChatBody,
    refuse_unsupported,
    template_messages,
)
from server.api.chat_template import ChatTemplate, RenderedChat
from server.api.fields import PROMPT
from server.api.intake import CompletionOrder, Intake, opens_objects
from server.api.protocol import INT31, CompletionBody, GenerationBody
from server.api.served_model import ServedModel
from server.api.structured import grammar_of_schema
from server.api.text import TokenIdNames, TokenNames
from server.api.tools.chosen import ChosenTools, chosen_tools
from server.api.tools.forced import ForcedCall, force_call
from server.api.tools.formats import MARKERS, ToolFormat, format_of
from server.api.tools.reader import ToolReader
from server.api.tools.telling import tell_tools
from server.errors import InvalidRequestError, RequestError, UnsupportedFieldError, echoed
from server.token_bytes import TokenBytes
from server.types import GrammarSpec, scope_of

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
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})

_NAMES = {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": "max_completion_tokens"}
"""The names of a chat's fields, by their keys."""


@dataclass(frozen=True, slots=True)
class ChatOrder:
    """A POST /v1/chat/completions after intake.

    order: the completion that it is. table: id -> bytes, with text for the tokens that the reading
    of tool calls needs. names: token texts for logprobs. style: how calls are written, None when no
    tool may be called. tools: what may be called. forced: a call that the prompt already opens.
    service_tier: the answer's member of that name, None to leave it out.
    """

    order: CompletionOrder
    table: TokenBytes
    names: TokenNames | TokenIdNames
    style: ToolFormat | None
    tools: ChosenTools
    forced: ForcedCall | None
    service_tier: str | None

    def new_reader(self) -> ToolReader | None:
        """The reader of one choice's text, None when no tool may be called."""
        if self.style is None:
            return None
        return ToolReader(
            self.style,
            frozenset(self.tools.callable),
            strict=self.tools.strict,
            max_calls=None if self.tools.parallel else 1,
            begun=self.forced is not None and self.forced.begun,
            forced=None if self.forced is None else self.forced.name,
        )


@dataclass(frozen=True, slots=True)
class _Talker:
    """A model with a chat template, and what is read from it once.

    style: how it writes calls, None for a way that is not read here. tells_tools: whether the
    server describes tools to it, because its template does not.
    """

    template: ChatTemplate
    style: ToolFormat | None
    tells_tools: bool
    table: TokenBytes
    names: TokenNames


@dataclass(frozen=True, slots=True)
class ChatNames:
    """The names of a route's fields, by their keys, and where each message lies in its body."""

    fields: Mapping[str, str]
    paths: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat as the model gets it. text: of `ids`, with control tokens. grammar: what the answer
    must match to be the forced call, and the field it comes from."""

    model: ServedModel
    talker: _Talker
    tools: ChosenTools
    forced: ForcedCall | None
    grammar: tuple[GrammarSpec, str] | None
    text: str
    ids: list[int]


_MAX_OWN_TALKERS = 256


class ChatIntake:
    """Turns chat bodies into ChatOrders. intake: the Intake of the same app."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._talkers = {
            name: _talker(model, model.chat)
            for name, model in intake.models.items()
            if model.chat is not None
        }
        self._own_talkers: dict[str, _Talker] = {}  # of adapters with ids of their own

    def _talker_of(self, model: ServedModel) -> _Talker | None:
        """The model's. An adapter with ids of its own gets its base's, with its own table of
        ids."""
        talker = self._talkers.get(model.name)
        if talker is None or not model.own_ids:
            return talker
        known = self._own_talkers.get(model.adapter_id)
        if known is None:
            if len(self._own_talkers) >= _MAX_OWN_TALKERS:
                self._own_talkers.clear()
            known = self._own_talkers[model.adapter_id] = _talker(model, talker.template)
        return known

    async def prompt(
        self,
        body: ChatBody,
        max_model_len: int | None = None,
        tenant: str = "",
        names: ChatNames | None = None,
    ) -> ChatPrompt:
        """The ids of one body's messages and tools. Raises the client's errors (4xx)."""
        names = names or _names_of(body)
        task, model = self._intake.find(body.model)
        talker = self._talker_of(model)
        if talker is None:
            raise UnsupportedFieldError(
                f"model: {echoed(model.name)} has no chat template: it continues text, it does not "
                "chat. Use /v1/completions.",
                param="model",
            )
        refuse_unsupported(body)
        tools = chosen_tools(body, close=not opens_objects(body, task))
        if tools.shown is not None and talker.style is None:
            raise UnsupportedFieldError(
                "tools: this model's chat template writes calls in a way that is not read here.",
                param="tools",
            )
        forced, grammar = await self._forced(body, tools, talker, tenant)
        room = min(model.max_model_len, max_model_len or model.max_model_len)
        max_tokens = body.max_completion_tokens or body.max_tokens
        messages = self._messages(body, talker.template, tools, names.paths)
        num_chars = sum(len(message["content"]) for message in messages)
        try:
            # Templates may repeat messages; they hardly ever leave one out.
            self._intake.check_size(num_chars, model, max_tokens, room, str(PROMPT))
            opening = "" if forced is None else forced.opening
            chat = await self._render(body, messages, tools, talker, opening)
            self._intake.check_size(chat.num_bytes, model, max_tokens, room, str(PROMPT))
        except RequestError as error:
            raise error.named(names.fields) from None
        ids = await self._intake.work(
            lambda: model.prompt_ids(talker.template.encode(chat)), chat.num_bytes
        )
        if not ids:
            raise InvalidRequestError("messages: they have no tokens.", param="messages")
        return ChatPrompt(model, talker, tools, forced, grammar, chat.text, ids)

    async def order(
        self,
        body: ChatBody,
        request_id: str,
        max_model_len: int | None = None,
        tenant: str = "",
        names: ChatNames | None = None,
    ) -> ChatOrder:
        """The order of one body, for a tenant. Raises the client's errors (4xx).

        names: the route's names of fields, where the route is not a chat.
        """
        names = names or _names_of(body)
        prompt = await self.prompt(body, max_model_len, tenant, names)
        talker, tools = prompt.talker, prompt.tools
        try:
            order = await self._intake.completion(
                CompletionBody.model_construct(
                    **{name: getattr(body, name) for name in GenerationBody.model_fields},
                    prompt=prompt.ids,
                    max_tokens=body.max_completion_tokens or body.max_tokens,
                    best_of=None,
                    logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                    echo=None,
                    suffix=None,
                    add_special_tokens=None,
                    truncate_prompt_tokens=None,
                ),
                request_id,
                max_model_len,
                default_max_tokens=INT31,
                grammar=prompt.grammar,
                tenant=tenant,
            )
        except RequestError as error:
            raise error.named(names.fields) from None
        return ChatOrder(
            order=replace(order, names={**order.names, **names.fields}),
            table=talker.table if tools.callable else prompt.model.table,
            names=order.token_names if body.return_tokens_as_token_ids else talker.names,
            style=talker.style if tools.callable else None,
            tools=tools,
            forced=prompt.forced,
            service_tier=None if body.service_tier is None else "default",
        )

    async def _forced(
        self, body: ChatBody, tools: ChosenTools, talker: _Talker, tenant: str
    ) -> tuple[ForcedCall | None, tuple[GrammarSpec, str] | None]:
        """How a call is forced, and its checked grammar."""
        formatted = body.structured_outputs is not None or (
            body.response_format is not None and body.response_format.type != "text"
        )
        if formatted and tools.callable:
            field = "structured_outputs" if body.structured_outputs else "response_format"
            raise UnsupportedFieldError(
                f"{field}: cannot be combined with tools that may be called: it says what the "
                "whole answer must match.",
                param=field,
            )
        if not tools.must_call:
            return None, None
        if body.continue_final_message:
            raise InvalidRequestError(
                "continue_final_message cannot be combined with a tool_choice that forces a call.",
                param="continue_final_message",
            )
        assert talker.style is not None
        forced = force_call(talker.style, tools.callable, parallel=tools.parallel)
        grammar = grammar_of_schema(forced.schema, "tools")
        scope = scope_of(tenant, body.cache_salt or "")
        await self._intake.grammars.check(grammar, "tools", scope)
        return forced, (grammar, "tools")

    def _messages(
        self, body: ChatBody, template: ChatTemplate, tools: ChosenTools, paths: Sequence[str]
    ) -> list[dict[str, Any]]:
        source = template.source if tools.shown is None else template.tool_source
        return template_messages(
            body.messages,
            has_developer="developer" in source,
            has_reasoning="reasoning_content" in source,
            paths=paths,
        )

    async def _render(
        self,
        body: ChatBody,
        messages: list[dict[str, Any]],
        tools: ChosenTools,
        talker: _Talker,
        opening: str,
    ) -> RenderedChat:
        template = talker.template
        with_tools = tools.shown is not None and not talker.tells_tools
        variables = _variables(body, template, with_tools)
        last = body.messages[-1]
        continues = bool(body.continue_final_message)
        if continues and (last.role != "assistant" or last.tool_calls):
            raise InvalidRequestError(
                "continue_final_message: the last message must be an assistant's text.",
                param="continue_final_message",
            )
        shown = tools.shown
        if talker.tells_tools:
            messages, shown = tell_tools(messages, shown), None
        adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
        num_chars = tools.num_chars + sum(len(message["content"]) + 64 for message in messages)
        for message in body.messages:
            for call in message.tool_calls or ():
                num_chars += len(call.function.arguments) if call.function is not None else 0
        return await self._intake.work(
            lambda: template.render(
                messages,
                tools=shown,
                add_generation_prompt=adds,
                continue_final_message=continues,
                variables=variables,
                opening=opening,
            ),
            num_chars,
        )


def _talker(model: ServedModel, template: ChatTemplate) -> _Talker:
    style: ToolFormat | None = "hermes"
    if template.has_tools:
        style = format_of(template.tool_source)
    table = model.table
    if style is not None:
        seen = {model.tokenizer.token_to_id(marker) for marker in MARKERS[style]}
        table = table.showing({token_id for token_id in seen if token_id is not None})
    tells_tools = not template.has_tools
    return _Talker(template, style, tells_tools, table, TokenNames(model.table, prefix=""))


def _names_of(body: ChatBody) -> ChatNames:
    """The names of a chat's fields; max_tokens has the name that the client used."""
    names = dict(_NAMES)
    if body.max_completion_tokens is None and body.max_tokens is not None:
        del names["max_tokens"]
    return ChatNames(names)


def _variables(body: ChatBody, template: ChatTemplate, with_tools: bool) -> dict[str, Any]:
    """The template's variables that the client sets. Raises UnsupportedFieldError for one that the
    template does not read."""
    variables: dict[str, Any] = {}
    for name, value in (body.chat_template_kwargs or {}).items():
        if value is None or (
            value is False and name in THINKING and not template.uses(name, with_tools=with_tools)
        ):
            continue  # without that variable in the template, the model does not think anyway
        at = f"chat_template_kwargs.{echoed(name, 40).strip(chr(39))}"
        kind = TEMPLATE_KWARGS.get(name)
        if kind is None or not template.uses(name, with_tools=with_tools):
            known = [n for n in TEMPLATE_KWARGS if template.uses(n, with_tools=with_tools)]
            raise UnsupportedFieldError(
                f"{at}: this model's chat template takes {', '.join(known) or 'no arguments'}.",
                param=at,
            )
        if not isinstance(value, kind) or (isinstance(value, str) and len(value) > 256):
            told = "true or false" if kind is bool else "a string of at most 256 characters"
            raise InvalidRequestError(f"{at}: must be {told}; got {echoed(value)}.", param=at)
        variables[name] = value
    if body.reasoning_effort is not None:
        variables |= _effort(body.reasoning_effort, template, with_tools)
    return variables


def _effort(effort: str, template: ChatTemplate, with_tools: bool) -> dict[str, Any]:
    """The template's variables for reasoning_effort.

    A template that reads it gets it. One that can only switch thinking gets it off for none and
    minimal, and on for more. A model whose template has no thinking never thinks: efforts that ask
    for little change nothing, the others are refused.
    """
    if template.uses("reasoning_effort", with_tools=with_tools):
        return {"reasoning_effort": effort}
    if template.uses("enable_thinking", with_tools=with_tools) and effort in EFFORTS:
        return {"enable_thinking": effort not in ("none", "minimal")}
    if effort in ("none", "minimal", "low"):
        return {}
    raise UnsupportedFieldError(
        f"reasoning_effort: this model's chat template does not think; {echoed(effort, 40)} is not "
        "available, only none, minimal and low.",
        param="reasoning_effort",
    )
