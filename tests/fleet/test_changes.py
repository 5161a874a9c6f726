"""A change of tasks at one ingress reaches the others, one at a time, and outlives the desk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server import channel
from server.api.admin import AdapterRoutes, LoadAdapterBody, UnloadAdapterBody
from server.api.engines.client import EngineSpec
from server.api.served_model import Catalog
from server.channel import merged
from server.config import TaskConfig
from server.errors import ConfigError, InvalidRequestError, UnavailableError
from server.fleet import changes
from server.fleet.changes import FOLLOW_S, ChangeLog, Changes, SharedTasks
from server.fleet.replica import LOST, EngineReplica
from server.types import AdapterOrder, Delta, Request, SamplingParams
from tests.api.live import served
from tests.api.test_adapter_routes import Adapters, Engines
from tests.fakes.scripted_engine import ScriptedEngine
from tests.waiting import until


class Files:
    """What all ingresses can read: the tasks' names, and how many examples each corpus has."""

    def __init__(self) -> None:
        self.names = ["a", "b"]
        self.corpora: dict[str, int] = {}
        self.num_changing = 0
        self.is_broken = False
        self.adapters: list[str] = []
        """Those that tasks name."""


class Admin:
    """What SharedTasks asks of a TaskAdmin, over Files that it has read once."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.adapters = Adapters()
        self.names = list(files.names)
        self.corpora = dict(files.corpora)

    @property
    def tasks(self) -> Mapping[str, TaskConfig]:
        return {name: TaskConfig(name=name) for name in self.names}

    async def reload(self) -> Mapping[str, TaskConfig]:
        if self._files.is_broken or not {*self._files.adapters} <= {*self.adapters.served}:
            raise ConfigError("broken")
        self.names = list(self._files.names)
        return self.tasks

    async def upload(
        self, task: str, examples: Sequence[Mapping[str, Any]], *, append: bool
    ) -> Mapping[str, TaskConfig]:
        self._files.num_changing += 1
        assert self._files.num_changing == 1
        before = self._files.corpora.get(task, 0) if append else 0
        await asyncio.sleep(0.01)
        self._files.corpora[task] = self.corpora[task] = before + len(examples)
        self._files.num_changing -= 1
        return self.tasks

    async def delete(self, task: str) -> Mapping[str, TaskConfig]:
        self._files.corpora.pop(task, None)
        self.corpora.pop(task, None)
        return self.tasks

    async def refresh(self, task: str) -> Mapping[str, TaskConfig]:
        self.corpora = {**self.corpora, task: self._files.corpora.get(task, 0)}
        return self.tasks


class Desk:
    """A ChangeLog that can be lost. is_silent: calls wait meanwhile, and raise nothing. known:
    ingresses that have told it that they are there."""

    def __init__(self) -> None:
        self.log: ChangeLog | None = ChangeLog()
        self.is_silent = False
        self.known: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            while self.log is None:
                if not self.is_silent:
                    raise ConnectionError
                await asyncio.sleep(0.01)
            if name == "follow":
                self.known.add(args[0])
            return await getattr(self.log, name)(*args)

        return call


class Ingress:
    def __init__(self, name: str, files: Files, desk: Any) -> None:
        self.admin = cast("Any", Admin(files))
        self.shared = SharedTasks(self.admin, desk, name)
        self.told: list[set[str]] = []
        self.engines = Engines()
        self.catalog = Catalog({}, {"tiny": served("tiny", 64)}, self.admin.adapters.served)
        context: Any = SimpleNamespace(catalog=self.catalog, client=self.engines)
        self.routes = AdapterRoutes(context, self.shared)
        self.running = asyncio.create_task(
            self.shared.run(lambda t: self.told.append(set(t)), self.routes.follow)
        )


@contextlib.asynccontextmanager
async def _fleet(num: int = 3) -> AsyncIterator[tuple[Files, Desk, list[Ingress]]]:
    files, desk = Files(), Desk()
    ingresses = [Ingress(f"i{i}", files, desk) for i in range(num)]
    await until(lambda: len(desk.known) == num)
    yield files, desk, ingresses
    for ingress in ingresses:
        ingress.running.cancel()
    await asyncio.gather(*(i.running for i in ingresses), return_exceptions=True)


async def test_a_reload_is_everywhere_when_it_is_answered() -> None:
    async with _fleet() as (files, _, ingresses):
        files.names.append("c")
        assert set(await ingresses[1].shared.reload()) == {"a", "b", "c"}
        assert all(i.admin.names == ["a", "b", "c"] for i in ingresses)
        assert ingresses[0].told == [{"a", "b", "c"}] == ingresses[2].told
        files.is_broken = True
        with pytest.raises(ConfigError):
            await ingresses[2].shared.reload()
        assert len(ingresses[0].told) == 1


async def test_changes_at_every_ingress_happen_one_at_a_time() -> None:
    async with _fleet() as (files, _, ingresses):
        example: dict[str, Any] = {}
        await asyncio.gather(
            *(ingresses[i % 3].shared.upload("a", [example], append=True) for i in range(12)),
            ingresses[0].shared.upload("b", [example] * 2, append=False),
        )
        assert files.corpora == {"a": 12, "b": 2}
        await ingresses[0].shared.delete("b")
        assert all(i.admin.corpora.get("a") == 12 for i in ingresses)
        assert not any(i.admin.corpora.get("b") for i in ingresses)


async def test_two_changes_around_a_new_desk_reach_every_ingress() -> None:
    async with _fleet() as (files, desk, ingresses):
        built, own = asyncio.Event(), ingresses[0].admin.upload

        async def upload(*args: Any, **options: Any) -> Mapping[str, TaskConfig]:
            tasks = await own(*args, **options)
            await built.wait()
            return tasks

        ingresses[0].admin.upload = upload
        slow = asyncio.create_task(ingresses[0].shared.upload("a", [{}], append=True))
        await until(lambda: files.corpora == {"a": 1})
        desk.log = ChangeLog()
        await ingresses[1].shared.upload("b", [{}], append=True)
        built.set()
        await slow
        # A new desk waits for those alone that have asked it since; the others do a poll later.
        await until(lambda: [i.admin.corpora for i in ingresses] == [{"a": 1, "b": 1}] * 3)


@pytest.mark.parametrize("is_silent", [False, True])
async def test_without_the_desk_nothing_is_changed_and_a_new_one_knows_all(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _fleet() as (files, desk, ingresses):
        await ingresses[0].shared.upload("a", [{}], append=True)
        desk.log, desk.is_silent = None, is_silent
        monkeypatch.setattr(changes, "_ANSWER_S", 0.05)
        upload = ingresses[1].shared.upload("a", [{}], append=True)
        with pytest.raises(UnavailableError, match="desk does not"):
            await asyncio.wait_for(upload, 5.0)
        monkeypatch.undo()
        assert files.corpora == {"a": 1}
        desk.log = ChangeLog()
        assert desk.log.orders("tiny") is None  # nobody has told it yet what to forget
        ingresses.append(Ingress("late", files, desk))
        await ingresses[1].shared.upload("a", [{}], append=True)
        await until(lambda: all(i.admin.corpora.get("a") == 2 for i in ingresses), 10)


async def test_an_ingress_that_is_gone_is_not_waited_for_and_loses_its_turn() -> None:
    now_s = 0.0

    log = ChangeLog(lambda: now_s)
    for name in ("a", "b"):
        await log.follow(name, Changes(number=1))
    assert await log.begin("a") is not None and await log.begin("b") is None
    assert not await log.is_followed(2)
    now_s = 30.0
    assert await log.begin("b") == Changes(number=1)
    await log.follow("b", Changes(number=2))
    assert await log.is_followed(2) and not await log.is_followed(3)
    await log.follow("c", Changes(number=2))
    assert log.told.keys() == {"b", "c"}


async def test_an_adapter_that_is_loaded_at_one_ingress_is_served_by_all_and_by_late_ones() -> None:
    async with _fleet() as (files, desk, ingresses):
        load = LoadAdapterBody(lora_name="new", lora_path="folder")
        await ingresses[0].shared.reload()
        await ingresses[1].routes.load(load)
        assert all(set(i.catalog.adapters) == {"new"} for i in ingresses)
        assert all(set(i.admin.adapters.served) == {"new"} for i in ingresses)
        asked = [i.engines.num_calls > 0 for i in ingresses]
        assert asked == [False, True, False]  # the replicas are told once
        assert desk.log is not None
        assert [order.adapter_id for order in desk.log.orders("tiny") or ()] == ["new@1"]
        assert not desk.log.orders("another")
        with pytest.raises(InvalidRequestError, match="already been loaded"):
            await ingresses[0].routes.load(load)
        files.names.append("c")
        files.adapters.append("new")
        await ingresses[0].shared.reload()
        ingresses.append(late := Ingress("late", files, desk))
        late.admin.names.remove("c")  # the file came when it had read the others
        # It follows at once, the adapter before the task that names it, and then takes requests.
        await asyncio.wait_for(late.shared.has_followed.wait(), 0.8 * FOLLOW_S)
        assert late.told == [{"a", "b", "c"}]
        await late.routes.load(LoadAdapterBody(lora_name="more", lora_path="folder"))
        assert set(late.catalog.adapters) == {"new", "more"}
        await ingresses[2].routes.unload(UnloadAdapterBody(lora_name="new"))
        assert all(set(i.catalog.adapters) == {"more"} for i in ingresses)
        assert [order.adapter_id for order in desk.log.orders("tiny") or ()] == ["more@1"]


async def test_without_the_desk_no_adapter_is_loaded() -> None:
    async with _fleet() as (_, desk, ingresses):
        desk.log = None
        with pytest.raises(UnavailableError):
            await ingresses[0].routes.load(LoadAdapterBody(lora_name="a", lora_path="folder"))
        assert not ingresses[0].catalog.adapters and not ingresses[0].engines.num_calls


def test_states_of_adapters_are_merged_over_replicas() -> None:
    def told(*states: tuple[str, bool, str]) -> dict[str, Any]:
        return {
            "ok": True,
            "value": [{"id": i, "pending": pending, "problem": no} for i, pending, no in states],
        }

    answers = [
        told(("a", False, ""), ("b", False, "")),
        told(("b", True, "")),
        told(("a", False, "x")),
    ]
    assert merged(answers)["value"] == [
        {"id": "a", "pending": False, "problem": "x"},
        {"id": "b", "pending": True, "problem": ""},
    ]
    assert merged([])["value"] == {}  # all sleep: a table or a list with nothing in it


async def test_an_engine_that_starts_late_or_again_is_told_of_adapters_once() -> None:
    def unknown(request: Request) -> list[list[Delta]]:
        delta = Delta(request.request_id, 0, (), finish_reason="error")
        return [[delta._replace(error="it is not loaded", error_code="model_not_found")]]

    engine = ScriptedEngine(unknown, name="engine-0")
    replica = EngineReplica(EngineSpec("engine-0", "tiny", "cpu", engine.factory))
    await replica.start()
    # Who comes before it is told goes elsewhere, or waits at the ingress.
    request = Request("r", "task", "tiny", (1,), SamplingParams(), adapter="a@1")
    stream = replica.stream(channel.encode(("submit", request)), 0.0)
    assert [channel.decode(one) async for one in stream] == [(LOST, "engine-0", False)]
    told: list[tuple[str, Any]] = []

    async def control(name: str, payload: Any, timeout_s: float = 0.0, replica: str = "") -> Any:
        told.append((name, payload if isinstance(payload, str) else payload["adapter_id"]))
        return {"ok": True, "value": None}

    replica.control = control  # type: ignore[method-assign]
    orders = [AdapterOrder(f"{name}@1", "folder", 64) for name in "ab"]
    for _ in range(2):
        await replica.know(orders)
    assert told == [("adapter_register", "a@1"), ("adapter_register", "b@1")]
    replica.client.slots[0].generation += 1  # another life: it knows nothing
    await replica.know(orders[1:])
    assert told[2:] == [("adapter_register", "b@1")]
    await replica.know([])
    assert told[3:] == [("adapter_forget", "b@1")]
    await replica.stop()
