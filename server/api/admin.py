"""The admin routes: what is served, how it drafts, and changes without a restart.

    GET    /v1/tasks                   the tasks
    GET    /v1/tasks/{task}            one: settings, corpus, calibration, tokens per step
    POST   /v1/tasks/reload            read the task files again (SIGHUP does the same)
    GET    /v1/tasks/{task}/corpus     the corpus and what was learned
    POST   /v1/tasks/{task}/corpus     upload examples
    DELETE /v1/tasks/{task}/corpus     delete what was uploaded and what was learned
    POST   /v1/load_lora_adapter       serve a folder that PEFT saved; vLLM's body
    POST   /v1/unload_lora_adapter     stop serving it; requests that are open end with it

The gate lets only admin keys in. A task's name must be that of a served task. Requests that are
open keep the tasks and drafters they began with. Engines of one model calibrate and learn
separately; answers have their sums.

An adapter is served once every engine of its base has read and checked it. Engines that start later
are told of it; a server that starts again is not. Where several servers serve the same engines
(server.fleet), a change at one is followed by the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import FailFast, Field, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.bodies import BodyPart, ModelName, TokenId, parse_object, read_body, validate
from server.api.engines.client import problem_of
from server.api.openapi import described
from server.api.route_context import AnswerResponse, RouteContext
from server.api.served_model import ServedModel
from server.api.shapes import Chance, CorpusSize, Count, Shape
from server.channel import merged
from server.config import AdapterConfig, TaskConfig
from server.config.task import task_version
from server.errors import (
    ClientGoneError,
    ConfigError,
    EngineError,
    InvalidRequestError,
    LoadingError,
    ModelError,
    ModelNotFoundError,
    TailorError,
    TaskNotFoundError,
    UnsupportedFieldError,
    echoed,
)
from server.types import CORPUS_FITS, AdapterOrder

adapter_log = logging.getLogger("tailor.adapters")

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
"""What a change is made in: nobody else makes one meanwhile, and no task begins to name an
adapter."""


class AdapterRoutes:
    """`add_to` puts the routes into an app. admin: None where nothing can be changed."""

    def __init__(self, context: RouteContext, admin: TaskAdmin | None) -> None:
        self._context = context
        self._client = context.client
        self._admin = admin

    async def load(self, body: LoadAdapterBody) -> str:
        """The answer of POST /v1/load_lora_adapter."""
        (admin, turn), catalog = self._need_admin(), self._context.catalog
        name = body.lora_name
        async with turn() as publish:
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
            if body.base_model_name not in (None, *catalog.models):
                raise InvalidRequestError("there is no such model.", at="base_model_name")
            try:
                config = AdapterConfig(name=name, path=body.lora_path, pinned=body.pinned)
                served = await asyncio.to_thread(admin.read, config, body.base_model_name)
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise InvalidRequestError(f"{message}.", at="lora_name") from None
            except (ConfigError, ModelError) as error:
                raise InvalidRequestError(f"{error.message[:300]}.", at="lora_path") from None
            if name in catalog.adapters and catalog.adapters[name].name != served.name:
                self._check_unused(name)
            await self._tell_engines(served)
            old = admin.add(served)
            assert served.adapter is not None
            await publish(name, AdapterChange(config, served.name, served.adapter))
            if old is not None and old.adapter_id != served.adapter_id:
                await self._forget(old)
        adapter_log.info("adapter %s was loaded", served.adapter_id)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: UnloadAdapterBody) -> str:
        """The answer of POST /v1/unload_lora_adapter."""
        (admin, turn), catalog = self._need_admin(), self._context.catalog
        name = body.lora_name
        async with turn() as publish:
            served = catalog.adapters.get(name)
            if served is None:
                raise ModelNotFoundError(
                    f"The lora adapter {echoed(name)} cannot be found.", param="lora_name"
                )
            self._check_unused(name)
            self._engines(served.name)
            admin.remove(name)
            await publish(name, None)
            await self._forget(served)
        adapter_log.info("adapter %s was unloaded", served.adapter_id)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def follow(self, name: str, change: AdapterChange | None) -> None:
        """Another server that serves the same engines has made this change, and told them.

        Raises ConfigError and ModelError for files that cannot be read here.
        """
        admin, _ = self._need_admin()
        if change is None:
            admin.remove(name)
        else:
            admin.add(await asyncio.to_thread(admin.read, change.config, change.model))

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""
        text = PlainTextResponse
        begin = described("Serve an adapter", body=LoadAdapterBody)
        end = described("Serve an adapter no more", body=UnloadAdapterBody)

        @app.post(LOAD_PATH, response_class=text, **begin)
        async def load_lora_adapter(request: HttpRequest) -> Response:
            body = await self._context.body(request, LoadAdapterBody)
            return PlainTextResponse(await self.load(body))

        @app.post(UNLOAD_PATH, response_class=text, **end)
        async def unload_lora_adapter(request: HttpRequest) -> Response:
            body = await self._context.body(request, UnloadAdapterBody)
            return PlainTextResponse(await self.unload(body))

    # -- parts ------------------------------------------------------------------------------

    def _need_admin(self) -> tuple[AdapterAdmin, AdapterTurn]:
        if self._admin is None or self._admin.adapters is None:
            raise UnsupportedFieldError("This server's adapters cannot be changed.")
        return self._admin.adapters, self._admin.adapter_turn

    def _check_unused(self, name: str) -> None:
        """Raise InvalidRequestError where a task names the adapter."""
        tasks = self._context.catalog.tasks.values()
        for user in sorted(task.name for task in tasks if task.adapter == name):
            raise InvalidRequestError(
                f"The lora adapter {echoed(name)} is used by the task {echoed(user)}.",
                param="lora_name",
            )

    def _engines(self, model: str) -> dict[str, int]:
        """The model's engines, each with the number of its start. Raises LoadingError while one is
        starting: it has the list of adapters from when it began."""
        slots = self._client.of(model)
        if any(slot.state in ("loading", "restarting") for slot in slots):
            raise LoadingError("An engine of the model is starting.", retry_after_s=2.0)
        return {slot.spec.name: slot.generation for slot in slots if slot.state == "ready"}

    async def _tell_engines(self, served: ServedModel) -> None:
        """Wait until every engine of the base has read the adapter. An engine that died and started
        again meanwhile does not have it from its start, so it is told now.

        Raises InvalidRequestError with what is wrong with the adapter, LoadingError, NoEngineError
        and EngineError; then no engine has it, unless it is served already.
        """
        told: dict[str, int] = {}
        try:
            while told != (engines := self._engines(served.name)):
                for name, life in engines.items():
                    if told.get(name) != life:
                        await self._tell_engine(served, name)
                told = engines
        except TailorError:
            now = self._context.catalog.adapters.get(served.key)
            if now is None or (now.name, now.adapter_id) != (served.name, served.adapter_id):
                with contextlib.suppress(EngineError):
                    await self._forget(served)
            raise

    async def _tell_engine(self, served: ServedModel, engine: str) -> None:
        order = served.adapter
        assert order is not None
        payload = {name: getattr(order, name) for name in type(order).__dataclass_fields__}
        deadline_s = time.monotonic() + _LOAD_TIMEOUT_S
        problem = problem_of(await self._client.control(engine, "adapter_register", payload))
        while not problem:
            answer = await self._client.control(engine, "adapter_states", None)
            if told := problem_of(answer):
                raise EngineError(f"An engine did not read the adapter: {told}")
            state = next((s for s in answer["value"] if s["id"] == order.adapter_id), None)
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
        """Make every engine forget the adapter; an engine that is not running has none. Raises
        EngineError once all were told."""
        if not await self._client.tell("adapter_forget", served.adapter_id, served.name):
            raise EngineError("An engine did not forget the adapter.")


# --- tasks ----------------------------------------------------------------------------------------


log = logging.getLogger("tailor.tasks")

REPORT_TIMEOUT_S = 10.0
MAX_EXAMPLES = 1_000_000
MAX_EXPECTED_TASKS = 64
"""With more tasks, their series appear with their first request: each task has some 400 samples."""
_MIN_COMPARED = 60  # steps before the answer says whether a corpus fits; `auto` judges earlier


class ExampleBody(BodyPart):
    """One example of a corpus upload: texts, or ids as `tailor record` writes them."""

    prompt: str | None = None
    completion: str | None = None
    prompt_ids: list[TokenId] | None = Field(None, fail_fast=True)
    output_ids: list[TokenId] | None = Field(None, min_length=1, fail_fast=True)


class CorpusBody(BodyPart):
    """POST /v1/tasks/{task}/corpus."""

    examples: Annotated[list[ExampleBody], FailFast()] = Field(
        min_length=1, max_length=MAX_EXAMPLES
    )
    mode: Literal["append", "replace"] = Field(
        "append", description="with what was uploaded before, or instead of it"
    )


class Learned(Shape, kw_only=True):
    tokens: Count
    outputs: Count
    scopes: Count


class TaskEntry(Shape, kw_only=True):
    id: str
    object: Literal["task"] = "task"
    description: str
    model: str
    drafter: str
    max_draft_tokens: Count
    learn: bool
    corpus: CorpusSize | None


class TaskList(Shape, kw_only=True):
    object: Literal["list"] = "list"
    data: list[TaskEntry]


class EngineReport(Shape, kw_only=True):
    name: str
    state: str
    answered: bool


class CalibrationRow(Shape, kw_only=True):
    source: str
    min_match_length: Count
    predicted_share: float
    offered: float
    accepted: float
    chance: Chance


class CorpusFit(Shape, kw_only=True):
    """Whether outputs follow the task's corpus. steps: whose trees were grown with the corpus and
    without, and followed. gain: tokens a step of those with it over those without, as `corpus_gain`
    of `tailor tasks tune`; fits: it is at least 1.02."""

    steps: Count
    gain: float
    fits: bool
    message: str


class TaskAnswer(TaskEntry, kw_only=True):
    """sampling, limits, speculation, vocabulary: keys of the task's file."""

    version: str
    sampling: dict[str, Any]
    limits: dict[str, Any]
    speculation: dict[str, Any]
    vocabulary: dict[str, Any]
    learned: Learned
    expected_tokens_per_step: float | None
    measured_steps: Count
    corpus_fit: CorpusFit | None
    engines: list[EngineReport]
    calibration: list[CalibrationRow]


