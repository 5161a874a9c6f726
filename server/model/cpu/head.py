"""The LM head's logits: FullHead, of the rows that need them, each row once; SlicedHead, of those
rows of the head that slices need, packed as the full head is.

A table (a task's T, copied once and never per request) is one contiguous packed matrix; sequences
share one pool of dynamic rows; the logits of one slice are gathered in id order. What not: which
rows a slice has and who holds them (the engine's SliceCacheIndex), draws (draws.py).

A row's logit is the same to the last bit in a slice and in the full head: the values are the same
and every product sums over k in order (kernels/vectors.py), wherever the row lies and whatever lies
beside it. Pad columns are never gathered, so a pad cannot win.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from server.engine.batch import Batch, Int32
from server.model.cpu.kernels import copy_bytes, greedy, likeliest, product
from server.model.cpu.linear import activations, aligned, float_linear
from server.model.cpu.records import (
    ALL_IDS,
    LANES,
    NO_LIKELY,
    PANEL,
    Float32,
    Head,
    Int64,
    Linear,
    Screen,
    UInt8,
    Wanted,
    Work,
)

_NO_IDS = np.zeros(0, np.int32)


class FullLogits(NamedTuple):
    """Logits of some rows over the whole vocabulary, -inf past its last id.

    logits float32 [places, outputs in whole panels], states float32 [places, hidden_size]: the
    hidden state that a place's logits are of. places: row -> place. Valid until the next call.
    """

    logits: Float32
    states: Float32
    places: dict[int, int]


def with_room(screen: Screen, num_rows: int) -> Screen:
    """The same for so many rows."""
    width = screen.order.shape[0]
    return screen._replace(
        weights=screen.weights._replace(rows=activations(num_rows, width)),
        states=np.zeros((num_rows, width), np.float32),
        row_bounds=np.zeros((num_rows, 3), np.float32),
        found=np.zeros((screen.found.shape[0], screen.limit * num_rows), np.int64),
    )


def _no_screen(head: Linear) -> Screen:
    """That of a head without one."""
    none, bytes_ = np.zeros((1, 0), np.float32), np.zeros((0, 0), np.uint8)
    order, found = np.zeros(0, np.int32), np.zeros((1, 0), np.int64)
    return Screen(head, bytes_, order, none, none, none, none[0], none[0], 0, found, found[0])


class FullHead:
    """The full LM head. Used from one thread at a time.

    cap: soft-capping of the logits, 0 = none.
    """

    def __init__(self, head: PackedHead, vocab_size: int, work: Work, cap: float = 0.0) -> None:
        self._head = head
        self.in_file = head.in_file
        self._work = work
        # A step multiplies by the whole head itself; one in its file comes in pieces, after it.
        weights = head.record(head.empty(0), 0) if head.in_file else next(head.pieces())
        states = np.zeros((0, head.width), np.float32)
        width = -(-vocab_size // head.outputs_per_panel) * head.outputs_per_panel
        logits = np.zeros((0, width), np.float32)
        self._rows = head.file_rows  # a record has only their address
        rows = self._rows.ctypes.data if self._rows.size else 0, self._rows.strides[0]
        self._record = Head(weights, states, logits, vocab_size, cap, *rows, _no_screen(weights))

    def widen(self, vocab_size: int) -> None:
        """Give the logits room for ids past the head's own: -inf, until somebody puts them in."""
        wide, logits = padded(vocab_size), self._record.logits
        if wide > logits.shape[1]:
            wider = np.zeros((logits.shape[0], wide), np.float32)
            self._record = self._record._replace(logits=wider)

    def use(self, screen: Screen) -> None:
        """Screen the logits of steps that want no more than the largest from now on."""
        self._record = self._record._replace(screen=screen)

    def release(self) -> None:
        """Give back the logits' memory, until a step needs it."""
        states, logits = self._record.states[:0].copy(), self._record.logits[:0].copy()
        self._record = self._record._replace(states=states, logits=logits)

    def record(self, num: int) -> Head:
        """The head for a step that wants logits of `num` rows; another one when it has grown."""
        states, logits = self._record.states, self._record.logits
        if num > states.shape[0]:
            room = max(num, 2 * states.shape[0])
            self._record = self._record._replace(
                states=np.zeros((room, states.shape[1]), np.float32),
                logits=np.zeros((room, logits.shape[1]), np.float32),
                screen=with_room(self._record.screen, room),
            )
        return self._record

    def logits_of(self, rows: npt.NDArray[Any], states: Float32) -> FullLogits:
        """Full logits of states[rows]; rows may repeat."""
        rows = np.unique(rows)
        self.fill(Wanted(rows, _NO_IDS, ALL_IDS, *NO_LIKELY, np.zeros(2, np.int64)), states)
        return self.found(rows)

    def fill(self, wanted: Wanted, states: Float32) -> None:
        """What a step gives (kernels/step.py), from the states of its rows."""
        num = wanted.rows.shape[0]
        head = self.record(num)
        wanted.clock[0] = time.perf_counter_ns()
        if num:
            head.states[:num] = states[wanted.rows]
            self._multiply(head, num)
            head.logits[:num, head.vocab_size :] = -np.inf
        if wanted.greedy.shape[0]:
            lines = np.arange(num)
            of_ids = wanted.words, head.vocab_size
            greedy(lines, *of_ids, head.logits, head.states, wanted.greedy)
            likely = wanted.likely_ids, wanted.chances
            if likely[0].size:
                likeliest(lines, lines, head.logits, head.states, *likely)
        wanted.clock[1] = time.perf_counter_ns()

    def _multiply(self, head: Head, num: int) -> None:
        """The logits of the first num states."""
        if not self.in_file:
            product(head.states, num, head.weights, head.logits, head.cap, self._work)
            return
        first = 0
        for weights in self._head.pieces():
            piece = np.empty((num, weights.outputs), np.float32)
            product(head.states, num, weights, piece, head.cap, self._work)
            last = min(first + weights.outputs, head.logits.shape[1])
            head.logits[:num, first:last] = piece[:, : last - first]
            first = last

    def found(self, rows: npt.NDArray[Any] = _NO_IDS) -> FullLogits:
        """The logits that a step gave. rows: different ones, to be found in `places`."""
        places = {row: i for i, row in enumerate(rows.tolist())}
        return FullLogits(self._record.logits, self._record.states, places)


