"""The routes that generate: /v1/completions, /v1/chat/completions, /v1/responses,
/v1/decisions, /v1/systemone."""

from __future__ import annotations

import functools
import secrets

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.chat import chat_events, chat_object
from server.api.chat_intake import ChatIntake
from server.api.chat_protocol import ChatBody
from server.api.completions import completion_events, completion_object
from server.api.decision_body import DecisionBody
from server.api.decisions import DecisionIntake, DecisionRun
from server.api.openapi import described
from server.api.protocol import CompletionBody, validate
from server.api.responses import SystemOneAnswer
from server.api.responses_api.answer import error_written, response_events, response_object
from server.api.responses_api.body import ResponsesBody
from server.api.responses_api.intake import responses_order
from server.api.route_context import RouteContext, visit_of
from server.api.system_one import SystemOneBody, answer_of, decision_body, renamed
from server.errors import RequestError


class GenerationRoutes:
    """`add_to` puts the routes into an app."""

    def __init__(self, context: RouteContext, chats: ChatIntake) -> None:
        self._context = context
        self._chats = chats
        self._decisions = DecisionIntake(context.intake, context.limits.max_request_tokens)

    async def completion(self, request: HttpRequest) -> Response:
        """POST /v1/completions."""
        context = self._context
        body = validate(CompletionBody, await context.named_body(request))
        _, model = context.find(request, body.model)
        request_id = f"cmpl-{secrets.token_hex(12)}"
        order = await context.intake.completion(
            body, request_id, context.room(model), tenant=visit_of(request).tenant
        )
        return await context.answer(request, order, completion_events, completion_object, order)

    async def chat(self, request: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        context = self._context
        body = validate(ChatBody, await context.named_body(request))
        _, model = context.find(request, body.model)
        request_id = f"chatcmpl-{secrets.token_hex(12)}"
        order = await self._chats.order(
            body, request_id, context.room(model), tenant=visit_of(request).tenant
        )
        return await context.answer(request, order.order, chat_events, chat_object, order)

    async def respond(self, request: HttpRequest) -> Response:
        """POST /v1/responses."""
        context = self._context
        body = validate(ResponsesBody, await context.named_body(request))
        _, model = context.find(request, body.model)
        order = await responses_order(
            body,
            self._chats,
            f"resp_{secrets.token_hex(12)}",
            context.room(model),
            visit_of(request).tenant,
        )
        return await context.answer(
            request, order.chat.order, response_events, response_object, order, error_written
        )

    async def decide(self, request: HttpRequest) -> Response:
        """POST /v1/decisions."""
        context = self._context
        body = validate(DecisionBody, await context.body(request))
        _, model = context.find(request, body.model)
        request_id = f"dec-{secrets.token_hex(12)}"
        order = await self._decisions.order(body, request_id, context.room(model))
        run = DecisionRun(order, functools.partial(context.submit, request))
        return await context.whole(request, run.answer, run.abort)

    async def decide_system_one(self, request: HttpRequest) -> Response:
        """POST /v1/systemone."""
        context = self._context
        body = validate(SystemOneBody, await context.body(request))
        _, model = context.find(request, body.model)
        asked = decision_body(body)
        request_id = f"sys-{secrets.token_hex(12)}"
        try:
            order = await self._decisions.order(asked, request_id, context.room(model))
        except RequestError as error:
            raise renamed(error, body.questions) from None
        run = DecisionRun(order, functools.partial(context.submit, request))

        async def answer() -> SystemOneAnswer:
            return answer_of(body, await run.answer())

        return await context.whole(request, answer, run.abort)

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""
        post = app.post

        @post("/v1/completions", **described(CompletionBody, "A text completion"))
        async def completions(request: HttpRequest) -> Response:
            return await self.completion(request)

        @post("/v1/chat/completions", **described(ChatBody, "A chat completion"))
        async def chat_completions(request: HttpRequest) -> Response:
            return await self.chat(request)

        @post("/v1/responses", **described(ResponsesBody, "A response, nothing stored"))
        async def responses(request: HttpRequest) -> Response:
            return await self.respond(request)

        @post("/v1/decisions", **described(DecisionBody, "Typed questions about an input"))
        async def decide(request: HttpRequest) -> Response:
            return await self.decide(request)

        @post("/v1/systemone", **described(SystemOneBody, "Named questions about a state"))
        async def system_one(request: HttpRequest) -> Response:
            return await self.decide_system_one(request)
