"""SegmentExchange: an engine's side of what travels (server.engine.task_store.Exchange).

Finished outputs and counts of drafts are gathered per (task, scope) and written as a segment when
there are enough or the first has waited long enough. Every so often it looks whether a new version
was published, and hands that on. All of it in a thread of its own: while the storage is away, that
is told once, what fits is kept, and the engine goes on with what it has.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import tempfile
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from drafters.array_file import ArrayFileError
from drafters.shared_counts import Counts, PackedCounts, TableId, added, pack, unpack
from drafters.shared_outputs import SharedFile, load_shared, save_shared, segment_of
from server.config.cluster import LearningConfig
from server.engine.calibrations import digest
from server.engine.task_store import Arrival, Example, Key, Wanted
from server.fleet.learning.storage import (
    Manifest,
    SegmentName,
    Storage,
    TornError,
    epoch_of,
    hash_of,
    read_hashed,
    read_manifest,
    scope_folder,
    task_folder,
)
from server.types import SharedFigures

log = logging.getLogger("tailor.fleet")

_MAX_SCOPES = 256
_TICK_S = 0.25
_CLOSE_S = 20.0


@dataclass(slots=True)
class _Sent:
    """A segment that is in no version that has arrived."""

    number: int
    path: str
    examples: list[Example]
    counts: dict[TableId, PackedCounts]


@dataclass(slots=True)
class _Scope:
    """Of one key, while it is in memory. buffer, counts: not written yet. since_s: when the first
    of them came."""

    wanted: Wanted
    writer: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    buffer: list[Example] = field(default_factory=list)
    counts: dict[TableId, Counts] = field(default_factory=dict)
    num_tokens: int = 0
    since_s: float = 0.0
    sent: deque[_Sent] = field(default_factory=deque)
    last_number: int = 0
    looked_s: float = float("-inf")
    epoch: int | None = None  # as it was seen last
    adopted: tuple[int, int] | None = None  # version, and when it was published
    manifest: Manifest | None = None  # of what has arrived

    @property
    def waits(self) -> bool:
        """Whether there is something to be written."""
        return bool(self.buffer or self.counts)

    def comes(self) -> None:
        """Something to be written is coming."""
        if not self.waits:
            self.since_s = time.monotonic()

    def drop(self) -> None:
        """All that is in no version."""
        self.buffer, self.counts, self.num_tokens = [], {}, 0
        self.sent.clear()


class SegmentExchange:
    """model: what the engines have in common that learn together."""

    def __init__(self, storage: Storage, model: str, config: LearningConfig) -> None:
        self._storage = storage
        self._model = model
        self._config = config
        self._lock = threading.Lock()
        self._scopes: OrderedDict[Key, _Scope] = OrderedDict()
        self._num_written: dict[str, int] = {}
        self._on_arrival: Callable[[Arrival], None] = lambda _: None
        self._is_away = False
        self._again_s = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)

    # -- server.engine.task_store.Exchange -----------------------------------------------------

    def start(self, on_arrival: Callable[[Arrival], None]) -> None:
        self._on_arrival = on_arrival
        self._thread.start()

    def open(self, wanted: Wanted) -> None:
        with self._lock:
            scope = self._scopes.get(wanted.key)
            if scope is None:
                scope = self._scopes[wanted.key] = _Scope(wanted)
                if len(self._scopes) > _MAX_SCOPES:
                    self._scopes.popitem(last=False)
            scope.wanted = wanted
            scope.adopted, scope.looked_s = None, float("-inf")  # what is published comes anew
            self._scopes.move_to_end(wanted.key)

    def append(self, key: Key, example: Example) -> None:
        with self._lock:
            scope = self._scopes.get(key)
            if scope is None:
                return
            self._scopes.move_to_end(key)
            scope.comes()
            scope.buffer.append(example)
            scope.num_tokens += int(example[1].shape[0])
            while scope.num_tokens > scope.wanted.max_tokens and len(scope.buffer) > 1:
                scope.num_tokens -= int(scope.buffer.pop(0)[1].shape[0])  # nobody takes them

    def count(self, key: Key, table: TableId, counts: Counts) -> None:
        with self._lock:
            scope = self._scopes.get(key)
            if scope is None:
                return
            scope.comes()
            scope.counts[table] = added([scope.counts.get(table, {}), counts])

    def unpublished(self, key: Key) -> list[Example]:
        with self._lock:
            scope = self._scopes.get(key)
            if scope is None:
                return []
            return [*(e for sent in scope.sent for e in sent.examples), *scope.buffer]

    def forget(self, task: str) -> None:
        with self._lock:
            for key in [key for key in self._scopes if key[0] == task]:
                del self._scopes[key]

    def figures(self) -> tuple[SharedFigures, ...]:
        with self._lock:
            by_task: dict[str, list[Manifest]] = {task: [] for task in self._num_written}
            for (task, _), scope in self._scopes.items():
                known = by_task.setdefault(task, [])
                known += [scope.manifest] if scope.manifest is not None else []
            return tuple(
                SharedFigures(
                    task,
                    self._num_written.get(task, 0),
                    sum(one.num_merged for one in known),
                    sum(one.version for one in known),
                    max((one.published_ns / 1e9 for one in known), default=0.0),
                )
                for task, known in sorted(by_task.items())
            )

    def close(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    # -- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux: the priority of this thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while not self._ending.wait(_TICK_S):
            self.tend()
        self.tend(is_last=True)

    def tend(self, *, is_last: bool = False) -> None:
        """Write and read what is due. is_last: write all, read nothing."""
        now_s = time.monotonic()
        if now_s < self._again_s and not is_last:
            return
        with self._lock:
            scopes = list(self._scopes.values())
        for scope in scopes:
            try:
                self._tend_scope(scope, now_s, is_last)
            except OSError as error:
                self._again_s = now_s + self._config.look_s
                if not self._is_away:
                    self._is_away = True
                    log.warning("what was learned does not travel: %s", error)
                return
            except Exception:
                log.exception("what was learned does not travel")
                self._again_s = now_s + self._config.look_s
                continue
            if self._is_away:
                self._is_away = False
                log.info("what was learned travels again")

    def _tend_scope(self, scope: _Scope, now_s: float, is_last: bool) -> None:
        config = self._config
        with self._lock:
            is_due = scope.num_tokens >= config.segment_tokens
            is_due |= now_s - scope.since_s >= config.append_s
            writes = scope.waits and (is_due or is_last)
            looks = not is_last and now_s - scope.looked_s >= config.look_s
        if not (writes or looks):
            return
        epoch = epoch_of(self._storage, task_folder(self._model, scope.wanted.key[0]))
        with self._lock:
            is_forgotten = scope.epoch not in (None, epoch)
            scope.epoch = epoch
            if is_forgotten:
                scope.drop()
                scope.adopted = None
        if is_forgotten:
            scope.manifest = None
            self._on_arrival(Arrival(scope.wanted, (), {}))
        elif writes:
            self._write(scope, epoch)
        if looks:
            scope.looked_s = now_s
            self._look(scope, epoch)

    def _write(self, scope: _Scope, epoch: int) -> None:
        with self._lock:
            wanted = scope.wanted
            told = scope.counts
            packed = {table: pack(counts) for table, counts in told.items()}
            sent = _Sent(scope.last_number + 1, "", scope.buffer, packed)
            scope.buffer, scope.counts, scope.num_tokens = [], {}, 0
        try:
            # Tells segments of one nanosecond apart.
            own = int(digest(scope.writer, str(sent.number)), 16) >> 2
            outputs = segment_of(sent.examples, time.time_ns(), own)
            meta = {"max_tokens": wanted.max_tokens}
            file = SharedFile(outputs, told, meta)
            data = encoded(file, wanted.fingerprint, digest(*wanted.key))
            name = SegmentName(scope.writer, sent.number, hash_of(data))
            sent.path = name.path(scope_folder(self._model, wanted.key, epoch))
            self._storage.write(sent.path, data)
        except OSError:  # the folder of temporary files may be full
            with self._lock:  # again later, before what came meanwhile
                scope.buffer = [*sent.examples, *scope.buffer]
                scope.num_tokens = sum(int(o.shape[0]) for _, o in scope.buffer)
                for table, counts in told.items():
                    scope.counts[table] = added([counts, scope.counts.get(table, {})])
            raise
        with self._lock:
            scope.last_number = sent.number
            scope.sent.append(sent)
            too_many = len(scope.sent) > self._config.max_segments
            oldest = scope.sent.popleft() if too_many else None
            task = wanted.key[0]
            self._num_written[task] = self._num_written.get(task, 0) + 1
        if oldest is not None:  # no builder takes them: what is kept there is bounded
            self._storage.delete(oldest.path)

    def _look(self, scope: _Scope, epoch: int) -> None:
        """Take a version that is new. One that is torn, or is replaced meanwhile, is left out."""
        wanted = scope.wanted
        folder = scope_folder(self._model, wanted.key, epoch)
        try:
            manifest = read_manifest(self._storage, folder)
            if manifest is None or scope.adopted == (manifest.version, manifest.published_ns):
                return
            data = read_hashed(self._storage, f"{folder}/{manifest.state}")
            file = decoded(data, wanted.fingerprint, digest(*wanted.key))
        except (TornError, ArrayFileError) as error:
            log.info("task %s: what was published is left out: %s", wanted.key[0], error)
            return
        mark = manifest.marks.get(scope.writer, (0, 0))[0]
        with self._lock:
            while scope.sent and scope.sent[0].number <= mark:
                scope.sent.popleft()
            scope.adopted = (manifest.version, manifest.published_ns)
            # What is published, what is not written yet, and what was written since.
            whole, packed = (file.counts, scope.counts), [sent.counts for sent in scope.sent]
            tables = {
                table: added(
                    itertools.chain(
                        (of[table] for of in whole if table in of),
                        (unpack(of[table]) for of in packed if table in of),
                    )
                )
                for table in {*itertools.chain(*whole, *packed)}
            }
        scope.manifest = manifest
        self._on_arrival(Arrival(wanted, file.outputs.oldest_first(), tables))


def encoded(file: SharedFile, fingerprint: str, scope: str) -> bytes:
    """A SharedFile as bytes. scope: the digest of its (task, scope)."""
    with tempfile.TemporaryDirectory(prefix="tailor-") as folder:
        path = Path(folder) / "file"
        save_shared(path, file, fingerprint=fingerprint, scope=scope)
        return path.read_bytes()


def decoded(data: bytes, fingerprint: str | None, scope: str) -> SharedFile:
    """What `encoded` gave. Raises ArrayFileError."""
    with tempfile.TemporaryDirectory(prefix="tailor-") as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        return load_shared(path, fingerprint=fingerprint, scope=scope)
