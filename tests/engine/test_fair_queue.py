"""Keys share an engine by rows, inside levels; with one key items leave in their order."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.plan import FairQueue


@dataclass(frozen=True, eq=False)
class Item:
    key: str
    number: int
    rows: int = 1
    level: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """A step of level is worth ten numbers."""
        return self.number - 10 * self.level, self.number

    @property
    def place(self) -> tuple[int, str]:
        return self.level, self.key


def queue_of(*items: Item) -> FairQueue[Item]:
    queue = FairQueue[Item]()
    for item in items:
        queue.add(item)
    return queue


def served(queue: FairQueue[Item], num: int) -> list[Item]:
    items = []
    for _ in range(num):
        items.append(queue.first())
        queue.serve(items[-1], items[-1].rows)
    return items


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(-3, 3)), min_size=1, max_size=30),
    st.data(),
)
def test_one_key_is_served_in_order_whatever_its_levels(
    items: list[tuple[int, int]], data: st.DataObject
) -> None:
    waiting = [Item("a", i, rows, level) for i, (rows, level) in enumerate(items)]
    queue = queue_of(*data.draw(st.permutations(waiting)))
    assert len(queue) == len(waiting) and set(queue) == set(waiting)
    numbers = [item.number - 10 * item.level for item in served(queue, len(waiting))]
    assert numbers == sorted(numbers) and not queue and not list(queue)


@given(st.randoms(use_true_random=False), st.integers(2, 60))
def test_keys_that_always_wait_take_equal_rows(rng: Random, num: int) -> None:
    """Their rows never differ by more than what one item of each takes (the paper's theorem 1)."""
    queue = queue_of(*(Item(k, i, rng.randint(1, 40)) for k in "ab" for i in range(num)))
    rows = {"a": 0, "b": 0}
    for item in served(queue, num):
        rows[item.key] += item.rows
        assert abs(rows["a"] - rows["b"]) <= 80


def test_who_wanted_nothing_has_saved_nothing_and_owes_nothing() -> None:
    queue = queue_of(*(Item("busy", i, 100) for i in range(100)))
    served(queue, 50)
    late = [Item("late", 1000 + i, 100) for i in range(10)]
    for item in late:
        queue.add(item)
    keys = [item.key for item in served(queue, 10)]
    assert sorted(keys) == ["busy"] * 5 + ["late"] * 5
    for item in list(queue):
        queue.remove(item)
    queue.add(again := Item("busy", 5000))
    queue.add(Item("late", 5001))
    assert served(queue, 1)[0].key in ("busy", "late") and again in [*queue, again]


def test_rows_that_are_told_later_count() -> None:
    queue = queue_of(*(Item(key, i) for i in range(10) for key in ("a", "b")))
    queue.charge("a", 7)
    assert [item.key for item in served(queue, 8)] == ["b"] * 7 + ["a"]


def test_a_level_goes_first_and_its_keys_share_it() -> None:
    low = [Item("a", i) for i in range(4)]
    high = [Item(key, 4 + i, level=2) for i in range(3) for key in ("a", "b")]
    queue = queue_of(*low, *high)
    assert [(item.level, item.key) for item in served(queue, 6)] == [
        (2, "a"), (2, "b"), (2, "a"), (2, "b"), (2, "a"), (2, "b"),
    ]  # fmt: skip
    assert served(queue, 4) == low


def test_what_does_not_wait_cannot_be_taken() -> None:
    queue = queue_of(Item("a", 1))
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(Item("a", 1))
    with pytest.raises(KeyError):
        queue.remove(Item("b", 1))
    with pytest.raises(IndexError):
        queue_of().first()
