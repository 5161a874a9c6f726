"""Pulse: whether an engine makes progress, as far as the API process can tell."""

from __future__ import annotations

import time
from collections.abc import Mapping

_SAME_S = 0.5
"""Progress that is told later by less than this is the same one, told again."""


class Pulse:
    """When one engine made progress last. Clock: time.monotonic().

    Every message is a sign of progress; a beat says how old the last progress is. Between messages
    the age grows, so a silent engine looks like one that hangs. What an engine waits for a core, on
    a machine that is busy with something else, is no hang: `look` takes it from the age.
    """

    def __init__(self, stuck_after_s: float) -> None:
        """stuck_after_s: seconds without progress after which the engine counts as stuck."""
        self._stuck_after_s = stuck_after_s
        self._progress_s = time.monotonic()
        self._starved_s = 0.0  # of the time since then
        self._waits: Mapping[str, float] = {}

    def heard(self, age_s: float = 0.0) -> None:
        """A message arrived. age_s: seconds since the loop last made progress, as the engine
        reports."""
        progress_s = time.monotonic() - age_s
        if progress_s > self._progress_s + _SAME_S:
            self._starved_s = 0.0
        self._progress_s = progress_s

    def look(self, late_s: float, waits: Mapping[str, float]) -> None:
        """Called now and then. late_s: how much later than it should this process comes to look.
        waits: seconds that each thread of the engine has waited for a core (machine.core_waits),
        since whenever: what the one that waited most has waited since the last look counts."""
        starved_s = max(
            (waits[name] - self._waits[name] for name in waits.keys() & self._waits.keys()),
            default=0.0,
        )
        self._waits = waits
        self._starved_s += max(late_s, starved_s, 0.0)

    @property
    def age_s(self) -> float:
        """Seconds since the last sign of progress in which it could have made some."""
        return max(0.0, time.monotonic() - self._progress_s - self._starved_s)

    @property
    def is_late(self) -> bool:
        """Whether that is longer than stuck_after_s."""
        return self.age_s > self._stuck_after_s
