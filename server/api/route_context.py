"""What routes share: the body, the caller's task and model, the engines; and answers over HTTP,
whole and as server-sent events, and noticing that a client left.

One RouteContext serves an app; the routes hold it. It has no state of its own. A Face is a route
that generates: what is its own is how it calls things and what its answers look like, all else is
the same for all of them. A further surface is a Face in a module of server.api.faces, and its name
in server.api.app.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.bodies import BodyPart, GenerationBody, parse_object, read_body, required, validate
from server.api.engines.client import EngineClient
from server.api.engines.submission import Submission
from server.api.keys import Caller
from server.api.order import Generation, Order, Orders, Target, tighter
from server.api.served_model import ServedModel
from server.api.shapes import error_answer
from server.errors import ModelNotFoundError, TailorError
from server.types import Delta, Request

# --- answers --------------------------------------------------------------------------------------

_encoder = msgspec.json.Encoder()
_WIDE = re.compile(r"[^\x00-\x7f]+")


def encode_ascii(answer: Struct) -> bytes:
    """JSON in ASCII: some clients of event streams split lines at U+2028 or U+0085 too."""
    data = _encoder.encode(answer)
    if data.isascii():
        return data
    return _WIDE.sub(lambda wide: json.dumps(wide[0])[1:-1], data.decode()).encode()


class AnswerResponse(Response):
    """An answer as an HTTP response."""

    media_type = "application/json"

    def __init__(
        self, answer: Struct, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(_encoder.encode(answer), status, headers)


DONE = b"data: [DONE]\n\n"
HEADER_WAIT_S = 1.0
COMMENT = b": keep-alive\n\n"


def event(data: Struct) -> bytes:
    """One event, its data in ASCII."""
    return b"data: " + encode_ascii(data) + b"\n\n"


@contextlib.asynccontextmanager
async def watching(
    receive: Receive, on_gone: Callable[[], None]
) -> AsyncIterator[asyncio.Task[None]]:
    """Calls `on_gone` as soon as the client leaves; the task is done then. The body must have been
    read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    task = asyncio.create_task(watch())
    try:
        yield task
    finally:
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise


