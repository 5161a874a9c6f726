"""Pulse: whether an engine makes progress, as far as the API process can tell."""

from __future__ import annotations

import time


class Pulse:
    """What was last heard of one engine. Clock: time.monotonic().

    Every message is a sign of progress; a beat may say that the last progress is older than itself.
    Between messages the age grows, so an engine that is silent looks as one that hangs.
    """

    def __init__(self, stuck_after_s: float) -> None:
        """stuck_after_s: seconds without progress after which the engine counts as stuck."""
        self._stuck_after_s = stuck_after_s
        self._progress_s = time.monotonic()

    def heard(self, age_s: float = 0.0) -> None:
        """A message arrived; age_s: how long ago the engine's loop went on, as it says."""
        self._progress_s = time.monotonic() - age_s

    @property
    def age_s(self) -> float:
        """Seconds since the last sign of progress."""
        return max(0.0, time.monotonic() - self._progress_s)

    @property
    def is_late(self) -> bool:
        """Whether that is too long ago."""
        return self.age_s > self._stuck_after_s
