"""Builder: merges the segments of a task and publishes what they make.

One pass looks at every scope of the tasks that are this builder's. New segments are merged into the
last state (drafters.shared_outputs: in any order to the same), and a manifest with a higher version
names the new one. Only then the segments are deleted.

A builder remembers nothing: one that is lost at any point is replaced by one that begins the same
pass again, because the state says which segments of which writer are in it. Two at once cost each
other work and, at worst, a segment.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from drafters.array_file import ArrayFileError
from drafters.shared_counts import added, bounded
from drafters.shared_outputs import SharedFile, SharedOutputs, merge
from server.config.cluster import LearningConfig
from server.errors import UnavailableError
from server.fleet.learning.exchange import SegmentExchange, decoded, encoded
from server.fleet.learning.storage import (
    MANIFEST,
    SCOPE_FOLDER,
    Manifest,
    SegmentName,
    Storage,
    StorageError,
    TornError,
    epoch_of,
    forget,
    hash_of,
    read_hashed,
    read_manifest,
)

log = logging.getLogger("tailor.fleet")

_MAX_TOKENS = 5_000_000
_MAX_AT_ONCE = 256  # segments of a scope in one pass
_MAX_WRITERS = 1024
_RETRIES = 3
_COUNTS_MEMORY = {"evidence": 20_000.0, "outcomes": 20_000.0, "offers": 2000.0}


@dataclass(slots=True)
class PassReport:
    """What one pass did. num_merged, num_torn: segments."""

    num_published: int = 0
    num_merged: int = 0
    num_torn: int = 0


class Builder:
    """See the top of this file. share: (i, n): this is the i-th of n builders, from 0."""

    def __init__(
        self, storage: Storage, config: LearningConfig, *, share: tuple[int, int] = (0, 1)
    ) -> None:
        self._storage = storage
        self._config = config
        self._share = share

    def run(self) -> PassReport:
        """One pass. Raises StorageError when the storage is away."""
        scopes = self._scopes()
        report = PassReport()
        by_task: dict[str, list[tuple[int, str]]] = {}
        for scope, files in scopes.items():
            manifest = self._tend(scope, files, report)
            if manifest is not None:
                task = scope.rpartition("/")[0]
                by_task.setdefault(task, []).append((manifest.published_ns, scope))
        for published in by_task.values():
            for _, scope in sorted(published)[: -self._config.max_scopes]:
                self._storage.delete(scope, recursive=True)
        return report

    def _scopes(self) -> dict[str, list[str]]:
        """The files of each scope of this builder's tasks, relative to it; old epochs are swept."""
        index, num = self._share
        scopes: dict[str, list[str]] = {}
        tasks: dict[str, int] = {}
        for path in self._storage.files():
            parts = path.split("/")
            scope = "/".join(parts[:4])
            task = "/".join(parts[:2])
            if len(parts) < 5 or not SCOPE_FOLDER.fullmatch(scope):
                continue
            if int(parts[1], 16) % num != index:
                continue
            if task not in tasks:
                tasks[task] = epoch_of(self._storage, task)
            if parts[2] == f"e{tasks[task]}":
                scopes.setdefault(scope, []).append("/".join(parts[4:]))
            else:
                self._storage.delete(path)  # late, for an epoch that is over
        return scopes

    def _tend(self, scope: str, files: Iterable[str], report: PassReport) -> Manifest | None:
        """What is published of a scope now."""
        storage, now_ns = self._storage, time.time_ns()
        manifest: Manifest | None = None
        with _begun_anew(scope):  # by the segments that are there
            manifest = read_manifest(storage, scope)
        segments = _segments(files)
        marks = {} if manifest is None else dict(manifest.marks)
        new = [s for s in segments if s.number > marks.get(s.writer, (0, 0))[0]][:_MAX_AT_ONCE]
        if not new:
            if manifest is not None and manifest.published_ns < self._oldest_ns():
                storage.delete(scope, recursive=True)
                return None
            self._sweep(scope, files, manifest, segments)
            return manifest
        read: list[SharedFile] = []
        for segment in new:
            marks[segment.writer] = (segment.number, now_ns)
            try:
                file = decoded(read_hashed(storage, segment.path(scope)), None, _key(scope))
                read.append(_not_ahead(file, now_ns))
            except (TornError, ArrayFileError) as error:
                log.warning("a segment is left out: %s", error)
        if read:
            manifest = self._publish(scope, manifest, read, marks)
        self._sweep(scope, files, manifest, new)
        report.num_published += bool(read)
        report.num_merged += len(read)
        report.num_torn += len(new) - len(read)
        return manifest

    def _oldest_ns(self) -> int:
        return max(0, time.time_ns() - int(self._config.max_age_days * 86400e9))

    def _publish(
        self,
        scope: str,
        before: Manifest | None,
        segments: list[SharedFile],
        marks: Mapping[str, tuple[int, int]],
    ) -> Manifest:
        """A version made of the last state and segments; all that is in other ids than the newest
        segment is left out."""
        storage = self._storage
        newest = max(segments, key=lambda file: max(file.outputs.examples, default=(0, 0, 0)))
        fingerprint = str(newest.meta["fingerprint"])
        state = SharedFile(SharedOutputs(), {}, {})
        if before is not None:
            with _begun_anew(scope):
                data = read_hashed(storage, f"{scope}/{before.state}")
                state = decoded(data, None, _key(scope))
        files = [f for f in (state, *segments) if f.meta.get("fingerprint") == fingerprint]
        max_tokens = max(1, min(_MAX_TOKENS, int(newest.meta.get("max_tokens") or 1)))
        outputs = merge(
            [file.outputs for file in files],
            max_tokens=max_tokens,
            oldest_ns=self._oldest_ns(),
        )
        counts = {}
        for table in {table for file in files for table in file.counts}:
            total = added(file.counts[table] for file in files if table in file.counts)
            most = max(_COUNTS_MEMORY.get(name, 2000.0) for name in total)
            counts[table] = bounded(total, most)
        kept_marks = sorted(marks.items(), key=lambda item: -item[1][1])[:_MAX_WRITERS]
        data = encoded(SharedFile(outputs, counts, {}), fingerprint, _key(scope))
        name = f"state-{hash_of(data)}.bin"
        storage.write(f"{scope}/{name}", data)
        manifest = Manifest(
            version=1 + (0 if before is None else before.version),
            published_ns=time.time_ns(),
            state=name,
            num_merged=len(segments) + (0 if before is None else before.num_merged),
            marks=dict(kept_marks),
        )
        storage.write(f"{scope}/{MANIFEST}", msgspec.json.encode(manifest))
        return manifest

    def _sweep(
        self,
        scope: str,
        files: Iterable[str],
        manifest: Manifest | None,
        segments: Iterable[SegmentName],
    ) -> None:
        """Delete segments that are merged, and what no manifest names: of `files`, as they were
        before this pass wrote any."""
        for segment in segments:
            self._storage.delete(segment.path(scope))
        named = {MANIFEST} if manifest is None else {MANIFEST, manifest.state}
        for file in files:
            if "/" not in file and file not in named:
                self._storage.delete(f"{scope}/{file}")


