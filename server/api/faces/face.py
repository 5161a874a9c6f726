"""Face: a route that generates. What is its own is how it calls things and what its answers look
like; all else is the same for all of them.

A further surface is a Face in a module of its own, and its name in server.api.app.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.bodies import BodyPart, GenerationBody, validate
from server.api.engines.submission import Submission
from server.api.order import Generation, Order, Target
from server.api.route_context import RouteContext
from server.api.sse import EventStream, error_event
from server.errors import TailorError


class Face(ABC):
    """One route. Its class says how it is described: body, answer and, where it streams, what the
    data of an event can be."""

    path: ClassVar[str]
    summary: ClassVar[str]
    body: ClassVar[type[BodyPart]]
    answer: ClassVar[type[Struct]]
    chunks: ClassVar[tuple[type[Struct], ...]] = ()

    def __init__(self, context: RouteContext) -> None:
        self.context = context

    @abstractmethod
    async def respond(self, request: HttpRequest) -> Response:
        """The response to one HTTP request. Raises the client's errors of server.errors."""


_B = TypeVar("_B", bound=GenerationBody)


class TextFace(Face, Generic[_B]):
    """A Face that answers with text, whole or as a stream."""

    id_prefix: ClassVar[str]

    @abstractmethod
    async def generation(self, body: _B, target: Target) -> Generation:
        """What the body asks for. Raises the client's errors (4xx)."""

    @abstractmethod
    async def whole(self, order: Order, submission: Submission) -> Struct:
        """The whole answer, once every choice ended. Raises the TailorError that ended it early."""

    @abstractmethod
    def events(self, order: Order, submission: Submission) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. An error before the first one is raised."""

    def late_error(self, error: TailorError) -> bytes:
        """The events of an error before the first event, once the status was sent."""
        return error_event(error)

    async def respond(self, request: HttpRequest) -> Response:
        context = self.context
        body: Any = validate(self.body, await context.body(request))
        target = context.target(request, body.model)
        generation = await self.generation(body, target)
        request_id = f"{self.id_prefix}{secrets.token_hex(12)}"
        order = await context.orders.order(generation, target, request_id)
        if order.needs_engine:
            submission = await context.submit(request, target, order.requests)
        else:
            submission = Submission.answered(order.requests, context.metrics)
        submission.grammar_field = order.grammar_field
        for account in submission.accounts:
            account.own_ids = target.model.own_ids
        if body.stream:
            return EventStream(
                self.events(order, submission),
                submission.abort,
                late_error=self.late_error,
                keep_alive_s=context.limits.sse_keep_alive_s,
            )
        return await context.whole(request, lambda: self.whole(order, submission), submission.abort)
