"""What every route that takes a body needs: the body, the caller's task and model, the engines.

One RouteContext serves an app; the routes hold it. It has no state of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.bodies import required
from server.api.body import read_object
from server.api.engines.client import EngineClient
from server.api.engines.submission import Submission
from server.api.keys import Caller
from server.api.order import Orders, Target, tighter
from server.api.served_model import ServedModel
from server.api.shapes import AnswerResponse
from server.api.sse import DisconnectWatch
from server.metrics.series import Metrics
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
        """The request's body as a JSON object."""
        return await read_object(request, self.limits.max_body_bytes, self.limits.body_timeout_s)

    def room(self, model: ServedModel) -> int:
        """Tokens that the model's engines can hold; the model's own figure until one is ready."""
        info = self.client.info(model.name)
        return min(model.max_model_len, model.max_model_len if info is None else info.max_model_len)

    def target(self, request: HttpRequest, name: str | None) -> Target:
        """What a `model` field names, if the caller may use it; else a 404. None is the server's
        first model; who may not use that one must name another."""
        caller, catalog = caller_of(request), self.catalog
        may_use = caller.may_use
        if name is None and may_use is not None:
            task, model = catalog.find(None)
            if not may_use(task.name, model.key):
                raise required("model")
        task, model = catalog.find(name, may_use)
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
