"""What one replica learned is drafted on another, in its scope, and changes no text."""

from __future__ import annotations

import errno
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from server.config.cluster import LearningConfig
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.engine.task_store import Arrival, TaskStore
from server.errors import UnavailableError
from server.fleet.changes import ChangeLog, SharedTasks
from server.fleet.learning.builder import Builder, BuilderLoop, Sharing
from server.fleet.learning.exchange import SegmentExchange, decoded
from server.fleet.learning.storage import (
    MANIFEST,
    Storage,
    StorageError,
    forget,
    read_manifest,
    scope_folder,
)
from server.types import SpeculationParams
from server.wiring.drafter import make_task_drafter
from tests.engine.requests import finish, ids_of, request_of, settled
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info
from tests.fleet.test_changes import Admin, Desk, Files
from tests.waiting import wait_until

VOCAB = 64
MODEL = FakeModel(VOCAB, seed=11, context=1, boost=9.0)
LEARN = SpeculationParams("auto", 5, (("auto.logits", 0),), learn_tokens=1000, persists=True)
PROMPT = [7, 9, 4, 7, 9, 12]
INFO = fake_info(
    vocab_size=VOCAB, num_blocks=512, block_size=4, max_model_len=64,
    max_num_seqs=8, max_num_batched_tokens=200,
)  # fmt: skip
SETTINGS = EngineSettings(max_num_seqs=8, max_num_batched_tokens=200)
EVERY_STORAGE = pytest.mark.parametrize("fleet", ["folder", "memory", "s3"], indirect=True)
"""Of tests that together do all that Storage can."""


def _config(**numbers: Any) -> LearningConfig:
    """Also of numbers that no file may have."""
    return LearningConfig().model_copy(update=numbers)


class Patient(SegmentExchange):
    """It has no thread: nothing is done but by `tend`."""

    def start(self, on_arrival: Callable[[Arrival], None]) -> None:
        self._on_arrival = on_arrival


@dataclass
class Replica:
    """An engine with its exchange, which does nothing by itself."""

    engine: Engine
    exchange: SegmentExchange
    memory: TaskStore

    def ask(self, prompt: list[int] = PROMPT, **fields: Any) -> tuple[list[int], int]:
        """(ids, drafted tokens that were accepted)."""
        asked = request_of(
            uuid.uuid4().hex, prompt, **{"max_tokens": 12, "speculation": LEARN, **fields}
        )
        [told] = finish(self.engine, asked).values()
        assert told[-1].finish_reason == "length"
        return ids_of(told), sum(d.counts.num_accepted for d in told)

    def learn(self, prompt: list[int] = PROMPT, **fields: Any) -> None:
        """Answer, and send what was learned of it."""
        self.ask(prompt, **fields)
        self.tend()

    def want(self, scope: str = "\0", tokens: int = 1000) -> None:
        """Fetch what there is of a scope, as its first request would."""
        self.memory.learned("task", scope, None, tokens, persist=True)
        self.tend()

    @property
    def num_learned(self) -> int:
        """Tokens that it holds."""
        return int(self.memory.report("task", None)()["num_learned_tokens"])

    def tend(self) -> None:
        """All that is due in its threads."""
        settled(self.memory)
        self.exchange.tend()
        settled(self.memory)
        self.engine.tend()


