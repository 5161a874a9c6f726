"""Pace: which replicas are slow, and get nothing but a trial now and then.

A slow replica (its machine is busy with something else, its clock is lowered, its memory swaps)
still answers, so nobody replaces it; but what runs there takes several times as long. The router
compares each replica's last steps with what steps of as many rows cost at the others.

Pure: no Ray, no clock but what is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from server.fleet.costs import StepCosts

SLOW = 4.0
"""So many times the usual seconds of a step are slow."""
TRIAL_S = 10.0
"""After so long a slow replica gets a request again, whose steps tell how it is now."""


class Pace:
    """See the top of this file."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tried_s: dict[str, float] = {}  # of those that are slow

    def read(
        self, recent: Mapping[str, tuple[float, float]], costs: Mapping[str, StepCosts]
    ) -> None:
        """What replicas told last. recent: (rows, seconds) of each one's last steps
        (CostMeter.recent). costs: of all."""
        known = sorted(costs.values(), key=lambda one: one.step_s(8))
        slow: list[str] = []
        if len(known) > 1:
            usual = known[(len(known) - 1) // 2]
            slow = [name for name, (rows, s) in recent.items() if s > SLOW * usual.step_s(rows)]
        if 2 * len(slow) > len(known):  # then it is the others that are fast
            slow = []
        now_s = self._clock()
        self._tried_s = {name: self._tried_s.get(name, now_s) for name in slow}

    def is_out(self, name: str) -> bool:
        """Whether a replica is slow and has no trial now."""
        tried_s = self._tried_s.get(name)
        return tried_s is not None and self._clock() < tried_s + TRIAL_S

    def routed(self, name: str) -> None:
        """A request went to a replica; the next trial of a slow one is later."""
        if name in self._tried_s:
            self._tried_s[name] = self._clock()
