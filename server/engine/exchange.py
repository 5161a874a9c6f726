"""Exchange: the seam by which what one engine learned reaches others, and theirs reaches it.

A TaskStore hands on every finished output of a task whose learned outputs may be written down, and
takes in what comes. What is behind the seam (server/fleet/learning) runs in threads of its own:
nothing here waits for storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from drafters.shared_counts import Counts, TableId
    from server.types import SharedFigures

Int32 = npt.NDArray[np.int32]
Key = tuple[str, str]
"""(task, scope)"""
Example = tuple[Int32, Int32]
"""(prompt ids, output ids)"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of a key. fingerprint: of the ids. corpus: the file of the task, if it has
    one. generation: the TaskStore's, told back with what comes."""

    key: Key
    fingerprint: str
    corpus: str | None
    max_tokens: int
    generation: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A version that was published. examples: its own, oldest first. layer: a Corpus that was built
    of them over `corpus`, or None. tables: the counts of all engines, this one's too."""

    key: Key
    generation: int
    examples: Sequence[Example]
    layer: Path | None
    corpus: str | None
    tables: Mapping[TableId, Counts]


class Exchange(Protocol):
    """Called from any thread; returns at once."""

    def start(self, on_arrival: Callable[[Arrival], None]) -> None:
        """on_arrival: called in a thread of the exchange. Before all else."""

    def open(self, wanted: Wanted) -> None:
        """From now on what others learned of this key is wanted; the last word counts."""

    def append(self, key: Key, example: Example) -> None:
        """An output that was finished; of a key that is open."""

    def count(self, key: Key, table: TableId, counts: Counts) -> None:
        """Drafts that came true since the last call; dropped for a key that is not open."""

    def unpublished(self, key: Key) -> list[Example]:
        """What was appended and is in no version that has arrived, oldest first."""

    def forget(self, task: str) -> None:
        """What was appended and not sent yet is dropped; keys are to be opened again."""

    def figures(self) -> tuple[SharedFigures, ...]:
        """By task."""

    def close(self) -> None:
        """Send what is left; returns when that is done or has failed."""
