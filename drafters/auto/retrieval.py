"""Which earlier outputs stand beside a request: those of the nearest prompts, and the newest ones.

An example's weight is its likeness over the greatest, to the power of SHARPNESS. The newest outputs
of a scope (`Seen.recent`) are there before a layer is built of them, and weigh RECENT_WEIGHT at
least: requests of one kind often come in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from drafters.arrays import Float32, Int32
from drafters.auto.copying import no_entries
from drafters.auto.likely import LikelyTable
from drafters.auto.tree_builder import Workspace

if TYPE_CHECKING:
    from drafters.corpus import Corpus

NUM_RETRIEVED = 12  # examples whose outputs are retrieved for a request
SHARPNESS = 4.0
NUM_RECENT = 4
MAX_RECENT = 1024  # tokens of a recent output, its first ones, that are kept
RECENT_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Seen:
    """What the requests of one scope leave behind in memory, for those after them.

    likely: what the model held likely, and entered: behind which tokens copies went on
    (drafters.auto.copying), written by the scope's sessions. recent: the last NUM_RECENT outputs
    that finished, the newest last, which no layer may hold yet; nobody writes to them. workspace:
    of all scopes that one thread drafts for.
    """

    likely: LikelyTable = field(default_factory=LikelyTable)
    recent: list[Int32] = field(default_factory=list)
    entered: Float32 = field(default_factory=no_entries)
    workspace: Workspace = field(default_factory=Workspace)

    def add(self, output_ids: Sequence[int] | Int32) -> None:
        """Take a finished output; the oldest goes, and an equal one, so that there are no two."""
        output = np.array(output_ids[:MAX_RECENT], np.int32)
        if output.shape[0]:
            others = [own for own in self.recent if not np.array_equal(own, output)]
            self.recent[:] = [*others, output][-NUM_RECENT:]


def retrieve(
    layers: Sequence[Corpus], prompt: Int32, num: int, recent: Sequence[Int32]
) -> list[tuple[float, Int32]]:
    """(weight, output) of the `num` nearest examples of all layers and of the recent outputs.

    The least first: newer text is looked at first where a walk is cut short.
    """
    found: list[tuple[float, Int32]] = []
    for layer in layers:
        examples, likeness = layer.nearest.find(prompt, num)
        offset = layer.num_documents - layer.nearest.norms.shape[0]
        for example, like in zip(examples, likeness, strict=True):
            found.append((float(like), layer.output(offset + int(example))))
    found = sorted(found, key=lambda pair: -pair[0])[:num]
    weighed = [((like / found[0][0]) ** SHARPNESS, output) for like, output in found]
    for new in recent:
        # A layer may hold it already: once is enough.
        same = next((i for i, (_, own) in enumerate(weighed) if _begins_alike(own, new)), None)
        if same is None:
            weighed.append((RECENT_WEIGHT, new))
        else:
            weighed[same] = (max(weighed[same][0], RECENT_WEIGHT), weighed[same][1])
    return sorted(weighed, key=lambda pair: pair[0])


def _begins_alike(output: Int32, recent: Int32) -> bool:
    """Whether a recent output, which may be cut off, is this one."""
    num = recent.shape[0]
    long_enough = output.shape[0] == num or (num == MAX_RECENT and output.shape[0] > num)
    return long_enough and np.array_equal(output[:num], recent)
