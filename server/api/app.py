"""The HTTP application: its middleware, its routes, its errors.

server/wiring/server.py uses it so:

    metrics = Metrics()
    client = EngineClient([EngineSpec(name, model, device, factory), ...], metrics=metrics,
                          restart=RestartPolicy(...), max_queued_requests=..., ...)
    app = create_app(config, tasks=tasks, models=models, client=client,
                     drafters=DRAFTER_NAMES)

- `config` is a ServerConfig (limits, keys, metrics and cors are read), `tasks` the TaskConfigs by
  name, `models` the ServedModels by name (the first is the default), one per model name in the
  client's specs.
- server.api.serving runs it.

`create_app` keeps no global state: two apps in one process share nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server import __version__
from server.api.adapters import ADAPTER_PATHS, AdapterRoutes
from server.api.chat_intake import ChatIntake
from server.api.dashboard import DATA_PATH, HISTORY_PATH, PAGE_PATHS, ROOT_PATH, DashboardRoutes
from server.api.dashboard_history import History
from server.api.engines.client import EngineClient
from server.api.generation_routes import GenerationRoutes
from server.api.intake import Intake
from server.api.keys import ApiKey, Keyring, KeyUse, OwnUse
from server.api.middleware import OPEN_PATHS, Gate, error_response
from server.api.model_routes import ModelRoutes
from server.api.openapi import document
from server.api.other_routes import advice
from server.api.query import QueryCheck
from server.api.route_context import RouteContext
from server.api.served_model import ServedModel
from server.api.state_routes import StateRoutes
from server.api.tasks import TaskAdmin, TaskRoutes
from server.config import ServerConfig, TaskConfig
from server.errors import (
    MethodNotAllowedError,
    RequestError,
    RouteNotFoundError,
    TailorError,
    echoed,
)
from server.metrics.series import Metrics
from server.tracing import TraceSink

_ANY_QUERY = OPEN_PATHS | frozenset({"/metrics", ROOT_PATH, *PAGE_PATHS})

MAX_EXPECTED_TASKS = 64
"""With more tasks, their series appear with their first request: each task has some 400 samples."""


def create_app(
    config: ServerConfig,
    *,
    tasks: Mapping[str, TaskConfig],
    models: Mapping[str, ServedModel],
    client: EngineClient,
    drafters: Sequence[str] = ("off",),
    task_admin: TaskAdmin | None = None,
    traces: TraceSink | None = None,
    key_use: Callable[[ApiKey], KeyUse] = OwnUse,
) -> FastAPI:
    """The application. It owns only its tokenizing threads; see the top of this file.

    task_admin: changes tasks for the admin routes and holds the adapters, if there are any; None:
    tasks can only be read. key_use: keeps the account of an API key.
    """
    metrics = client.metrics
    keys = Keyring([ApiKey.from_config(key) for key in config.keys], key_use)
    adapters = None if task_admin is None else task_admin.adapters
    intake = Intake(
        tasks=tasks,
        models=models,
        drafters=drafters,
        limits=config.limits,
        adapters=None if adapters is None else adapters.served,
    )
    for task in tasks.values() if len(tasks) <= MAX_EXPECTED_TASKS else ():
        model = intake.find(task.name)[1].name
        metrics.expect(task.name, task.speculation.drafter, model)
    paths: dict[str, str] = {}
    page = DashboardRoutes(client, metrics, tells_sums=not config.metrics.admin_only)
    app = FastAPI(
        title="Tailor",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(QueryCheck(_ANY_QUERY))],
        lifespan=_life(intake, page.history if config.dashboard.enabled else None),
        middleware=_middleware(config, metrics, paths, traces, keys),
    )
    app.add_exception_handler(TailorError, _tailor_error)
    app.add_exception_handler(HTTPException, _http_error)
    context = RouteContext(intake=intake, client=client, metrics=metrics, limits=config.limits)
    chats = ChatIntake(intake)
    GenerationRoutes(context, chats).add_to(app)
    ModelRoutes(context, chats).add_to(app)
    StateRoutes(client, metrics).add_to(app)
    task_routes = TaskRoutes(
        intake=intake, client=client, metrics=metrics, limits=config.limits, admin=task_admin
    )
    task_routes.add_to(app)
    turn = None if task_admin is None else task_admin.adapter_turn
    adapter_routes = AdapterRoutes(context, client, adapters, turn)
    adapter_routes.add_to(app)
    app.state.follow_adapter = adapter_routes.follow
    app.state.reload_tasks = task_routes.reload
    app.state.follow_tasks = task_routes.follow
    if config.dashboard.enabled:
        page.add_to(app)
    for route in [r for r in app.routes if isinstance(r, APIRoute) and r.methods == {"GET"}]:
        app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    known = (str(getattr(route, "path", "{")) for route in app.routes)
    paths.update({path: path for path in known if "{" not in path})
    app.openapi = lambda: document(app, has_keys=bool(config.keys))  # type: ignore[method-assign]
    return app


def _life(
    intake: Intake, history: History | None
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    """Runs while the application does: takes the page's history, then ends the threads."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        taking = None if history is None else asyncio.create_task(history.run())
        yield
        if taking is not None:
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await taking
        intake.close()

    return lifespan


def _middleware(
    config: ServerConfig,
    metrics: Metrics,
    paths: Mapping[str, str],
    traces: TraceSink | None,
    keys: Keyring,
) -> list[Middleware]:
    """CORS where it is configured, and the gate. paths: those that metrics may name."""
    open_paths, admin_paths = OPEN_PATHS, ADAPTER_PATHS
    if config.metrics.admin_only and config.keys:
        admin_paths |= frozenset({"/metrics"})
    elif not config.metrics.require_key:
        open_paths |= {"/metrics"}
    if config.dashboard.enabled:
        open_paths |= frozenset((ROOT_PATH, *PAGE_PATHS))
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
    gate = Middleware(
        Gate,
        keys=keys,
        open_paths=open_paths,
        quiet_paths=frozenset({DATA_PATH, HISTORY_PATH}),
        admin_paths=admin_paths,
        metrics=metrics,
        routes=paths,
        traces=traces,
    )
    return [*middleware, gate]


async def _tailor_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, TailorError)
    request.state.error_code = error.code or ""
    status, body, headers = error_response(error)
    response = Response(body, status)
    response.raw_headers = headers
    return response


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """The router's own refusals in our shape."""
    assert isinstance(error, HTTPException)
    method, path = request.method[:16], echoed(request.url.path, 100)
    told: TailorError = RequestError("The request cannot be handled.")
    if error.status_code == 404:
        ours = {getattr(route, "path", "") for route in request.app.routes}
        told = RouteNotFoundError(f"There is no route {path}.{advice(request.url.path, ours)}")
    elif error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        told = MethodNotAllowedError(
            f"The route {path} has no {echoed(method)}.", headers=(("allow", allow),)
        )
    return await _tailor_error(request, told)
