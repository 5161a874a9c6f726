"""Loading an adapter while engines die and start again: whoever serves its base knows it then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.api.admin import AdapterRoutes, LoadAdapterBody, UnloadAdapterBody
from server.api.engines.client import EngineClient
from server.api.served_model import Catalog, ServedModel
from server.config import AdapterConfig, TaskConfig
from server.errors import EngineError, InvalidRequestError, LoadingError, NoEngineError
from server.types import AdapterOrder
from server.wiring.task_set import TaskSet
from tests.api.live import served

BODY = LoadAdapterBody(lora_name="new", lora_path="folder")


@dataclass
class Engines:
    """Engines of one model as the routes see them: EngineClient's slots and control().

    events: {number of the call: what happens before it}.
    """

    slots: list[Any] = field(
        default_factory=lambda: [
            SimpleNamespace(
                spec=SimpleNamespace(name=name, model="tiny"), state="ready", generation=0
            )
            for name in ("e0", "e1")
        ]
    )
    known: dict[str, set[str]] = field(default_factory=lambda: {"e0": set(), "e1": set()})
    events: dict[int, Any] = field(default_factory=dict)
    problem: str = ""
    fails: str = ""  # the call that e1 does not do
    num_calls: int = 0
    of, ask, tell = EngineClient.of, EngineClient.ask, EngineClient.tell

    def restart(self, index: int) -> None:
        """It died and is back, and knows what it was told at its start: nothing."""
        self.slots[index].generation += 1
        self.known[f"e{index}"].clear()

    async def control(self, engine: str, name: str, payload: Any, timeout_s: float = 0.0) -> Any:
        await asyncio.sleep(0)
        self.num_calls += 1
        event = self.events.pop(self.num_calls, None)
        if event is not None:
            event()
        slot = next(slot for slot in self.slots if slot.spec.name == engine)
        if slot.state != "ready":
            raise NoEngineError("gone")
        if name == self.fails and engine == "e1":
            if name != "adapter_states":
                raise EngineError("e1 does not answer")
            return {"ok": False, "error": "e1 cannot tell"}
        if name == "adapter_register":
            self.known[engine].add(payload["adapter_id"])
        elif name == "adapter_forget":
            self.known[engine].discard(payload)
        else:
            problem = self.problem if engine == "e1" else ""
            states = [
                {"id": i, "pending": False, "problem": problem} for i in sorted(self.known[engine])
            ]
            return {"ok": True, "value": states}
        return {"ok": True, "value": None}


@dataclass
class Adapters:
    """An AdapterAdmin that has what it has read."""

    served: dict[str, ServedModel] = field(default_factory=dict)

    def read(self, config: AdapterConfig, model: str | None = None) -> ServedModel:
        return replace(
            served(model or "tiny", 64), adapter=AdapterOrder(f"{config.name}@1", config.path, 64)
        )

    def add(self, model: ServedModel) -> ServedModel | None:
        self.served[model.key] = model
        return None

    def remove(self, name: str) -> None:
        self.served.pop(name, None)


def routes(engines: Engines) -> tuple[AdapterRoutes, Adapters]:
    return beside_tasks(engines, dict)[:2]


def beside_tasks(
    engines: Engines, load: Callable[[], Mapping[str, TaskConfig]]
) -> tuple[AdapterRoutes, Adapters, Callable[[], Awaitable[None]]]:
    """The routes, their adapters, and what reloads the tasks. load: reads these, of which there are
    none at first."""
    admin = Adapters()
    catalog = Catalog({}, {"tiny": served(), "second": served("second")}, admin.served)
    context: Any = SimpleNamespace(catalog=catalog, client=engines)
    models = {name: (Path(name), "00") for name in catalog.models}
    tasks = TaskSet({}, load=load, models=models, kept=Path("nowhere"), adapters=admin)

    async def reload() -> None:
        catalog.replace_tasks(await tasks.reload())

    return AdapterRoutes(context, tasks), admin, reload


# Between its order and its answer; when e0 had read it, and e1 is being asked.
@pytest.mark.parametrize("call", [2, 4])
def test_an_engine_that_started_again_meanwhile_is_told_again(call: int) -> None:
    engines = Engines()
    engines.events[call] = lambda: engines.restart(0)
    made, admin = routes(engines)
    asyncio.run(made.load(BODY))
    assert engines.known == {"e0": {"new@1"}, "e1": {"new@1"}}
    assert set(admin.served) == {"new"}


@pytest.mark.parametrize("call", [3, 4])
def test_while_an_engine_is_away_nothing_is_loaded_and_no_engine_knows_it(call: int) -> None:
    engines = Engines()

    def die() -> None:
        engines.slots[0].state = "restarting"
        engines.slots[0].generation += 1
        engines.known["e0"].clear()

    engines.events[call] = die
    made, admin = routes(engines)
    with pytest.raises(LoadingError):
        asyncio.run(made.load(BODY))
    assert not engines.known["e1"] and not admin.served


def test_what_is_served_stays_where_it_cannot_be_loaded_again() -> None:
    engines = Engines()
    made, admin = routes(engines)
    asyncio.run(made.load(BODY))
    engines.slots[1].state = "restarting"
    with pytest.raises(LoadingError):
        asyncio.run(made.load(BODY.model_copy(update={"load_inplace": True})))
    assert engines.known["e0"] == {"new@1"} and set(admin.served) == {"new"}


def test_what_one_engine_refuses_no_engine_keeps() -> None:
    engines = Engines(problem="its rank is odd")
    made, admin = routes(engines)
    with pytest.raises(InvalidRequestError, match="rank is odd"):
        asyncio.run(made.load(BODY))
    assert engines.known == {"e0": set(), "e1": set()} and not admin.served


@pytest.mark.parametrize("call", ["adapter_register", "adapter_states"])
def test_where_one_engine_does_not_answer_no_engine_keeps_it(call: str) -> None:
    engines = Engines(fails=call)
    made, admin = routes(engines)
    with pytest.raises(EngineError, match="e1"):
        asyncio.run(made.load(BODY))
    assert engines.known == {"e0": set(), "e1": set()} and not admin.served


def test_an_adapter_that_one_engine_does_not_forget_is_forgotten_by_the_others() -> None:
    engines = Engines(fails="adapter_forget")
    made, admin = routes(engines)
    engines.slots.reverse()
    asyncio.run(made.load(BODY))
    with pytest.raises(EngineError, match="did not forget the adapter"):
        asyncio.run(made.unload(UnloadAdapterBody(lora_name="new")))
    assert engines.known == {"e0": set(), "e1": {"new@1"}} and not admin.served


@pytest.mark.parametrize("answer", [None, {"ok": False, "is_lost": True, "error": "e0 is lost"}])
async def test_an_engine_that_does_not_answer_is_an_error_of_the_engine_s(answer: Any) -> None:
    calls: dict[int, Any] = {}

    def send(message: Any) -> None:
        if answer is not None:
            calls[message[1]][1].set_result(answer)

    slot = SimpleNamespace(spec=SimpleNamespace(name="e0"), state="ready", send=send)
    client: Any = SimpleNamespace(slots=[slot], _next_call=0, _calls=calls)
    with pytest.raises(EngineError, match=r"e0 (is lost|does not answer)"):
        await EngineClient.control(client, "e0", "figures", None, 0.01)


def test_a_base_that_there_is_not_is_named() -> None:
    made, admin = routes(Engines())
    body = BODY.model_copy(update={"base_model_name": "other"})
    with pytest.raises(InvalidRequestError, match=r"base_model_name: there is no such model"):
        asyncio.run(made.load(body))
    assert not admin.served


def test_a_task_s_adapter_stays_while_the_tasks_are_read_and_beside_its_model() -> None:
    begun, go = threading.Event(), threading.Event()

    def load() -> Mapping[str, TaskConfig]:
        begun.set()  # here its adapter was seen to be served
        go.wait()
        return {"task": TaskConfig(name="task", adapter="new")}

    made, admin, reload = beside_tasks(Engines(), load)

    async def change() -> None:
        await made.load(BODY)
        reloading = asyncio.ensure_future(reload())
        await asyncio.to_thread(begun.wait)
        unloading = asyncio.create_task(made.unload(UnloadAdapterBody(lora_name="new")))
        await asyncio.sleep(0.05)
        go.set()
        await reloading
        with pytest.raises(InvalidRequestError, match="used by the task 'task'"):
            await unloading
        moved = BODY.model_copy(update={"load_inplace": True, "base_model_name": "second"})
        with pytest.raises(InvalidRequestError, match="used by the task 'task'"):
            await made.load(moved)
        await made.load(BODY.model_copy(update={"load_inplace": True}))

    asyncio.run(change())
    assert admin.served["new"].name == "tiny"
