"""SliceCacheIndex against a device that does exactly what a Placement says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from tests.profiles import examples
from vocab_store.errors import VocabStoreError
from vocab_store.slice import RequiredIds, VocabSlice
from vocab_store.slice_cache import Placement, SliceCacheIndex

V = 40
REQUIRED = RequiredIds.of(V, eos_ids=[0])


def task_slice(*ids: int) -> VocabSlice:
    return VocabSlice.make([0, *ids], REQUIRED)


class Device:
    """Head rows by id: T of each profile, and a pool whose places hold ids (-1: never written)."""

    def __init__(self, capacity: int) -> None:
        self.static: dict[Any, np.ndarray[Any, Any]] = {}
        self.pool = np.full(capacity, -1, np.int64)

    def add(self, index: SliceCacheIndex, profile: Any, static: VocabSlice) -> None:
        index.add_profile(profile, static)
        self.static[profile] = static.ids.copy()

    def do(self, placement: Placement) -> list[int]:
        """Returns the ids that were there before, in the order of the places."""
        before = self.pool[placement.load_positions]
        self.pool[placement.load_positions] = placement.load_ids
        return [i for i in before.tolist() if i >= 0]

    def seen_by(self, index: SliceCacheIndex, sequence: Any, profile: Any) -> list[int]:
        """The ids of the rows that a sequence's columns point at."""
        ids, columns, num_static = index.columns(sequence)
        assert num_static == len(self.static[profile])
        row_ids = np.concatenate((self.static[profile], self.pool))[columns]
        np.testing.assert_array_equal(row_ids, ids)
        assert columns.dtype == np.int32
        return [int(i) for i in row_ids]


def test_static_rows_are_copied_once_per_profile_not_per_request() -> None:
    index, device = SliceCacheIndex(8), Device(8)
    static = task_slice(1, 2, 3)
    for _ in range(3):
        device.add(index, "a@1", static)
    loads = 0
    for sequence in range(5):
        placement = index.acquire(sequence, "a@1", static.union([2, 20]))
        device.do(placement)
        loads += placement.num_loads
    assert loads == 1, "row 20 is shared by all five"
    assert (index.num_loads, index.num_hits) == (4 + 1, 4)
    assert index.num_static_rows == 4 and len(index.num_users) == 1
    # Another scope loads its own row, so that it cannot tell what others have used.
    other = index.acquire("other", "a@1", static.union([20]), scope="b")
    assert other.num_loads == 1 and index.num_hits == 4
    device.do(other)
    device.do(index.extend(0, [21]))
    more = index.extend("other", [21])
    assert more.load_ids.tolist() == [21]
    device.do(more)
    assert device.seen_by(index, "other", "a@1") == device.seen_by(index, 0, "a@1")


def test_a_full_pool_tells_what_it_lacks() -> None:
    index, static = SliceCacheIndex(3), task_slice(1)
    index.add_profile("a", static)
    index.acquire("s1", "a", static.union([10, 11]))
    index.acquire("idle", "a", static.union([12]))
    index.release("idle")
    # 12 is idle but asked for: it is a hit, so none is left for 13.
    with pytest.raises(VocabStoreError, match="1 head rows to load, 0 places free and 0 idle"):
        index.acquire("s2", "a", static.union([12, 13]))
    assert index.acquire("s2", "a", static.union([12])).num_loads == 0
    with pytest.raises(KeyError):
        index.columns("nobody")


def test_rows_without_room_are_loaded_by_the_next_who_asks() -> None:
    index, device = SliceCacheIndex(6), Device(6)
    static = task_slice(1)
    device.add(index, "a", static)
    device.do(index.acquire("s1", "a", static.union([10])))
    refused = index.acquire("s2", "a", static.union([10, 11, 12]))
    assert refused.load_ids.tolist() == [11, 12]
    assert refused.load_positions.tolist() == [1, 2], "the lowest free places"
    index.take_back("s2", refused.load_ids)
    index.release("s2")
    assert (len(index.num_users), index.num_cached_rows) == (1, 1)
    again = index.acquire("s2", "a", static.union([11]))
    assert again.load_ids.tolist() == [11]
    device.do(again)
    index.take_back("s2", index.extend("s2", [13]).load_ids)
    assert device.seen_by(index, "s2", "a") == [0, 1, 11]
    device.do(index.extend("s2", [13]))
    assert device.seen_by(index, "s2", "a") == [0, 1, 11, 13]
    assert index.acquire("s3", "a", static.union([20, 21, 22])).num_loads == 3, "none is lost"


