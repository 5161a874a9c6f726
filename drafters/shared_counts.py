"""Counts of drafts that came true, as they are added up over several writers.

A table (drafters.auto.trust.Trust, drafters.calibration.Calibration) tells its own with `counts`
and takes a sum with `set_counts`: float64 [rows, cells] by name, without what it began with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Counts = Mapping[str, Float64]
TableId = tuple[str, str]
"""(drafter's name, id of the corpus that it draws on)"""


def added(parts: Iterable[Counts]) -> Counts:
    """The sum; of one shape only: a name whose shape differs from the first one's is left out."""
    total: dict[str, Float64] = {}
    for part in parts:
        for name, values in part.items():
            known = total.get(name)
            if known is None:
                total[name] = values.copy()
            elif known.shape == values.shape:
                known += values
    return total


def since(now: Counts, before: Counts) -> Counts:
    """What was counted since `before`; a cell that has faded meanwhile counts for nothing."""
    empty = np.zeros(())
    return {name: np.maximum(0.0, values - before.get(name, empty)) for name, values in now.items()}


def bounded(counts: Counts, most: float) -> Counts:
    """No cell above `most`; its rows keep their ratio."""
    told = {}
    for name, values in counts.items():
        largest = values.max(axis=0, initial=0.0)
        told[name] = values * np.where(largest > most, most / np.maximum(largest, 1.0), 1.0)
    return told


def is_empty(counts: Counts) -> bool:
    """Whether nothing was counted."""
    return not any(bool(values.any()) for values in counts.values())


PackedCounts = Mapping[str, tuple[npt.NDArray[np.int64], Float64, tuple[int, ...]]]
"""Counts of which most are 0: by name the cells that are not, int64, their values, and a shape."""


def pack(counts: Counts) -> PackedCounts:
    """The inverse of `unpack`."""
    cells = {name: np.flatnonzero(values) for name, values in counts.items()}
    return {
        name: (cells[name], values.reshape(-1)[cells[name]], values.shape)
        for name, values in counts.items()
    }


def unpack(packed: PackedCounts) -> Counts:
    """As they were."""
    told: dict[str, Float64] = {}
    for name, (cells, values, shape) in packed.items():
        told[name] = np.zeros(shape)
        told[name].reshape(-1)[cells] = values
    return told
