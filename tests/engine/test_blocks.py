"""BlockPool: states, publication, LRU eviction, and its own integrity check, which random schedules
pass after every step (test_lossless.py)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.blocks import BlockPool, NoFreeBlockError, chain_key, root_key

ROOT = root_key("model", "")


def _ids(*ids: int) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def _key(*ids: int) -> bytes:
    return chain_key(ROOT, _ids(*ids))


def _place(*ids: int) -> tuple[bytes, bytes, bytes]:
    """What a block of these ids is published with."""
    return _key(*ids), ROOT, _ids(*ids)


def test_a_published_block_is_found_until_it_is_evicted() -> None:
    pool = BlockPool(2, 4)
    a = pool.allocate()
    pool.publish(a, *_place(1))
    assert not pool.writable(a)
    pool.release([a])
    assert pool.num_free == 2 and pool.lookup(_key(1)) == a
    pool.acquire(a)
    assert pool.ref_count(a) == 1 and not pool.writable(a)
    pool.release([a])
    assert {pool.allocate(), pool.allocate()} == {0, 1}  # the free one first, then the cached one
    assert pool.lookup(_key(1)) is None and pool.num_cached == 0
    with pytest.raises(NoFreeBlockError):
        pool.allocate()


def test_the_least_recently_released_block_is_evicted_first() -> None:
    pool = BlockPool(3, 4)
    blocks = [pool.allocate() for _ in range(3)]
    for i, block in enumerate(blocks):
        pool.publish(block, *_place(i))
    pool.release([blocks[1]])
    pool.release([blocks[0], blocks[2]])
    pool.acquire(blocks[1])  # used again: now the youngest
    pool.release([blocks[1]])
    assert [pool.allocate() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]


def test_the_key_that_has_most_gives_a_block_first() -> None:
    """Whatever another asks and however often: it loses what is beyond what the others have."""
    pool = BlockPool(8, 4)

    def put(tenant: str, number: int) -> None:
        block = pool.allocate()
        pool.publish(block, *_place(number), tenant)
        pool.release([block])

    for number in range(3):
        put("a", number)
    for number in range(100, 130):
        put("b", number)
        pool.check([])
        assert all(pool.lookup(_key(i)) is not None for i in range(3))
    assert [pool.lookup(_key(i)) is not None for i in range(125, 130)] == [True] * 5
    for number in range(200, 230):  # a third one: each keeps about as much as the others
        put("c", number)
        pool.check([])
    assert sum(pool.lookup(_key(i)) is not None for i in range(3)) >= 2
    for number in range(300, 330):  # its own oldest go when it has the most
        put("a", number)
    assert pool.lookup(_key(0)) is None and pool.lookup(_key(329)) is not None


@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), max_size=12), st.data())
def test_the_nearest_block_is_the_one_with_most_ids_in_common(
    texts: list[list[int]], data: st.DataObject
) -> None:
    """Among those behind the same parent that are still published; not behind another's."""
    pool, held = BlockPool(6, 4), dict[int, list[int]]()
    for ids in texts:
        block = pool.allocate()
        held.pop(block, None)  # evicted
        pool.publish(block, *_place(*ids))
        if not pool.writable(block):
            held[block] = ids
        pool.release([block])
        pool.check([])
    wanted = data.draw(st.lists(st.integers(0, 2), max_size=4))

    def num_common(ids: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), len(wanted)
        )

    most = max(map(num_common, held.values()), default=0)
    block, num = pool.nearest(ROOT, _ids(*wanted))
    assert num == most and (num == 0 or num_common(held[block]) == num)
    assert pool.nearest(root_key("model", "salt"), _ids(*wanted))[1] == 0
    pool.drop_cache()
    assert pool.nearest(ROOT, _ids(*wanted))[1] == 0


def test_without_a_prefix_cache_nothing_is_published() -> None:
    pool = BlockPool(1, 4, prefix_cache=False)
    a = pool.allocate()
    pool.publish(a, *_place(1))
    assert pool.lookup(_key(1)) is None and pool.writable(a)


def test_keys_separate_models_salts_parents_and_ids() -> None:
    ids = b"\1\0\0\0"
    keys = {
        chain_key(root_key("m", ""), ids),
        chain_key(root_key("n", ""), ids),
        chain_key(root_key("m", "salt"), ids),
        chain_key(chain_key(root_key("m", ""), ids), ids),
        chain_key(root_key("m", ""), b"\2\0\0\0"),
    }
    assert len(keys) == 5


def test_misuse_raises() -> None:
    pool = BlockPool(2, 4)
    a = pool.allocate()
    pool.release([a])
    with pytest.raises(ValueError, match="released more often"):
        pool.release([a])
    with pytest.raises(ValueError, match="cannot be published"):
        BlockPool(1, 1).publish(0, *_place(1))
    with pytest.raises(ValueError, match="no content"):
        BlockPool(1, 1).acquire(0)


@pytest.mark.parametrize("damage", ["ref", "free", "key", "lost"])
def test_check_sees_damage(damage: str) -> None:
    pool = BlockPool(3, 4)
    a = pool.allocate()
    pool.check([[a]])
    if damage == "ref":
        pool._ref_counts[a] = 2
    elif damage == "free":
        pool._free.append(a)
    elif damage == "key":
        pool._keys[a] = _key(1)
    else:
        pool._free.pop()
    with pytest.raises((AssertionError, KeyError)):
        pool.check([[a]])
