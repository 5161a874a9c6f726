"""Which rows of which choices a step computes, and whose blocks hold them.

Rows are the only unit. A decoding sequence has one row pending, a prompt many; both are "rows
that still have to be computed", and so is what a preempted sequence has to recompute. Rules:

- decodes first, then chunks of prompts under way, then admissions; those of one key in the order
  (due, arrival, choice), where a step of priority moves the due time by PRIORITY_STEP_S: within a
  priority nothing is overtaken, and nothing starves whatever others ask for;
- inside a priority keys share by the rows that they take (FairQueue). A request of many choices
  is admitted when half of the seats are free for it, its other choices follow one by one. Where all
  seats or blocks are taken and a key waits that stays within its share of them, the latest choice
  of the key that has most is preempted, if that has more than its share and keeps another choice;
- chunked prefill: a long prompt in one step would delay every choice that decodes, so while others
  decode, prompts get at most `chunked_prefill_rows` rows a step, by the measured cost of rows;
- when blocks run out under choices that run, the lowest priority, latest arrival is preempted, of
  the key that has more than its share, if there is one: it loses its blocks and recomputes later.
  The first in order always makes progress. A sequence that is alone and still does not fit fails,
  and only it;
- no other admission preempts anyone. Drafts take what is left and never preempt either.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from server.engine.batch import Int32
from server.engine.blocks import BlockPool, chain_key
from server.engine.sequence import Sequence, Status
from server.engine.step_times import CostTable
from server.engine.table import CHUNK, LACKS_ROOM, Table, describe, scan
from server.types import EngineSizes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings(EngineSizes):
    """An engine's sizes, and the numbers of its step loop.

    chunked_prefill_rows: prompt rows a step while others decode, None for half
    of max_num_batched_tokens. target_step_s: if above 0 and costs are measured, prompt rows are
    chosen so that a step takes about so long (never below min_chunked_prefill_rows). prefill_ratio:
    where a step is slow, prompt rows may take this many times as long as the decoding rows alone,
    up to chunked_prefill_rows; with a fixed time alone, chunks on a slow machine or with a large
    model would be so small that most of a prompt's time went to the decoding rows of its many
    steps. max_draft_rows: tree nodes a step, over all sequences; 0 is off. max_verify_every: most
    unverified tokens of an `exact` sequence. may_use_full_head: whether `exact` draws from the full
    head where that is cheaper. slices_only: requests that need the full head are refused: it is in
    its file.
    """

    chunked_prefill_rows: int | None = None
    min_chunked_prefill_rows: int = 16
    target_step_s: float = 0.0
    prefill_ratio: float = 8.0
    max_draft_rows: int = 512
    max_verify_every: int = 64
    may_use_full_head: bool = True
    slices_only: bool = False

    @property
    def most_prefill_rows(self) -> int:
        """chunked_prefill_rows as a number."""
        if self.chunked_prefill_rows is not None:
            return self.chunked_prefill_rows
        return max(16, self.max_num_batched_tokens // 2)


# -- who is next -----------------------------------------------------------------------------------


def _order(item: Sequence) -> tuple[float, int, int, int]:
    return item.order


class FairQueue:
    """Who waits, and who is next, so that keys share an engine by the rows that they take. While an
    item waits its order, which is unique, and its place, (level, key), do not change.

    Start-time fair queueing (Goyal, Vin, Cheng 1996, section 2): each key has a clock that advances
    by the rows it took. Served next is who waits with the earliest clock. A key that comes back
    after it had nothing waiting starts at the time of the queue, that of the key served last: it
    saved nothing up, and owes nothing for rows that nobody else wanted. Deficit round robin gives
    the same shares, but must know what an item costs before it is served; here rows are told when
    they were taken.

    Levels (priorities) come first: served is the level that holds who is first in order, and inside
    it keys share. So with one key items leave in their order, whatever their levels are.
    """

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, list[Sequence]]] = {}  # by level and key, each in order
        self._num_of: dict[str, int] = {}  # that wait, of keys that have some
        # Rows that a key took, and those that others took while it wanted none.
        self._clocks: dict[str, int] = {}
        self._now = 0

    def __len__(self) -> int:
        return sum(self._num_of.values())

    def __bool__(self) -> bool:
        return bool(self._num_of)

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait; those of one level and key in their order."""
        for lines in self._lines.values():
            for line in lines.values():
                yield from line

    @property
    def keys(self) -> Iterable[str]:
        """The keys of which something waits."""
        return self._num_of.keys()

    def add(self, item: Sequence) -> None:
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

    def remove(self, item: Sequence) -> None:
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

    def first(self) -> Sequence:
        """Who is served next. Raises IndexError when nobody waits."""
        levels = list(self._lines.values())
        lines = levels[0]
        if len(levels) > 1:
            lines = min(levels, key=lambda of: min(line[0].order for line in of.values()))
        heads = [line[0] for line in lines.values()]
        return heads[0] if len(heads) == 1 else min(heads, key=self._rank)

    def serve(self, item: Sequence, num_rows: int) -> None:
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
        self._clocks.clear()

    def _rank(self, item: Sequence) -> tuple[float, ...]:
        return (self._clocks.get(item.place[1], 0), *item.order)