class CorpusAnswer(Shape, kw_only=True):
    object: Literal["task.corpus"] = "task.corpus"
    task: str
    corpus: CorpusSize | None
    learn: bool
    learned: Learned


class CorpusDeleted(Shape, kw_only=True):
    object: Literal["task.corpus.deleted"] = "task.corpus.deleted"
    task: str
    deleted: Literal[True] = True


class ReloadAnswer(Shape, kw_only=True):
    object: Literal["task.reload"] = "task.reload"
    tasks: list[str]
    added: list[str]
    removed: list[str]
    changed: list[str]


class TaskAdmin(Protocol):
    """Keeps the tasks (server.wiring.task_set).

    profile_summary reads a file. It and the three methods that change something raise ConfigError,
    and change nothing then.
    """

    @property
    def tasks(self) -> Mapping[str, TaskConfig]: ...

    @property
    def adapters(self) -> AdapterAdmin | None: ...

    def adapter_turn(self) -> AbstractAsyncContextManager[Publish]: ...

    def corpus_size(self, task: str) -> CorpusSize | None: ...

    def profile_summary(self, task: str) -> dict[str, Any] | None: ...

    async def reload(self) -> Mapping[str, TaskConfig]: ...

    async def upload(
        self, task: str, examples: Sequence[Mapping[str, Any]], *, append: bool
    ) -> Mapping[str, TaskConfig]: ...

    async def delete(self, task: str) -> Mapping[str, TaskConfig]: ...


