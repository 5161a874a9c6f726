"""SliceCacheIndex: in which rows of a device the ids of VocabSlices lie.

This module holds no weights. A device keeps a matrix of T per profile and one pool of dynamic
rows, and copies the rows that a `Placement` lists.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from vocab_store.errors import VocabStoreError
from vocab_store.slice import Ids, Int32, VocabSlice


@dataclass(frozen=True, slots=True)
class Placement:
    """What a device does before the next step: copy head rows into the dynamic pool.

    load_ids, load_positions: int32 [k]: row load_ids[i] of the full head goes to pool position
    load_positions[i], in place of what lies there.

    The copy is ordered after every launched step and before the next one that uses the sequence:
    a step in flight may still read an evicted row, in columns that no live sequence looks at.
    """

    load_ids: Int32
    load_positions: Int32

    @property
    def num_loads(self) -> int:
        """Rows copied."""
        return int(self.load_ids.shape[0])


_Row = tuple[Hashable, int]
"""(scope, token id) of a dynamic row."""


@dataclass(slots=True)
class _Holder:
    profile: Hashable
    scope: Hashable
    ids: list[int]


class SliceCacheIndex:
    """Bookkeeping of a device's slice cache: T once per profile, dynamic rows per scope and id.

    The device holds one matrix per profile (T, contiguous, in id order, so that a CPU can prepack
    it once) and one pool of `capacity` dynamic rows. A dynamic row is pinned while a sequence holds
    it and stays cached afterwards until its place is needed; the least recently released goes
    first. Free places are taken lowest first, so that the product over the pool stays narrow.

    Sequences of one scope share rows. Another scope has its own row of the same id, so that the
    number of rows to load tells a scope nothing about the ids that others have used.

    One writer, one thread. A method that raises changes nothing.
    """

    def __init__(self, capacity: int) -> None:
        """capacity: rows of the dynamic pool."""
        self.capacity = capacity
        self.num_hits = 0
        self.num_loads = 0
        self.num_evictions = 0
        self._static: dict[Hashable, Int32] = {}  # T by profile
        self._sequences: dict[Hashable, _Holder] = {}
        self._position: dict[_Row, int] = {}
        self.num_users: dict[_Row, int] = {}  # of pinned rows
        # Cached and unpinned, oldest release first.
        self._idle: OrderedDict[_Row, None] = OrderedDict()
        self._free = list(range(capacity))

    # -- profiles ------------------------------------------------------------------------------

    def add_profile(self, profile: Hashable, static: VocabSlice) -> None:
        """T is resident from now on. `profile` names a task's profile *version*, so that a name
        stands for the same ids: a second call loads nothing."""
        if profile not in self._static:
            self._static[profile] = static.ids
            self.num_loads += static.num_ids

    def drop_profile(self, profile: Hashable) -> bool:
        """Forget T, unless a sequence sees it. Returns whether it is forgotten.

        Raises KeyError for an unknown profile.
        """
        if any(holder.profile == profile for holder in self._sequences.values()):
            return False
        del self._static[profile]
        return True

    # -- sequences -----------------------------------------------------------------------------

    def acquire(
        self,
        sequence: Hashable,
        profile: Hashable,
        slice_: VocabSlice,
        *,
        scope: Hashable = None,
    ) -> Placement:
        """Pin the rows of a new sequence's slice, which holds T of its profile, beyond T. scope:
        who shares them.

        Raises KeyError for a profile that is not resident, VocabStoreError when pinned rows
        leave no room (the caller then uses the full head for it, or lets it wait).
        """
        dynamic = np.setdiff1d(slice_.ids, self._static[profile], assume_unique=True)
        placement = self._pin(scope, dynamic.tolist())
        self._sequences[sequence] = _Holder(profile, scope, dynamic.tolist())
        return placement

    def extend(self, sequence: Hashable, token_ids: Ids) -> Placement:
        """Pin further rows of a live sequence: `exact` adds the ids it missed, so that a union
        changes while sequences run. Ids it already has are ignored.

        Raises KeyError for an unknown sequence, VocabStoreError as `acquire`.
        """
        holder = self._sequences[sequence]
        static = self._static[holder.profile]
        extra = np.unique(np.asarray([int(i) for i in token_ids], np.int32))
        new = np.setdiff1d(extra, static, assume_unique=True)
        new = np.setdiff1d(new, np.asarray(holder.ids, np.int32))
        placement = self._pin(holder.scope, new.tolist())
        holder.ids.extend(new.tolist())
        return placement

    def take_back(self, sequence: Hashable, token_ids: Ids) -> None:
        """Forget rows that `acquire` or `extend` has just told to load, and that a device had no
        room for: the next who asks for them is told to load them again. They are the sequence's
        alone. Raises KeyError for an unknown sequence.
        """
        holder = self._sequences[sequence]
        gone = {int(i) for i in token_ids}
        holder.ids = [i for i in holder.ids if i not in gone]
        for row in [(holder.scope, i) for i in gone]:
            del self.num_users[row]
            heapq.heappush(self._free, self._position.pop(row))
        self.num_loads -= len(gone)

    def release(self, sequence: Hashable) -> None:
        """Unpin a sequence's rows; they stay cached. Raises KeyError for an unknown sequence."""
        holder = self._sequences.pop(sequence)
        for token_id in holder.ids:
            row = (holder.scope, token_id)
            self.num_users[row] -= 1
            if self.num_users[row] == 0:
                del self.num_users[row]
                self._idle[row] = None

    def columns(self, sequence: Hashable) -> tuple[Int32, Int32, int]:
        """Where this sequence's slice lies in the logits [T of its profile | dynamic pool]: ids,
        columns, num_static. Raises KeyError for an unknown sequence.

        ids: int32 [n], ascending. columns: int32 [n]: logits[:, columns] are the slice's logits in
        id order; a column below num_static is in T, the others are num_static + pool position.
        Valid until the sequence is extended or released; other sequences never move its rows.
        """
        holder = self._sequences[sequence]
        static = self._static[holder.profile]
        num_static = int(static.shape[0])
        dynamic = np.sort(np.asarray(holder.ids, np.int32))
        position, scope = self._position, holder.scope
        places = np.asarray([num_static + position[scope, int(i)] for i in dynamic], np.int32)
        at = np.searchsorted(static, dynamic)
        return (
            np.insert(static, at, dynamic),
            np.insert(np.arange(num_static, dtype=np.int32), at, places),
            num_static,
        )

    # -- figures -------------------------------------------------------------------------------

    @property
    def num_static_rows(self) -> int:
        """Rows of all resident T."""
        return sum(int(ids.shape[0]) for ids in self._static.values())

    @property
    def num_cached_rows(self) -> int:
        """Dynamic rows resident, pinned or not."""
        return len(self._position)

    # -- inside --------------------------------------------------------------------------------

    def _pin(self, scope: Hashable, ids: list[int]) -> Placement:
        rows: list[_Row] = [(scope, i) for i in ids]
        missing = [row for row in rows if row not in self._position]
        # Idle rows that this very call pins are hits, not places to evict.
        num_evictable = len(self._idle) - sum(1 for row in rows if row in self._idle)
        if len(missing) > len(self._free) + num_evictable:
            raise VocabStoreError(
                f"{len(missing)} head rows to load, {len(self._free)} places free and "
                f"{num_evictable} idle of {self.capacity}"
            )
        for row in rows:
            if row in self._position:
                self.num_hits += 1
                self._idle.pop(row, None)
                self.num_users[row] = self.num_users.get(row, 0) + 1
        positions: list[int] = []
        for row in missing:
            if not self._free:
                victim, _ = self._idle.popitem(last=False)
                heapq.heappush(self._free, self._position.pop(victim))
                self.num_evictions += 1
            place = heapq.heappop(self._free)
            self._position[row] = place
            self.num_users[row] = 1
            positions.append(place)
        self.num_loads += len(missing)
        return Placement(
            np.asarray([token_id for _, token_id in missing], np.int32),
            np.asarray(positions, np.int32),
        )