# -- which rows ------------------------------------------------------------------------------------


_SMALL_STEPS = 1000  # after the n-th step that did not fit, n times as many


@cache
def _ones(num: int) -> Int32:
    """int32 [num] of ones, which nobody changes."""
    return np.ones(num, np.int32)


@dataclass(slots=True)
class Rows:
    """The rows of a step: of each item, positions [start, start + num) of one choice.

    sequences, seats, start, num: by item; int32 [items]. Choices that decode come first. draws:
    int32, 1 where an item's last row is drawn from, else 0. num_rows: of all items;
    num_prefill_rows: of them those of prompts and of what is computed again. is_plain: whether all
    choices are (see the table). copies: blocks (from, to) to be copied before. failed: choices that
    no memory is large enough for. While the same choices decode and nobody else does anything,
    `seats` is the same array from step to step, and the others are written anew.
    """

    sequences: SequenceOf[Sequence]
    seats: Int32
    start: Int32
    num: Int32
    draws: Int32
    num_rows: int
    num_prefill_rows: int
    is_plain: bool
    copies: list[tuple[int, int]]
    failed: list[Sequence]


@dataclass(slots=True)
class _Plan:
    """Rows as they are granted: choices that decode, then (choice, rows) of others."""

    decoding: SequenceOf[Sequence] = ()
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns the queues and every block table. Not thread safe: one engine owns it."""

    def __init__(
        self,
        table: Table,
        pool: BlockPool,
        settings: EngineSettings,
        cost: CostTable | None = None,
    ) -> None:
        """cost: of rows, for chunks of prompts (None: not measured). A step holds a row of every
        sequence, by the configuration (EngineConfig)."""
        self.table = table
        self.pool = pool
        self.max_num_seqs = settings.max_num_seqs
        self.max_num_batched_tokens = settings.max_num_batched_tokens
        self._settings = settings
        self._num_too_large = self._num_small = 0  # steps that did not fit; small ones since then
        self._cost = cost
        self._seats: Int32 | None = None  # of `running`; None: somebody has come or gone
        self._found = self._start = self._draws = _ones(0)  # of each of these, in this step
        self.roll_back: Callable[[Sequence, int], None] = Sequence.rollback  # Drafts' goes further
        self.running: list[Sequence] = []  # in order
        self.waiting = FairQueue()
        self._held: Counter[str] = Counter()  # seats, by key
        self.num_waiting_tokens = 0
        self._looked_for: tuple[object, tuple[list[int], int, int]] = None, ([], -1, 0)
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up, prompt tokens found
        self.prefix_hits = 0

    # -- queues -----------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        """A new sequence, or one that lost its blocks, waits in its order."""
        sequence.status = Status.WAITING
        self.waiting.add(sequence)
        self.num_waiting_tokens += sequence.num_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares the parent's blocks up to the prompt's end and runs on, if a seat is
        free.

        Full blocks stay shared; the tail block is copied by the first that writes into it. Without
        a seat the child waits and recomputes what the prefix cache no longer holds.
        """
        if len(self.running) >= self.max_num_seqs:
            self.enqueue(child)
            return
        table, size = self.table, self.table.block_size
        num = -(-parent.prompt_len // size)
        table.blocks[child.seat, :num] = table.blocks[parent.seat, :num]
        child.num_blocks = num
        for block in child.blocks():
            self.pool.acquire(block)
        parent.room = min(parent.room, parent.prompt_len // size * size)  # the tail block is shared
        child.num_computed = min(parent.prompt_len, child.num_tokens - 1)
        child.keys = parent.keys[: parent.prompt_len // size]
        child.num_published = len(child.keys)
        self._run(child)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queues and return all its blocks: finished, failed or
        aborted."""
        self.waiting.charge(sequence.request.tenant, sequence.num_output)
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            self.num_waiting_tokens -= sequence.num_tokens
        sequence.status = Status.FINISHED
        self.release_blocks(sequence, 0)
        if not self.running and not self.waiting:
            self.waiting.rest()

    def release_blocks(self, sequence: Sequence, keep: int) -> None:
        """Give back the blocks after the first `keep`."""
        table, seat = self.table, sequence.seat
        num = int(table.num_blocks[seat])
        if num > keep:
            blocks = table.blocks[seat, keep:num]
            self.pool.release(reversed(blocks.tolist()))
            blocks[:] = 0
            table.num_blocks[seat] = keep
            table.room[seat] = min(table.room[seat], keep * table.block_size)

    def trim(self, sequence: Sequence) -> None:
        """Give back blocks that only held draft nodes; none past the last known token stays."""
        num_tokens = int(self.table.num_tokens[sequence.seat])
        self.release_blocks(sequence, -(-num_tokens // self.table.block_size))

    def preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a running sequence; it waits and recomputes. Not a finish.

        Tokens that are emitted but not verified are dropped: they will be drawn again, the same.
        """
        self._stop(sequence)
        self.roll_back(sequence, sequence.num_verified)
        self.release_blocks(sequence, 0)
        sequence.num_computed = 0
        sequence.num_published = 0
        self.num_preemptions += 1
        self.enqueue(sequence)

    # -- the step ---------------------------------------------------------------------------

    def make_smaller(self, num_rows: int) -> bool:
        """A step of num_rows rows did not fit the device's memory: for some time a step has at most
        half as many, and never fewer than max_num_seqs. False when it was already that small."""
        smaller = max(self.max_num_seqs, num_rows // 2)
        if smaller >= num_rows:
            return False
        self.max_num_batched_tokens = smaller
        self._num_too_large, self._num_small = self._num_too_large + 1, 0
        _log.warning("a step of %d rows did not fit the memory: now %d at most", num_rows, smaller)
        return True

    def plan(self, only: Sequence | None = None) -> Rows:
        """The rows of the next step. only: the one sequence that may run (a failed step is
        isolated)."""
        most, now = self._settings.max_num_batched_tokens, self.max_num_batched_tokens
        if now < most:  # there may be memory again; this is tried less and less often
            self._num_small += 1
            if self._num_small >= _SMALL_STEPS * self._num_too_large:
                self.max_num_batched_tokens, self._num_small = min(most, 2 * now), 0
        plan, running, seats = _Plan(), self.running, self._running_seats()
        if only is not None:
            running = [s for s in running if s is only]
            seats = np.array([s.seat for s in running], np.int32)
        found = self._found[: len(running)]
        every = scan(self.table.numbers, seats, found)
        plan.decoding, others = running[:], []
        if every & CHUNK:
            plan.decoding = [running[i] for i in np.flatnonzero(found != CHUNK)]
            others = [running[i] for i in np.flatnonzero(found == CHUNK)]
        if every & LACKS_ROOM:
            for sequence in [running[i] for i in np.flatnonzero(found == LACKS_ROOM)]:
                if sequence.status is Status.RUNNING:
                    self._reserve(sequence, 1, plan)
        left = self.max_num_batched_tokens - len(plan.decoding)
        if len(plan.decoding) and (others or self.num_waiting_tokens):
            left = min(left, self._chunked_prefill_rows(plan.decoding))
        for sequence in others:
            if left > 0 and sequence.status is Status.RUNNING:
                left -= self._grant(sequence, left, plan)
        # Where one has failed nobody runs, and the other choices of its request are to fail, too.
        while left > 0 and self.num_waiting_tokens and not plan.failed:
            sequence = self.waiting.first() if only is None else only
            if sequence.status is not Status.WAITING:
                break
            while not self._admit(sequence):  # before who makes way, whose turn it may be again
                if not self._make_way(sequence, plan):
                    return self._rows(plan)
            left -= self._grant(sequence, left, plan)
        return self._rows(plan)

    def _make_way(self, sequence: Sequence, plan: _Plan) -> bool:
        """Preempt a choice for a waiting one that was not admitted and whose key stays within its
        share with it. False: seats and blocks are shared, or it waits for something else."""
        if self._num_keys < 2:
            return False
        held: Mapping[str, int] = self._held
        share, num_wanted = self.max_num_seqs // self._num_keys, 1
        if len(self.running) < self.max_num_seqs:  # then it lacks blocks, or seats for its choices
            if self._fits(sequence, *self._cached(sequence)):
                return False
            held = self._blocks_of_keys()
            share = self.pool.num_blocks // self._num_keys
            num_wanted = self._num_blocks(sequence.num_tokens + 1)
        if held.get(sequence.request.tenant, 0) + num_wanted > max(1, share):
            return False
        victim = self._latest_of_most(held, share, sequence.place[0])
        if victim is None:
            return False
        self._unplan(victim, plan)
        self.preempt(victim)
        return True

    @property
    def _num_keys(self) -> int:
        """Keys of which a choice runs or waits."""
        return len(self._held.keys() | set(self.waiting.keys))

    def _latest_of_most(self, held: Mapping[str, int], share: int, level: int) -> Sequence | None:
        """The latest choice, of this level or a later one, of the key that holds most, where that
        is more than a share. Never a key's only one: it would begin again and again, never end."""
        more = [key for key in held if held[key] > share and self._held[key] > 1]
        most = max(more, key=held.__getitem__, default=None)
        of_most = (s for s in reversed(self.running) if s.request.tenant == most)
        return next((s for s in of_most if s.place[0] >= level), None)

    def _blocks_of_keys(self) -> dict[str, int]:
        """Blocks by key: those of choices that run, and those that their tokens will take."""
        table, promised = self.table, Counter[str]()
        has = {key: np.zeros(self.pool.num_blocks, np.bool_) for key in self._held}
        for sequence in self.running:
            key, num = sequence.request.tenant, sequence.num_blocks
            has[key][table.blocks[sequence.seat, :num]] = True  # choices of a prompt share some
            promised[key] += max(0, self._num_blocks(sequence.num_tokens) - num)
        return {key: int(blocks.sum()) + promised[key] for key, blocks in has.items()}

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.table.block_size)

    def _rows(self, plan: _Plan) -> Rows:
        """What was planned, in columns."""
        sequences, num = plan.decoding, _ones(len(plan.decoding))
        if len(sequences) == len(self.running) and self._seats is not None:
            seats, start, draws = self._seats, self._start, self._draws
        else:
            sequences = [*plan.decoding, *(sequence for sequence, _ in plan.chunks)]
            seats = np.array([s.seat for s in sequences], np.int32)
            num = np.array([*num, *(num_rows for _, num_rows in plan.chunks)], np.int32)
            start, draws = np.empty((2, len(sequences)), np.int32)
        counts = describe(self.table.numbers, seats, num, start, draws)
        return Rows(sequences, seats, start, num, draws, *counts, plan.copies, plan.failed)

    def _chunked_prefill_rows(self, decoding: SequenceOf[Sequence]) -> int:
        """Most prompt rows of a step in which these decode: see EngineSettings."""
        settings, cost = self._settings, self._cost
        if cost is None or settings.target_step_s <= 0.0:
            return settings.most_prefill_rows
        num_keys = int(self.table.num_tokens[[s.seat for s in decoding]].sum())
        alone_s = cost.cost(len(decoding), num_keys)
        return max(
            settings.min_chunked_prefill_rows,
            cost.rows_within(settings.target_step_s),
            min(settings.most_prefill_rows, cost.rows_within(settings.prefill_ratio * alone_s)),
        )

    @property
    def num_awaiting_first(self) -> int:
        """Choices without a first token that the next steps serve: those whose prompt is under way,
        and those in the queue that free seats would take. A request without a free seat is not
        counted: it waits for others to end, and drafts make them end sooner."""
        table, seats = self.table, self._running_seats()
        first = np.flatnonzero(table.num_tokens[seats] == table.prompt_len[seats])
        num_siblings = sum(len(self.running[i].siblings) for i in first)
        num_free = max(0, self.max_num_seqs - len(seats) - num_siblings)
        num_waiting = len(self.waiting) if self.num_waiting_tokens else 0
        return first.shape[0] + num_siblings + min(num_waiting, num_free)

    def reserve_drafts(self, sequence: Sequence, num_nodes: int) -> int:
        """Reserve room for tree nodes after the root, from free blocks only. Returns how many
        fit."""
        table, seat = self.table, sequence.seat
        first = int(table.num_tokens[seat])  # the slot of node 0
        num_nodes = min(num_nodes, table.blocks.shape[1] * table.block_size - first)
        while table.room[seat] < first + num_nodes and self.pool.num_free > 0:
            self._add_block(sequence)
        return max(0, min(num_nodes, int(table.room[seat]) - first))

    def publish(self, sequence: Sequence) -> None:
        """Publish full blocks whose tokens are verified and whose KV is computed."""
        if not self._settings.prefix_cache:
            return
        table, seat = self.table, sequence.seat
        verified = table.prompt_len[seat] + table.num_verified[seat]
        num = int(min(table.num_computed[seat], verified)) // table.block_size
        first = int(table.num_published[seat])
        if num <= first:
            return
        self._extend_keys(sequence, num)
        size, keys = table.block_size, sequence.keys
        for i in range(first, num):
            block = int(table.blocks[seat, i])
            if self.pool.writable(block):
                parent = keys[i - 1] if i else sequence.root_key
                ids = sequence.ids[i * size : (i + 1) * size].tobytes()
                self.pool.publish(block, parent, ids, sequence.request.tenant)
        table.num_published[seat] = num

    # -- inside -----------------------------------------------------------------------------

    def _extend_keys(self, sequence: Sequence, num: int) -> None:
        size, keys = self.table.block_size, sequence.keys
        parent = keys[-1] if keys else sequence.root_key
        for i in range(len(keys), num):
            parent = chain_key(parent, sequence.ids[i * size : (i + 1) * size].tobytes())
            keys.append(parent)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a seat and its cached prefix, if seat and blocks allow."""
        if self.running:
            num_seats = sum(self._portion(s) for s in self.running)
            if num_seats + self._portion(sequence) > self.max_num_seqs:
                return False
        hits, num_cached = self._cached(sequence)
        if self.running and not self._fits(sequence, hits, num_cached):
            return False
        self.waiting.serve(sequence, sequence.num_tokens - num_cached)
        self.num_waiting_tokens -= sequence.num_tokens
        for block in hits:
            self.pool.acquire(block)
        sequence.num_blocks = len(hits)
        self.table.blocks[sequence.seat, : len(hits)] = hits
        sequence.num_published = num_cached // self.table.block_size
        sequence.num_computed = num_cached
        if self._reads_cache(sequence) and sequence.num_cached_tokens < 0:
            self.prefix_queries += sequence.prompt_len
            self.prefix_hits += num_cached
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = num_cached
        self._run(sequence)
        return True

    def _reads_cache(self, sequence: Sequence) -> bool:
        return self._settings.prefix_cache and not sequence.scores_prompt

    def _cached(self, sequence: Sequence) -> tuple[list[int], int]:
        """The blocks of a waiting sequence's prefix that the cache has, and how many of its tokens
        they hold. Behind those that are its own whole there may be one more, which begins as its
        next block will: `_reserve` copies that before anything is written into it."""
        if not self._reads_cache(sequence):
            return [], 0
        # Who waits for blocks is looked for at every step. An order is one choice's; the choice
        # itself would outlive its request here.
        of = sequence.order, sequence.num_tokens, self.pool.num_changes
        if self._looked_for[0] != of:
            self._looked_for = of, self._look_for(sequence)
        hits, block, more = self._looked_for[1]
        num = len(hits) * self.table.block_size
        if more and self._fits(sequence, [*hits, block], num):
            return [*hits, block], num + more
        return hits, num

    def _look_for(self, sequence: Sequence) -> tuple[list[int], int, int]:
        """(the whole blocks that `_cached` tells of, what BlockPool.nearest finds behind them)."""
        hits, size = list[int](), self.table.block_size
        ids = sequence.ids[: sequence.num_tokens - 1].tobytes()  # one token is recomputed
        while True:
            num = len(hits) * size
            self._extend_keys(sequence, len(hits))
            parent = sequence.keys[len(hits) - 1] if hits else sequence.root_key
            block, more = self.pool.nearest(parent, ids[4 * num : 4 * (num + size)])
            if more < size:
                return hits, block, more
            hits.append(block)

    def _fits(self, sequence: Sequence, hits: list[int], num_cached: int) -> bool:
        """Whether blocks are free for a waiting sequence beside those that it finds, `hits`. As
        rows are left for it, prompts under way have all of theirs, and their blocks."""
        idle_hits = sum(self.pool.ref_count(block) == 0 for block in hits)
        need = self._num_blocks(sequence.num_tokens + 1) - num_cached // self.table.block_size
        return need <= self.pool.num_free - idle_hits

    def _portion(self, sequence: Sequence) -> int:
        """Seats that are kept for a sequence and the choices that fork off it."""
        return min(1 + len(sequence.siblings), max(1, self.max_num_seqs // 2))

    def _running_seats(self) -> Int32:
        """int32: of those that run, in order; the same array while nobody comes or goes."""
        if self._seats is None:
            self._seats = np.array([s.seat for s in self.running], np.int32)
            self._found, self._start, self._draws = np.empty((3, len(self.running)), np.int32)
        return self._seats

    def _run(self, sequence: Sequence) -> None:
        """Add a sequence to those that run."""
        sequence.status = Status.RUNNING
        adapter = sequence.adapter
        self.table.adapter[sequence.seat] = -1 if adapter is None else adapter.place
        insort(self.running, sequence, key=_order)
        self._held[sequence.request.tenant] += 1
        self._seats = None

    def _stop(self, sequence: Sequence) -> None:
        """Take a sequence out of those that run."""
        self.running.remove(sequence)
        self._held[sequence.request.tenant] -= 1
        if not self._held[sequence.request.tenant]:
            del self._held[sequence.request.tenant]
        self._seats = None

    def _grant(self, sequence: Sequence, left: int, plan: _Plan) -> int:
        """Plan the next rows of a running sequence, `left` at most; how many (0: it lost its
        blocks)."""
        num_rows = min(left, sequence.num_tokens - sequence.num_computed)
        if not self._reserve(sequence, num_rows, plan):
            return 0
        plan.chunks.append((sequence, num_rows))
        return num_rows

    def _reserve(self, sequence: Sequence, num_rows: int, plan: _Plan) -> bool:
        """Writable blocks for the next rows of a sequence. Preempts from the back of the order."""
        table, seat, pool = self.table, sequence.seat, self.pool
        size, blocks, start = table.block_size, table.blocks[seat], int(table.num_computed[seat])
        at, end = start // size, start + num_rows
        while True:
            # A victim may have shared the block that is to be copied.
            num_blocks = int(table.num_blocks[seat])
            copy = at < num_blocks and not pool.writable(int(blocks[at]))
            if pool.num_free >= max(0, -(-end // size) - num_blocks) + copy:
                break
            victim = self.running[-1]
            if len(self._held) > 1:
                share = pool.num_blocks // self._num_keys
                held, level = self._blocks_of_keys(), victim.place[0]
                victim = self._latest_of_most(held, share, level) or victim
            self._unplan(victim, plan)
            if victim is sequence and len(self.running) == 1:
                plan.failed.append(sequence)
                self.remove(sequence)
                return False
            self.preempt(victim)
            if victim is sequence:
                return False
        if copy:
            shared, own = int(blocks[at]), pool.allocate()
            plan.copies.append((shared, own))
            pool.release((shared,))
            blocks[at] = own
        table.room[seat] = num_blocks * size
        while table.room[seat] < end:
            self._add_block(sequence)
        return True

    def _add_block(self, sequence: Sequence) -> None:
        """One more block at a sequence's end."""
        table, seat = self.table, sequence.seat
        num = int(table.num_blocks[seat])
        table.blocks[seat, num] = self.pool.allocate()
        table.num_blocks[seat] = num + 1
        table.room[seat] = (num + 1) * table.block_size

    def _unplan(self, sequence: Sequence, plan: _Plan) -> None:
        """Its rows are not computed in this step; its blocks are still its own."""
        plan.decoding = [s for s in plan.decoding if s is not sequence]
        plan.chunks = [chunk for chunk in plan.chunks if chunk[0] is not sequence]
        own = set(sequence.blocks())
        plan.copies = [(src, dst) for src, dst in plan.copies if dst not in own]
