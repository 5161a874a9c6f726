"""Stop strings, matched on bytes across token boundaries.

The engine never detokenizes. TokenBytes has the bytes that an id adds to the text, and a
`StopMatcher` of each sequence keeps just enough of the tail to see a string that spans tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from server.token_bytes import TokenBytes


class StopMatcher:
    """Finds the first byte at which one of the stop strings ends.

    Where several end at the same byte the longest wins, so the result does not depend on how the
    text was cut into tokens. The state is a function of the tokens pushed so far.
    """

    __slots__ = ("_skip_special", "_stops", "_table", "_tail", "_tail_size")

    def __init__(self, stops: tuple[bytes, ...], table: TokenBytes, skip_special: bool) -> None:
        if not stops or not all(stops):
            raise ValueError("a matcher needs at least one stop string, none of them empty")
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._tail_size = len(self._stops[0]) - 1
        self._table = table
        self._skip_special = skip_special
        self._tail = b""

    def push(self, token_id: int) -> bytes | None:
        """Take one more token. Returns the stop string that ends inside its bytes, or None."""
        added = self._table.join((token_id,), skip_special=self._skip_special)
        if not added:
            return None
        text = self._tail + added
        num_old = len(self._tail)
        found: bytes | None = None
        first_end = len(text) + 1
        for stop in self._stops:
            at = text.find(stop, max(0, num_old - len(stop) + 1))
            if at >= 0 and at + len(stop) < first_end:
                found, first_end = stop, at + len(stop)
        self._tail = text[max(0, len(text) - self._tail_size) :]
        return found

    def replay(self, token_ids: Iterable[int]) -> None:
        """The state after exactly these tokens."""
        text = self._table.join(token_ids, skip_special=self._skip_special)
        self._tail = text[max(0, len(text) - self._tail_size) :]
