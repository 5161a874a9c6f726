"""The routes about models and their tokens: /v1/models, /tokenize, /detokenize, /tokenizer_info,
and /v1/chat/completions/render, which shows a chat as the model gets it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import FailFast, Field, WithJsonSchema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.bodies import BodyPart, ModelName, TokenId, validate
from server.api.chats import ChatPrompt, Chats
from server.api.faces.chat import ChatBody, chat_of
from server.api.http_answers import AnswerResponse
from server.api.openapi import described
from server.api.order import Target
from server.api.route_context import RouteContext, caller_of
from server.api.shapes import Count, Shape
from server.errors import InvalidRequestError, ModelNotFoundError

_LIST = WithJsonSchema({"type": "array"})
_CHAT_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class TokenizeBody(BodyPart):
    """POST /tokenize, vLLM's shape: a prompt, or a chat's messages and tools as their template
    writes them. Without a model: the server's first."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[Any, _LIST] = None
    tools: Annotated[Any, _LIST] = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(None, description="of a prompt; default true")
    return_token_strs: bool | None = None


class DetokenizeBody(BodyPart):
    """POST /detokenize, vLLM's shape."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], FailFast()]


class ModelEntry(Shape, kw_only=True):
    """OpenAI's members, vLLM's root and max_model_len, a description, and what computes the model:
    `tailor`, or `transformers` for a dense model of another family (slower)."""

    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "tailor"
    root: str
    parent: str | None
    max_model_len: Count
    description: str
    implementation: Literal["tailor", "transformers"]


class ModelList(Shape, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class Tokens(Shape, kw_only=True):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str | None] | None


class RenderedPrompt(Shape, kw_only=True):
    """A chat as the model gets it, control tokens included."""

    prompt: str
    prompt_token_ids: list[Count]
    count: Count
    max_model_len: Count


class AddedToken(Shape, kw_only=True):
    id: Count
    content: str
    special: bool


class TokenizerInfo(Shape, kw_only=True):
    """tool_chat_template: of models that have one of their own for requests with tools."""

    model: str
    tokenizer_class: str
    vocab_size: Count
    max_model_len: Count
    special_tokens: dict[str, str]
    added_tokens: list[AddedToken]
    chat_template: str | None
    tool_chat_template: str | None


class Detokenized(Shape, kw_only=True):
    prompt: str


class ModelRoutes:
    """`add_to` puts the routes into an app."""

    def __init__(self, context: RouteContext, chats: Chats) -> None:
        self._context = context
        self._chats = chats

    def entry(self, name: str) -> ModelEntry:
        """The entry of one model or task in GET /v1/models."""
        task, model = self._context.catalog.find(name)
        is_adapter = name == model.key and bool(model.root)
        parent = model.name if is_adapter else model.key
        return ModelEntry(
            id=name,
            created=model.created,
            root=model.root if is_adapter else model.key,
            parent=None if parent == name else parent,
            max_model_len=self._context.room(model),
            description="" if name == model.key else task.description,
            implementation=model.implementation,
        )

    async def tokenize(self, request: HttpRequest) -> Tokens:
        """POST /tokenize."""
        context = self._context
        body = validate(TokenizeBody, await context.body(request))
        target = context.target(request, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages.", at="prompt")
        if body.prompt is None:
            ids = (await self._chat(body, target)).ids
        else:
            for name in _CHAT_FIELDS:
                if getattr(body, name) not in (None, [], {}):
                    raise InvalidRequestError("allowed only with messages.", at=name)
            special = body.add_special_tokens is not False
            ids = await context.orders.encode(target.model, body.prompt, add_special=special)
        to_token = target.model.tokenizer.id_to_token
        return Tokens(
            count=len(ids),
            max_model_len=target.room,
            tokens=ids,
            token_strs=[to_token(i) for i in ids] if body.return_token_strs else None,
        )

    async def _chat(self, body: TokenizeBody, target: Target) -> ChatPrompt:
        """The messages and tools of a /tokenize body as /v1/chat/completions takes them."""
        fields = ("messages", *_CHAT_FIELDS)
        given = {name: value for name in fields if (value := getattr(body, name)) is not None}
        if body.add_special_tokens:
            given["add_special_tokens"] = True  # refused by its name
        return await self._chats.prompt(chat_of(validate(ChatBody, given)), target)

    async def render(self, request: HttpRequest) -> RenderedPrompt:
        """POST /v1/chat/completions/render."""
        body = validate(ChatBody, await self._context.body(request))
        target = self._context.target(request, body.model)
        prompt = await self._chats.prompt(chat_of(body), target)
        return RenderedPrompt(
            prompt=prompt.text,
            prompt_token_ids=prompt.ids,
            count=len(prompt.ids),
            max_model_len=target.room,
        )

    def tokenizer_info(self, request: HttpRequest, name: str | None) -> TokenizerInfo:
        """GET /tokenizer_info?model=NAME; without a model: the server's first."""
        target = self._context.target(request, name)
        model, chat = target.model, target.model.chat
        added = sorted(model.tokenizer.get_added_tokens_decoder().items())
        own = None if chat is None or chat.tool_source == chat.source else chat.tool_source
        return TokenizerInfo(
            model=model.name,
            tokenizer_class=model.tokenizer_class,
            vocab_size=model.vocab_size,
            max_model_len=target.room,
            special_tokens={} if chat is None else dict(chat.constants),
            added_tokens=[
                AddedToken(id=token_id, content=token.content, special=token.special)
                for token_id, token in added
            ],
            chat_template=None if chat is None else chat.source,
            tool_chat_template=own,
        )

    async def detokenize(self, request: HttpRequest) -> Detokenized:
        """POST /detokenize: the text of ids, special ones included, as in vLLM."""
        context = self._context
        body = validate(DetokenizeBody, await context.body(request))
        model = context.target(request, body.model).model
        if max(body.tokens, default=0) >= model.vocab_size:
            raise InvalidRequestError(
                f"ids must be below the vocabulary size, {model.vocab_size}.", at="tokens"
            )

        def decode() -> str:
            text: str = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
            return text

        return Detokenized(prompt=await context.orders.work(decode, len(body.tokens)))

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""
        context = self._context

        @app.get("/v1/models", **described("The models and tasks that the key may use", ModelList))
        async def list_models(request: HttpRequest) -> Response:
            names = context.catalog.names_for(caller_of(request).may_use)
            return AnswerResponse(ModelList(data=[self.entry(name) for name in names]))

        @app.get("/v1/models/{model:path}", **described("One model or task", ModelEntry))
        async def get_model(request: HttpRequest, model: str) -> Response:
            if not model:
                raise ModelNotFoundError("The name of the model is empty.", param="model")
            context.target(request, model)
            return AnswerResponse(self.entry(model))

        @app.get(
            "/tokenizer_info",
            **described("Special tokens and chat template of a model", TokenizerInfo),
        )
        async def tokenizer_info(request: HttpRequest, model: str | None = None) -> Response:
            return AnswerResponse(self.tokenizer_info(request, model))

        @app.post("/tokenize", **described("Token ids of a text", Tokens, body=TokenizeBody))
        async def tokenize(request: HttpRequest) -> Response:
            return AnswerResponse(await self.tokenize(request))

        @app.post("/detokenize", **described("Text of token ids", Detokenized, body=DetokenizeBody))
        async def detokenize(request: HttpRequest) -> Response:
            return AnswerResponse(await self.detokenize(request))

        told = described("A chat as the model gets it", RenderedPrompt, body=ChatBody)

        @app.post("/v1/chat/completions/render", **told)
        async def render(request: HttpRequest) -> Response:
            return AnswerResponse(await self.render(request))
