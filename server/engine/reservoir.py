"""Reservoir: the learned outputs of one (task, scope), as the thread that learns keeps them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from drafters.array_file import ArrayFileError
from server.engine.calibrations import digest
from server.engine.exchange import Int32, Key

if TYPE_CHECKING:
    from drafters.corpus import Corpus
    from drafters.learned import LearnedOutputs
    from server.engine.learning_jobs import Open

_log = logging.getLogger(__name__)

MAX_PROMPT = 1024  # tokens of a prompt, its last ones, that are kept with an output
MAX_FILES = 256  # learned files in an engine's folder; the oldest go first


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer over the corpus `base`."""

    corpus: Corpus
    base: str | None
    generation: int


@dataclass(slots=True)
class Reservoir:
    """num_unbuilt, num_unsaved: outputs that are in no layer, in no file. is_wanted: whether its
    layer is drafted from now. Times are time.monotonic()."""

    key: Key
    outputs: LearnedOutputs
    corpus: str | None
    generation: int
    persist: bool
    num_unbuilt: int = 0
    num_unsaved: int = 0
    is_wanted: bool = True
    saved_at_s: float = field(default_factory=time.monotonic)

    @property
    def is_due(self) -> bool:
        """Whether a new layer is worth its time: where nobody drafts from it, only once as much
        again was learned, so that all builds together take twice the last one's."""
        return self.num_unbuilt >= max(1, 0 if self.is_wanted else (len(self.outputs) + 1) // 2)

    def rebuild(self) -> None:
        """Its layer is to be built anew, whatever was learned."""
        self.num_unbuilt, self.is_wanted = max(1, self.num_unbuilt), True

    @classmethod
    def of(cls, wanted: Open) -> Reservoir:
        """An empty one."""
        outputs = _outputs(wanted.key, wanted.max_tokens)
        return cls(wanted.key, outputs, wanted.corpus, wanted.generation, wanted.persist)

    def restore(self, path: Path, fingerprint: str) -> None:
        """What `save` wrote, where that is there and right."""
        try:
            self.outputs.restore(path, fingerprint=fingerprint, scope=digest(*self.key))
            self.num_unbuilt = len(self.outputs)
        except FileNotFoundError:
            pass
        except (ArrayFileError, OSError) as error:
            _log.warning("task %s learns anew: %s", self.key[0], error)

    def replace(self, examples: Iterable[tuple[Int32, Int32]]) -> None:
        """Hold these (prompt ids, output ids), oldest first."""
        outputs = _outputs(self.key, self.outputs.max_tokens)
        for prompt, output in examples:
            outputs.add(prompt, output)
        outputs.num_seen = self.outputs.num_seen
        self.outputs, self.num_unbuilt = outputs, len(outputs)

    def save(self, path: Path, fingerprint: str) -> None:
        """Write it; of too many files of the folder the oldest go."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.outputs.save(path, fingerprint=fingerprint, scope=digest(*self.key))
            files = sorted(path.parent.glob("learned-*.bin"), key=lambda p: p.stat().st_mtime)
            for old in files[: max(0, len(files) - MAX_FILES)]:
                old.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("task %s: what it learned could not be written: %s", self.key[0], error)


def _outputs(key: Key, max_tokens: int) -> LearnedOutputs:
    from drafters.learned import LearnedOutputs

    return LearnedOutputs(max_tokens, max_prompt=MAX_PROMPT, seed=int(digest(*key), 16))
