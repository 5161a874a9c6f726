"""The routes about models and their tokens: /v1/models, /tokenize, /detokenize."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.openapi import described
from server.api.protocol import DetokenizeBody, TokenizeBody, validate
from server.api.responses import AnswerResponse, Detokenized, ModelEntry, ModelList, Tokens
from server.api.route_context import RouteContext, visit_of
from server.errors import ModelNotFoundError

__all__ = ["ModelRoutes"]


class ModelRoutes:
    """`add_to` puts the routes into an app."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context

    def entry(self, name: str) -> ModelEntry:
        """One model or task as GET /v1/models tells it."""
        task, model = self._context.intake.find(name)
        return ModelEntry(
            id=name,
            created=model.created,
            root=model.name,
            parent=None if model.name == name else model.name,
            max_model_len=self._context.room(model),
            description="" if name == model.name else task.description,
        )

    def models(self, request: HttpRequest) -> ModelList:
        """GET /v1/models: what the caller may use."""
        intake = self._context.intake
        names = [*intake.models, *(name for name in intake.tasks if name not in intake.models)]
        key = visit_of(request).key
        if key is not None:
            found = {name: intake.find(name) for name in names}
            names = [n for n, (task, model) in found.items() if key.may_use(task.name, model.name)]
        return ModelList(data=[self.entry(name) for name in names])

    async def tokenize(self, request: HttpRequest) -> Tokens:
        """POST /tokenize."""
        context = self._context
        body = validate(TokenizeBody, await context.body(request))
        _, model = context.find(request, body.model)
        add_special = body.add_special_tokens
        ids = await context.intake.encode(model, body.prompt, add_special=add_special)
        names = [model.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
        return Tokens(
            count=len(ids),
            max_model_len=context.room(model),
            tokens=ids,
            token_strs=names,
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

        @app.post("/detokenize", **described(DetokenizeBody, "Text of token ids"))
        async def detokenize(request: HttpRequest) -> Response:
            return AnswerResponse(await self.detokenize(request))
