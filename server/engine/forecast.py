"""What a drafter is expected to gain on this machine: recorded outputs, replayed in steps.

`forecast` runs recordings through a drafter as Engine.step would, but asks a CostTable instead of a
model how long each step takes. The planner is the engine's (planner.py), prompts come in chunks and
from the prefix cache, the first tree hangs off the step that ends the prompt, and a session is told
the likeliest ids of accepted rows where they were recorded. The time of proposing is measured while
it runs, in CPU seconds of the thread, so that a busy machine does not make drafts look expensive;
in a replay it finds in the caches what a model step would have pushed out of them, so it counts
`ServedBy.cold` times. What else the host does in a step comes from HostCosts. The result is
compared with the plain decode of the same recordings in the same seats:

    speedup = seconds without drafts / seconds with them

The tokens are the recorded ones, so the forecast does not depend on sampling. It chooses among ways
to draft; what the chosen one gains is measured where it can be (served_gain.py).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from drafters.base import Drafter, DraftSession
from drafters.replay import Recording, follow, note_rows
from server.engine.drafting import CheckedTree
from server.engine.gain import Gain, StepShape
from server.engine.host_cost import HostCosts
from server.engine.planner import Ask, DraftPlanner
from server.engine.step_times import CostTable


@dataclass(frozen=True, slots=True)
class ServedBy:
    """The engine that a forecast is of.

    cost: of its steps, every row drawn. undrawn_row_s: seconds that a row of a prompt takes less,
    because it has no LM head. host: beside the model; None: what sessions take to learn is measured
    as proposing is, and the rest costs nothing. vocab_size: what ids of trees are checked against.
    max_rows: rows a step. block_size: of the prefix cache, 0 without one. cold: how many times as
    long asking sessions takes between model steps as between steps of a replay.
    """

    cost: CostTable
    host: HostCosts | None = None
    undrawn_row_s: float = 0.0
    vocab_size: int = 1 << 31
    max_rows: int = 512
    block_size: int = 0
    cold: float = 1.0

    def step_s(self, num_rows: int, num_draws: int, keys: float) -> float:
        """Seconds of the model. num_draws: rows that are drawn from, draft nodes too."""
        whole = self.cost.cost(num_rows, keys)
        # At least half of it: what heads take was measured at another number of rows.
        return max(0.5 * whole, whole - self.undrawn_row_s * (num_rows - num_draws))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expectations for one drafter on one set of recordings. Seconds are the cost table's.

    num_streams: sequences at once. num_tokens: output tokens after each first one. num_steps:
    decode steps of all sequences, the one that ends a prompt not counted (as in drafters.replay).
    num_rows: draft rows. seconds, plain_s: the whole load with drafts and without. prefill_s: the
    part of plain_s that would be left if every output ended at its first token. ask_s: CPU seconds
    that asking sessions took in a step that drafted, in this replay; the median. error: standard
    error of the speedup, by the recordings' own spread.
    """

    num_streams: int
    num_tokens: int
    num_steps: int
    num_rows: int
    seconds: float
    plain_s: float
    prefill_s: float
    ask_s: float = 0.0
    error: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Per sequence, over all its decode steps; the number of tokens without any step."""
        return self.num_tokens / max(1, self.num_steps)

    @property
    def speedup(self) -> float:
        """Of whole requests, prompts included: above 1 is faster than without drafts."""
        return self.plain_s / self.seconds

    @property
    def decode_speedup(self) -> float:
        """Of what comes after the prompts alone."""
        with_drafts = max(self.seconds - self.prefill_s, 1e-12)
        return max(self.plain_s - self.prefill_s, 1e-12) / with_drafts


def ratio_error(above: Sequence[float], below: Sequence[float]) -> float:
    """Standard error of sum(above) / sum(below), of pairs that were drawn together (the delta
    method); 0 where there is one pair."""
    num = len(above)
    if num < 2:
        return 0.0
    ratio = sum(above) / sum(below)
    left = sum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))
    return math.sqrt(left * num / (num - 1)) / sum(below)


class _Seat:
    """One recording under way: prompt rows computed, output tokens emitted, its shares of steps."""

    __slots__ = ("num_computed", "position", "recording", "seat", "seconds", "session")

    def __init__(self, recording: Recording, session: DraftSession | None, seat: int) -> None:
        self.recording = recording
        self.session = session
        self.seat = seat
        self.num_computed = 0
        self.position = 0
        self.seconds = 0.0

    @property
    def length(self) -> int:
        """Keys that its last row attends to."""
        return self.num_computed + self.position


def forecast(
    drafter: Drafter | None,
    recordings: Sequence[Recording],
    served_by: ServedBy,
    *,
    max_draft_tokens: int = 16,
    num_streams: int = 1,
    max_tokens: int = 1 << 30,
) -> Forecast:
    """Replay `recordings` in `num_streams` seats, in order, and price every step.

    drafter: None for the plain path. max_tokens: longest output that requests allow. Recordings
    without a prompt or without an output are left out. Raises ValueError when none is left, and
    DraftError for a tree that an engine would refuse.
    """
    usable = [r for r in recordings if len(r.prompt_ids) and len(r.output_ids)]
    if not usable:
        raise ValueError("a forecast needs at least one recording with a prompt and an output")
    plain = None
    if drafter is not None:
        plain = _Load(usable, None, served_by, 0, num_streams, max_tokens)
    load = _Load(usable, drafter, served_by, max_draft_tokens, num_streams, max_tokens)
    load.run()
    if plain is not None:
        plain.run()
    return Forecast(
        num_streams,
        sum(len(r.output_ids) - 1 for r in usable),
        load.num_steps,
        load.num_rows,
        load.seconds,
        load.seconds if plain is None else plain.seconds,
        _prefill_s(usable, served_by),
        statistics.median(load.asks_s) if load.asks_s else 0.0,
        0.0 if plain is None else ratio_error(plain.shares_s, load.shares_s),
    )


def _prefill_s(recordings: Sequence[Recording], served_by: ServedBy) -> float:
    """Of all prompts, one after the other."""
    seconds = 0.0
    cache = _PrefixCache(served_by.block_size)
    for recording in recordings:
        done = cache.find(recording.prompt_ids)
        left = len(recording.prompt_ids) - done
        while left:
            rows = min(left, served_by.max_rows)
            seconds += served_by.step_s(rows, int(rows == left), rows * (done + 0.5 * rows))
            left, done = left - rows, done + rows
        cache.add(recording.prompt_ids)
    return seconds


class _PrefixCache:
    """Which prompts' blocks are there. It forgets nothing."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._known: set[tuple[int, ...]] = set()

    def find(self, prompt_ids: Sequence[int]) -> int:
        """Tokens of a prompt that need not be computed; the last one is."""
        num = 0
        for blocks in self._blocks(prompt_ids, len(prompt_ids) - 1):
            if blocks not in self._known:
                break
            num = len(blocks)
        return num

    def add(self, prompt_ids: Sequence[int]) -> None:
        """A prompt was computed."""
        self._known.update(self._blocks(prompt_ids, len(prompt_ids)))

    def _blocks(self, prompt_ids: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
        if self._size:
            for end in range(self._size, most + 1, self._size):
                yield tuple(prompt_ids[:end])


class _Load:
    """One pass over the recordings. Written by `run` alone."""

    def __init__(
        self,
        recordings: Sequence[Recording],
        drafter: Drafter | None,
        served_by: ServedBy,
        max_draft_tokens: int,
        num_streams: int,
        max_tokens: int,
    ) -> None:
        self.seconds = 0.0
        self.num_steps = 0
        self.num_rows = 0
        self.asks_s: list[float] = []
        self.shares_s: list[float] = []  # of the seconds, by recording
        self._recordings = recordings
        self._drafter = drafter if max_draft_tokens > 0 else None
        self._served_by = served_by
        self._planner = DraftPlanner(Gain(served_by.cost), served_by.vocab_size)
        known = self._planner.gain.seat("load")  # a scope in which as much comes as is claimed
        for claim in (0.05, 0.25, 0.5, 0.75, 0.95):
            claims = np.full(100, claim)
            self._planner.gain.observe_drafts(known, claims, range(round(100 * claim)))
        costs = HostCosts() if served_by.host is None else served_by.host
        self._host = (costs.plain, costs.plain if self._drafter is None else costs.drafted)
        self._cache = _PrefixCache(served_by.block_size)
        self._max_draft_tokens = max_draft_tokens
        self._num_streams = num_streams
        self._max_rows = max(served_by.max_rows, num_streams)
        self._max_tokens = max_tokens

    def run(self) -> None:
        """Seat recordings, step, and free seats until every recording is done."""
        waiting = iter(self._recordings)
        seats: list[_Seat] = []
        seated: list[_Seat] = []
        while True:
            while len(seats) < self._num_streams:
                recording = next(waiting, None)
                if recording is None:
                    break
                session = None
                if self._drafter is not None:
                    session = self._drafter.open([int(i) for i in recording.prompt_ids])
                seat = _Seat(recording, session, self._planner.gain.seat("load"))
                seat.num_computed = self._cache.find(recording.prompt_ids)
                seats.append(seat)
                seated.append(seat)
            if not seats:
                self.shares_s = [seat.seconds for seat in seated]
                return
            before_s = self.seconds
            self._step(seats)
            for seat in seats:
                seat.seconds += (self.seconds - before_s) / len(seats)
            for seat in [s for s in seats if s.position >= len(s.recording.output_ids)]:
                seats.remove(seat)
                if seat.session is not None:
                    seat.session.close()

    def _step(self, seats: list[_Seat]) -> None:
        num_rows, keys = 0, 0.0
        drawing: list[_Seat] = []
        room = self._max_rows - sum(seat.position > 0 for seat in seats)
        for seat in seats:
            if seat.position:
                num_rows += 1
                keys += seat.length
                drawing.append(seat)
                continue
            left = len(seat.recording.prompt_ids) - seat.num_computed
            rows = min(left, room)
            room -= rows
            num_rows += rows
            keys += rows * (seat.num_computed + 0.5 * rows)
            seat.num_computed += rows
            if rows and rows == left:
                drawing.append(seat)
                self._cache.add(seat.recording.prompt_ids)
        num_waiting = sum(seat.position == 0 for seat in seats)
        num_decoding = len(seats) - num_waiting
        trees, has_asked, host_s = self._timed_trees(drawing, num_rows, num_waiting)
        for seat in seats:  # while the device works: its time is not the step's
            if seat.session is not None:
                seat.session.settle()
        began = time.thread_time()
        num_nodes = 0
        for seat, tree in zip(drawing, trees, strict=True):
            if tree is not None:
                num_nodes += len(tree.token_ids)
                keys += len(tree.token_ids) * seat.length
            self._accept(seat, tree)
        if self._served_by.host is not None:
            host_s += self._host[has_asked].seconds(len(drawing), num_nodes)
        elif self._drafter is not None:
            host_s += time.thread_time() - began
        else:
            host_s = 0.0
        if num_decoding:
            self._planner.gain.host.observe_mix(num_rows > num_decoding)
        if num_rows == len(drawing):
            self._planner.gain.host.observe(num_rows, has_asked, host_s)
        self.num_rows += num_nodes
        num_draws = len(drawing) + num_nodes
        self.seconds += self._served_by.step_s(num_rows + num_nodes, num_draws, keys) + host_s

    def _timed_trees(
        self, drawing: list[_Seat], num_rows: int, num_waiting: int
    ) -> tuple[list[CheckedTree | None], bool, float]:
        """The trees, whether any session was asked, and the seconds that it takes an engine."""
        began = time.thread_time()
        trees, has_asked = self._propose(drawing, num_rows, num_waiting)
        seconds = time.thread_time() - began
        if any(tree is not None for tree in trees):
            self.asks_s.append(seconds)
        return trees, has_asked, seconds * (self._served_by.cold if has_asked else 1.0)

    def _propose(
        self, drawing: list[_Seat], num_rows: int, num_waiting: int
    ) -> tuple[list[CheckedTree | None], bool]:
        """The trees, and whether any session was asked."""
        if self._drafter is None or not drawing:
            return [None] * len(drawing), False
        mean_len = sum(seat.length for seat in drawing) / len(drawing)
        shape = StepShape(len(drawing), num_rows, mean_len, num_waiting)
        room = self._max_rows - num_rows
        room = min(room, self._max_draft_tokens * len(drawing))
        most = self._planner.gain.most(shape, room)
        if not most:
            return [None] * len(drawing), False
        asks: list[Ask] = []
        places: list[int] = []
        for place, seat in enumerate(drawing):
            assert seat.session is not None
            depth = min(self._max_tokens - seat.position - 1, self._max_draft_tokens)
            if depth > 0:
                places.append(place)
                asks.append(Ask(seat.session, seat.seat, self._max_draft_tokens, depth))
        plan = self._planner.plan(asks, shape, most, room)
        if plan.errors:
            raise plan.errors[0][1]
        trees: list[CheckedTree | None] = [None] * len(drawing)
        for place, tree in zip(places, plan.trees, strict=True):
            trees[place] = tree
        return trees, bool(asks)

    def _accept(self, seat: _Seat, tree: CheckedTree | None) -> None:
        output = seat.recording.output_ids
        accepted: list[int] = []
        if tree is not None:
            accepted = follow(tree.tree, output, seat.position)
            self._planner.gain.observe_drafts(seat.seat, tree.survival, accepted)
        num = min(len(accepted) + 1, len(output) - seat.position)
        self.num_steps += seat.position > 0
        if seat.session is not None:
            note_rows(seat.session, seat.recording, seat.position, num)
            if tree is not None:
                seat.session.feedback(tree.tree, accepted)
            seat.session.extend([int(i) for i in output[seat.position : seat.position + num]])
        seat.position += num
