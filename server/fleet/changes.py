"""Changes of tasks reach every ingress: the others follow the one that an admin route called.

Task files and uploaded corpora lie where every ingress can read them. So a change is made once, on
those files, by the ingress that was asked; the others are told which files to look at again, by a
number that only grows. The admin route answers when every ingress has followed.
An adapter that is loaded or unloaded is followed likewise: the ingress that was asked tells all
replicas, and those that start later are told by the desk.

One ingress changes something at a time. The desk keeps no more than that turn and the latest
Changes, which every ingress has too: a new desk takes the latest that it is told. This module does
not import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from server.api.admin import AdapterAdmin, AdapterChange, Publish, TaskAdmin
from server.api.shapes import CorpusSize
from server.config import TaskConfig
from server.errors import ConfigError, ModelError, UnavailableError
from server.types import AdapterOrder

log = logging.getLogger("tailor.fleet")

OnAdapter = Callable[[str, AdapterChange | None], Awaitable[None]]

FOLLOW_S = 1.0
"""How long the desk lets an ingress wait for a change before it answers that there was none."""
_GONE_S = 5.0  # an ingress that has not asked for so long is not waited for, and has no turn
_AGAIN_S = 0.05
_FOLLOWED_S = 10.0
_TURN_S = 120.0
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Changes:
    """What was changed since the files were first read.

    number: ascending, of all changes. last: of everything that was changed, the number of its last
    change. It is ("tasks", "") for all task files, ("corpus", a task), or ("adapter", a name) with
    what is served now, None for nothing.
    """

    number: int = 0
    last: Mapping[tuple[str, str], tuple[int, AdapterChange | None]] = field(default_factory=dict)

    def orders(self, model: str) -> tuple[AdapterOrder, ...]:
        """What the model's engines must know of those that were loaded."""
        changes = [change for _, change in self.last.values()]
        return tuple(c.order for c in changes if c is not None and c.model == model)


class ChangeLog:
    """The desk's side. Belongs to one event loop. Where it is elsewhere, what SharedTasks calls may
    raise anything while the desk is away."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest = Changes()
        self.told: dict[str, tuple[int, float]] = {}  # number that an ingress has, when it asked
        self._turn: str | None = None
        self._news = asyncio.Event()

    def orders(self, model: str) -> tuple[AdapterOrder, ...] | None:
        """Changes.orders of the latest; None while no ingress has told a new desk of any."""
        return self._latest.orders(model) if self._latest.number else None

    async def follow(self, ingress_id: str, changes: Changes) -> Changes:
        """The latest Changes, as soon as they are newer than the ingress's own, or after FOLLOW_S;
        at once for one that is new here.

        Those that are newer than the desk's become its own.
        """
        is_new = ingress_id not in self.told
        if is_new:  # each that is replaced or started again has another id
            self.told = {name: told for name, told in self.told.items() if self._is_there(name)}
        self.told[ingress_id] = (changes.number, self._clock())
        if changes.number > self._latest.number:
            self._latest = changes
            self._news.set()
            self._news = asyncio.Event()
        if changes.number == self._latest.number and not is_new:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_S):
                    await self._news.wait()
        return self._latest

    async def begin(self, ingress_id: str) -> Changes | None:
        """The ingress's turn to change something: the Changes that it must have followed before.
        None while it is another one's turn."""
        if self._turn is not None and self._turn != ingress_id and self._is_there(self._turn):
            return None
        self._turn = ingress_id
        return self._latest

    async def end(self, ingress_id: str) -> None:
        """Its turn is over."""
        if self._turn == ingress_id:
            self._turn = None

    async def is_followed(self, number: int) -> bool:
        """Whether every ingress that is there has this number's Changes."""
        return number <= self._latest.number and all(
            has >= number for name, (has, _) in self.told.items() if self._is_there(name)
        )

    def _is_there(self, ingress_id: str) -> bool:
        return self._clock() - self.told.get(ingress_id, (0, -1e9))[1] < _GONE_S + FOLLOW_S


class FollowedAdmin(TaskAdmin, Protocol):
    """A TaskAdmin whose files other processes change, too (server.wiring.task_set.TaskSet)."""

    async def refresh(self, task: str) -> Mapping[str, TaskConfig]: ...