class EventStream(Response):
    """Sends the events of a writer as they come: the headers with the first one, so that an error
    before that still has its status, or after HEADER_WAIT_S, so that a client behind a proxy sees
    that it is served.

    submission: what they come of; aborted at once when the client leaves, also while no event
    comes. keep_alive_s: after so many seconds without an event a comment is sent, which clients
    skip and which keeps proxies from closing the connection; 0 is off. The writer's generator is
    closed in every case.
    """

    media_type = "text/event-stream"

    def __init__(self, writer: StreamWriter, submission: Submission, keep_alive_s: float) -> None:
        self.status_code = 200
        self.background = None
        self._writer = writer
        self._events = writer.events(submission)
        self._submission = submission
        self._keep_alive_s = keep_alive_s
        self._last_s = 0.0
        # Without Response.__init__ there is no body whose length would be told.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        keeper: asyncio.Task[None] | None = None
        try:
            async with watching(receive, self._submission.abort) as leaving:
                first = asyncio.ensure_future(anext(self._events, None))
                await asyncio.wait({first}, timeout=HEADER_WAIT_S)
                if first.done():
                    first.result()  # the status of an error can still be told
                await send(start)
                if self._keep_alive_s > 0:
                    keeper = asyncio.create_task(self._keep_alive(send))
                try:
                    data = await first
                    while data is not None and not leaving.done():
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        self._last_s = time.monotonic()
                        data = await anext(self._events, None)
                except TailorError as error:
                    if not leaving.done():
                        data = self._writer.error(error)
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                if keeper is not None:
                    keeper.cancel()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if keeper is not None:
                keeper.cancel()
            self._submission.abort()
            await self._events.aclose()

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for keep_alive_s. Events are sent whole, so a
        comment never falls into one."""
        self._last_s = time.monotonic()
        while True:
            await asyncio.sleep(max(0.01, self._last_s + self._keep_alive_s - time.monotonic()))
            if time.monotonic() - self._last_s >= self._keep_alive_s:
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
                self._last_s = time.monotonic()


# --- what routes share ----------------------------------------------------------------------------

_P = TypeVar("_P", bound=BodyPart)


def caller_of(request: HttpRequest) -> Caller:
    """The Caller that the gate made for a request."""
    caller: Caller = request.state.caller
    return caller


class RouteContext:
    """What the routes of one app share (see the top of this file)."""

    def __init__(self, orders: Orders, client: EngineClient) -> None:
        self.orders = orders
        self.catalog = orders.catalog
        self.limits = orders.limits
        self.client = client

    async def body(self, request: HttpRequest, model: type[_P]) -> _P:
        """The request's body as a `model`. Raises what reading and checking it raise."""
        limits = self.limits
        raw = await read_body(request, limits.max_body_bytes, limits.body_timeout_s)
        # Read sixteen times as fast as it is tokenized.
        return await self.orders.work(
            lambda: validate(model, parse_object(raw), len(raw)), len(raw) // 16
        )

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
        self,
        request: HttpRequest,
        target: Target,
        requests: Sequence[Request],
        every: Sequence[Request] = (),
    ) -> Submission:
        """Hand Requests to the engines for this caller; all of them are taken or none. every: these
        and all that come later, whose tokens are reserved and whose time runs from the first on.
        Every route that generates goes through here.

        Raises what EngineClient.submit and Caller.reserve raise.
        """
        caller, every = caller_of(request), every or requests
        if not caller.submissions:
            await caller.reserve(every)
        timeout_s = tighter(self.limits.total_timeout_s, target.task.limits.total_timeout_s)
        submission = self.client.submit(requests)
        if timeout_s is not None:
            submission.expire_after(every[0].arrival_s + timeout_s - time.monotonic())
        caller.submissions.append(submission)
        return submission

    async def whole(
        self,
        request: HttpRequest,
        make: Callable[[], Awaitable[Struct]],
        abort: Callable[[], None] = lambda: None,
    ) -> Response:
        """The answer that `make` gives. abort: frees its work; called at once when the client
        leaves. Raises ClientGoneError then, unless the answer is there already."""
        async with watching(request.receive, abort):
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


class StreamWriter(ABC):
    """A streamed answer as it grows: what its server-sent events are."""

    @abstractmethod
    def written(self, arrived: list[tuple[int, Delta]]) -> bytes:
        """The events of all that arrived together, b"" for none yet."""

    @abstractmethod
    def end(self) -> bytes:
        """The last events, once every choice has ended."""

    def error(self, error: TailorError) -> bytes:
        """The events of an error after the status was sent."""
        return event(error_answer(error)) + DONE

    async def events(self, submission: Submission) -> AsyncGenerator[bytes, None]:
        """One byte string for all that arrived together. Raises the TailorError that ends it."""
        async for arrived in submission:
            if data := self.written(arrived):
                yield data
        yield self.end()


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
    def writer(self, order: Order, submission: Submission) -> StreamWriter:
        """What writes the answer as a stream."""

    async def respond(self, request: HttpRequest) -> Response:
        context = self.context
        body: Any = await context.body(request, self.body)
        target = context.target(request, body.model)
        generation = await self.generation(body, target)
        request_id = f"{self.id_prefix}{secrets.token_hex(12)}"
        order = await context.orders.order(generation, target, request_id)
        if order.needs_engine:
            submission = await context.submit(request, target, order.requests)
        else:
            submission = Submission.answered(order.requests, context.client.metrics)
        submission.grammar_field = order.grammar_field
        for account in submission.accounts:
            account.own_ids = target.model.own_ids
        if body.stream:
            writer = self.writer(order, submission)
            return EventStream(writer, submission, context.limits.sse_keep_alive_s)
        return await context.whole(request, lambda: self.whole(order, submission), submission.abort)
