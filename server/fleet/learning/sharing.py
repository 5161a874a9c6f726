"""Sharing: what cluster.yaml says of learning, as parts of a fleet take it with them. Picklable."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from server.config.cluster import LearningConfig
from server.errors import UnavailableError
from server.fleet.learning.builder import Builder, BuilderNumbers
from server.fleet.learning.exchange import ExchangeNumbers, SegmentExchange
from server.fleet.learning.places import forget
from server.fleet.learning.storage import Storage, StorageError

log = logging.getLogger("tailor.fleet")

_RETRIES = 3


@dataclass(frozen=True, slots=True)
class Sharing:
    """storage: a folder or a URL. publish_s: seconds between two passes of a builder."""

    storage: str
    exchange: ExchangeNumbers
    builder: BuilderNumbers
    publish_s: float

    @staticmethod
    def of(config: LearningConfig, folder: Path) -> Sharing:
        """folder: where what is learned lies when the config names no storage."""
        return Sharing(
            config.storage or str(folder),
            ExchangeNumbers(
                append_s=config.append_s,
                segment_tokens=config.segment_tokens,
                look_s=config.look_s,
                max_segments=config.max_segments,
            ),
            BuilderNumbers(max_age_s=config.max_age_days * 86400.0, max_scopes=config.max_scopes),
            config.publish_s,
        )

    def __call__(self, model: str, folder: Path) -> SegmentExchange:
        """For an engine: server.wiring.engine.Share."""
        return SegmentExchange(Storage(self.storage), model, folder, self.exchange)

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
        numbers = BuilderNumbers(sharing.builder.max_age_s, sharing.builder.max_scopes, share)
        self._builder = Builder(Storage(sharing.storage), numbers)
        self._every_s = sharing.publish_s
        self._stop = threading.Event()
        self._is_away = False
        self._thread = threading.Thread(target=self._work, name="builder", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises RuntimeError when the thread has ended: the builder is to be replaced."""
        if not self._thread.is_alive():
            raise RuntimeError("the builder has ended")

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
