"""What every route that takes a body needs: the body, the caller's task and model, the engines.

One RouteContext serves an app; the route classes hold it. It has no state of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.body import read_object
from server.api.engines.client import EngineClient
from server.api.engines.submission import Submission
from server.api.intake import CompletionOrder, Intake
from server.api.keys import Visit
from server.api.middleware import CLIENT_GONE
from server.api.responses import AnswerResponse
from server.api.served_model import ServedModel
from server.api.sse import DisconnectWatch, EventStream, error_event
from server.config import LimitsConfig, TaskConfig, TaskLimits
from server.errors import TailorError
from server.metrics.series import Metrics
from server.types import Request

_O = TypeVar("_O")


def visit_of(request: HttpRequest) -> Visit:
    """The Visit that the gate made for a request."""
    visit: Visit = request.state.visit
    return visit


class RouteContext:
    """What the routes of one app share (see the top of this file). limits: the server's."""

    def __init__(
        self, *, intake: Intake, client: EngineClient, metrics: Metrics, limits: LimitsConfig
    ) -> None:
        self.intake = intake
        self.client = client
        self.metrics = metrics
        self.limits = limits

    async def body(self, request: HttpRequest) -> dict[str, Any]:
        """The request's body as a JSON object."""
        return await read_object(request, self.limits.max_body_bytes, self.limits.body_timeout_s)

    async def named_body(self, request: HttpRequest) -> dict[str, Any]:
        """The body of a generation; without a `model` it gets the server's first, where the caller
        may use that."""
        body = await self.body(request)
        if body.get("model") is not None:
            return body
        task, model = self.intake.find(None)
        key = visit_of(request).key
        if key is not None and not key.may_use(task.name, model.key):
            return body
        return {**body, "model": model.key}

    def room(self, model: ServedModel) -> int:
        """Tokens that the model's engines can hold; the model's own figure until one is ready."""
        info = self.client.info(model.name)
        return min(model.max_model_len, model.max_model_len if info is None else info.max_model_len)

    def find(self, request: HttpRequest, name: str | None) -> tuple[TaskConfig, ServedModel]:
        """The task and model of a `model` field, if the caller may use them; else a 404."""
        task, model = self.intake.find(name)
        visit_of(request).check(task.name, model.key, model.key if name is None else name)
        return task, model

    async def submit(self, request: HttpRequest, requests: Sequence[Request]) -> Submission:
        """Hand the Requests of one order to the engines, for this caller and with its task's
        time-outs. Every route that generates goes through here."""
        task = self.intake.tasks.get(requests[0].task)
        own = TaskLimits() if task is None else task.limits
        return await visit_of(request).submit(
            self.client,
            requests,
            queue_timeout_s=_tighter(self.limits.queue_timeout_s, own.queue_timeout_s),
            total_timeout_s=_tighter(self.limits.total_timeout_s, own.total_timeout_s),
        )

    async def answer(
        self,
        request: HttpRequest,
        order: CompletionOrder,
        events: Callable[[_O, Submission], AsyncGenerator[bytes, None]],
        whole: Callable[[_O, Submission], Awaitable[Struct]],
        shape: _O,
        late_error: Callable[[TailorError], bytes] = error_event,
    ) -> Response:
        """Submit what was ordered and answer: streamed by `events` or at once by `whole`, which
        get `shape`, the route's own view of the order. late_error: as of EventStream."""
        if order.needs_engine:
            submission = await self.submit(request, order.requests)
        else:
            submission = Submission.answered(order.requests, self.metrics)
        submission.names = order.names
        for account in submission.accounts:
            account.own_ids = order.model.own_ids
        if order.stream:
            return EventStream(
                events(shape, submission),
                submission.abort,
                late_error=late_error,
                keep_alive_s=self.limits.sse_keep_alive_s,
            )
        return await self.whole(request, lambda: whole(shape, submission), submission.abort)

    async def whole(
        self,
        request: HttpRequest,
        make: Callable[[], Awaitable[Struct]],
        abort: Callable[[], None],
    ) -> Response:
        """The answer that `make` gives, unless the client leaves first. abort: frees its work."""
        async with DisconnectWatch(request.receive, abort) as watch:
            try:
                body = await make()
            finally:
                abort()
        if watch.gone:
            return Response(status_code=CLIENT_GONE)
        return AnswerResponse(body)


def _tighter(a: float | None, b: float | None) -> float | None:
    return min((limit for limit in (a, b) if limit is not None), default=None)
