"""The HTTP application: routes, and `serve`, which runs it until it is told to stop.

For the composition root (server/commands/cli.py):

    metrics = Metrics()
    client = EngineClient([EngineSpec(name, model, device, factory), ...], metrics=metrics,
                          restart=RestartPolicy(...), max_queued_requests=..., ...)
    app = create_app(config, tasks=tasks, models=models, client=client, metrics=metrics,
                     drafters=DRAFTER_NAMES)
    status = await serve(app, client, host=..., port=..., drain_s=config.limits.drain_s)

- `config` is a ServerConfig (limits, keys, metrics and cors are read), `tasks` the TaskConfigs by
  name, `models` the ServedModels by name (the first is the default), one per model name in the
  client's specs.
- All of it inside one coroutine, run by `run_loop(main())`, which is asyncio.run on uvloop where
  that is installed.
- `serve` starts the engines, listens at once (/ready is 503 until they are loaded), and returns an
  exit status: 0 after SIGTERM or SIGINT and a drain, 1 when no engine is left.
- `on_ready` of `serve` is called once with the port, when everything is loaded.

`create_app` makes no hidden state: two apps in one process share nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import signal
import socket
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server import __version__
from server.api import protocol
from server.api.body import read_object
from server.api.chat import chat_events, chat_object
from server.api.chat_intake import ChatIntake
from server.api.chat_protocol import ChatBody
from server.api.completions import completion_events, completion_object
from server.api.connection import Connection
from server.api.dashboard import DATA_PATH, PAGE_PATHS, Page, snapshot
from server.api.decision_body import DecisionBody
from server.api.decisions import DecisionIntake, DecisionRun
from server.api.engines.client import EngineClient, Submission
from server.api.intake import CompletionOrder, Intake, ServedModel
from server.api.keys import ApiKey, Visit
from server.api.middleware import CLIENT_GONE, OPEN_PATHS, Gate, error_response
from server.api.openapi import described as _documented
from server.api.openapi import document
from server.api.sse import DisconnectWatch, EventStream
from server.api.tasks import TaskAdmin, TaskRoutes
from server.config import ServerConfig, TaskConfig, TaskLimits
from server.errors import (
    MethodNotAllowedError,
    ModelNotFoundError,
    RequestError,
    RouteNotFoundError,
    TailorError,
    echoed,
)
from server.metrics.series import CONTENT_TYPE_LATEST, Metrics
from server.tracing import TraceSink
from server.types import Request

__all__ = ["create_app", "run_loop", "serve"]

log = logging.getLogger("tailor.server")

_O = TypeVar("_O")

MAX_EXPECTED_TASKS = 64
"""With more tasks, their series appear with their first request: each task has some 400 samples."""


def create_app(
    config: ServerConfig,
    *,
    tasks: Mapping[str, TaskConfig],
    models: Mapping[str, ServedModel],
    client: EngineClient,
    metrics: Metrics,
    drafters: Sequence[str] = ("off",),
    task_admin: TaskAdmin | None = None,
    traces: TraceSink | None = None,
) -> FastAPI:
    """The application. It owns nothing but its tokenizing threads; see the top of this file.

    task_admin: who changes tasks for the admin routes; None: they only look.
    """
    intake = Intake(tasks=tasks, models=models, drafters=drafters, limits=config.limits)
    decisions = DecisionIntake(intake, config.limits.max_request_tokens)
    routes: dict[str, str] = {}

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        yield
        intake.close()

    for task in tasks.values() if len(tasks) <= MAX_EXPECTED_TASKS else ():
        model = intake.find(task.name)[1].name
        metrics.expect(task.name, task.speculation.drafter, model)

    open_paths = OPEN_PATHS
    if not config.metrics.require_key:
        open_paths |= {"/metrics"}
    if config.dashboard.enabled:
        open_paths |= frozenset(PAGE_PATHS)

    middleware = []
    if config.cors.allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors.allow_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-request-id"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    middleware.append(
        Middleware(
            Gate,
            keys=[ApiKey.from_config(key) for key in config.keys],
            open_paths=open_paths,
            quiet_paths=frozenset({DATA_PATH}),
            metrics=metrics,
            routes=routes,
            traces=traces,
        )
    )
    app = FastAPI(
        title="Tailor",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=middleware,
    )

    @app.exception_handler(TailorError)
    async def tailor_error(request: HttpRequest, error: TailorError) -> Response:
        return _answer(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: HttpRequest, error: HTTPException) -> Response:
        method, path = request.method[:16], echoed(request.url.path, 100)
        if error.status_code == 404:
            return _answer(request, RouteNotFoundError(f"There is no route {path}."))
        if error.status_code == 405:
            allow = (error.headers or {}).get("Allow", "")
            return _answer(
                request,
                MethodNotAllowedError(
                    f"The route {path} has no {echoed(method)}.", headers=(("allow", allow),)
                ),
            )
        return _answer(request, RequestError("The request cannot be handled."))

    async def body_of(request: HttpRequest) -> dict[str, Any]:
        limits = config.limits
        return await read_object(request, limits.max_body_bytes, limits.body_timeout_s)

    def context_of(model: ServedModel) -> int:
        """What the model's engines can hold; known once one is ready."""
        info = client.info(model.name)
        return min(model.max_model_len, model.max_model_len if info is None else info.max_model_len)

    def find(request: HttpRequest, name: str | None) -> tuple[TaskConfig, ServedModel]:
        """The task and model of a `model` field, if the caller may use them; else a 404."""
        task, model = intake.find(name)
        visit_of(request).check(task.name, model.name, model.name if name is None else name)
        return task, model

    def submit(request: HttpRequest, requests: Sequence[Request]) -> Submission:
        """Hand the Requests of one order to the engines, for this caller and with its task's
        time-outs. Every route that generates goes through here."""
        limits, task = config.limits, intake.tasks.get(requests[0].task)
        own = TaskLimits() if task is None else task.limits
        return visit_of(request).submit(
            client,
            requests,
            queue_timeout_s=_tighter(limits.queue_timeout_s, own.queue_timeout_s),
            total_timeout_s=_tighter(limits.total_timeout_s, own.total_timeout_s),
        )

    async def answer(
        request: HttpRequest,
        order: CompletionOrder,
        events: Callable[[_O, Submission], AsyncGenerator[bytes, None]],
        whole: Callable[[_O, Submission], Awaitable[dict[str, Any]]],
        shape: _O,
    ) -> Response:
        """Submit what was ordered and answer: streamed by `events` or at once by `whole`, which
        get `shape`, the route's own view of the order."""
        if order.needs_engine:
            submission = submit(request, order.requests)
        else:
            submission = Submission.answered(order.requests, metrics)
        if order.stream:
            return EventStream(
                events(shape, submission),
                submission.abort,
                keep_alive_s=config.limits.sse_keep_alive_s,
            )
        async with DisconnectWatch(request.receive, submission.abort) as watch:
            try:
                body = await whole(shape, submission)
            finally:
                submission.abort()
        if watch.gone:
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(body)

    # --- completions ---

    @app.post("/v1/completions", **_documented(protocol.CompletionBody, "A text completion"))
    async def completions(request: HttpRequest) -> Response:
        body = protocol.validate(protocol.CompletionBody, await body_of(request))
        _, model = find(request, body.model)
        order = await intake.completion(body, f"cmpl-{secrets.token_hex(12)}", context_of(model))
        return await answer(request, order, completion_events, completion_object, order)

    # --- chat ---

    chats = ChatIntake(intake)

    @app.post("/v1/chat/completions", **_documented(ChatBody, "A chat completion"))
    async def chat_completions(request: HttpRequest) -> Response:
        body = protocol.validate(ChatBody, await body_of(request))
        _, model = find(request, body.model)
        order = await chats.order(body, f"chatcmpl-{secrets.token_hex(12)}", context_of(model))
        return await answer(request, order.order, chat_events, chat_object, order)

    # --- decisions ---

    @app.post("/v1/decisions", **_documented(DecisionBody, "Typed questions about an input"))
    async def decide(request: HttpRequest) -> Response:
        body = protocol.validate(DecisionBody, await body_of(request))
        _, model = find(request, body.model)
        order = await decisions.order(body, f"dec-{secrets.token_hex(12)}", context_of(model))
        run = DecisionRun(order, functools.partial(submit, request))
        async with DisconnectWatch(request.receive, run.abort) as watch:
            try:
                answer = await run.answer()
            finally:
                run.abort()
        if watch.gone:
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(answer)

    # --- models ---

    def model_entry(name: str) -> dict[str, Any]:
        task, model = intake.find(name)
        return protocol.model_object(
            name,
            created=model.created,
            root=model.name,
            max_model_len=context_of(model),
            description="" if name == model.name else task.description,
        )

    @app.get("/v1/models")
    async def list_models(request: HttpRequest) -> Response:
        names = [*intake.models, *(name for name in intake.tasks if name not in intake.models)]
        key = visit_of(request).key
        if key is not None:
            found = {name: intake.find(name) for name in names}
            names = [n for n, (task, model) in found.items() if key.may_use(task.name, model.name)]
        return JSONResponse({"object": "list", "data": [model_entry(name) for name in names]})

    @app.get("/v1/models/{model:path}")
    async def get_model(request: HttpRequest, model: str) -> Response:
        if not model:
            raise ModelNotFoundError("The name of the model is empty.", param="model")
        find(request, model)
        return JSONResponse(model_entry(model))

    # --- tokens ---

    @app.post("/tokenize", **_documented(protocol.TokenizeBody, "Token ids of a text"))
    async def tokenize(request: HttpRequest) -> Response:
        body = protocol.validate(protocol.TokenizeBody, await body_of(request))
        _, model = find(request, body.model)
        ids = await intake.encode(model, body.prompt, add_special=body.add_special_tokens)
        names = [model.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": context_of(model),
                "tokens": ids,
                "token_strs": names,
            }
        )

    @app.post("/detokenize", **_documented(protocol.DetokenizeBody, "Text of token ids"))
    async def detokenize(request: HttpRequest) -> Response:
        body = protocol.validate(protocol.DetokenizeBody, await body_of(request))
        _, model = find(request, body.model)
        return JSONResponse({"prompt": await intake.decode(model, body.tokens)})

    # --- state ---

    @app.get("/health")
    async def health() -> Response:
        states = [engine["state"] for engine in client.engines()]
        if not client.is_alive:
            status = "dead"
        elif "ready" not in states:
            status = "loading"
        else:
            status = "ok" if all(state == "ready" for state in states) else "degraded"
        return JSONResponse(
            {"status": status, "engines": client.engines()},
            status_code=200 if client.is_alive else 503,
        )

    @app.get("/ready")
    async def ready() -> Response:
        status = "draining" if client.is_draining else "ready" if client.is_ready else "loading"
        return JSONResponse(
            {"status": status},
            status_code=200 if status == "ready" else 503,
            headers={} if status == "ready" else {"retry-after": "1"},
        )

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics", response_class=PlainTextResponse, summary="Prometheus metrics")
    async def get_metrics() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    task_routes = TaskRoutes(
        intake=intake, client=client, metrics=metrics, limits=config.limits, admin=task_admin
    )
    task_routes.add_to(app)
    app.state.reload_tasks = task_routes.reload

    # --- the built-in page ---

    if config.dashboard.enabled:
        page = Page()

        async def get_page(request: HttpRequest) -> Response:
            return page.response(request)

        for path in PAGE_PATHS:
            app.add_api_route(path, get_page, methods=["GET", "HEAD"], include_in_schema=False)

        @app.get(DATA_PATH, include_in_schema=False)
        async def get_dashboard_data(request: HttpRequest) -> Response:
            figures = snapshot(metrics, client, visit_of(request).key)
            return JSONResponse(
                {"version": __version__, **figures},
                headers={"cache-control": "no-store"},
            )

    routes.update(
        {
            path: path
            for route in app.routes
            if "{" not in (path := str(getattr(route, "path", "{")))
        }
    )
    app.openapi = lambda: document(app, has_keys=bool(config.keys))  # type: ignore[method-assign]
    return app


