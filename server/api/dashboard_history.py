"""The last hour of a server, kept in memory for the page: one point every ten seconds, and of the
last minutes all figures, so that a page that was just opened shows the time before.

Both hold cumulative counts, as the page's own snapshots do, so that the page can take the
difference of any two. Nothing is written to disk, and no text or open request is kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.api.keys import ApiKey

EVERY_S = 10.0
NUM_POINTS = 361
NUM_RECENT = 31
"""Points whose figures are kept whole: the page's longest period, five minutes."""


@dataclass(frozen=True, slots=True)
class Point:
    """Counts at one moment. now_s: time.monotonic(). drafts: (task, model, tokens, steps, drafted,
    accepted) for each task and model. running: open sequences of all engines; engine_steps,
    draft_rows: summed over engines."""

    now_s: float
    drafts: tuple[tuple[str, str, float, float, float, float], ...]
    running: float
    engine_steps: float
    draft_rows: float

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Point:
        """The point of a dashboard.snapshot made without a key."""
        sums: dict[tuple[str, str], list[float]] = {}
        for entry in figures["drafts"]:
            own = sums.setdefault((entry["task"], entry["model"]), [0.0] * 4)
            for i, name in enumerate(("tokens", "steps", "drafted", "accepted")):
                own[i] += entry.get(name, 0.0)
        engines = figures["engines"]
        return cls(
            float(figures["now_s"]),
            tuple((task, model, s[0], s[1], s[2], s[3]) for (task, model), s in sums.items()),
            sum(engine.get("running", 0.0) for engine in engines),
            sum(engine.get("steps", 0.0) for engine in engines),
            sum(engine["rows"].get("draft", 0.0) for engine in engines),
        )


class History:
    """Takes a point every EVERY_S seconds while `run` runs, and forgets those over an hour old.

    look: makes a dashboard.snapshot without a key.
    """

    def __init__(self, look: Callable[[], Mapping[str, Any]]) -> None:
        self._look = look
        self._points: deque[Point] = deque(maxlen=NUM_POINTS)
        self._recent: deque[dict[str, Any]] = deque(maxlen=NUM_RECENT)

    def take(self) -> None:
        """Add the point of now."""
        figures = self._look()
        self._points.append(Point.of(figures))
        self._recent.append({**figures, "open": [], "num_open": 0})

    async def run(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Take points until it is cancelled. ask: has engines tell their figures."""
        while True:
            await ask()
            self.take()
            await asyncio.sleep(EVERY_S)

    def since(
        self, after_s: float, key: ApiKey | None, *, tells_sums: bool = True
    ) -> list[dict[str, Any]]:
        """The points later than after_s that `key` may see, as JSON; oldest first.

        A key sees the tasks that it may use; None (a server without keys) sees all. tells_sums: see
        dashboard.snapshot; without them a key that is no admin's sees how busy the engines are.
        """
        is_cut = tells_load_only(key, tells_sums)
        shown = []
        for point in self._points:
            if point.now_s <= after_s:
                continue
            drafts = [
                entry
                for entry in point.drafts
                if not is_cut and (key is None or key.may_use(entry[0], entry[1]))
            ]
            shown.append(
                {
                    "now_s": point.now_s,
                    "running": point.running,
                    "engine_steps": 0.0 if is_cut else point.engine_steps,
                    "draft_rows": 0.0 if is_cut else point.draft_rows,
                    "drafts": drafts,
                }
            )
        return shown

    def recent(self, key: ApiKey | None, *, tells_sums: bool = True) -> list[dict[str, Any]]:
        """The figures of the last minutes that `key` may see, oldest first, without open requests.

        As `since` has it; a key that sees only how busy the engines are gets none.
        """
        if tells_load_only(key, tells_sums):
            return []
        return [
            {
                **figures,
                **{
                    kind: [e for e in figures[kind] if key is None or _may_see(key, e)]
                    for kind in ("drafts", "tasks", "slices")
                },
            }
            for figures in self._recent
        ]


def tells_load_only(key: ApiKey | None, tells_sums: bool) -> bool:
    """Whether a key sees only how busy the engines are. tells_sums: see dashboard.snapshot."""
    return not tells_sums and key is not None and not key.admin


def _may_see(key: ApiKey, entry: Mapping[str, Any]) -> bool:
    return key.may_use(entry["task"], entry["model"])
