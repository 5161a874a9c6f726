"""The admin routes for adapters, which add and remove them without a restart.

    POST /v1/load_lora_adapter     serve a folder that PEFT saved; vLLM's body
    POST /v1/unload_lora_adapter   stop serving it; requests that are open end with it

The gate lets only admin keys in. An adapter is served once every engine of its base has read and
checked it. Engines that start later are told of it; a server that starts again is not. Where
several servers serve the same engines (server.fleet), a change at one is followed by the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import Field, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.bodies import BodyPart, ModelName, validate
from server.api.openapi import described
from server.api.route_context import RouteContext
from server.api.served_model import ServedModel
from server.config import AdapterConfig
from server.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    LoadingError,
    ModelError,
    ModelNotFoundError,
    NoEngineError,
    TailorError,
    UnsupportedFieldError,
    echoed,
)
from server.types import AdapterOrder

log = logging.getLogger("tailor.adapters")

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADAPTER_PATHS = frozenset({LOAD_PATH, UNLOAD_PATH})
"""Paths that need an admin key."""

_LOAD_TIMEOUT_S = 120.0
_POLL_S = 0.02


class LoadAdapterBody(BodyPart):
    """POST /v1/load_lora_adapter: vLLM's body, and what is Tailor's own."""

    lora_name: str = Field(max_length=256, description="what the `model` field will call it")
    lora_path: str = Field(min_length=1, max_length=4096, description="folder that PEFT saved")
    load_inplace: bool = Field(False, description="whether it may replace one of the same name")
    base_model_name: ModelName | None = Field(
        None, description="the model that it is beside; default the server's first"
    )
    pinned: bool = Field(False, description="whether it stays in memory")


class UnloadAdapterBody(BodyPart):
    """POST /v1/unload_lora_adapter: vLLM's body."""

    lora_name: str = Field(max_length=256)
    lora_int_id: int | None = Field(None, description="vLLM's number of it; not looked at")


