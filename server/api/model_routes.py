"""The routes about models and their tokens: /v1/models, /tokenize, /detokenize, /tokenizer_info,
and /v1/chat/completions/render, which shows a chat as the model gets it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.chat_intake import ChatIntake, ChatPrompt
from server.api.chat_protocol import ChatBody
from server.api.openapi import described
from server.api.protocol import DetokenizeBody, TokenizeBody, validate
from server.api.responses import AnswerResponse
from server.api.route_context import RouteContext, visit_of
from server.api.state_responses import (
    AddedToken,
    Detokenized,
    ModelEntry,
    ModelList,
    RenderedPrompt,
    TokenizerInfo,
    Tokens,
)
from server.errors import InvalidRequestError, ModelNotFoundError


class ModelRoutes:
    """`add_to` puts the routes into an app."""

    def __init__(self, context: RouteContext, chats: ChatIntake) -> None:
        self._context = context
        self._chats = chats

    def entry(self, name: str) -> ModelEntry:
        """The entry of one model or task in GET /v1/models."""
        task, model = self._context.intake.find(name)
        info = self._context.client.info(model.name)
        decoder: Any = UNSET if info is None or not info.decoder else info.decoder
        return ModelEntry(
            id=name,
            created=model.created,
            root=model.root if name == model.key and model.root else model.key,
            parent=model.name if name == model.key and model.root else _other(model.key, name),
            max_model_len=self._context.room(model),
            description="" if name == model.key else task.description,
            implementation=model.implementation,
            decoder=decoder,
        )

    def models(self, request: HttpRequest) -> ModelList:
        """GET /v1/models: what the caller may use."""
        intake = self._context.intake
        models = [*intake.models, *intake.adapters]
        names = [*models, *(name for name in intake.tasks if name not in models)]
        key = visit_of(request).key
        if key is not None:
            found = {name: intake.find(name) for name in names}
            names = [n for n, (task, model) in found.items() if key.may_use(task.name, model.key)]
        return ModelList(data=[self.entry(name) for name in names])

    async def tokenize(self, request: HttpRequest) -> Tokens:
        """POST /tokenize."""
        context = self._context
        body = validate(TokenizeBody, await context.body(request))
        _, model = context.find(request, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt: give either prompt or messages.", param="prompt")
        if body.prompt is None:
            ids = (await self._chat(request, body)).ids
        else:
            _refuse_chat_fields(body)
            add_special = body.add_special_tokens is not False
            ids = await context.intake.encode(model, body.prompt, add_special=add_special)
        names = [model.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
        return Tokens(
            count=len(ids),
            max_model_len=context.room(model),
            tokens=ids,
            token_strs=names,
        )

    async def _chat(self, request: HttpRequest, body: TokenizeBody) -> ChatPrompt:
        """The messages and tools of a /tokenize body as /v1/chat/completions takes them."""
        fields = ("messages", "tools", *_CHAT_FIELDS)
        given = {name: value for name in fields if (value := getattr(body, name)) is not None}
        if body.add_special_tokens:
            given["add_special_tokens"] = True  # refused by its name
        name = body.model or next(iter(self._context.intake.models))
        chat = validate(ChatBody, {"model": name, **given})
        return await self._chats.prompt(chat, None, visit_of(request).tenant)

    async def render(self, request: HttpRequest) -> RenderedPrompt:
        """POST /v1/chat/completions/render."""
        context = self._context
        body = validate(ChatBody, await context.named_body(request))
        _, model = context.find(request, body.model)
        room = context.room(model)
        prompt = await self._chats.prompt(body, room, visit_of(request).tenant)
        return RenderedPrompt(
            prompt=prompt.text,
            prompt_token_ids=prompt.ids,
            count=len(prompt.ids),
            max_model_len=room,
        )

    def tokenizer_info(self, request: HttpRequest, name: str | None) -> TokenizerInfo:
        """GET /tokenizer_info?model=NAME; without a model: the server's first."""
        _, model = self._context.find(request, name)
        chat = model.chat
        added = sorted(model.tokenizer.get_added_tokens_decoder().items())
        return TokenizerInfo(
            model=model.name,
            vocab_size=model.vocab_size,
            max_model_len=self._context.room(model),
            special_tokens={} if chat is None else dict(chat.constants),
            added_tokens=[
                AddedToken(id=token_id, content=token.content, special=token.special)
                for token_id, token in added
            ],
            chat_template=None if chat is None else chat.source,
            tool_chat_template=(
                None if chat is None or chat.tool_source == chat.source else chat.tool_source
            ),
        )

    async def detokenize(self, request: HttpRequest) -> Detokenized:
        """POST /detokenize."""
        context = self._context
        body = validate(DetokenizeBody, await context.body(request))
        _, model = context.find(request, body.model)
        return Detokenized(prompt=await context.intake.decode(model, body.tokens))

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""

        @app.get("/v1/models")
        async def list_models(request: HttpRequest) -> Response:
            return AnswerResponse(self.models(request))

        @app.get("/v1/models/{model:path}")
        async def get_model(request: HttpRequest, model: str) -> Response:
            if not model:
                raise ModelNotFoundError("The name of the model is empty.", param="model")
            self._context.find(request, model)
            return AnswerResponse(self.entry(model))

        @app.post("/tokenize", **described(TokenizeBody, "Token ids of a text"))
        async def tokenize(request: HttpRequest) -> Response:
            return AnswerResponse(await self.tokenize(request))

        @app.get("/tokenizer_info")
        async def tokenizer_info(request: HttpRequest, model: str | None = None) -> Response:
            return AnswerResponse(self.tokenizer_info(request, model))

        @app.post("/v1/chat/completions/render", **described(ChatBody, "A chat's prompt"))
        async def render(request: HttpRequest) -> Response:
            return AnswerResponse(await self.render(request))

        @app.post("/detokenize", **described(DetokenizeBody, "Text of token ids"))
        async def detokenize(request: HttpRequest) -> Response:
            return AnswerResponse(await self.detokenize(request))


def _other(model: str, name: str) -> str | None:
    """The model that a name stands for, None where it is its own."""
    return None if model == name else model


_CHAT_FIELDS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")


def _refuse_chat_fields(body: TokenizeBody) -> None:
    for name in ("tools", *_CHAT_FIELDS):
        if getattr(body, name) not in (None, [], {}):
            raise InvalidRequestError(f"{name} is allowed only with messages.", param=name)
