"""FullHead: the LM head's logits for the rows that need them, each row once."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from server.model.cpu.kernels import greedy, likeliest, product
from server.model.cpu.records import FAILED, NO_LIKELY, Float32, Head, Wanted, Work
from server.model.cpu.sizes import LANES
from server.model.cpu.slices import PackedHead

_NO_IDS = np.zeros(0, np.int32)


class FullLogits(NamedTuple):
    """Logits of some rows over the whole vocabulary, -inf past its last id.

    logits float32 [places, outputs in whole panels], states float32 [places, hidden_size]: the
    hidden state that a place's logits are of. places: row -> place. Valid until the next call.
    """

    logits: Float32
    states: Float32
    places: dict[int, int]


class FullHead:
    """The full LM head. Used from one thread at a time.

    cap: soft-capping of the logits, 0 = none.
    """

    def __init__(self, head: PackedHead, vocab_size: int, work: Work, cap: float = 0.0) -> None:
        self._cap = cap
        self._head = head
        self.in_file = head.in_file
        # A step multiplies by the whole head itself; one in its file comes in pieces, after it.
        self._weights = head.record(head.empty(0), 0) if head.in_file else next(head.pieces())
        self._vocab_size = vocab_size
        self._work = work
        self._states = np.zeros((0, head.width), np.float32)
        width = -(-vocab_size // head.outputs_per_panel) * head.outputs_per_panel
        self._logits = np.zeros((0, width), np.float32)
        self._record = self._recorded()

    def _recorded(self) -> Head:
        return Head(self._weights, self._states, self._logits, self._vocab_size, self._cap)

    def widen(self, vocab_size: int) -> None:
        """Give the logits room for ids past the head's own: -inf, until somebody puts them in."""
        wide = -(-vocab_size // LANES) * LANES
        if wide > self._logits.shape[1]:
            self._logits = np.zeros((self._logits.shape[0], wide), np.float32)
            self._record = self._recorded()

    def record(self, num: int) -> Head:
        """The head for a step that wants logits of `num` rows; another one when it has grown."""
        if num > self._states.shape[0]:
            room = max(num, 2 * self._states.shape[0])
            self._states = np.zeros((room, self._states.shape[1]), np.float32)
            self._logits = np.zeros((room, self._logits.shape[1]), np.float32)
            self._record = self._recorded()
        return self._record

    def logits_of(self, rows: npt.NDArray[Any], states: Float32) -> FullLogits:
        """Full logits of states[rows]; rows may repeat."""
        rows = np.unique(rows)
        self.fill(Wanted(rows, _NO_IDS, *NO_LIKELY, np.zeros(2, np.int64)), states)
        return self.found(rows)

    def fill(self, wanted: Wanted, states: Float32) -> int:
        """What a step gives (kernels/step.py), from the states of its rows."""
        num = wanted.rows.shape[0]
        self.record(num)
        wanted.clock[0] = time.perf_counter_ns()
        if num:
            self._states[:num] = states[wanted.rows]
            self._multiply(num)
            self._logits[:num, self._vocab_size :] = -np.inf
        if wanted.greedy.shape[0]:
            lines = np.arange(num)
            greedy(lines, self._logits, self._states, wanted.greedy)
            likely = wanted.likely_ids, wanted.chances
            if likely[0].size:
                likeliest(lines, lines, self._logits, self._states, *likely)
        wanted.clock[1] = time.perf_counter_ns()
        return int(np.count_nonzero(wanted.greedy == FAILED))

    def _multiply(self, num: int) -> None:
        """The logits of the first num states."""
        if not self.in_file:
            product(self._states, num, self._weights, self._logits, self._cap, self._work)
            return
        first = 0
        for weights in self._head.pieces():
            piece = np.empty((num, weights.outputs), np.float32)
            product(self._states, num, weights, piece, self._cap, self._work)
            last = min(first + weights.outputs, self._logits.shape[1])
            self._logits[:num, first:last] = piece[:, : last - first]
            first = last

    def found(self, rows: npt.NDArray[Any] = _NO_IDS) -> FullLogits:
        """The logits that a step gave. rows: different ones, to be found in `places`."""
        places = {row: i for i, row in enumerate(rows.tolist())}
        return FullLogits(self._logits, self._states, places)
