"""Other projects' drafters behind our protocol, for replays.

ArcticSuffix: SuffixDecodingCache of `arctic-inference` (only its csrc/suffix_decoding part has to
be built). Two are written anew from their papers: Token
Recycling (Luo et al., arXiv 2408.08696), which keeps for every token the likeliest ids of the last
row behind it, and drafts a fixed tree over ranks; LogitSpec (Liu et al., arXiv 2507.01449), which
takes what the last row held likeliest for the token after the next one, and looks pairs of it up in
the text.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters.calibration import Calibration
from drafters.corpus import Corpus
from drafters.session import TextSession
from drafters.tree import DraftTree, followed

NUM_LIKELY = 8
LONGEST_MATCH, MOST_COPIED = 3, 8  # of LogitSpec: tokens that are looked up, and behind a match
RANK_CHANCES = (0.42, 0.13, 0.07, 0.05, 0.035, 0.03, 0.025, 0.02)
"""How often a node of each rank is right, about: the fixed tree holds the likeliest places."""


class ArcticSuffix:
    """Suffix decoding as shipped: local tree of the request, global tree of cached responses.

    corpus: its outputs are put into the global tree. use_tree_spec, max_spec_factor: as in
    SuffixDecodingCache.speculate; the defaults are that method's own. remembers: keep the response
    of every request, as the cache does by itself; else it is evicted at the request's end.
    """

    name = "arctic"
    sources = ("arctic",)

    def __init__(
        self,
        *,
        corpus: Corpus | None = None,
        use_tree_spec: bool = False,
        max_spec_factor: float = 1.0,
        remembers: bool = False,
    ) -> None:
        from arctic_inference.suffix_decoding import (  # type: ignore[import-not-found]
            SuffixDecodingCache,
        )

        self.cache: Any = SuffixDecodingCache(max_tree_depth=64, max_cached_requests=-1)
        self.ids = itertools.count(1)
        self.remembers = remembers
        self.options = {"use_tree_spec": use_tree_spec, "max_spec_factor": max_spec_factor}
        outputs = [] if corpus is None else map(corpus.output, range(corpus.num_documents))
        for output in outputs:
            request = next(self.ids)
            self.cache.start_request(request, [])
            self.cache.add_active_response(request, output.tolist())
            self.cache.stop_request(request)

    def open(self, prompt_ids: Sequence[int], **_: Any) -> ArcticSession:
        """A session over the whole prompt."""
        return ArcticSession(self, prompt_ids)


class ArcticSession:
    """One request, of which nothing can be taken back."""

    def __init__(self, drafter: ArcticSuffix, prompt_ids: Sequence[int]) -> None:
        self._ids = list(prompt_ids)
        self._num_prompt = len(self._ids)
        self._drafter = drafter
        self._request = next(drafter.ids)
        drafter.cache.start_request(self._request, self._ids)

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Not used there."""

    def settle(self) -> None:
        """Nothing is deferred there."""

    def checkpoint(self) -> int:
        return len(self._ids) - self._num_prompt

    def rollback(self, mark: int) -> None:
        raise NotImplementedError("Arctic cannot forget a part of a request")

    def propose(self, budget: int, max_depth: int) -> DraftTree:
        draft = self._drafter.cache.speculate(
            self._request,
            self._ids[-64:],
            max_spec_tokens=min(budget, max_depth),
            **self._drafter.options,
        )
        return _tree(draft.token_ids, draft.parents, draft.probs)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._ids.extend(token_ids)
        self._drafter.cache.add_active_response(self._request, list(token_ids))

    def close(self) -> None:
        self._drafter.cache.stop_request(self._request)
        if not self._drafter.remembers:
            self._drafter.cache.evict_cached_response(self._request)


