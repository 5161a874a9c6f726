"""Pulse: whether an engine makes progress, as far as the API process can tell."""

from __future__ import annotations

import time


class Pulse:
    """When one engine was last heard of. Clock: time.monotonic().

    Every message is a sign of progress; a beat says how old the last progress is. Between messages
    the age grows, so a silent engine looks like one that hangs.
    """

    def __init__(self, stuck_after_s: float) -> None:
        """stuck_after_s: seconds without progress after which the engine counts as stuck."""
        self._stuck_after_s = stuck_after_s
        self._progress_s = time.monotonic()

    def heard(self, age_s: float = 0.0) -> None:
        """A message arrived. age_s: seconds since the loop last made progress, as the engine
        reports."""
        self._progress_s = time.monotonic() - age_s

    @property
    def age_s(self) -> float:
        """Seconds since the last sign of progress."""
        return max(0.0, time.monotonic() - self._progress_s)

    @property
    def is_late(self) -> bool:
        """Whether that is longer than stuck_after_s."""
        return self.age_s > self._stuck_after_s
