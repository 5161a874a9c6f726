"""DrafterRegistry: the Drafter that a request's speculation names, made once per distinct options.

server.wiring registers, per drafter name, either a ready Drafter or a factory `(task, speculation)
-> Drafter`. A factory gets the task's name and the request's SpeculationParams, and may read
`options` and `corpus`. Its result is kept for requests with the same (name, task, corpus, options,
scope); the least recently used ones are dropped past a bound. A drafter serves one scope, because
its calibration is made of that scope's outcomes alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from drafters.base import Drafter
from drafters.tree import DraftTree
from server.engine.trees import check
from server.types import SpeculationParams

DrafterFactory = Callable[[str, SpeculationParams], Drafter]
"""(task, speculation) -> Drafter. Raises ValueError for options it refuses."""


class DraftError(ValueError):
    """A drafter proposed something that is not a tree over the vocabulary."""


_MAX_KINDS = 1024  # of drafters that are known to be possible


class DrafterRegistry:
    """Resolves a request's speculation to a Drafter."""

    def __init__(
        self, entries: Mapping[str, Drafter | DrafterFactory], *, max_made: int = 128
    ) -> None:
        self._entries = dict(entries)
        # Asked once: isinstance() of a Protocol looks through all its members.
        self._ready = {
            name: entry
            for name, entry in entries.items()
            if isinstance(entry, Drafter) and not isinstance(entry, type)
        }
        self._made: OrderedDict[tuple[object, ...], Drafter] = OrderedDict()
        self._max_made = max_made
        # (name, task, corpus, options) of drafters that were made -> whether there can be such
        # that know nothing of how an answer begins.
        self._kinds: dict[tuple[object, ...], bool] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, "off" included."""
        return ("off", *sorted(name for name in self._entries if name != "off"))

    def resolve(self, task: str, speculation: SpeculationParams) -> Drafter | None:
        """The drafter, or None for "off". Raises ValueError for an unknown name or bad options."""
        name = speculation.drafter
        if name == "off" or speculation.max_draft_tokens <= 0:
            return None
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError(f"unknown drafter {name!r}; known: {', '.join(self.names)}")
        if name in self._ready:
            return self._ready[name]
        key = self._key(task, speculation)
        drafter = self._made.get(key)
        if drafter is None:
            drafter = cast("DrafterFactory", entry)(task, speculation)
            self._made[key] = drafter
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            self._kinds[key[:4]] = hasattr(drafter, "knows_starts")
            if len(self._made) > self._max_made:
                self._made.popitem(last=False)
        else:
            self._made.move_to_end(key)
        return drafter

    def check(self, task: str, speculation: SpeculationParams) -> None:
        """Raise what `resolve` would, making no drafter if one was made for any scope."""
        if self._key(task, speculation)[:4] not in self._kinds:
            self.resolve(task, speculation)

    def may_wait(self, task: str, speculation: SpeculationParams) -> bool:
        """Whether the drafter has still to be made, and one of its kind without a corpus may know
        nothing of how an answer begins (its `knows_starts`)."""
        key = self._key(task, speculation)
        return not speculation.corpus and key not in self._made and self._kinds.get(key[:4], False)

    @staticmethod
    def _key(task: str, speculation: SpeculationParams) -> tuple[object, ...]:
        own = speculation.scope, speculation.learn_tokens > 0
        return speculation.drafter, task, speculation.corpus, speculation.options, *own

    def forget(self, task: str | None = None, scope: str | None = None) -> None:
        """Make a task's drafters anew from now on (None: everyone's). Open sessions keep theirs.

        scope: only the drafters that draft from what this scope has learned.
        """
        for key in [
            k
            for k in self._made
            if (task is None or k[1] == task) and (scope is None or (k[4] == scope and k[5]))
        ]:
            del self._made[key]
        if scope is None:
            self._kinds.clear()  # what they are made of may have changed


class CheckedTree:
    """A DraftTree that was checked, with its fields as lists.

    depths[i] is 1 for a child of the root. survival: float64, clipped to [0, 1] and to the
    parent's. num_certain: of its first nodes, how many a grammar forces from the root on.
    """

    __slots__ = ("depths", "num_certain", "parents", "survival", "token_ids", "tree")

    def __init__(
        self,
        tree: DraftTree,
        token_ids: list[int],
        parents: list[int],
        depths: list[int],
        survival: Sequence[float] | npt.NDArray[np.float64],
    ) -> None:
        self.tree = tree
        self.token_ids = token_ids
        self.parents = parents
        self.depths = depths
        self.survival = np.asarray(survival, np.float64)
        self.num_certain = 0

    def for_session(self, accepted: Sequence[int]) -> tuple[DraftTree, Sequence[int]] | None:
        """The tree and the accepted nodes as the session that proposed it knows them."""
        return self.tree, accepted

    def prune(self, num_nodes: int) -> CheckedTree:
        """The num_nodes likeliest nodes; closed under parents, order kept."""
        if num_nodes >= len(self.token_ids):
            return self
        order = np.argsort(-self.survival, kind="stable")[:num_nodes]
        order.sort()
        return self._only(order)

    def within(
        self, allowed: Callable[[npt.NDArray[np.int32]], npt.NDArray[np.bool_]]
    ) -> CheckedTree | None:
        """Only the nodes whose whole path has allowed tokens; None when no node is left.

        allowed: token ids -> whether each is allowed.
        """
        stays = allowed(np.asarray(self.token_ids, np.int32)).tolist()
        if all(stays):
            return self
        for i, parent in enumerate(self.parents):  # parents come first
            stays[i] = stays[i] and (parent < 0 or stays[parent])
        kept = np.flatnonzero(stays)
        return self._only(kept) if kept.size else None

    def _only(self, order: npt.NDArray[np.intp]) -> CheckedTree:
        """The nodes `order`, ascending and closed under parents."""
        kept: list[int] = order.tolist()
        renumber = {old: new for new, old in enumerate(kept)}
        renumber[-1] = -1
        parents = [renumber[self.parents[i]] for i in kept]
        tree = self.tree
        return CheckedTree(
            DraftTree(
                tree.token_ids[order],
                np.asarray(parents, np.int32),
                tree.survival[order],
                tree.source[order] if tree.source.shape[0] else tree.source,
            ),
            [self.token_ids[i] for i in kept],
            parents,
            [self.depths[i] for i in kept],
            self.survival[order].tolist(),
        )


def check_tree(tree: DraftTree, vocab_size: int, max_depth: int) -> CheckedTree:
    """Raise DraftError unless the tree can be verified. Drafters may be a user's own: nothing is
    trusted."""
    token_ids, parents = tree.token_ids.astype(np.int64), tree.parents.astype(np.int64)
    survival, num = tree.survival.astype(np.float64), tree.token_ids.shape[0]
    if not (parents.shape == survival.shape == (num,)) or tree.source.shape[0] not in (0, num):
        raise DraftError("token_ids, parents, survival and source differ in length")
    depths = np.empty(num, np.int64)
    why, i = check(token_ids, parents, survival, depths, vocab_size, max_depth)
    if why:
        raise DraftError(
            (
                f"node {i} holds id {token_ids[i]}, outside the vocabulary",
                f"node {i} has parent {parents[i]}",
                f"node {i} survives with chance {survival[i]}",
                f"node {i} repeats a sibling's token",
                f"node {i} is {depths[i]} deep, past {max_depth}",
            )[why - 1]
        )
    return CheckedTree(tree, token_ids.tolist(), parents.tolist(), depths.tolist(), survival)
