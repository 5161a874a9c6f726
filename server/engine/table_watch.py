"""TableWatch: whether steps as they are served take what a kept cost table says of them.

A table of costs (budget.py) is measured at a first start and kept in a file. Steps that are served
correct the table in memory, and other starts take what is quicker in them; neither mends a table
that was measured on a day on which this machine, or what runs beside, was another. So the table of
the file is compared with served steps of the kind that it was measured by: one choice and its draft
nodes. Where they stay apart the file is doubted, and the next start measures anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.engine.budget import CostTable


class TableWatch:
    """Lower quartiles of served over kept seconds, by rows: 1, 2, up to 4, 8, 16, more.

    Quartiles, because others on the machine only add to a step. Engines that serve take somewhat
    longer than a probe that does nothing else, so all row counts may be off by SCALE; what draft
    nodes cost beside the first row decides more, so row counts may be apart by SHAPE alone.
    """

    WINDOW = 256  # steps of a class that are judged together
    FOR_LONG = 8  # windows in a row before the file is doubted, or believed again
    SCALE = 2.0
    SHAPE = 1.6
    NUM_CLASSES = 6

    def __init__(self, kept: CostTable, doubt: Callable[[bool], None]) -> None:
        """kept: as in the file, not written to by served steps. doubt: called with whether the file
        is doubted, whenever that changes."""
        self._kept = kept
        self._doubt = doubt
        self._ratios: list[list[float]] = [[] for _ in range(self.NUM_CLASSES)]
        self._quartiles: dict[int, float] = {}
        self._num_other = 0  # windows in a row that say otherwise than is_doubted
        self.is_doubted = False

    def observe(self, num_rows: int, keys: float, seconds: float) -> None:
        """A step of one choice without rows of a prompt; as CostTable.observe."""
        at = min((num_rows - 1).bit_length(), self.NUM_CLASSES - 1)
        ratios = self._ratios[at]
        ratios.append(seconds / self._kept.cost(num_rows, keys))
        if len(ratios) < self.WINDOW:
            return
        self._quartiles[at] = sorted(ratios)[self.WINDOW // 4]
        ratios.clear()
        least, most = min(self._quartiles.values()), max(self._quartiles.values())
        is_off = most > self.SCALE or least < 1.0 / self.SCALE or most > self.SHAPE * least
        self._num_other = self._num_other + 1 if is_off != self.is_doubted else 0
        if self._num_other >= self.FOR_LONG:
            self.is_doubted, self._num_other = is_off, 0
            self._doubt(is_off)