# -- Slices of it ---------------------------------------------------------------------------------

_EMPTY_ROW = np.empty(0, np.float32)
Panels = npt.NDArray[Any]
"""Of floats [panels, K, PANEL], float32 or uint16 with bfloat16 bits; of integers uint8 [panels,
bytes of a panel]."""


class PackedHead:
    """An LM head as its weight kind packs it: what products and slices need of it.

    panels: [panels, ...], `outputs_per_panel` rows of the head in each. width: K. runs: as
    kernels.copy_bytes has them. record_of: (panels, how many of them) -> a product's weights.
    row_bytes: memory of one row. in_file: whether the rows stay in the model's file, and are packed
    when they are asked for. file_rows: all rows as they lie in a GGUF, uint8 [rows, bytes of a
    row], where they are q8_0, else [0, 0].
    """

    in_file = False
    file_rows: UInt8 = np.zeros((0, 0), np.uint8)

    def __init__(
        self,
        panels: Panels,
        outputs_per_panel: int,
        width: int,
        runs: Int64,
        record_of: Callable[[Panels, int], Linear],
    ) -> None:
        self.panels = panels
        self.outputs_per_panel, self.width = outputs_per_panel, width
        self.row_bytes = panels.strides[0] // outputs_per_panel
        self.record = record_of
        self._runs = runs

    def empty(self, num_rows: int) -> Panels:
        """Zeroed panels for num_rows rows, on a cache line's boundary."""
        num_panels = -(-num_rows // self.outputs_per_panel)
        memory = aligned(num_panels * self.outputs_per_panel * self.row_bytes)
        return memory.view(self.panels.dtype).reshape(num_panels, *self.panels.shape[1:])

    def copy_rows(self, token_ids: Int64, out: Panels, places: Int64) -> None:
        """Row token_ids[i] of the head to row places[i] of `out`, from `empty`."""
        copy_bytes(_bytes(self.panels), token_ids, _bytes(out), places, self._runs)

    def pieces(self) -> Iterator[Linear]:
        """All rows as products' weights, one piece after the other; each is good until the next."""
        yield self.record(self.panels, self.panels.shape[0])


def float_head(panels: Panels) -> PackedHead:
    """A head of floats: panels [panels, K, PANEL], float32 or bfloat16 bits."""
    width, lane = int(panels.shape[1]), panels.itemsize
    starts = np.arange(width, dtype=np.int64) * (PANEL * lane)
    runs = np.stack([starts, starts * 0 + lane, starts * 0 + PANEL], axis=1)
    return PackedHead(
        panels, PANEL, width, runs,
        lambda some, num: float_linear(some)._replace(outputs=num * PANEL),
    )  # fmt: skip


class HeadInFile(PackedHead):
    """A head whose rows stay in the model's file: for a model whose tasks are all slices.

    pack: some rows by their ids, as a PackedHead of their own. What needs all rows packs them
    anew, _PIECE of them at a time: right, and slow.
    """

    in_file = True

    def __init__(self, num_rows: int, pack: Callable[[Int64], PackedHead]) -> None:
        one = pack(np.zeros(1, np.int64))
        super().__init__(one.panels, one.outputs_per_panel, one.width, one._runs, one.record)
        self._num_rows, self._pack = num_rows, pack

    def copy_rows(self, token_ids: Int64, out: Panels, places: Int64) -> None:
        """See PackedHead."""
        if token_ids.shape[0]:
            own = np.arange(token_ids.shape[0], dtype=np.int64)
            self._pack(token_ids).copy_rows(own, out, places)

    def pieces(self) -> Iterator[Linear]:
        """_PIECE rows each, but the last."""
        for first in range(0, self._num_rows, _PIECE):
            last = min(first + _PIECE, self._num_rows)
            piece = self._pack(np.arange(first, last, dtype=np.int64))
            yield from piece.pieces()


_PIECE = 8192


def _bytes(panels: Panels) -> npt.NDArray[np.uint8]:
    return panels.reshape(panels.shape[0], -1).view(np.uint8)


def padded(num: int) -> int:
    """num rounded up to whole vectors."""
    return -(-num // LANES) * LANES


@dataclass(slots=True)
class _Rows:
    """Rows of the head, packed as it is. logits: [rows of a step, outputs in whole panels], grown
    as needed."""

    panels: Any
    logits: Float32


class SlicedHead:
    """Tables and the dynamic pool over one packed head. Used from one thread at a time.

    head: the packed full head. work: the threads of its products. cap: soft-capping of the logits,
    0 = none. `num_bytes` counts what is held beside it.
    """

    def __init__(self, head: PackedHead, work: Work, cap: float = 0.0) -> None:
        self._head = head
        self._cap = cap
        self._panel = head.outputs_per_panel
        self._work = work
        self._tables: dict[int, _Rows] = {}
        self._pool = self._rows_for(0)

    def _rows_for(self, num: int) -> _Rows:
        return _Rows(self._head.empty(num), np.zeros((0, 0), np.float32))

    @property
    def num_bytes(self) -> int:
        """Bytes of copied head rows, pads included."""
        return sum(int(held.panels.nbytes) for held in (self._pool, *self._tables.values()))

    def load_table(self, table: int, token_ids: Int32) -> None:
        """Copy the rows of ascending ids into one matrix. Raises ValueError for a taken number."""
        if table in self._tables:
            raise ValueError(f"table {table} is loaded already")
        held = self._rows_for(token_ids.shape[0])
        places = np.arange(token_ids.shape[0], dtype=np.int64)
        self._head.copy_rows(token_ids.astype(np.int64), held.panels, places)
        self._tables[table] = held

    def drop_table(self, table: int) -> None:
        """Forget a table; unknown numbers are fine."""
        self._tables.pop(table, None)

    def load_rows(self, token_ids: Int32, places: Int32) -> None:
        """Copy head rows into places of the pool, which doubles when it is too small."""
        if not places.shape[0]:
            return
        most, old = int(places.max()) + 1, self._pool.panels
        if most > old.shape[0] * self._panel:
            self._pool.panels = self._head.empty(max(most, 2 * old.shape[0] * self._panel))
            self._pool.panels[: old.shape[0]] = old
        pool = self._pool.panels
        self._head.copy_rows(token_ids.astype(np.int64), pool, places.astype(np.int64))

    def logits_of(self, batch: Batch, hidden: Float32) -> dict[int, tuple[Float32, Float32]]:
        """Per draw from a cached slice: its row's logits over the table and the dynamic rows.

        One product for each table and one over the dynamic rows, whatever the number of slices.
        hidden: [rows of the batch, K].
        """
        if batch.draw_slice is None:
            return {}
        by_table: dict[int, list[int]] = {}
        num_pool = 0
        for d, i in enumerate(batch.draw_slice.tolist()):
            if i >= 0 and batch.slices[i].table >= 0:
                by_table.setdefault(batch.slices[i].table, []).append(d)
        for slice_ in batch.slices:
            if slice_.columns.shape[0]:
                num_pool = max(num_pool, int(slice_.columns.max()) + 1 - slice_.num_static)
        views: dict[int, tuple[Float32, Float32]] = {}
        for table, draws in by_table.items():
            rows, where = np.unique(batch.draw_rows[draws], return_inverse=True)
            states = hidden[rows]
            held = self._tables[table]
            static = self._product(held, held.panels.shape[0], states)
            pool = None
            if num_pool > 0:
                pool = self._product(self._pool, -(-num_pool // self._panel), states)
                if len(by_table) > 1:  # the next table's rows overwrite it
                    pool = pool[: rows.shape[0]].copy()
            for d, place in zip(draws, where.tolist(), strict=True):
                views[d] = static[place], _EMPTY_ROW if pool is None else pool[place]
        return views

    def _product(self, held: _Rows, num_panels: int, states: Float32) -> Float32:
        """Logits of states [n, K] over the first panels: [n or more, outputs in whole panels].

        Valid until the next call for the same rows. Columns past them are no logits.
        """
        num, (room, width) = states.shape[0], held.logits.shape
        if room < num or width < num_panels * self._panel:
            size = max(num, 2 * room), held.panels.shape[0] * self._panel
            held.logits = np.zeros(size, np.float32)
        if num and num_panels:
            weights = self._head.record(held.panels, num_panels)
            product(states, num, weights, held.logits, self._cap, self._work)
        return held.logits