class SharedTasks:
    """The ingress's side: a TaskAdmin whose changes the other ingresses follow.

        shared = SharedTasks(task_set, desk, "ingress-1")
        app = create_app(..., task_admin=shared)
        await shared.run(app.state.follow_tasks)       # until cancelled

    forget: drops what replicas have learned of a task where all of them find it.

    Raises UnavailableError where the desk is away: then nothing was changed.
    """

    def __init__(
        self,
        own: FollowedAdmin,
        desk: ChangeLog,
        ingress_id: str,
        forget: Callable[[str], None] | None = None,
    ) -> None:
        self._own = own
        self.adapters: AdapterAdmin | None = own.adapters
        self._forget = forget
        self._desk = desk
        self._id = ingress_id
        self._changes = Changes()
        self.has_followed = asyncio.Event()
        """Set once it knows what was changed before it came."""
        self._mine = asyncio.Lock()
        self._following = asyncio.Lock()
        self._on_tasks: Callable[[Mapping[str, TaskConfig]], None] | None = None
        self._on_adapter: OnAdapter | None = None

    # -- TaskAdmin ---------------------------------------------------------------------------

    @property
    def tasks(self) -> Mapping[str, TaskConfig]:
        return self._own.tasks

    def corpus_size(self, task: str) -> CorpusSize | None:
        return self._own.corpus_size(task)

    def profile_summary(self, task: str) -> dict[str, Any] | None:
        return self._own.profile_summary(task)

    async def reload(self) -> Mapping[str, TaskConfig]:
        async with self._turn():
            tasks = await self._own.reload()
            await self._publish("tasks")
        return tasks

    async def upload(
        self, task: str, examples: Sequence[Mapping[str, Any]], *, append: bool
    ) -> Mapping[str, TaskConfig]:
        async with self._turn():
            tasks = await self._own.upload(task, examples, append=append)
            await self._publish("corpus", task)
        return tasks

    async def delete(self, task: str) -> Mapping[str, TaskConfig]:
        async with self._turn():
            if self._forget is not None:
                await asyncio.to_thread(self._forget, task)
            tasks = await self._own.delete(task)
            await self._publish("corpus", task)
        return tasks

    @contextlib.asynccontextmanager
    async def adapter_turn(self) -> AsyncIterator[Publish]:
        async with self._turn():
            yield partial(self._publish, "adapter")

    # -- the fleet ---------------------------------------------------------------------------

    async def run(
        self,
        on_tasks: Callable[[Mapping[str, TaskConfig]], None],
        on_adapter: OnAdapter | None = None,
    ) -> None:
        """Follow what others change. on_tasks: told the tasks then. on_adapter: AdapterRoutes'
        follow."""
        self._on_tasks, self._on_adapter = on_tasks, on_adapter
        while True:
            try:
                latest = await self._desk.follow(self._id, self._changes)
                await self._follow(latest)
                self.has_followed.set()
            except Exception as error:
                log.warning("changes of tasks cannot be followed: %s", type(error).__name__)
                await asyncio.sleep(FOLLOW_S)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        async with self._mine:
            wait = asyncio.timeout(_TURN_S)
            try:
                async with wait:
                    before = await self._begin()
            except Exception:
                await self._end()  # it may have been given when nobody waited for it any more
                problem = "The fleet's desk does not answer"
                if wait.expired():
                    problem = "Another ingress changes the tasks"
                raise UnavailableError(f"{problem}. Try again later.", retry_after_s=5.0) from None
            try:
                await self._follow(before)
                yield
            finally:
                await self._end()

    async def _end(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_ANSWER_S):
                await self._desk.end(self._id)

    async def _begin(self) -> Changes:
        """ChangeLog.begin once it is its turn, of a desk that answers: a call waits for one that
        is away."""
        while True:
            async with asyncio.timeout(_ANSWER_S):
                before = await self._desk.begin(self._id)
            if before is not None:
                return before
            await asyncio.sleep(_AGAIN_S)

    async def _follow(self, latest: Changes) -> None:
        """Look again at the files that others have changed."""
        async with self._following:
            before = self._changes
            if latest.number <= before.number:
                return
            # In their order: a task may name an adapter that was loaded before it came.
            for (kind, name), (number, adapter) in sorted(
                latest.last.items(), key=lambda change: change[1][0]
            ):
                try:
                    if number <= before.number:
                        continue
                    if kind == "tasks":
                        await self._own.reload()
                    elif kind == "corpus":
                        await self._own.refresh(name)
                    elif self._on_adapter is not None:
                        await self._on_adapter(name, adapter)
                except (ConfigError, ModelError) as error:
                    log.error("%s cannot be read as another ingress did: %s", kind, error.message)
            self._changes = latest
            if self._on_tasks is not None:
                self._on_tasks(self._own.tasks)

    async def _publish(
        self, kind: str, name: str = "", adapter: AdapterChange | None = None
    ) -> None:
        """Tell the others, and wait until they have followed."""
        try:
            async with asyncio.timeout(_FOLLOWED_S):
                try:  # a desk that is new may have given another ingress the turn meanwhile
                    await self._follow(await self._begin())
                finally:
                    number, last = self._changes.number + 1, self._changes.last
                    changes = Changes(number, {**last, (kind, name): (number, adapter)})
                    self._changes = changes
                telling = asyncio.create_task(self._desk.follow(self._id, changes))
                await asyncio.sleep(0)
                while not await self._desk.is_followed(changes.number):
                    await asyncio.sleep(_AGAIN_S)
                telling.cancel()
        except Exception:
            log.warning("not every ingress has followed change %d", self._changes.number)
