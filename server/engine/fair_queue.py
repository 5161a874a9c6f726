"""FairQueue: who waits, and who is next, so that keys share an engine by the rows that they take.

Start-time fair queueing (Goyal, Vin, Cheng 1996, section 2): each key has a clock that advances by
the rows it took. Served next is who waits with the earliest clock. A key that comes back after it
had nothing waiting starts at the time of the queue, that of the key served last: it saved nothing
up, and owes nothing for rows that nobody else wanted. Deficit round robin gives the same shares,
but must know what an item costs before it is served; here rows are told when they were taken.

Levels (priorities) come first: served is the level that holds who is first in order, and inside it
keys share. So with one key items leave in their order, whatever their levels are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What does not change while it waits. order: unique. place: its (level, key)."""

    @property
    def order(self) -> tuple[Any, ...]: ...

    @property
    def place(self) -> tuple[int, str]: ...


T = TypeVar("T", bound=Waiting)


def _order(item: Waiting) -> tuple[Any, ...]:
    return item.order


class FairQueue(Generic[T]):
    """The items that wait. Not thread safe."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, list[T]]] = {}  # by level and key, each in order
        self._num_of: dict[str, int] = {}  # that wait, of keys that have some
        self._clocks: dict[str, int] = {}  # rows
        self._now = 0

    def __len__(self) -> int:
        return sum(self._num_of.values())

    def __bool__(self) -> bool:
        return bool(self._num_of)

    def __iter__(self) -> Iterator[T]:
        """All that wait; those of one level and key in their order."""
        for lines in self._lines.values():
            for line in lines.values():
                yield from line

    @property
    def keys(self) -> Iterable[str]:
        """The keys of which something waits."""
        return self._num_of.keys()

    def add(self, item: T) -> None:
        """An item waits."""
        level, key = item.place
        if key not in self._num_of:
            self._clocks[key] = max(self._clocks.get(key, 0), self._now)
        self._num_of[key] = self._num_of.get(key, 0) + 1
        line = self._lines.setdefault(level, {}).setdefault(key, [])
        if line:
            insort(line, item, key=_order)
        else:
            line.append(item)

    def remove(self, item: T) -> None:
        """An item waits no more. Raises KeyError or ValueError when it does not wait."""
        level, key = item.place
        line = self._lines[level][key]
        at = 0 if line[0] is item else bisect_left(line, item.order, key=_order)
        if at == len(line) or line[at] is not item:
            raise ValueError("it does not wait")
        del line[at]
        if not line:
            del self._lines[level][key]
            if not self._lines[level]:
                del self._lines[level]
        self._num_of[key] -= 1
        if not self._num_of[key]:
            del self._num_of[key]

    def first(self) -> T:
        """Who is served next. Raises IndexError when nobody waits."""
        levels = list(self._lines.values())
        lines = levels[0]
        if len(levels) > 1:
            lines = min(levels, key=lambda of: min(line[0].order for line in of.values()))
        heads = [line[0] for line in lines.values()]
        return heads[0] if len(heads) == 1 else min(heads, key=self._rank)

    def serve(self, item: T, num_rows: int) -> None:
        """An item waits no more, and its key takes so many rows for it. Raises as `remove`."""
        _, key = item.place
        self.remove(item)
        clock = self._clocks[key]
        self._now = max(self._now, clock)
        self._clocks[key] = clock + num_rows

    def charge(self, key: str, num_rows: int) -> None:
        """A key took so many rows more for what it was served."""
        self._clocks[key] = self._clocks.get(key, 0) + num_rows

    def rest(self) -> None:
        """Nothing waits, and nothing that was served runs: whoever comes next is level with all."""
        self._now = max(self._now, *self._clocks.values(), 0)
        self._clocks.clear()

    def clock(self, key: str) -> int:
        """Rows that a key took, and those that others took while it wanted none."""
        return self._clocks.get(key, 0)

    def _rank(self, item: T) -> tuple[Any, ...]:
        return (self.clock(item.place[1]), *item.order)
