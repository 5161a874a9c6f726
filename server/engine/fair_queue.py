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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """The items that wait. Not thread safe.

    order: of an item, unique, which does not change while it waits. place: its (level, key).
    """

    def __init__(
        self, order: Callable[[T], tuple[Any, ...]], place: Callable[[T], tuple[int, str]]
    ) -> None:
        self._order = order
        self._place = place
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
        level, key = self._place(item)
        if key not in self._num_of:
            self._clocks[key] = max(self.clock(key), self._now)
        self._num_of[key] = self._num_of.get(key, 0) + 1
        insort(self._lines.setdefault(level, {}).setdefault(key, []), item, key=self._order)

    def remove(self, item: T) -> None:
        """An item waits no more. Raises KeyError or ValueError when it does not wait."""
        level, key = self._place(item)
        line = self._lines[level][key]
        at = bisect_left(line, self._order(item), key=self._order)
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
        """Who is served next. Raises ValueError when nobody waits."""
        lines = min(
            self._lines.values(), key=lambda of: min(self._order(line[0]) for line in of.values())
        )
        return min((line[0] for line in lines.values()), key=self._rank)

    def serve(self, item: T, num_rows: int) -> None:
        """An item waits no more, and its key takes so many rows for it. Raises as `remove`."""
        _, key = self._place(item)
        self.remove(item)
        self._now = max(self._now, self.clock(key))
        self.charge(key, num_rows)

    def charge(self, key: str, num_rows: int) -> None:
        """A key took so many rows more for what it was served."""
        self._clocks[key] = self.clock(key) + num_rows

    def clock(self, key: str) -> int:
        """Rows that a key took, and those that others took while it wanted none."""
        return self._clocks.get(key, 0)

    def _rank(self, item: T) -> tuple[Any, ...]:
        return (self.clock(self._place(item)[1]), *self._order(item))
