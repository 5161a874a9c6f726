"""Token Recycling and LogitSpec, written anew from their papers, to be compared with.

Token Recycling (Luo et al., arXiv 2408.08696): for every token the likeliest ids of the last row
behind it, a fixed tree over ranks. LogitSpec (Liu et al., arXiv 2507.01449): what the last row held
likeliest is taken for the token after the next one; pairs of it are looked up in the text.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters.calibration import Calibration
from drafters.session import TextSession
from drafters.tree import DraftTree

NUM_LIKELY = 8
RANK_CHANCES = (0.42, 0.13, 0.07, 0.05, 0.035, 0.03, 0.025, 0.02)
"""How often a node of each rank is right, about: the fixed tree holds the likeliest places."""


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

    def __init__(self, prompt_ids: Sequence[int], source: str) -> None:
        super().__init__(prompt_ids, Calibration((source,)))

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Neither paper learns from it."""


class TokenRecyclingSession(_LikelySession):
    def __init__(self, drafter: TokenRecycling, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids, "recycled")
        self._followers = drafter.followers

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
                self._followers[token] = [i for i in row if i >= 0]

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
                followers = self._followers.get(token, ())
                for chance, follower in zip(RANK_CHANCES, followers, strict=False):
                    order += 1
                    heapq.heappush(waiting, (negative * chance, order, node, follower, depth + 1))
        return _tree(tokens, parents, survival)


class LogitSpec:
    """ngram: longest match that is looked up. path: most tokens copied behind one."""

    name = "logitspec"
    sources = ("logitspec",)

    def __init__(self, ngram: int = 3, path: int = 8) -> None:
        self.ngram = ngram
        self.path = path

    def open(self, prompt_ids: Sequence[int], **_: Any) -> LogitSpecSession:
        return LogitSpecSession(self, prompt_ids)


class LogitSpecSession(_LikelySession):
    def __init__(self, drafter: LogitSpec, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids, "logitspec")
        self._drafter = drafter
        self._rows: tuple[list[int], list[int], list[list[int]]] = ([], [], [])
        self._guesses: list[int] = []

    def note_likely(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        ids: npt.NDArray[np.int32],
        chances: npt.NDArray[np.float32],
    ) -> None:
        self._rows = list(token_ids), list(parents), ids.tolist()

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens, parents, rows = self._rows
        row = 0
        for token in token_ids[:-1]:
            row = next(
                (
                    1 + node
                    for node, of in enumerate(zip(tokens, parents, strict=True))
                    if of == (token, row - 1)
                ),
                -1,
            )
            if row < 0:
                break
        known = 0 <= row < len(rows)
        self._guesses = [i for i in rows[row] if i >= 0 and i != token_ids[-1]] if known else []
        self._rows = ([], [], [])
        super().extend(token_ids)

    def _behind(self, gram: list[int]) -> list[int]:
        """What followed the last occurrence of `gram` in the text."""
        text = self.text[: self.size]
        num = len(gram)
        where = np.flatnonzero(text[num - 1 : -1] == gram[-1])
        for at in where[::-1].tolist():
            if text[at : at + num].tolist() == gram:
                found: list[int] = text[at + num : at + num + self._drafter.path].tolist()
                return found
        return []

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        last = self.text[max(0, self.size - self._drafter.ngram) : self.size].tolist()
        paths = [self._behind(last[i:]) for i in range(len(last))]
        paths = [next((path for path in paths if path), [])]
        for guess in self._guesses:
            behind = self._behind([last[-1], guess]) if last else []
            behind = behind or self._behind([guess])
            paths.append([guess, *behind])
        from loadtest.peer_drafters import tree_of_paths

        return tree_of_paths((path[:max_depth] for path in paths), budget, max_depth)


def _tree(tokens: list[int], parents: list[int], survival: list[float]) -> DraftTree:
    return DraftTree(
        np.asarray(tokens, np.int32),
        np.asarray(parents, np.int32),
        np.asarray(survival, np.float32),
        np.zeros(len(tokens), np.uint8),
    )
