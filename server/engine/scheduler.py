"""Scheduler: which rows of which sequences a step computes, and whose blocks hold them.

Rows are the only unit. A decoding sequence has one row pending, a prompt many; both are "rows
that still have to be computed", and so is what a preempted sequence has to recompute. Rules:

- decodes first, then chunks of prompts under way, then admissions; each in the order
  (due, arrival, choice), where a step of priority moves the due time by PRIORITY_STEP_S: within a
  priority nothing is overtaken, and nothing starves whatever others ask for;
- chunked prefill: while others decode, prompts get at most `chunked_prefill_rows` rows a step;
- when blocks run out the lowest priority, latest arrival is preempted: it loses its blocks and
  recomputes later. The first in order always makes progress. A sequence that is alone and still
  does not fit fails, and only it;
- an admission never preempts anyone. Drafts take what is left and never preempt either.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Sequence as SequenceOf

from server.engine.blocks import BlockPool, chain_key
from server.engine.plan import Plan, Scheduled
from server.engine.sequence import Sequence, SequenceMark, Status

__all__ = ["Scheduler"]

_log = logging.getLogger(__name__)


def _order(sequence: Sequence) -> tuple[float, int, int, int]:
    return sequence.order


class Scheduler:
    """Owns the queues and every block table. Not thread safe: one engine owns it."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill_rows: int,
    ) -> None:
        """chunked_prefill_rows: most prompt rows a step while others decode; the engine refreshes
        it before each step.

        Raises ValueError when a step could not hold one row of every sequence.
        """
        if max_num_seqs < 1 or chunked_prefill_rows < 1:
            raise ValueError("max_num_seqs and chunked_prefill_rows must be at least 1")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill_rows = chunked_prefill_rows
        self.running: list[Sequence] = []  # in order
        self.waiting: list[Sequence] = []  # in order
        self.num_waiting_tokens = 0
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up, prompt tokens found
        self.prefix_hits = 0

    # -- queues -----------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        """A new sequence, or one that lost its blocks, waits in its order."""
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_order)
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
        num = -(-parent.prompt_len // parent.block_size)
        child.table[:num] = parent.table[:num]
        child.num_blocks = num
        for block in child.blocks():
            self.pool.acquire(block)
        child.num_computed = min(parent.prompt_len, child.num_tokens - 1)
        child.keys = parent.keys[: parent.prompt_len // parent.block_size]
        child.num_published = len(child.keys)
        child.status = Status.RUNNING
        insort(self.running, child, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queues and return all its blocks: finished, failed or
        aborted."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            self.num_waiting_tokens -= sequence.num_tokens
        sequence.status = Status.FINISHED
        self.release_blocks(sequence, 0)

    def release_blocks(self, sequence: Sequence, keep: int) -> None:
        """Give back the blocks after the first `keep`."""
        num = sequence.num_blocks
        if num > keep:
            self.pool.release(reversed(sequence.table[keep:num].tolist()))
            sequence.table[keep:num] = 0
            sequence.num_blocks = keep

    def trim(self, sequence: Sequence) -> None:
        """Give back blocks that only held draft nodes; none past the last known token stays."""
        self.release_blocks(sequence, -(-sequence.num_tokens // sequence.block_size))

    def preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a running sequence; it waits and recomputes. Not a finish.

        Tokens that are emitted but not verified are dropped: they will be drawn again, the same.
        """
        self.running.remove(sequence)
        sequence.rollback(SequenceMark(sequence.num_verified))
        self.release_blocks(sequence, 0)
        sequence.num_computed = 0
        sequence.num_published = 0
        self.num_preemptions += 1
        self.enqueue(sequence)

    # -- the step ---------------------------------------------------------------------------

    def make_smaller(self, num_rows: int) -> bool:
        """A step of num_rows rows did not fit the device's memory: from now on a step has at most
        half as many, and never fewer than max_num_seqs. False when it was already that small."""
        smaller = max(self.max_num_seqs, num_rows // 2)
        if smaller >= num_rows:
            return False
        self.max_num_batched_tokens = min(self.max_num_batched_tokens, smaller)
        _log.warning("a step of %d rows did not fit the memory: now %d at most", num_rows, smaller)
        return True

    def schedule(self, only: Sequence | None = None) -> Plan:
        """The rows of the next step. only: the one sequence that may run (a failed step is
        isolated)."""
        plan = Plan()
        running = [s for s in self.running if only is None or s is only]
        for sequence in running:
            if sequence.num_pending == 1 and sequence.status is Status.RUNNING:
                self._grant(sequence, 1, plan)
        left = self.max_num_batched_tokens - plan.num_rows
        if plan.items:
            left = min(left, self.chunked_prefill_rows)
        for sequence in running:
            if left <= 0:
                break
            if sequence.num_pending > 1 and sequence.status is Status.RUNNING:
                left -= self._grant(sequence, min(left, sequence.num_pending), plan)
        while left > 0 and self.waiting:
            sequence = self.waiting[0] if only is None else only
            if sequence.status is not Status.WAITING or not self._admit(sequence):
                break
            left -= self._grant(sequence, min(left, sequence.num_pending), plan)
        return plan

    @property
    def num_awaiting_first(self) -> int:
        """Choices without a first token that the next steps serve: those whose prompt is under way,
        and those in the queue that free seats would take. A request without a free seat is not
        counted: it waits for others to end, and drafts make them end sooner."""
        seats = sum(1 + len(s.siblings) for s in self.running)
        under_way = sum(1 + len(s.siblings) for s in self.running if s.num_output == 0)
        return under_way + min(len(self.waiting), max(0, self.max_num_seqs - seats))

    def reserve_drafts(self, sequence: Sequence, num_nodes: int) -> int:
        """Reserve room for tree nodes after the root, from free blocks only. Returns how many
        fit."""
        size = sequence.block_size
        first = sequence.num_tokens  # slot of node 0
        num_nodes = min(num_nodes, sequence.table.shape[0] * size - first)
        while sequence.num_blocks * size < first + num_nodes and self.pool.num_free > 0:
            sequence.table[sequence.num_blocks] = self.pool.allocate()
            sequence.num_blocks += 1
        return max(0, min(num_nodes, sequence.num_blocks * size - first))

    def reserve_rows(self, sequences: SequenceOf[Sequence]) -> bool:
        """Slots of each last known token, from free blocks only. False, and nothing is taken, if
        there are too few."""
        pool = self.pool
        grow = [s for s in sequences if s.num_tokens > s.num_blocks * s.block_size]
        if len(grow) > pool.num_free:
            return False
        for sequence in grow:
            sequence.table[sequence.num_blocks] = pool.allocate()
            sequence.num_blocks += 1
        return True

    @property
    def can_seat(self) -> bool:
        """Whether someone waits and there is a seat."""
        return bool(self.waiting) and len(self.running) < self.max_num_seqs

    def publish(self, sequence: Sequence) -> None:
        """Publish full blocks whose tokens are verified and whose KV is computed.

        The block of the last verified token stays open until the next one is verified, so that a
        rollback to the verified mark never has to write into a published block.
        """
        if not self.pool.prefix_cache:
            return
        verified = sequence.prompt_len + sequence.num_verified - 1
        num = min(sequence.num_computed, verified) // sequence.block_size
        if num <= sequence.num_published:
            return
        self._extend_keys(sequence, num)
        for i in range(sequence.num_published, num):
            block = int(sequence.table[i])
            if self.pool.writable(block):
                self.pool.publish(block, sequence.keys[i])
        sequence.num_published = num

    # -- inside -----------------------------------------------------------------------------

    def _extend_keys(self, sequence: Sequence, num: int) -> None:
        size, keys = sequence.block_size, sequence.keys
        parent = keys[-1] if keys else sequence.root_key
        for i in range(len(keys), num):
            parent = chain_key(parent, sequence.ids[i * size : (i + 1) * size].tobytes())
            keys.append(parent)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a seat and its cached prefix, if seat and blocks allow."""
        if self.running:
            seats = sum(1 + len(s.siblings) for s in self.running)
            if seats + 1 + len(sequence.siblings) > self.max_num_seqs:
                return False
        size, pool = sequence.block_size, self.pool
        hits: list[int] = []
        reads_cache = pool.prefix_cache and not sequence.scores_prompt
        if reads_cache:
            most = (sequence.num_tokens - 1) // size  # one token at least is recomputed
            self._extend_keys(sequence, most)
            for key in sequence.keys[:most]:
                block = pool.lookup(key)
                if block is None:
                    break
                hits.append(block)
        if self.running:
            promised = sum(max(0, -(-s.num_tokens // size) - s.num_blocks) for s in self.running)
            idle_hits = sum(pool.ref_count(block) == 0 for block in hits)
            need = -(-(sequence.num_tokens + 1) // size) - len(hits)
            if need > pool.num_free - idle_hits - promised:
                return False
        self.waiting.remove(sequence)
        self.num_waiting_tokens -= sequence.num_tokens
        for block in hits:
            pool.acquire(block)
        num = len(hits)
        sequence.table[:num] = hits
        sequence.num_blocks = sequence.num_published = num
        sequence.num_computed = num * size
        if reads_cache and sequence.num_cached_tokens < 0:
            self.prefix_queries += sequence.prompt_len
            self.prefix_hits += num * size
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = num * size
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_order)
        return True

    def _grant(self, sequence: Sequence, num_rows: int, plan: Plan) -> int:
        """Plan the next rows of a running sequence; the number planned (0: it lost its blocks)."""
        start = sequence.num_computed
        if not self._reserve(sequence, start, start + num_rows, plan):
            return 0
        draws = start + num_rows == sequence.num_tokens
        plan.items.append(Scheduled(sequence, start, num_rows, draws))
        plan.num_rows += num_rows
        if num_rows > 1 or start < sequence.prompt_len:
            plan.num_prefill_rows += num_rows
        return num_rows

    def _reserve(self, sequence: Sequence, start: int, end: int, plan: Plan) -> bool:
        """Writable blocks for positions [start, end). Preempts from the back of the order."""
        size, pool, table = sequence.block_size, self.pool, sequence.table
        at = start // size
        copy = at < sequence.num_blocks and not pool.writable(int(table[at]))
        need = max(0, -(-end // size) - sequence.num_blocks) + copy
        while pool.num_free < need:
            victim = self.running[-1]
            if victim is sequence:
                if len(self.running) == 1:
                    plan.failed.append(sequence)
                    self.remove(sequence)
                else:
                    self.preempt(sequence)
                return False
            self._unplan(victim, plan)
            self.preempt(victim)
            # The victim may have shared the block that was to be copied.
            copy = at < sequence.num_blocks and not pool.writable(int(table[at]))
            need = max(0, -(-end // size) - sequence.num_blocks) + copy
        if copy:
            shared = int(table[at])
            own = pool.allocate()
            plan.copies.append((shared, own))
            pool.release((shared,))
            table[at] = own
            need -= 1
        for i in range(sequence.num_blocks, sequence.num_blocks + need):
            table[i] = pool.allocate()
        sequence.num_blocks += need
        return True

    def _unplan(self, sequence: Sequence, plan: Plan) -> None:
        for i, item in enumerate(plan.items):
            if item.sequence is sequence:
                del plan.items[i]
                plan.num_rows -= item.num_rows
                if item.num_rows > 1 or item.start < sequence.prompt_len:
                    plan.num_prefill_rows -= item.num_rows
                break
        own = set(sequence.blocks())
        plan.copies = [(src, dst) for src, dst in plan.copies if dst not in own]
