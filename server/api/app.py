"""The HTTP application: its middleware, its routes, its errors.

server/wiring/server.py uses it so:

    metrics = Metrics()
    client = EngineClient([EngineSpec(name, model, device, factory), ...], metrics=metrics,
                          restart=RestartConfig(...), limits=LimitsConfig(...))
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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from typing import NoReturn

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.routing import Match

from server import __version__
from server.api.admin import ADAPTER_PATHS, AdapterRoutes, TaskAdmin, TaskRoutes
from server.api.dashboard import (
    DATA_PATH,
    HISTORY_PATH,
    PAGE_PATHS,
    ROOT_PATH,
    History,
    View,
    add_dashboard,
    snapshot,
)
from server.api.engines.client import EngineClient
from server.api.faces.chat import ChatCompletions
from server.api.faces.completions import Completions
from server.api.faces.decisions import Decisions
from server.api.faces.responses import Responses
from server.api.faces.system_one import SystemOne
from server.api.gate import OPEN_PATHS, Gate, Traces, check_query
from server.api.keys import ApiKey, Keyring, KeyUse, OwnUse
from server.api.openapi import described, document
from server.api.order import Orders
from server.api.route_context import Face, RouteContext
from server.api.routes import add_model_routes, add_state_routes
from server.api.served_model import Catalog, ServedModel
from server.config import ServerConfig, TaskConfig
from server.errors import (
    MethodNotAllowedError,
    RequestError,
    RouteNotFoundError,
    TailorError,
    echoed,
)
from server.metrics import Metrics


def create_app(
    config: ServerConfig,
    *,
    tasks: Mapping[str, TaskConfig],
    models: Mapping[str, ServedModel],
    client: EngineClient,
    drafters: Sequence[str] = ("off",),
    task_admin: TaskAdmin | None = None,
    traces: Traces | None = None,
    key_use: Callable[[ApiKey], KeyUse] = OwnUse,
) -> FastAPI:
    """The application. It owns only its tokenizing threads; see the top of this file.

    task_admin: changes tasks for the admin routes and holds the adapters, if there are any; None:
    tasks can only be read. key_use: keeps the account of an API key.
    """
    keys = Keyring([ApiKey.from_config(key) for key in config.keys], key_use)
    adapters = None if task_admin is None else task_admin.adapters
    catalog = Catalog(tasks, models, {} if adapters is None else adapters.served)
    orders = Orders(catalog, drafters, config.limits)
    paths: set[str] = set()
    history = History(lambda: snapshot(client, View()))
    has_page = config.dashboard.enabled

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        taking = asyncio.create_task(history.run(client.ask_figures)) if has_page else None
        yield
        if taking is not None:
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await taking
        orders.close()

    app = FastAPI(
        title="Tailor",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(check_query)],
        lifespan=lifespan,
        middleware=_middleware(config, client.metrics, paths, traces, keys),
    )
    app.add_exception_handler(HTTPException, _http_error)
    context = RouteContext(orders, client)
    faces: list[Face] = [
        Completions(context),
        ChatCompletions(context),
        Responses(context),
        Decisions(context),
        SystemOne(context),
    ]
    for face in faces:
        told = described(face.summary, face.answer, body=face.body, chunks=face.chunks)
        app.add_api_route(face.path, face.respond, methods=["POST"], response_model=None, **told)
    add_model_routes(app, context)
    add_state_routes(app, client)
    task_routes = TaskRoutes(context, task_admin)
    task_routes.add_to(app)
    adapter_routes = AdapterRoutes(context, task_admin)
    adapter_routes.add_to(app)
    app.state.follow_adapter = adapter_routes.follow
    app.state.reload_tasks = task_routes.reload
    app.state.follow_tasks = task_routes.follow
    if has_page:
        add_dashboard(app, client, history, tells_sums=not config.metrics.admin_only)
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            route.methods.add("HEAD")
    paths |= {str(path) for r in app.routes if "{" not in (path := getattr(r, "path", "{"))}
    app.openapi = lambda: document(app, has_keys=bool(config.keys))  # type: ignore[method-assign]
    return app


def _middleware(
    config: ServerConfig,
    metrics: Metrics,
    paths: Set[str],
    traces: Traces | None,
    keys: Keyring,
) -> list[Middleware]:
    """CORS where it is configured, and the gate. paths: those that metrics may name."""
    open_paths, admin_paths = OPEN_PATHS, ADAPTER_PATHS
    browser_paths = frozenset({"/metrics", ROOT_PATH, *PAGE_PATHS, DATA_PATH, HISTORY_PATH})
    if config.metrics.admin_only and config.keys:
        admin_paths |= frozenset({"/metrics"})
    elif not config.metrics.require_key:
        open_paths |= {"/metrics"}
    middleware = []
    if config.cors.allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors.allow_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # openai for Node sends a dozen of its own
                expose_headers=["x-request-id", "retry-after", "x-should-retry"],
            )
        )
    gate = Middleware(
        Gate,
        keys=keys,
        open_paths=open_paths,
        browser_paths=browser_paths,
        admin_paths=admin_paths,
        metrics=metrics,
        routes=paths,
        traces=traces,
    )
    return [*middleware, gate]


async def _http_error(request: HttpRequest, error: Exception) -> NoReturn:
    """Raise the router's own refusals as ours, which the gate answers as it does all others."""
    assert isinstance(error, HTTPException)
    method, path = request.method[:16], echoed(request.url.path, 100)
    told: TailorError = RequestError("The request cannot be handled.")
    if error.status_code == 404:
        ours = {getattr(route, "path", "") for route in request.app.routes}
        told = RouteNotFoundError(f"There is no route {path}.{_advice(request.url.path, ours)}")
    elif error.status_code == 405:
        routes = [r for r in request.app.routes if r.matches(request.scope)[0] != Match.NONE]
        allow = ", ".join(sorted({method for route in routes for method in route.methods}))
        told = MethodNotAllowedError(
            f"The route {path} has no {echoed(method)}.", headers=(("allow", allow),)
        )
    raise told


