"""The desk: the state that all parts of a fleet share.

Replicas of engines report to it each second; ingresses ask it. Its state is seconds old at most: a
new desk gets everything again. This module does not import Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from server.types import FigureValue, ModelInfo

LIVES_S = 1.5
"""A replica that has told something since then lives: it does so every second."""
GONE_AFTER_S = 5.0
"""A replica that has not reported for so long counts as gone."""
_STARTS_S = 600.0  # a replica that has its number and has not reported is starting


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a replica. name: of its engine, `model/rank`. replica_id: as Serve calls it.
    figures: in the order of the info's."""

    name: str
    model: str
    replica_id: str
    info: ModelInfo
    figures: list[FigureValue]


@dataclass(frozen=True, slots=True)
class FleetState:
    """What is known of a model's replicas: one's info (None before any is ready) and the figures of
    each by its name, in the order of the info's (none of one whose engine died). left: names of
    those that have ended because they were asked to."""

    info: ModelInfo | None
    figures: dict[str, list[FigureValue]]
    left: frozenset[str] = frozenset()


class Desk:
    """See the top of this file."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._standings: dict[str, tuple[float, Standing]] = {}
        self._infos: dict[str, ModelInfo] = {}
        self._left: set[str] = set()
        self._given: dict[str, tuple[int, float]] = {}  # to which rank, when; until it reports
        self._owner = ""
        self._is_ending = False

    def tell(self, standing: Standing) -> None:
        """A replica is there, and how."""
        self._standings[standing.replica_id] = (self._clock(), standing)
        self._infos[standing.model] = standing.info
        self._left.discard(standing.name)
        self._given.pop(standing.name, None)

    def leave(self, replica_id: str) -> None:
        """A replica ends because it was asked to."""
        if (told := self._standings.pop(replica_id, None)) is not None:
            self._left.add(told[1].name)

    def standings(self, model: str) -> list[Standing]:
        """The replicas of a model that are there, by name."""
        oldest_s = self._clock() - GONE_AFTER_S
        self._standings = {
            key: (told_s, standing)
            for key, (told_s, standing) in self._standings.items()
            if told_s >= oldest_s
        }
        found = [standing for _, standing in self._standings.values() if standing.model == model]
        return sorted(found, key=lambda standing: (standing.name, standing.replica_id))

    def number(self, model: str, rank: int) -> int:
        """What a replica that starts may be called: its rank, unless another one that lives or
        starts is called so. After an update Serve gives ranks anew, and names stay."""
        now_s, number = self._clock(), rank
        taken = {s.name for told_s, s in self._standings.values() if told_s >= now_s - LIVES_S}
        for name, (given_to, given_s) in self._given.items():
            if given_to != rank and given_s >= now_s - _STARTS_S:
                taken.add(name)
        while (name := f"{model}/{number}") in taken:
            number += 1
        self._given[name] = rank, now_s
        return number

    def state(self, model: str) -> FleetState:
        """For the ingresses. The info is there also when all engines sleep."""
        figures = {s.name: s.figures for s in self.standings(model)}
        left = frozenset(name for name in self._left if name.rpartition("/")[0] == model)
        return FleetState(self._infos.get(model), figures, left)

    def own(self, owner: str) -> None:
        """Who has deployed the fleet last, and takes it away in the end."""
        self._owner = owner

    def owner(self) -> str:
        """As told last; "" for nobody."""
        return self._owner

    def end(self) -> None:
        """All of the fleet is about to be taken away."""
        self._is_ending = True

    def is_ending(self) -> bool:
        """For ingresses that end: whether the others do, too."""
        return self._is_ending
