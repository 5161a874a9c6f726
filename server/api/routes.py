"""The routes that generate nothing: about models and their tokens (/v1/models, /tokenize,
/detokenize, /tokenizer_info, and /v1/chat/completions/render, which shows a chat as the model gets
it), and about the server's state (/health, /ready, /ping, /load, /version, /metrics)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from msgspec import UNSET, Struct, UnsetType
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import FailFast, Field, WithJsonSchema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server import __version__
from server.api.bodies import BodyPart, ModelName, TokenId, validate
from server.api.chats import generation_of
from server.api.engines.client import EngineClient
from server.api.faces.chat import ChatBody, chat_of
from server.api.openapi import described
from server.api.route_context import AnswerResponse, RouteContext, caller_of
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

    ELSEWHERE: ClassVar[Mapping[str, str]] = {"content": "Send prompt.", "text": "Send prompt."}


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


def add_model_routes(app: FastAPI, context: RouteContext) -> None:
    """Declare the routes about models and their tokens."""

    def entry(name: str) -> ModelEntry:
        task, model = context.catalog.find(name)
        is_adapter = name == model.key and bool(model.root)
        parent = model.name if is_adapter else model.key
        return ModelEntry(
            id=name,
            created=model.created,
            root=model.root if is_adapter else model.key,
            parent=None if parent == name else parent,
            max_model_len=context.room(model),
            description="" if name == model.key else task.description,
            implementation=model.implementation,
        )

    @app.get("/v1/models", **described("The models and tasks that the key may use", ModelList))
    async def list_models(request: HttpRequest) -> Response:
        names = context.catalog.names_for(caller_of(request).may_use)
        return AnswerResponse(ModelList(data=[entry(name) for name in names]))

    @app.get("/v1/models/{model:path}", **described("One model or task", ModelEntry))
    async def get_model(request: HttpRequest, model: str) -> Response:
        if not model:
            raise ModelNotFoundError("The name of the model is empty.", param="model")
        context.target(request, model)
        return AnswerResponse(entry(model))

    told = described("Special tokens and chat template of a model", TokenizerInfo)

    @app.get("/tokenizer_info", **told)
    async def tokenizer_info(request: HttpRequest, model: str | None = None) -> Response:
        target = context.target(request, model)
        served, chat = target.model, target.model.chat
        added = sorted(served.tokenizer.get_added_tokens_decoder().items())
        own = None if chat is None or chat.tool_source == chat.source else chat.tool_source
        return AnswerResponse(
            TokenizerInfo(
                model=served.name,
                tokenizer_class=served.tokenizer_class,
                vocab_size=served.vocab_size,
                max_model_len=target.room,
                special_tokens={} if chat is None else dict(chat.constants),
                added_tokens=[
                    AddedToken(id=token_id, content=token.content, special=token.special)
                    for token_id, token in added
                ],
                chat_template=None if chat is None else chat.source,
                tool_chat_template=own,
            )
        )

    @app.post("/tokenize", **described("Token ids of a text", Tokens, body=TokenizeBody))
    async def tokenize(request: HttpRequest) -> Response:
        body = await context.body(request, TokenizeBody)
        target = context.target(request, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages.", at="prompt")
        ids: Any
        if body.prompt is None:
            fields = ("messages", *_CHAT_FIELDS)
            given = {name: value for name in fields if (value := getattr(body, name)) is not None}
            if body.add_special_tokens:
                given["add_special_tokens"] = True  # refused by its name
            chat = await generation_of(
                lambda: chat_of(validate(ChatBody, given)), body.num_bytes, target, context.orders
            )
            [ids] = chat.prompts
        else:
            for name in _CHAT_FIELDS:
                if getattr(body, name) not in (None, [], {}):
                    raise InvalidRequestError("allowed only with messages.", at=name)
            special = body.add_special_tokens is not False
            encode = partial(target.model.encoded, body.prompt, special)
            ids = await context.orders.work(encode, len(body.prompt))
        to_token = target.model.tokenizer.id_to_token
        return AnswerResponse(
            Tokens(
                count=len(ids),
                max_model_len=target.room,
                tokens=ids,
                token_strs=[to_token(i) for i in ids] if body.return_token_strs else None,
            )
        )

    @app.post("/detokenize", **described("Text of token ids", Detokenized, body=DetokenizeBody))
    async def detokenize(request: HttpRequest) -> Response:
        body = await context.body(request, DetokenizeBody)
        model = context.target(request, body.model).model
        model.check_ids(body.tokens, "tokens")
        # Special ids are told too, as in vLLM.
        decode = partial(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
        text = await context.orders.work(decode, len(body.tokens))
        return AnswerResponse(Detokenized(prompt=text))

    told = described("A chat as the model gets it", RenderedPrompt, body=ChatBody)

    @app.post("/v1/chat/completions/render", **told)
    async def render(request: HttpRequest) -> Response:
        body = await context.body(request, ChatBody)
        target = context.target(request, body.model)
        chat = await generation_of(lambda: chat_of(body), body.num_bytes, target, context.orders)
        ids: Any = chat.prompts[0]
        answer = RenderedPrompt(
            prompt=chat.text, prompt_token_ids=ids, count=len(ids), max_model_len=target.room
        )
        return AnswerResponse(answer)


# --- the server's state ---------------------------------------------------------------------------

HealthStatus = Literal["ok", "degraded", "loading", "stuck", "dead"]
ReadyStatus = Literal["ready", "loading", "stuck", "draining"]


class EngineState(Shape, kw_only=True):
    name: str
    model: str
    device: str
    state: Literal["loading", "ready", "stuck", "restarting", "failed", "stopped"]
    restarts: Count
    open_requests: Count


class Health(Shape, kw_only=True):
    status: HealthStatus
    engines: list[EngineState]


class Ready(Shape, kw_only=True):
    status: ReadyStatus
    stuck: list[str] | UnsetType = UNSET


class Load(Shape, kw_only=True):
    """Requests that engines work for, or that wait for one."""

    server_load: Count


class Version(Shape, kw_only=True):
    version: str


def _by_status(answer: Struct, is_well: bool) -> Response:
    return AnswerResponse(answer) if is_well else AnswerResponse(answer, 503, {"retry-after": "1"})


def add_state_routes(app: FastAPI, client: EngineClient) -> None:
    """Declare the routes about the server's state."""

    @app.get("/health", **described("The state of every engine", Health, own_503=True))
    async def health() -> Response:
        # As load balancers read it: 200 while an engine serves and none hangs.
        engines = [EngineState(**engine) for engine in client.engines()]
        states = [engine.state for engine in engines]
        status: HealthStatus = "degraded"
        if client.stuck:
            status = "stuck"
        elif not {"ready", "loading", "restarting"} & set(states):
            status = "dead"
        elif "ready" not in states:
            status = "loading"
        elif set(states) == {"ready"}:
            status = "ok"
        return _by_status(Health(status=status, engines=engines), status in ("ok", "degraded"))

    @app.get("/ready", **described("Whether requests are taken", Ready, own_503=True))
    async def ready() -> Response:
        stuck = client.stuck
        status: ReadyStatus = "stuck" if stuck else "loading"
        if client.is_draining:
            status = "draining"
        elif client.is_ready:
            status = "ready"
        return _by_status(Ready(status=status, stuck=stuck or UNSET), status == "ready")

    @app.get("/ping", response_class=Response)
    async def ping() -> Response:
        """For who ends a process that will not recover: 200 while it serves or loads, again too."""
        return Response(status_code=503 if client.gave_up.is_set() or client.stuck else 200)

    @app.get("/load", **described("Open requests", Load))
    async def load() -> Response:
        return AnswerResponse(Load(server_load=client.num_open))

    @app.get("/version", **described("The server's version", Version))
    async def version() -> Response:
        return AnswerResponse(Version(version=__version__))

    @app.get("/metrics", response_class=PlainTextResponse, summary="Prometheus metrics")
    async def get_metrics(request: HttpRequest) -> Response:
        await client.ask_figures()
        _, port = request.scope.get("server") or ("", 0)
        return Response(client.metrics.exposition(port), media_type=CONTENT_TYPE_LATEST)
