"""Stop strings, matched on bytes across token boundaries.

The engine never detokenizes. `StopTable` gives the bytes that an id adds to the text (two flat
arrays, so the table may be memory-mapped and shared by processes), and a `StopMatcher` of each
sequence keeps just enough of the tail to see a string that spans tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class StopTable:
    """The bytes that each id adds to the text.

    offsets: int64 [V + 1], ascending. blob: uint8 [offsets[-1]]. Token i adds blob[offsets[i] :
    offsets[i + 1]]; ids at or past V (padded vocabularies) add nothing. special_ids: ids that add
    nothing when a request skips special tokens. Raises ValueError where the arrays do not fit.
    """

    def __init__(
        self,
        offsets: npt.NDArray[np.int64],
        blob: npt.NDArray[np.uint8],
        special_ids: Iterable[int] = (),
    ) -> None:
        if offsets.ndim != 1 or offsets.shape[0] < 1 or int(offsets[-1]) != blob.shape[0]:
            raise ValueError("offsets must be [V + 1] and end at the length of the blob")
        self._offsets = offsets
        self._blob = blob
        self._special = frozenset(special_ids)
        self.vocab_size = offsets.shape[0] - 1

    @staticmethod
    def from_list(tokens: list[bytes], special_ids: Iterable[int] = ()) -> StopTable:
        """A table from the bytes of each id."""
        offsets = np.zeros(len(tokens) + 1, np.int64)
        np.cumsum([len(t) for t in tokens], out=offsets[1:])
        return StopTable(offsets, np.frombuffer(b"".join(tokens), np.uint8), special_ids)

    def of(self, token_id: int, skip_special: bool) -> bytes:
        """The bytes `token_id` adds to the text."""
        if token_id >= self.vocab_size or (skip_special and token_id in self._special):
            return b""
        return self._blob[self._offsets[token_id] : self._offsets[token_id + 1]].tobytes()


class StopMatcher:
    """Finds the first byte at which one of the stop strings ends.

    Where several end at the same byte the longest wins, so the result does not depend on how the
    text was cut into tokens. The state is a function of the tokens pushed so far.
    """

    __slots__ = ("_skip_special", "_stops", "_table", "_tail", "_tail_size")

    def __init__(self, stops: tuple[bytes, ...], table: StopTable, skip_special: bool) -> None:
        if not stops or not all(stops):
            raise ValueError("a matcher needs at least one stop string, none of them empty")
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._tail_size = len(self._stops[0]) - 1
        self._table = table
        self._skip_special = skip_special
        self._tail = b""

    def push(self, token_id: int) -> bytes | None:
        """Take one more token. Returns the stop string that ends inside its bytes, or None."""
        added = self._table.of(token_id, self._skip_special)
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
        self._tail = text[len(text) - self._tail_size :] if self._tail_size < len(text) else text
        return found

    def replay(self, token_ids: Iterable[int]) -> None:
        """The state after exactly these tokens."""
        self._tail = b""
        for token_id in token_ids:
            self.push(token_id)