@dataclass
class Fleet:
    """Replicas of one model, and a storage."""

    url: str
    folder: Path
    replicas: list[Replica]

    @property
    def storage(self) -> Storage:
        return Storage(self.url)

    def add(self, storage: Storage | None = None, max_scopes: int = 64, **numbers: Any) -> Replica:
        own = self.folder / f"engine-{len(self.replicas)}"
        config = _config(append_s=0.0, look_s=0.0, **numbers)
        exchange = Patient(storage or self.storage, "fake", config)
        memory = TaskStore(
            own, fingerprint="f", build_share=1e9, save_every_s=0.0, max_scopes=max_scopes,
            exchange=exchange,
        )  # fmt: skip
        drafters = {
            name: partial(make_task_drafter, name, "f", INFO.eos_token_ids, memory=memory)
            for name in ("auto", "mix")
        }
        engine = Engine(FakeRunner(MODEL, INFO), drafters, SETTINGS, memory=memory)
        self.replicas.append(Replica(engine, exchange, memory))
        return self.replicas[-1]

    def tend(self) -> None:
        """All that is due at every replica."""
        for replica in self.replicas:
            replica.tend()

    def num_fetched(self, tokens: int = 1000) -> int:
        """Tokens that a new replica finds there."""
        new = self.add()
        new.want(tokens=tokens)
        return new.num_learned

    def build(self, **numbers: Any) -> Any:
        return Builder(self.storage, _config(**numbers)).run()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of an S3 server in this process: `pip install s3fs 'moto[server]'`, which no extra
    brings."""
    pytest.importorskip("s3fs", reason="s3fs and moto are not installed")
    moto = pytest.importorskip("moto.server", reason="s3fs and moto are not installed")
    import fsspec

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    told = {"endpoint_url": f"http://{host}:{port}", "key": "key", "secret": "secret"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", told)
        fsspec.filesystem("s3").mkdir("tailor")
        yield "s3://tailor"
    server.stop()


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """With a folder for its storage, or what EVERY_STORAGE asks for."""
    pytest.importorskip("fsspec", reason="fsspec is not installed: the extra `ray`")
    kind, url = getattr(request, "param", "folder"), str(tmp_path / "shared")
    if kind == "memory":
        url = f"memory://{uuid.uuid4().hex}"
    elif kind == "s3":
        url = f"{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}"
    fleet = Fleet(url, tmp_path, [])
    yield fleet
    for replica in fleet.replicas:
        replica.engine.close()


@EVERY_STORAGE
def test_what_one_answered_is_drafted_on_the_other(fleet: Fleet) -> None:
    first, second, alone = fleet.add(), fleet.add(), fleet.add()
    plain, _ = alone.ask(speculation=SpeculationParams())
    ids, _ = first.ask()
    first.tend()
    report = fleet.build()
    assert (report.num_published, report.num_merged, report.num_torn) == (1, 1, 0)
    second.want()
    told, accepted = second.ask()
    cold, few = alone.ask()
    assert told == cold == ids == plain
    assert accepted > few + 3
    [figures] = second.memory.shared()
    assert (figures.task, figures.num_merged, figures.version) == ("task", 1, 1)
    assert figures.published_s > 1e9
    assert first.memory.shared()[0].num_written == 1


@EVERY_STORAGE
def test_both_ways_and_after_a_restart(fleet: Fleet) -> None:
    first, second = fleet.add(), fleet.add()
    prompts = [[i, i + 1, 5, 7] for i in range(8, 16)]
    for i, prompt in enumerate(prompts):
        (first, second)[i % 2].ask(prompt)
    fleet.tend()
    assert fleet.build().num_merged == 2
    for replica in (first, second):
        replica.tend()
        assert replica.num_learned == 12 * len(prompts)
    for _ in range(3):  # counts of drafts come after the outputs
        fleet.tend()
        fleet.build()
    fleet.tend()  # what a replica has from others is not sent once more
    assert fleet.build().num_merged == 0
    third = fleet.add()
    for prompt in (prompts[0], [50, 51, 5, 7]):  # the first is known from the others
        third.ask(prompt)
    third.tend()
    third.tend()
    assert third.num_learned == 12 * (len(prompts) + 1)


def test_what_may_not_be_kept_does_not_travel(fleet: Fleet) -> None:
    for speculation in (replace(LEARN, learn_tokens=0), replace(LEARN, persists=False)):
        first = fleet.add()
        first.learn(speculation=speculation)
        fleet.build()
    assert fleet.storage.files() == []
    assert not any(replica.exchange.figures() for replica in fleet.replicas)


def test_scopes_share_nothing(fleet: Fleet) -> None:
    first, second = fleet.add(), fleet.add()
    first.ask(tenant="a")
    first.learn(tenant="a", cache_salt="s")
    assert fleet.build().num_published == 2
    for tenant, salt in (("b", ""), ("", ""), ("b", "s"), ("a", "t")):
        second.memory.learned("task", f"{tenant}\0{salt}", None, 1000, persist=True)
    second.tend()
    assert second.num_learned == 0
    second.want("a\0")
    assert second.num_learned == 12
    # A file that is put where another scope's lies is refused by what it says of itself.
    storage = fleet.storage
    states = {f.split("/")[3]: f for f in storage.files() if "state-" in f}
    one, other = states.values()
    storage.write(other, storage.read(one, most=1 << 20))
    third = fleet.add()
    for salt in ("", "s"):
        third.memory.learned("task", f"a\0{salt}", None, 1000, persist=True)
    third.tend()
    assert third.num_learned <= 12


def test_counts_travel_but_not_those_of_a_salt(fleet: Fleet) -> None:
    first, second = fleet.add(), fleet.add()
    for salt in ("", "s"):
        for _ in range(4):
            first.learn(cache_salt=salt)
    for _ in range(3):
        first.tend()
    fleet.build()
    for salt in ("", "s"):
        second.ask(cache_salt=salt)
    second.tend()

    def evidence(server: Replica, salt: str) -> float:
        asked = replace(LEARN, scope="\0" + salt)
        drafter: Any = server.engine.drafters.resolve("task", asked)
        return float(drafter.trust.counts()["evidence"].sum())

    assert evidence(second, "") > 0.5 * evidence(first, "")
    assert evidence(second, "s") < 0.5 * evidence(first, "s")


def test_a_writer_whose_clock_is_ahead_keeps_nobody_out(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, second = fleet.add(), fleet.add()
    small = replace(LEARN, learn_tokens=30)  # two answers
    with monkeypatch.context() as patch:
        tomorrow_ns = time.time_ns() + 86_400_000_000_000
        patch.setattr(time, "time_ns", lambda: tomorrow_ns)
        for i in range(4):
            ahead.learn([i, 9], speculation=small)
    fleet.build()
    second.learn([20, 21], speculation=small)
    fleet.build()
    [state] = [f for f in fleet.storage.files() if "/state-" in f]
    file = decoded(fleet.storage.read(state, most=1 << 20), None, state.split("/")[3])
    assert file.outputs.oldest_first()[-1][0].tolist() == [20, 21]


def test_a_torn_segment_is_left_out(fleet: Fleet) -> None:
    first, second = fleet.add(), fleet.add()
    first.learn()
    second.learn([3, 4, 5])
    [torn, _] = segments = [f for f in fleet.storage.files() if "/segments/" in f]
    data = fleet.storage.read(torn, most=1 << 20)
    fleet.storage.write(torn, data[: len(data) // 2])
    report = fleet.build()
    assert (report.num_merged, report.num_torn) == (1, 1)
    assert not any(f in fleet.storage.files() for f in segments)
    third = fleet.add()
    third.learn([6, 7, 8])
    assert third.num_learned == 24


@pytest.mark.parametrize("part", [MANIFEST, "state-"])
def test_torn_publications_are_left_out_and_replaced(fleet: Fleet, part: str) -> None:
    first, second = fleet.add(), fleet.add()
    ids, _ = first.ask()
    first.tend()
    fleet.build()
    [file] = [f for f in fleet.storage.files() if f"/{part}" in f]
    fleet.storage.write(file, fleet.storage.read(file, most=1 << 24)[:40])
    second.want()
    assert second.ask()[0] == ids
    second.tend()
    assert fleet.build().num_published == 1
    third = fleet.add()
    third.want()
    assert third.num_learned >= 12
    assert third.ask()[0] == ids


class BrokenStorage(Storage):
    """One whose writes fail while it is away."""

    is_away = True

    def write(self, path: str, data: bytes) -> None:
        if self.is_away:
            raise StorageError("OSError: the bucket is gone")
        super().write(path, data)


def test_a_storage_that_is_away_is_told_once_and_costs_nothing(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    storage = BrokenStorage(fleet.url)
    first = fleet.add(storage)
    with caplog.at_level(logging.INFO, "tailor.fleet"):
        for i in range(5):
            first.learn([i, 5, 6])
    assert len([r for r in caplog.records if "does not travel" in r.message]) == 1
    assert first.ask([1, 5, 6])[1] > 8  # it drafts from what it has learned itself
    storage.is_away = False
    first.tend()
    assert fleet.build().num_merged == 1
    assert fleet.num_fetched() == 60, "one came twice"


def test_what_cannot_be_packed_is_kept_and_holds_no_other_scope_up(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fleet.add()

    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("server.fleet.learning.exchange.encoded", full)
        first.learn()

    def folder_of(model: str, key: tuple[str, str], epoch: int) -> str:
        if key[1].startswith("odd"):
            raise ValueError("odd")
        return scope_folder(model, key, epoch)

    monkeypatch.setattr("server.fleet.learning.exchange.scope_folder", folder_of)
    for tenant in ("odd", ""):
        first.learn([1, 5, 6], tenant=tenant)
    assert fleet.build().num_published == 1
    assert fleet.num_fetched() == 24


class LostBuilder(Exception):
    pass


class DyingStorage(Storage):
    """Ends its builder before the n-th time that it writes or deletes."""

    def __init__(self, url: str, left: int) -> None:
        super().__init__(url)
        self.left = left

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise LostBuilder

    def write(self, path: str, data: bytes) -> None:
        self._step()
        super().write(path, data)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        self._step()
        super().delete(path, recursive=recursive)


def test_a_builder_that_is_lost_anywhere_is_begun_again(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed: the extra `ray`")
    ended = []
    for left in range(20):
        fleet = Fleet(f"memory://{uuid.uuid4().hex}", tmp_path / str(left), [])
        first = fleet.add()
        for prompts in ([[1, 2, 3], [4, 5, 6]], [[7, 8, 9]]):
            for prompt in prompts:
                first.learn(prompt)
            try:
                Builder(DyingStorage(fleet.url, left), _config()).run()
                ended.append(left)
            except LostBuilder:
                pass
        fleet.build()
        fleet.build()
        files = [f.rpartition("/")[2] for f in fleet.storage.files()]
        assert sorted(f.partition("-")[0] for f in files) == [MANIFEST, "state"]
        assert fleet.num_fetched() == 36  # nothing twice
        for replica in fleet.replicas:
            replica.engine.close()
        if ended.count(left) == 2:
            break
    assert left > 3 and ended


@EVERY_STORAGE
def test_forgetting_reaches_the_storage_and_every_replica(fleet: Fleet) -> None:
    first, second = fleet.add(), fleet.add()
    for replica in (first, second):
        replica.learn()
    fleet.build()
    fleet.tend()
    first.engine.controls["task_forget"]({"task": "task"})  # the second one is not reached
    settled(first.memory)
    forget(fleet.storage, "task")
    assert [f.rpartition("/")[2] for f in fleet.storage.files()] == ["began"]
    second.learn([20, 21])
    second.tend()
    assert second.num_learned == 0
    second.learn([20, 21])
    fleet.build()
    first.want()
    assert first.num_learned == 12


def test_a_scope_that_was_put_away_goes_on(fleet: Fleet) -> None:
    first = fleet.add(max_scopes=1)
    for i in range(3):
        first.learn([i, 9])
        assert fleet.build().num_merged == 1
        first.exchange.forget("task")  # as when there are too many scopes there
        first.memory.learned("other", "\0", None, 1000, persist=True)  # and here
        settled(first.memory)
    assert fleet.num_fetched() == 36


async def test_a_deleted_corpus_is_deleted_there_first(fleet: Fleet) -> None:
    """An ingress answers once it is forgotten, or says that it is not."""

    def away(task: str) -> None:
        raise UnavailableError("The storage is away.")

    sharing = Sharing(fleet.url, LearningConfig())
    first = fleet.add()
    first.learn()
    fleet.build()
    assert any("state-" in f for f in fleet.storage.files())
    files, desk = Files(), cast("ChangeLog", Desk())
    files.corpora["task"] = 5
    shared = SharedTasks(cast("Any", Admin(files)), desk, "i", sharing.forget)
    await shared.delete("task")
    assert not files.corpora and not any("state-" in f for f in fleet.storage.files())
    files.corpora["task"] = 5
    shared = SharedTasks(cast("Any", Admin(files)), desk, "i", away)
    with pytest.raises(UnavailableError):
        await shared.delete("task")
    assert files.corpora == {"task": 5}


def test_a_builder_publishes_by_itself(fleet: Fleet) -> None:
    first = fleet.add()
    first.learn()
    loop = BuilderLoop(Sharing(fleet.url, LearningConfig(publish_s=0.01)))
    wait_until(lambda: any(f.endswith(MANIFEST) for f in fleet.storage.files()))
    assert "builder" in {thread.name for thread in threading.enumerate()}
    loop.stop()
    assert "builder" not in {thread.name for thread in threading.enumerate()}


def test_what_is_kept_is_bounded(fleet: Fleet) -> None:
    first = fleet.add(max_segments=3)
    for i in range(8):  # no builder
        first.learn([i, 9])
    assert len(fleet.storage.files()) == 3
    small = replace(LEARN, learn_tokens=30)
    for i in range(8):
        first.learn([i, 9], speculation=small)
        fleet.build()
    [file] = [f for f in fleet.storage.files() if f.endswith(MANIFEST)]
    manifest = read_manifest(fleet.storage, file.removesuffix(f"/{MANIFEST}"))
    assert manifest is not None and manifest.version == 8
    assert fleet.num_fetched(tokens=30) <= 30
    for salt in "abcd":
        first.learn([1, 2], cache_salt=salt)
    fleet.build(max_scopes=2)
    assert len({f.split("/")[3] for f in fleet.storage.files()}) == 2
    fleet.build(max_age_days=-1.0)
    assert fleet.storage.files() == []
