"""Serve's autoscaler with scaling.WorkPolicy, in simulated time: which replicas a fleet has.

Replicas note their work once a second and report it every `report_s`; the policy reads the mean of
what was reported within `look_back_s`; what it says must hold for `up_after_s` or `down_after_s`;
a new replica takes requests `start_s` later. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from server.fleet.scaling import ReplicaWork, ScalingNumbers, replicas_for, work_of

LOOK_S = 1.0
"""Between two looks of the simulated autoscaler."""


@dataclass(frozen=True, slots=True)
class ScalingTimes:
    """Seconds, as in cluster.yaml's replicas.scaling. report_s: between two reports of a replica,
    Ray's own number. phase_s: since the first replicas' last report, at the beginning. start_s:
    until a new replica takes requests."""

    up_after_s: float = 5.0
    down_after_s: float = 120.0
    look_back_s: float = 30.0
    report_s: float = 10.0
    phase_s: float = 0.0
    start_s: float = 5.0


class SimulatedScaling:
    """See the top of this file. `names`: the replicas that take requests; `changes`: (seconds, how
    many they are from then on). It begins with the fewest, and with one at least."""

    def __init__(self, numbers: ScalingNumbers, times: ScalingTimes) -> None:
        self._numbers = numbers
        self._times = times
        self._target = self._num_made = max(1, numbers.least)
        self.names = [f"replica-{i}" for i in range(self._target)]
        self.changes = [(0.0, self._target)]
        self.next_s = 0.0
        self._began_s = dict.fromkeys(self.names, -times.phase_s)
        self._starting: deque[tuple[float, str]] = deque()
        self._notes: deque[tuple[float, Mapping[str, dict[str, float]]]] = deque()
        self._wants: tuple[bool, float] | None = None  # (more?, since when)

    def look(self, now_s: float, works: Mapping[str, ReplicaWork]) -> bool:
        """Look at the replicas' work, once LOOK_S. Returns whether `names` changed."""
        self.next_s = now_s + LOOK_S
        self._notes.append((now_s, {name: work.told() for name, work in works.items()}))
        while self._notes[0][0] < now_s - self._times.look_back_s - self._times.report_s:
            self._notes.popleft()
        self._decide(now_s)
        before = list(self.names)
        while len(self.names) + len(self._starting) > self._target:
            if self._starting:
                self._starting.pop()
            else:
                self.names.pop()
        while len(self.names) + len(self._starting) < self._target:
            self._starting.append((now_s + self._times.start_s, f"replica-{self._num_made}"))
            self._num_made += 1
        while self._starting and self._starting[0][0] <= now_s:
            name = self._starting.popleft()[1]
            self.names.append(name)
            self._began_s[name] = now_s
        if self.names == before:
            return False
        self.changes.append((now_s, len(self.names)))
        return True

    def _decide(self, now_s: float) -> None:
        told = self._reported(now_s)
        if not told:
            return
        wanted = replicas_for(work_of(told, 0.0), self._target, self._numbers)
        wanted = max(1, wanted)
        if wanted == self._target:
            self._wants = None
            return
        more = wanted > self._target
        if self._wants is None or self._wants[0] != more:
            self._wants = (more, now_s)
        after_s = self._times.up_after_s if more else self._times.down_after_s
        if now_s - self._wants[1] >= after_s:
            self._target, self._wants = wanted, None

    def _reported(self, now_s: float) -> dict[str, dict[str, float]]:
        """Means by name of a number, then by replica, of what has been reported."""
        told: dict[str, dict[str, float]] = {}
        for name in self.names:
            age_s = now_s - self._began_s[name]
            sent_s = now_s - age_s % self._times.report_s
            notes = [
                works[name]
                for at_s, works in self._notes
                if name in works and now_s - self._times.look_back_s <= at_s <= sent_s
            ]
            for key in notes[0] if notes and age_s >= self._times.report_s else ():
                mean = math.fsum(note[key] for note in notes) / len(notes)
                told.setdefault(key, {})[name] = mean
        return told
