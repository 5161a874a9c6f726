"""What every route that takes a body needs: the body, the caller's task and model, the engines.

One RouteContext serves an app; the routes hold it. It has no state of its own. A Face is a route
that generates: what is its own is how it calls things and what its answers look like, all else is
the same for all of them. A further surface is a Face in a module of server.api.faces, and its name
in server.api.app.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.bodies import BodyPart, GenerationBody, parse_object, read_body, required, validate
from server.api.engines.client import EngineClient
from server.api.engines.submission import Submission
from server.api.http_answers import AnswerResponse, DisconnectWatch, EventStream, error_event
from server.api.keys import Caller
from server.api.order import Generation, Order, Orders, Target, tighter
from server.api.served_model import ServedModel
from server.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    TailorError,
    UnknownFieldError,
    echoed,
)
from server.metrics import Metrics
from server.types import Request


def caller_of(request: HttpRequest) -> Caller:
    """The Caller that the gate made for a request."""
    caller: Caller = request.state.caller
    return caller


class RouteContext:
    """What the routes of one app share (see the top of this file)."""

    def __init__(self, orders: Orders, client: EngineClient, metrics: Metrics) -> None:
        self.orders = orders
        self.catalog = orders.catalog
        self.limits = orders.limits
        self.client = client
        self.metrics = metrics

    async def body(self, request: HttpRequest) -> dict[str, Any]:
        """The request's body as a JSON object. Raises what read_body and parse_object raise."""
        limits = self.limits
        return parse_object(await read_body(request, limits.max_body_bytes, limits.body_timeout_s))

    def room(self, model: ServedModel) -> int:
        """Tokens that the model's engines can hold; the model's own figure until one is ready."""
        info = self.client.info(model.name)
        return min(model.max_model_len, model.max_model_len if info is None else info.max_model_len)

    def target(self, request: HttpRequest, name: str | None) -> Target:
        """What a `model` field names, if the caller may use it; else a 404. None is the server's
        first model; who may not use that one must name another."""
        caller = caller_of(request)
        try:
            task, model = self.catalog.find(name, caller.may_use)
        except ModelNotFoundError:
            if name is None:
                raise required("model") from None
            raise
        caller.task, caller.model = task.name, model.key
        return Target(name or model.key, task, model, self.room(model), caller.tenant)

    async def submit(
        self, request: HttpRequest, target: Target, requests: Sequence[Request]
    ) -> Submission:
        """Hand the Requests of one order to the engines, for this caller and with its task's
        time-out. Every route that generates goes through here."""
        limits = (self.limits.total_timeout_s, target.task.limits.total_timeout_s)
        return await caller_of(request).submit(self.client, requests, tighter(*limits))

    async def whole(
        self,
        request: HttpRequest,
        make: Callable[[], Awaitable[Struct]],
        abort: Callable[[], None] = lambda: None,
    ) -> Response:
        """The answer that `make` gives. abort: frees its work; called at once when the client
        leaves. Raises ClientGoneError then, unless the answer is there already."""
        async with DisconnectWatch(request.receive, abort):
            try:
                answer = await make()
            finally:
                abort()
        return AnswerResponse(answer)


# --- routes that generate ------------------------------------------------------------------------


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


class QueryCheck:
    """A dependency of every route: a GET route honours the query keys that it declares as its own
    parameters; others are refused by name.

    ignores: paths where any query is ignored, because browsers and monitors add keys of their own
    to pages and probes. Queries of POST routes are ignored, too: some clients put a version there.
    """

    def __init__(self, ignores: frozenset[str]) -> None:
        self._ignores = ignores

    async def __call__(self, request: HttpRequest) -> None:
        """Raises UnknownFieldError, and InvalidRequestError for a key that is given twice."""
        route = request.scope["route"]
        if request.method not in ("GET", "HEAD") or route.path in self._ignores:
            return
        known = {field.alias for field in route.dependant.query_params}
        for key in request.query_params:
            if key not in known:
                name = echoed(key, 64).strip("'")
                raise UnknownFieldError(f"Unknown query key: {name}.", param=name)
            if len(request.query_params.getlist(key)) > 1:
                raise InvalidRequestError(f"{key}: may be given once.", param=key)