def test_a_dropped_profile_lives_until_its_last_sequence() -> None:
    """A request keeps the versions it began with (docs/DESIGN.md section 7)."""
    index = SliceCacheIndex(4)
    old, new = task_slice(1), task_slice(1, 2)
    index.add_profile("a@1", old)
    index.acquire("s", "a@1", old.union([9]))
    index.add_profile("a@2", new)
    assert not index.drop_profile("a@1")
    assert index.columns("s")[0].tolist() == [0, 1, 9]
    index.release("s")
    with pytest.raises(KeyError):
        index.release("s")
    assert index.drop_profile("a@1") and index.num_static_rows == new.num_ids
    with pytest.raises(KeyError):
        index.acquire("t", "a@1", old)
    assert index.drop_profile("a@2")
    assert index.num_static_rows == 0


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, grow and go in any order; each sees its own slice at all times."""

    sequences = Bundle("sequences")

    @initialize(
        capacity=st.integers(0, 12),
        first=st.lists(st.integers(0, V - 1), max_size=6),
        second=st.lists(st.integers(0, V - 1), max_size=6),
    )
    def start(self, capacity: int, first: list[int], second: list[int]) -> None:
        self.index = SliceCacheIndex(capacity)
        self.device = Device(capacity)
        self.tasks = {"a": task_slice(*first), "b": task_slice(*second)}
        for profile, static in self.tasks.items():
            self.device.add(self.index, profile, static)
        self.live: dict[int, tuple[str, set[int]]] = {}
        self.order: dict[int, list[int]] = {}
        self.idle: list[int] = []
        self.num_evicted = 0
        self.next_sequence = 0

    def pinned(self) -> set[int]:
        return {
            i for task, ids in self.live.values() for i in ids - set(self.tasks[task].ids.tolist())
        }

    def apply(self, wanted: set[int], action: Any) -> bool:
        """Do an action that pins `wanted` dynamic ids; check it against plain sets."""
        pinned = self.pinned()
        fits = len(pinned | wanted) <= self.index.capacity
        try:
            placement = action()
        except VocabStoreError:
            assert not fits, "refused although it fits"
            return False
        assert fits, "pinned more than the pool holds"
        # Evictions: never pinned, never asked for, and the longest idle ones.
        evicted = self.device.do(placement)
        self.num_evicted += len(evicted)
        assert self.index.num_evictions == self.num_evicted
        self.idle = [i for i in self.idle if i not in wanted]
        assert evicted == self.idle[: len(evicted)]
        self.idle = self.idle[len(evicted) :]
        return True

    @rule(
        target=sequences,
        task=st.sampled_from(["a", "b"]),
        prompt=st.lists(st.integers(0, V - 1), max_size=8),
    )
    def admit(self, task: str, prompt: list[int]) -> int:
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        made = self.tasks[task].union(prompt)
        wanted = set(made.ids.tolist()) - set(self.tasks[task].ids.tolist())
        if self.apply(wanted, lambda: self.index.acquire(sequence, task, made)):
            self.live[sequence] = (task, set(made.ids.tolist()))
            self.order[sequence] = sorted(wanted)
        return sequence

    @rule(sequence=sequences, missed=st.lists(st.integers(0, V - 1), min_size=1, max_size=3))
    def add_missed(self, sequence: int, missed: list[int]) -> None:
        if sequence not in self.live:
            return
        ids = self.live[sequence][1]
        wanted = set(missed) - ids
        if self.apply(wanted, lambda: self.index.extend(sequence, missed)):
            ids.update(missed)
            self.order[sequence] += sorted(wanted)

    @rule(sequence=consumes(sequences))
    def finish(self, sequence: int) -> None:
        if sequence not in self.live:
            return
        before = self.pinned()
        self.index.release(sequence)
        del self.live[sequence]
        freed = before - self.pinned()
        # Rows of one release go idle in the order in which they were pinned.
        self.idle += [i for i in self.order.pop(sequence) if i in freed]

    @invariant()
    def each_sequence_sees_its_own_slice(self) -> None:
        for sequence, (task, ids) in self.live.items():
            assert self.device.seen_by(self.index, sequence, task) == sorted(ids)

    @invariant()
    def counts_agree(self) -> None:
        pinned = self.pinned()
        assert len(self.index.num_users) == len(pinned)
        assert self.index.num_cached_rows == len(pinned) + len(self.idle)
        assert self.index.num_cached_rows <= self.index.capacity


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=examples(300), stateful_step_count=30)