class AdapterAdmin(Protocol):
    """Keeps the adapters (server.wiring.model.AdapterSet). `read` is called in a thread; it raises
    ConfigError and ModelError."""

    @property
    def served(self) -> Mapping[str, ServedModel]: ...

    def read(self, config: AdapterConfig, model: str | None = None) -> ServedModel: ...

    def add(self, served: ServedModel) -> ServedModel | None: ...

    def remove(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """An adapter that is served from now on. model: its base. order: what its engines know."""

    config: AdapterConfig
    model: str
    order: AdapterOrder


Publish = Callable[[str, AdapterChange | None], Awaitable[None]]
"""(name, None where it is served no more): tells whoever else serves it."""
AdapterTurn = Callable[[], AbstractAsyncContextManager[Publish]]
"""What a change is made in: nobody else makes one meanwhile."""


@contextlib.asynccontextmanager
async def _alone() -> AsyncIterator[Publish]:
    """A server that nobody else serves with."""

    async def publish(name: str, change: AdapterChange | None) -> None:
        del name, change

    yield publish


class AdapterRoutes:
    """`add_to` puts the routes into an app. admin: None where nothing can be changed. turn: of the
    servers that serve the same engines together; None is this one alone."""

    def __init__(
        self,
        context: RouteContext,
        admin: AdapterAdmin | None,
        turn: AdapterTurn | None = None,
    ) -> None:
        self._context = context
        self._client = context.client
        self._admin = admin
        self._turn = turn or _alone
        self._lock = asyncio.Lock()

    async def load(self, body: LoadAdapterBody) -> str:
        """The answer of POST /v1/load_lora_adapter."""
        admin, catalog = self._need_admin(), self._context.catalog
        name = body.lora_name
        async with self._lock, self._turn() as publish:
            if name in catalog.names and name not in catalog.adapters:
                raise InvalidRequestError(
                    f"{echoed(name)} is the name of a model or task.", at="lora_name"
                )
            if name in catalog.adapters and not body.load_inplace:
                raise InvalidRequestError(
                    f"The lora adapter {echoed(name)} has already been loaded. To load it in "
                    "place, set load_inplace to true.",
                    param="lora_name",
                )
            try:
                config = AdapterConfig(name=name, path=body.lora_path, pinned=body.pinned)
                served = await asyncio.to_thread(admin.read, config, body.base_model_name)
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise InvalidRequestError(f"{message}.", at="lora_name") from None
            except (ConfigError, ModelError) as error:
                raise InvalidRequestError(f"{error.message[:300]}.", at="lora_path") from None
            await self._tell_engines(served)
            old = admin.add(served)
            catalog.adapters[name] = served
            assert served.adapter is not None
            await publish(name, AdapterChange(config, served.name, served.adapter))
            if old is not None and old.adapter_id != served.adapter_id:
                await self._forget(old)
        log.info("adapter %s was loaded", served.adapter_id)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: UnloadAdapterBody) -> str:
        """The answer of POST /v1/unload_lora_adapter."""
        admin, catalog = self._need_admin(), self._context.catalog
        name = body.lora_name
        async with self._lock, self._turn() as publish:
            served = catalog.adapters.get(name)
            if served is None:
                raise ModelNotFoundError(
                    f"The lora adapter {echoed(name)} cannot be found.", param="lora_name"
                )
            users = sorted(task.name for task in catalog.tasks.values() if task.adapter == name)
            if users:
                raise InvalidRequestError(
                    f"The lora adapter {echoed(name)} is used by the task {echoed(users[0])}.",
                    param="lora_name",
                )
            self._engines(served.name)
            del catalog.adapters[name]
            admin.remove(name)
            await publish(name, None)
            await self._forget(served)
        log.info("adapter %s was unloaded", served.adapter_id)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def follow(self, name: str, change: AdapterChange | None) -> None:
        """Another server that serves the same engines has made this change, and told them.

        Raises ConfigError and ModelError for files that cannot be read here.
        """
        admin, catalog = self._need_admin(), self._context.catalog
        if change is None:
            catalog.adapters.pop(name, None)
            admin.remove(name)
            return
        served = await asyncio.to_thread(admin.read, change.config, change.model)
        admin.add(served)
        catalog.adapters[name] = served

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""
        text = PlainTextResponse
        begin = described("Serve an adapter", body=LoadAdapterBody)
        end = described("Serve an adapter no more", body=UnloadAdapterBody)

        @app.post(LOAD_PATH, response_class=text, **begin)
        async def load_lora_adapter(request: HttpRequest) -> Response:
            body = validate(LoadAdapterBody, await self._context.body(request))
            return PlainTextResponse(await self.load(body))

        @app.post(UNLOAD_PATH, response_class=text, **end)
        async def unload_lora_adapter(request: HttpRequest) -> Response:
            body = validate(UnloadAdapterBody, await self._context.body(request))
            return PlainTextResponse(await self.unload(body))

    # -- parts ------------------------------------------------------------------------------

    def _need_admin(self) -> AdapterAdmin:
        if self._admin is None:
            raise UnsupportedFieldError("This server's adapters cannot be changed.")
        return self._admin

    def _engines(self, model: str) -> dict[str, int]:
        """The model's engines, each with the number of its start. Raises LoadingError while one is
        starting: it has the list of adapters from when it began."""
        slots = [slot for slot in self._client.slots if slot.spec.model == model]
        if any(slot.state in ("loading", "restarting") for slot in slots):
            raise LoadingError("An engine of the model is starting.", retry_after_s=2.0)
        return {slot.spec.name: slot.generation for slot in slots if slot.state == "ready"}

    async def _tell_engines(self, served: ServedModel) -> None:
        """Wait until every engine of the base has read the adapter. An engine that died and started
        again meanwhile does not have it from its start, so it is told now.

        Raises InvalidRequestError with what is wrong with the adapter, LoadingError and
        NoEngineError; then no engine has it.
        """
        told: dict[str, int] = {}
        try:
            while told != (engines := self._engines(served.name)):
                for name, life in engines.items():
                    if told.get(name) != life:
                        await self._tell_engine(served, name)
                told = engines
        except TailorError:
            await self._forget(served)
            raise

    async def _tell_engine(self, served: ServedModel, engine: str) -> None:
        order = served.adapter
        assert order is not None
        payload = {name: getattr(order, name) for name in type(order).__dataclass_fields__}
        deadline_s = time.monotonic() + _LOAD_TIMEOUT_S
        problem = _problem_of(await self._client.control(engine, "adapter_register", payload))
        while not problem:
            states = (await self._client.control(engine, "adapter_states", None))["value"]
            state = next((s for s in states if s["id"] == order.adapter_id), None)
            if state is None:  # the engine was started again
                return
            problem = state["problem"]
            if not state["pending"]:
                break
            if time.monotonic() > deadline_s:
                problem = "it takes too long to read"
            await asyncio.sleep(_POLL_S)
        if problem:
            raise InvalidRequestError(f"{problem}.", at="lora_path")

    async def _forget(self, served: ServedModel) -> None:
        """Make every engine forget the adapter; an engine that is not running has none."""
        for slot in self._client.slots:
            if slot.spec.model != served.name or slot.state != "ready":
                continue
            with contextlib.suppress(NoEngineError):
                problem = _problem_of(
                    await self._client.control(slot.spec.name, "adapter_forget", served.adapter_id)
                )
                if problem:
                    raise EngineError(f"An engine did not forget the adapter: {problem}")


def _problem_of(answer: Any) -> str:
    return "" if answer.get("ok") else str(answer.get("error", "an engine refused it"))
