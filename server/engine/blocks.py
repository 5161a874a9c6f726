"""BlockPool: fixed runs of KV slots, with reference counts and a prefix cache keyed by content.

A *Block* is `block_size` consecutive KV slots. It is always in exactly one of three states:

    referenced   ref_count >= 1: it stands in that many block tables
    cached       ref_count == 0 and published: its content can still be found; evicted LRU first,
                 of the API key that has the most of them
    free         ref_count == 0 and unpublished

A published block is found by its ids and by the key of its parent, sha256 over (model fingerprint,
cache salt, parent key, token ids), so what is found has equal content, whoever wrote it. Where none
has all ids, one may begin with the same ones: whoever copies it computes only the rest. Rows may
be written into a block only while its reference count is 1 and it is unpublished (`writable`). A
key loses no cached block to others while it has fewer than each of them, so what it finds again
does not tell what they ask. The pool moves no memory and knows no sequences; it only hands out ids.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256


class NoFreeBlockError(RuntimeError):
    """allocate() was called with every block referenced. The scheduler asks num_free first."""


def root_key(fingerprint: str, cache_salt: str) -> bytes:
    """The parent key of a first block: 32 bytes that no request with another salt shares."""
    salt = sha256(cache_salt.encode()).digest()
    return sha256(b"tailor kv 1\0" + fingerprint.encode() + b"\0" + salt).digest()


def chain_key(parent: bytes, token_ids: bytes) -> bytes:
    """The key of a full block: parent key (32 bytes) and its ids as little-endian int32 bytes."""
    return sha256(parent + token_ids).digest()


def _num_common(left: bytes, right: bytes) -> int:
    """How many int32 ids two runs begin with alike."""
    most = min(len(left), len(right))
    ends = (i for i in range(0, most, 4) if left[i : i + 4] != right[i : i + 4])
    return next(ends, most) // 4


class BlockPool:
    """Hands out blocks 0 .. num_blocks - 1. Not thread safe: one engine owns it. num_changes: how
    often what can be found became another."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a pool needs at least one block of at least one slot")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        # Of published blocks: parent key, ids.
        self._places: list[tuple[bytes, bytes] | None] = [None] * num_blocks
        self._behind: dict[bytes, list[tuple[bytes, int]]] = {}  # the same: (ids, block), sorted
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[str, OrderedDict[int, None]] = {}  # by tenant, oldest first
        self._tenants = [""] * num_blocks  # who has published it
        self._num_cached = 0
        self.num_changes = 0

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can hand out: free ones, and cached ones by eviction."""
        return len(self._free) + self._num_cached

    @property
    def num_cached(self) -> int:
        """Published blocks, referenced or not."""
        return sum(map(len, self._behind.values()))

    def ref_count(self, block: int) -> int:
        """In how many block tables the block stands."""
        return self._ref_counts[block]

    def writable(self, block: int) -> bool:
        """Whether rows may be written into it: its reference count is 1 and it is unpublished."""
        return self._ref_counts[block] == 1 and self._places[block] is None

    def allocate(self) -> int:
        """A writable block. Evicts a cached block when none is free: the least recently used of the
        tenant that has the most.

        Raises NoFreeBlockError when every block is referenced.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            most = max(self._cached.values(), key=len)
            block = next(iter(most))
            self._uncache(block)
            self._forget(block)
        else:
            raise NoFreeBlockError("every KV block is referenced")
        self._ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more reference to a referenced or cached block (a fork, or a prefix-cache hit)."""
        if self._ref_counts[block] == 0:
            if self._places[block] is None:
                raise ValueError(f"block {block} is free: it has no content to share")
            self._uncache(block)
        self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each. Pass a table's blocks last first, so that its first block is
        evicted last."""
        for block in blocks:
            count = self._ref_counts[block] - 1
            if count < 0:
                raise ValueError(f"block {block} is released more often than it was acquired")
            self._ref_counts[block] = count
            if count == 0:
                if self._places[block] is None:
                    self._free.append(block)
                else:
                    self._cached.setdefault(self._tenants[block], OrderedDict())[block] = None
                    self._num_cached += 1

    def publish(self, block: int, parent: bytes, ids: bytes, tenant: str = "") -> None:
        """Make a full, verified block of a tenant's findable. From now on no row may be written
        into it. parent, ids: as chain_key has them.

        Where another block is found by them already, this one stays unpublished.
        """
        if self.nearest(parent, ids)[1] == self.block_size:
            return
        if self._ref_counts[block] == 0 or self._places[block] is not None:
            raise ValueError(f"block {block} cannot be published")
        self._places[block] = parent, ids
        self.num_changes += 1
        insort(self._behind.setdefault(parent, []), (ids, block))
        self._tenants[block] = tenant

    def nearest(self, parent: bytes, ids: bytes) -> tuple[int, int]:
        """(block, n): the published block behind a parent that begins with most of these ids, with
        n of them; n is 0 where none does. Does not acquire it. parent, ids: as chain_key has them.
        """
        behind = self._behind.get(parent, [])
        at = bisect(behind, (ids, -1))
        if at < len(behind) and behind[at][0] == ids:  # as most of a prompt's blocks
            return behind[at][1], len(ids) // 4
        found = [(_num_common(own, ids), block) for own, block in behind[max(0, at - 1) : at + 1]]
        num, block = max(found, default=(0, -1))  # what has most in common stands next to them
        return block, num

    def drop_cache(self) -> None:
        """Forget all published content (a changed model). Referenced blocks stay referenced."""
        self._places = [None] * self.num_blocks
        self.num_changes += 1
        self._behind.clear()
        for cached in self._cached.values():
            self._free.extend(cached)
        self._cached.clear()
        self._num_cached = 0

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every invariant holds for exactly these block tables."""
        counts = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block in table:
                counts[block] += 1
        wrong = [b for b, count in enumerate(counts) if count != self._ref_counts[b]]
        assert not wrong, f"blocks {wrong} are in more or fewer tables than their ref counts say"
        free = set(self._free)
        cached = {block for blocks in self._cached.values() for block in blocks}
        assert len(cached) == self._num_cached == sum(map(len, self._cached.values()))
        assert all(self._cached.values()), "a tenant without cached blocks is kept"
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both free and cached"
        unreferenced = {b for b, count in enumerate(counts) if count == 0}
        assert free | cached == unreferenced, "a block is lost or free while referenced"
        published = {(*place, b) for b, place in enumerate(self._places) if place is not None}
        assert cached == unreferenced & {place[-1] for place in published}, "cached, not published"
        found = [(p, *one) for p, all_ in self._behind.items() for one in all_]
        assert set(found) == published, "blocks behind a parent are others than those published"
        assert len({place[:2] for place in found}) == len(found), "two blocks of the same content"
        assert all(self._behind.values()), "a parent without blocks is kept"

    def _uncache(self, block: int) -> None:
        tenant = self._tenants[block]
        del self._cached[tenant][block]
        if not self._cached[tenant]:
            del self._cached[tenant]
        self._num_cached -= 1

    def _forget(self, block: int) -> None:
        place, self._places[block] = self._places[block], None
        self.num_changes += 1
        assert place is not None
        parent, ids = place
        behind = self._behind[parent]
        del behind[bisect(behind, (ids, -1))]
        if not behind:
            del self._behind[parent]