@dataclass(slots=True)
class _Report:
    """What the engines of a task's model keep of it. told: the sum of their answers."""

    told: Mapping[str, Any]
    engines: list[EngineReport]

    @property
    def learned(self) -> Learned:
        return Learned(
            **{n: self.told.get(f"num_learned_{n}", 0) for n in ("tokens", "outputs", "scopes")}
        )

    def calibration(self) -> list[CalibrationRow]:
        """The sums by source, length and share, those that were offered most first."""
        cells: dict[tuple[str, int, float], list[float]] = {}
        for source, length, share, offered, accepted in self.told.get("calibration", ()):
            cell = cells.setdefault((source, length, share), [0.0, 0.0])
            cell[0] += offered
            cell[1] += accepted
        return [
            CalibrationRow(
                source=source,
                min_match_length=length,
                predicted_share=share,
                offered=round(offered, 1),
                accepted=round(accepted, 1),
                chance=round((accepted + 1) / (offered + 2), 4),
            )
            for (source, length, share), (offered, accepted) in sorted(
                cells.items(), key=lambda item: -item[1][0]
            )
        ]

    def corpus_fit(self) -> CorpusFit | None:
        """Whether the corpus fits; None before enough steps were compared."""
        steps = self.told.get("corpus_steps", 0)
        if steps < _MIN_COMPARED:
            return None
        gain = self.told["tokens_with"] / self.told["tokens_without"]
        fits, message = gain >= CORPUS_FITS, "outputs follow the corpus"
        if not fits:
            message = (
                "this corpus does not fit: the model's outputs do not follow it, and drafts do not "
                "come from it where it costs steps"
            )
        return CorpusFit(steps=round(steps), gain=round(gain, 3), fits=fits, message=message)


