"""The life cycle that drafters share: of a session over plain text, and of one over an index.

TextSession holds prompt and output as one int32 buffer; a drafter derives its session from it and
writes `_draft`. IndexedSession holds them as a TextIndex; a drafter writes `propose` and `extend`.
Both forget the end of the text on rollback, and refuse every call after close().
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from drafters.arrays import Int32
from drafters.auto.text_index import TextIndex
from drafters.base import SessionClosedError
from drafters.calibration import Calibration
from drafters.tree import DraftTree

MakerT = TypeVar("MakerT")


class TextSession:
    """Prompt and output of one Sequence. text: int32 [capacity], the first `size` are valid."""

    __slots__ = ("_calibration", "_closed", "num_prompt", "size", "text")

    def __init__(self, prompt_ids: Sequence[int], calibration: Calibration) -> None:
        self.num_prompt = len(prompt_ids)
        self.size = self.num_prompt
        self.text: Int32 = np.empty(self.num_prompt + 256, np.int32)
        self.text[: self.size] = prompt_ids
        self._calibration = calibration
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError(f"this {type(self).__name__} is closed")

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        """The drafter's rule; budget and max_depth are at least 1."""
        raise NotImplementedError

    def propose(self, budget: int, max_depth: int) -> DraftTree:
        """See DraftSession.propose."""
        self._check_open()
        if budget <= 0 or max_depth <= 0:
            return DraftTree.empty()
        return self._draft(budget, max_depth)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append emitted tokens: O(1) each, amortised."""
        self._check_open()
        end = self.size + len(token_ids)
        if end > self.text.shape[0]:
            text = np.empty(2 * end, np.int32)
            text[: self.size] = self.text[: self.size]
            self.text = text
        self.text[self.size : end] = token_ids
        self.size = end

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Tell the calibration what became of the tree."""
        self._check_open()
        self._calibration.record(tree, accepted)

    def settle(self) -> None:
        """Do nothing; a subclass may."""
        self._check_open()

    def checkpoint(self) -> int:
        """Tokens seen since open()."""
        self._check_open()
        return self.size - self.num_prompt

    def rollback(self, mark: int) -> None:
        """Forget all but the first `mark` tokens seen since open(). Raises ValueError."""
        self._check_open()
        if not 0 <= mark <= self.size - self.num_prompt:
            raise ValueError(f"mark {mark} is not in 0..{self.size - self.num_prompt}")
        self.size = self.num_prompt + mark

    def close(self) -> None:
        """Release the text. Idempotent."""
        self._closed = True
        self.text = np.empty(0, np.int32)


class IndexedSession(Generic[MakerT]):
    """Prompt and output of one Sequence as a TextIndex, and the drafter that made it."""

    __slots__ = ("_drafter", "_index", "_num_prompt")

    def __init__(self, drafter: MakerT, num_prompt: int) -> None:
        """Begins with an empty index: the subclass appends the ids of the prompt."""
        self._drafter: MakerT | None = drafter
        self._num_prompt = num_prompt
        self._index = TextIndex(num_prompt + 256)

    def _closed(self) -> SessionClosedError:
        return SessionClosedError(f"this {type(self).__name__} is closed")

    def _owner(self) -> MakerT:
        if self._drafter is None:
            raise self._closed()
        return self._drafter

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Learn nothing from trees; a subclass may."""
        self._owner()

    def settle(self) -> None:
        """Do nothing; a subclass may."""
        self._owner()

    def checkpoint(self) -> int:
        """Tokens seen since open()."""
        self._owner()
        return self._index.size - self._num_prompt

    def rollback(self, mark: int) -> None:
        """Forget all but the first `mark` tokens seen since open(). Raises ValueError."""
        self._owner()
        if not 0 <= mark <= self._index.size - self._num_prompt:
            raise ValueError(f"mark {mark} is not in 0..{self._index.size - self._num_prompt}")
        self._index.truncate(self._num_prompt + mark)

    def close(self) -> None:
        """Release the index. Idempotent."""
        if self._drafter is not None:
            self._drafter = None
            self._index = TextIndex(0)