# --- where a client of another server finds what it asked for -------------------------------------

_NO_VECTORS = "This server generates text and has no vectors or scores of whole texts"

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
ELSEWHERE = {
    # llama.cpp's server
    "/completion": _COMPLETIONS,
    "/props": "/tokenizer_info and /v1/models",
    "/slots": "/load and /metrics",
    "/apply-template": "/v1/chat/completions/render",
    "/lora-adapters": "/v1/models",
    "/infill": _COMPLETIONS,
    "/v1/health": "/health",
    # vLLM, SGLang, Text Generation Inference
    "/generate": _COMPLETIONS,
    "/generate_stream": _COMPLETIONS,
    "/server_info": "/version",
    "/get_server_info": "/version",
    "/get_model_info": "/v1/models",
    "/info": "/version and /v1/models",
    "/invocations": _COMPLETIONS,
    "/health_generate": "/ready",
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
    "/classify": "/v1/decisions",
    "/v1/classify": "/v1/decisions",
    # Ollama
    "/api/generate": _COMPLETIONS,
    "/api/chat": _CHAT,
    "/api/tags": "/v1/models",
    "/api/show": "/v1/models",
    "/api/version": "/version",
    # probes of Kubernetes
    "/healthz": "/health",
    "/livez": "/ping",
    "/readyz": "/ready",
    # Anthropic
    "/v1/messages": _CHAT,
}
"""Our routes by theirs."""

_VECTORS = frozenset(
    f"{prefix}/{name}"
    for prefix in ("", "/v1", "/v2", "/api")
    for name in ("embedding", "embeddings", "embed", "rerank", "reranking", "score", "pooling")
)


def _advice(path: str, ours: Set[str]) -> str:
    """A sentence behind "There is no route": what to ask instead. "" where nothing is known.

    ours: the paths that this server has.
    """
    path = "/" + "/".join(part for part in path.split("/") if part)
    if path in _VECTORS:
        return f" {_NO_VECTORS}."
    path = path.removeprefix("/v1") if path.startswith("/v1/v1/") else path
    found = path if path in ours else "/v1" + path if "/v1" + path in ours else None
    found = found or ELSEWHERE.get(path)
    return f" Ask {found}." if found else ""