def tree_of_paths(paths: Iterable[Sequence[int]], budget: int, max_depth: int) -> DraftTree:
    """The tree of paths, at most `budget` nodes of it, no deeper."""
    nodes: dict[tuple[int, ...], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    for path in paths:
        for depth, token in enumerate(path, 1):
            prefix = tuple(path[:depth])
            if depth > max_depth:
                break
            if prefix in nodes:
                continue
            if len(tokens) >= budget:
                break
            nodes[prefix] = len(tokens)
            tokens.append(token)
            parents.append(nodes.get(prefix[:-1], -1))
    return _tree(tokens, parents, np.ones(len(tokens)))  # it does not say


class TokenRecycling:
    """The rows stay from request to request, as in the paper's warm start."""

    name = "token recycling"
    sources = ("recycled",)

    def __init__(self) -> None:
        self.followers: dict[int, list[int]] = {}

    def open(self, prompt_ids: Sequence[int], **_: Any) -> TokenRecyclingSession:
        return TokenRecyclingSession(self, prompt_ids)


class _LikelySession(TextSession):
    num_likely = NUM_LIKELY

    def __init__(self, drafter: Any, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids, Calibration(drafter.sources))
        self._drafter = drafter

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Neither paper learns from it."""


class TokenRecyclingSession(_LikelySession):
    def note_likely(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        ids: npt.NDArray[np.int32],
        chances: npt.NDArray[np.float32],
    ) -> None:
        last = [int(self.text[self.size - 1]), *token_ids]
        for token, row in zip(last, ids.tolist(), strict=True):
            if row and row[0] >= 0:
                self._drafter.followers[token] = [i for i in row if i >= 0]

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        survival: list[float] = []
        waiting = [(-1.0, 0, -1, int(self.text[self.size - 1]), 0)]
        order = 0
        while waiting and len(tokens) < budget:
            negative, _, parent, token, depth = heapq.heappop(waiting)
            node = -1
            if depth:
                node = len(tokens)
                tokens.append(token)
                parents.append(parent)
                survival.append(-negative)
            if depth < max_depth:
                followers = self._drafter.followers.get(token, ())
                for chance, follower in zip(RANK_CHANCES, followers, strict=False):
                    order += 1
                    heapq.heappush(waiting, (negative * chance, order, node, follower, depth + 1))
        return _tree(tokens, parents, survival)


class LogitSpec:
    """What it knows is a request's own."""

    name = "logitspec"
    sources = ("logitspec",)

    def open(self, prompt_ids: Sequence[int], **_: Any) -> LogitSpecSession:
        return LogitSpecSession(self, prompt_ids)


class LogitSpecSession(_LikelySession):
    def __init__(self, drafter: LogitSpec, prompt_ids: Sequence[int]) -> None:
        super().__init__(drafter, prompt_ids)
        self._tree, self._rows = DraftTree.empty(), list[list[int]]()
        self._guesses: list[int] = []

    def note_likely(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        ids: npt.NDArray[np.int32],
        chances: npt.NDArray[np.float32],
    ) -> None:
        self._tree = _tree(token_ids, parents, np.ones(len(token_ids)))
        self._rows = ids.tolist()

    def extend(self, token_ids: Sequence[int]) -> None:
        # The row of the last token before the newest: the first is the root's.
        path = [-1, *followed(self._tree.children(), token_ids[:-1])]
        self._guesses = []
        if len(path) == len(token_ids) and path[-1] + 1 < len(self._rows):
            row = self._rows[path[-1] + 1]
            self._guesses = [i for i in row if i >= 0 and i != token_ids[-1]]
        self._rows = []
        super().extend(token_ids)

    def _behind(self, gram: list[int]) -> list[int]:
        """What followed the last occurrence of `gram` in the text."""
        text = self.text[: self.size]
        num = len(gram)
        where = np.flatnonzero(text[num - 1 : -1] == gram[-1])
        for at in where[::-1].tolist():
            if text[at : at + num].tolist() == gram:
                found: list[int] = text[at + num : at + num + MOST_COPIED].tolist()
                return found
        return []

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        last = self.text[max(0, self.size - LONGEST_MATCH) : self.size].tolist()
        paths = [self._behind(last[i:]) for i in range(len(last))]
        paths = [next((path for path in paths if path), [])]
        for guess in self._guesses:
            behind = self._behind([last[-1], guess]) if last else []
            behind = behind or self._behind([guess])
            paths.append([guess, *behind])
        return tree_of_paths((path[:max_depth] for path in paths), budget, max_depth)


def _tree(tokens: Sequence[int], parents: Sequence[int], survival: Any) -> DraftTree:
    return DraftTree(
        np.asarray(tokens, np.int32),
        np.asarray(parents, np.int32),
        np.asarray(survival, np.float32),
        np.zeros(len(tokens), np.uint8),
    )
