"""BlockPool: what it finds and refuses, and its own integrity check, which random schedules pass
after every step (test_lossless.py). Whose cached block goes first is held by test_engine.py and
test_fairness.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.blocks import BlockPool, NoFreeBlockError, chain_key, root_key

ROOT = root_key("model", "")


def _ids(*ids: int) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def _place(*ids: int) -> tuple[bytes, bytes]:
    """What a block of these ids is published with."""
    return ROOT, _ids(*ids)


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
    pool = BlockPool(1, 4)
    a = pool.allocate()
    with pytest.raises(NoFreeBlockError):
        pool.allocate()
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
        pool._places[a] = _place(1)
    else:
        pool._free.pop()
    with pytest.raises((AssertionError, KeyError)):
        pool.check([[a]])
