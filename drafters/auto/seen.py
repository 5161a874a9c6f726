"""Seen: what the requests of one scope leave behind in memory, for those after them."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafters.arrays import Float32
from drafters.auto.copying import no_entries
from drafters.auto.likely import LikelyTable
from drafters.auto.retrieval import RecentOutputs


@dataclass(frozen=True, slots=True)
class Seen:
    """likely: what the model held likely, written by the scope's sessions. recent: the outputs that
    finished last, which no layer may hold yet; added by whoever owns this."""

    likely: LikelyTable = field(default_factory=LikelyTable)
    recent: RecentOutputs = field(default_factory=RecentOutputs)
    entered: Float32 = field(default_factory=no_entries)