def _tighter(a: float | None, b: float | None) -> float | None:
    return min((limit for limit in (a, b) if limit is not None), default=None)


def visit_of(request: HttpRequest) -> Visit:
    """The visit that the gate made for a request: generation is submitted through it."""
    visit: Visit = request.state.visit
    return visit


def _answer(request: HttpRequest, error: TailorError) -> Response:
    request.state.error_code = error.code or ""
    status, body, headers = error_response(error)
    response = Response(body, status)
    response.raw_headers = headers
    return response


_T = TypeVar("_T")


def run_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """asyncio.run, on uvloop where it is installed (about half the CPU per streamed token)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: `serve` drains before it lets go of the socket."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(
    app: FastAPI,
    client: EngineClient,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    sockets: Sequence[socket.socket] | None = None,
    drain_s: float = 30.0,
    max_header_bytes: int = 65536,
    header_timeout_s: float = 15.0,
    send_timeout_s: float = 60.0,
    on_ready: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Run the app and its engines; returns the exit status.

    sockets: listening sockets to use instead of host and port. stop: ends the server like SIGTERM
    (tests; where signals cannot be caught). max_header_bytes, header_timeout_s, send_timeout_s: of
    each connection, see server.api.connection. A second SIGTERM or SIGINT ends the drain.

    On the first signal /ready turns 503 and new completions are refused with 503, while open ones
    go on for up to drain_s seconds; then they are aborted with an error, the engines are stopped
    and the status is 0. When no engine is left and none will be restarted, the status is 1.
    SIGHUP reloads the tasks; when it says that the terminal is gone, it ends the server.
    """
    connection: Any = functools.partial(
        Connection,
        max_header_bytes=max_header_bytes,
        header_timeout_s=header_timeout_s,
        send_timeout_s=send_timeout_s,
        on_refused=functools.partial(client.metrics.count_response, "other"),
    )
    server = _Server(
        uvicorn.Config(
            app,
            http=connection,
            host=host,
            port=port,
            access_log=False,
            log_config=None,
            ws="none",
            lifespan="on",
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
    )
    stop = stop or asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    caught = []
    reloads: set[asyncio.Task[None]] = set()
    terminal = _has_terminal()

    def on_hangup() -> None:
        if terminal and not _has_terminal():
            on_signal()
            return
        reload = asyncio.create_task(_reload(app))
        reloads.add(reload)
        reload.add_done_callback(reloads.discard)

    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError, AttributeError):
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        caught.append(signal.SIGHUP)
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, on_signal)
            caught.append(number)
    await client.start()
    running = asyncio.create_task(server.serve(list(sockets) if sockets else None))
    tasks = [
        asyncio.create_task(stop.wait()),
        asyncio.create_task(client.gave_up.wait()),
        asyncio.create_task(_announce(server, client, on_ready)),
    ]
    try:
        await asyncio.wait({running, *tasks[:2]}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set() and not client.gave_up.is_set():
            log.info("draining: %d open requests", client.num_open)
            drain = asyncio.create_task(client.drain(drain_s))
            hurried = asyncio.create_task(hurry.wait())
            await asyncio.wait({drain, hurried}, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            drain.cancel()
        gave_up = client.gave_up.is_set()
        await client.stop()
        server.should_exit = True
        await running
        return 1 if gave_up else 0
    finally:
        for task in tasks:
            task.cancel()
        for number in caught:
            loop.remove_signal_handler(number)
        await client.stop()


def _has_terminal() -> bool:
    """Whether the process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _reload(app: FastAPI) -> None:
    """What SIGHUP does; a problem is told in the log, and the old tasks stay."""
    try:
        await app.state.reload_tasks()
    except TailorError as error:
        log.error("%s", error.message)
    except Exception:
        log.exception("the tasks could not be reloaded")


async def _announce(
    server: uvicorn.Server, client: EngineClient, on_ready: Callable[[int], None] | None
) -> None:
    """Call on_ready with the port once the socket listens and every model has an engine."""
    while not (server.started and client.is_ready):
        await asyncio.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    log.info("ready on port %d", port)
    if on_ready is not None:
        on_ready(port)