class TaskRoutes:
    """The routes' work. `add_to` puts them into an app; `reload` is SIGHUP's too.

    admin: None where nothing can be changed (tests, embedding).
    """

    def __init__(self, context: RouteContext, admin: TaskAdmin | None) -> None:
        self._catalog = context.catalog
        self._client = context.client
        self._limits = context.limits
        self._admin = admin
        self._note_tasks()

    # -- what is there ----------------------------------------------------------------------

    async def corpus(self, name: str) -> CorpusAnswer:
        """GET /v1/tasks/{task}/corpus."""
        task = self._find(name)
        report = await self._report(task)
        return CorpusAnswer(
            task=task.name,
            corpus=self._corpus(task),
            learn=task.speculation.learns,
            learned=report.learned,
        )

    # -- changes ----------------------------------------------------------------------------

    async def reload(self) -> ReloadAnswer:
        """POST /v1/tasks/reload. Raises InvalidRequestError; the old tasks then stay."""
        admin = self._need_admin()
        old = dict(self._catalog.tasks)
        with _refused("The tasks were not reloaded, the old ones stay"):
            tasks = await admin.reload()
        await self._serve(tasks)
        new = self._catalog.tasks
        log.info("the tasks were reloaded: %s", ", ".join(new))
        return ReloadAnswer(
            tasks=list(new),
            added=[name for name in new if name not in old],
            removed=[name for name in old if name not in new],
            changed=[
                name
                for name in new
                if name in old and task_version(new[name]) != task_version(old[name])
            ],
        )

    # -- parts ------------------------------------------------------------------------------

    def _need_admin(self) -> TaskAdmin:
        if self._admin is None:
            raise UnsupportedFieldError("This server's tasks cannot be changed.")
        return self._admin

    def _find(self, name: str) -> TaskConfig:
        task = self._catalog.tasks.get(name)
        if task is None:
            raise TaskNotFoundError(f"There is no task {echoed(name)}.", param="task")
        return task

    def _entry(self, task: TaskConfig) -> dict[str, Any]:
        return {
            "id": task.name,
            "description": task.description,
            "model": self._catalog.model_of(task).name,
            "drafter": task.speculation.drafter,
            "max_draft_tokens": task.speculation.max_draft_tokens,
            "learn": task.speculation.learns,
            "corpus": self._corpus(task),
        }

    def _corpus(self, task: TaskConfig) -> CorpusSize | None:
        return None if self._admin is None else self._admin.corpus_size(task.name)

    async def _vocabulary(self, task: TaskConfig) -> dict[str, Any]:
        """The task's settings, with what its profile holds where it names one."""
        told: dict[str, Any] = task.vocabulary.model_dump(mode="json", exclude_none=True)
        if task.vocabulary.profile is None or self._admin is None:
            return told
        with _refused("The vocabulary profile"):
            summary = await asyncio.to_thread(self._admin.profile_summary, task.name)
        return {**told, "profile": summary}

    def follow(self, tasks: Mapping[str, TaskConfig]) -> None:
        """Use these tasks for new requests."""
        self._catalog.replace_tasks(tasks)
        self._note_tasks()

    async def _serve(self, tasks: Mapping[str, TaskConfig]) -> None:
        """`follow`, and the engines make drafters anew for them."""
        self.follow(tasks)
        await self._client.tell("drafters_reload", None)

    def _note_tasks(self) -> None:
        metrics, tasks = self._client.metrics, self._catalog.tasks
        sizes = {name: self._corpus(task) for name, task in tasks.items()}
        metrics.corpus_sizes({n: 0 if size is None else size.tokens for n, size in sizes.items()})
        for task in tasks.values() if len(tasks) <= MAX_EXPECTED_TASKS else ():
            model = self._catalog.base_of(task).name
            metrics.expect(task.name, task.speculation.drafter, model)

    async def _report(self, task: TaskConfig) -> _Report:
        """What the engines of a task's model know of it, summed. Engines that do not answer in
        time are left out and listed in `engines`."""
        served = self._catalog.model_of(task)
        model, spec = served.name, task.speculation
        payload = {
            "task": task.name,
            "drafter": spec.drafter,
            "options": spec.options(),
            "corpus": spec.corpus,
            "adapter": served.adapter_id,
        }
        engines = [e for e in self._client.engines() if e["model"] == model]
        names = [engine["name"] for engine in engines]
        answers = await self._client.ask(names, "task_report", payload, REPORT_TIMEOUT_S)
        told = {name: answer for name, answer in answers.items() if not problem_of(answer)}
        reports = [
            EngineReport(name=e["name"], state=e["state"], answered=e["name"] in told)
            for e in engines
        ]
        return _Report(merged([*told.values()])["value"], reports)

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes. `reload` comes before {task}, so that no task's name hides it."""
        one, corpus = "/v1/tasks/{task}", "/v1/tasks/{task}/corpus"

        @app.get("/v1/tasks", **described("The tasks", TaskList))
        async def list_tasks() -> Response:
            entries = [TaskEntry(**self._entry(task)) for task in self._catalog.tasks.values()]
            return AnswerResponse(TaskList(data=entries))

        @app.post("/v1/tasks/reload", **described("Read the task files again", ReloadAnswer))
        async def reload_tasks() -> Response:
            return AnswerResponse(await self.reload())

        @app.get(one, **described("One task: settings, corpus, calibration", TaskAnswer))
        async def get_task(task: str) -> Response:
            found = self._find(task)
            report = await self._report(found)
            steps, tokens = (report.told.get(name, 0) for name in ("num_steps", "num_tokens"))
            spec = found.speculation.model_dump(mode="json", by_alias=True, exclude={"corpus"})
            answer = TaskAnswer(
                **self._entry(found),
                version=task_version(found),
                sampling=found.sampling.model_dump(mode="json", exclude_none=True),
                limits=found.limits.model_dump(mode="json", exclude_none=True),
                speculation=spec,
                vocabulary=await self._vocabulary(found),
                learned=report.learned,
                expected_tokens_per_step=round(tokens / steps, 3) if steps else None,
                measured_steps=round(steps),
                corpus_fit=None if found.speculation.corpus is None else report.corpus_fit(),
                engines=report.engines,
                calibration=report.calibration(),
            )
            return AnswerResponse(answer)

        @app.get(corpus, **described("A task's corpus and what it learned", CorpusAnswer))
        async def get_corpus(task: str) -> Response:
            return AnswerResponse(await self.corpus(task))

        @app.post(corpus, **described("Upload a task's examples", CorpusAnswer, body=CorpusBody))
        async def post_corpus(request: HttpRequest, task: str) -> Response:
            self._find(task)  # before the body is read
            limits = self._limits
            raw = await read_body(request, limits.max_upload_bytes, limits.body_timeout_s)
            # Megabytes: read in a thread, so that the streams of others go on.
            examples, append = await asyncio.to_thread(_read_upload, raw)
            if await request.is_disconnected():
                raise ClientGoneError("The client left before its upload was read.")
            admin, name = self._need_admin(), self._find(task).name
            with _refused("The corpus was not changed", "examples"):
                tasks = await admin.upload(name, examples, append=append)
            await self._serve(tasks)
            return AnswerResponse(await self.corpus(name))

        @app.delete(
            corpus, **described("Delete what was uploaded and what was learned", CorpusDeleted)
        )
        async def delete_corpus(task: str) -> Response:
            admin, name = self._need_admin(), self._find(task).name
            # First the engines, which write what they have learned; then the files of all engines.
            if not await self._client.tell("task_forget", {"task": name}):
                raise EngineError("An engine did not forget what it learned. Try again.")
            with _refused("The corpus was not deleted"):
                tasks = await admin.delete(name)
            await self._serve(tasks)
            return AnswerResponse(CorpusDeleted(task=name))


@contextlib.contextmanager
def _refused(what: str, param: str | None = None) -> Iterator[None]:
    """A ConfigError within is the client's."""
    try:
        yield
    except ConfigError as error:
        raise InvalidRequestError(f"{what}: {error.message}", param=param) from None


def _read_upload(raw: bytes) -> tuple[list[dict[str, Any]], bool]:
    """(examples, whether to append) of a body. Raises InvalidRequestError."""
    body = validate(CorpusBody, parse_object(raw))
    for i, example in enumerate(body.examples):
        at = f"examples[{i}]"
        if (example.completion is None) == (example.output_ids is None):
            raise InvalidRequestError("give either completion or output_ids.", at=at)
        if example.completion is not None and example.prompt_ids is not None:
            raise InvalidRequestError(
                "goes with output_ids; with completion give prompt.", at=f"{at}.prompt_ids"
            )
        if example.output_ids is not None and example.prompt is not None:
            raise InvalidRequestError(
                "goes with completion; with output_ids give prompt_ids.", at=f"{at}.prompt"
            )
    examples = [example.model_dump(exclude_none=True) for example in body.examples]
    return examples, body.mode == "append"
