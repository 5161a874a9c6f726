"""SequenceHead: what part of the LM head one sequence sees, and its unverified tokens.

A sequence in mode "full" has none. See slices.py for what is done with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from server.engine.batch import DrawParams, HeadSlice, UInt32
from server.types import VocabularyCounts
from vocab_store.slice import VocabSlice

ScopedProfile = tuple[str, str]
"""(key of a profile version, scope)"""


@dataclass(frozen=True, slots=True, eq=False)
class Unverified:
    """One emitted, unverified token: where its hidden state is kept, and its grammar mask."""

    place: int
    mask: UInt32 | None


@dataclass(slots=True, eq=False)
class SequenceHead:
    """What part of the LM head one sequence sees. Written by SliceBook and the engine's accept.

    profile: key of the profile version it was opened with. scope: of its request. static: T, as
    that profile's table has it. slice: all ids it may draw; `exact` adds missed ones. miss_rate:
    the profile's expectation, if it has one. where: for the Batch, None until it is seated.
    proposes: whether this step's draws come from the slice. unverified: emitted tokens in order.
    params: DrawParams before the first of them.
    """

    mode: str
    profile: str
    scope: str
    static: VocabSlice
    slice: VocabSlice
    verify_every: int
    miss_rate: float | None = None
    where: HeadSlice | None = None
    proposes: bool = False
    unverified: list[Unverified] = field(default_factory=list)
    params: DrawParams | None = None
    counts: VocabularyCounts = field(default_factory=VocabularyCounts)

    @property
    def key(self) -> ScopedProfile:
        """The key of its misses and its plan (exact_control.py)."""
        return self.profile, self.scope

    def drop_after(self, num_kept: int) -> None:
        """Only the first num_kept unverified tokens stand."""
        del self.unverified[num_kept:]

    def add(self, **more: float) -> None:
        """Add to the counts."""
        values = {name: getattr(self.counts, name) + value for name, value in more.items()}
        self.counts = replace(self.counts, **values)

    def take_counts(self, verify_every: int) -> VocabularyCounts:
        """The counts since the last call, with the slice's size and N now."""
        counts = replace(self.counts, num_ids=self.slice.num_ids, verify_every=verify_every)
        self.counts = VocabularyCounts()
        return counts