@contextlib.contextmanager
def _begun_anew(scope: str) -> Iterator[None]:
    """What is damaged of a scope's publication is told, and counts as not there."""
    try:
        yield
    except (TornError, ArrayFileError) as error:
        log.warning("what is learned in %s is begun anew: %s", scope, error)


def _key(scope: str) -> str:
    """What a file of this scope says whose it is."""
    return scope.rpartition("/")[2]


def _not_ahead(file: SharedFile, now_ns: int) -> SharedFile:
    """A segment whose examples are no newer than now. Those of a writer whose clock is ahead would
    else be kept as the newest, and nobody else's until then."""
    examples = {
        (min(written_ns, now_ns), segment, number): example
        for (written_ns, segment, number), example in file.outputs.examples.items()
    }
    return replace(file, outputs=SharedOutputs(examples, file.outputs.floor))


def _segments(files: Iterable[str]) -> list[SegmentName]:
    """Ascending, writer by writer."""
    parts = (file.rpartition("/") for file in files)
    named = (SegmentName.of(name) for folder, _, name in parts if folder == "segments")
    return sorted(
        (segment for segment in named if segment is not None),
        key=lambda s: (s.number, s.writer, s.hash),
    )


# --- what a fleet's parts take with them ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sharing:
    """What cluster.yaml says of learning; picklable. storage: a folder or a URL."""

    storage: str
    config: LearningConfig

    def __call__(self, model: str) -> SegmentExchange:
        """For an engine: server.wiring.engine.Share."""
        return SegmentExchange(Storage(self.storage), model, self.config)

    def forget(self, task: str) -> None:
        """For an ingress: what is kept of a task is dropped. Raises UnavailableError; then it may
        not be said that it was."""
        for attempt in range(_RETRIES):
            try:
                forget(Storage(self.storage), task)
                return
            except StorageError as error:
                log.warning("what is learned could not be forgotten: %s", error)
                time.sleep(0.2 * (attempt + 1))
        raise UnavailableError(
            "What replicas learned of the task could not be deleted from their storage. Try again.",
            retry_after_s=5.0,
        )


class BuilderLoop:
    """A Builder in a thread of its own, a pass every publish_s seconds, until `stop`.

    share: (i, n), of n builders the i-th. While the storage is away, that is told once.
    """

    def __init__(self, sharing: Sharing, share: tuple[int, int] = (0, 1)) -> None:
        self._builder = Builder(Storage(sharing.storage), sharing.config, share=share)
        self._every_s = sharing.config.publish_s
        self._stop = threading.Event()
        self._is_away = False
        self._thread = threading.Thread(target=self._work, name="builder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """After the pass in flight."""
        self._stop.set()
        self._thread.join(30.0)

    def _work(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                report = self._builder.run()
            except StorageError as error:
                if not self._is_away:
                    log.warning("what was learned is not merged: %s", error)
                self._is_away = True
                continue
            except Exception:
                log.exception("what was learned is not merged")
                continue
            if self._is_away:
                self._is_away = False
                log.info("what was learned is merged again")
            if report.num_published:
                log.info(
                    "%d versions of what was learned were published, of %d segments (%d torn)",
                    report.num_published, report.num_merged, report.num_torn,
                )  # fmt: skip
