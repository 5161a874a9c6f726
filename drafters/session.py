"""TextSession: the life cycle that the drafters' sessions share, over prompt and output."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.arrays import Int32
from drafters.auto.text_index import TextIndex
from drafters.base import SessionClosedError
from drafters.calibration import Calibration
from drafters.tree import DraftTree


class TextSession:
    """Prompt and output of one Sequence, as a TextIndex; a drafter derives its session from it and
    writes `_draft`. It forgets the end of the text on rollback, and refuses every call after
    close().

    calibration: what learns from trees, or None.
    """

    def __init__(self, prompt_ids: Sequence[int], calibration: Calibration | None = None) -> None:
        self.num_prompt = len(prompt_ids)
        self._index = TextIndex(self.num_prompt + 256)
        self._index.append(prompt_ids)
        self._calibration = calibration
        self._closed = False

    @property
    def text(self) -> Int32:
        """int32 [capacity], the first `size` are valid."""
        row: Int32 = self._index.text[0]
        return row

    @property
    def size(self) -> int:
        """Tokens of prompt and output."""
        return self._index.size

    def _closed_error(self) -> SessionClosedError:
        return SessionClosedError(f"this {type(self).__name__} is closed")

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        """The drafter's rule; budget and max_depth are at least 1."""
        raise NotImplementedError

    def propose(self, budget: int, max_depth: int) -> DraftTree:
        """See DraftSession.propose."""
        if self._closed:  # a call less in each step, here and in `auto`
            raise self._closed_error()
        if budget <= 0 or max_depth <= 0:
            return DraftTree.empty()
        return self._draft(budget, max_depth)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append emitted tokens: O(1) each, amortised."""
        self._check_open()
        self._index.append(token_ids)

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Tell the calibration what became of the tree."""
        self._check_open()
        if self._calibration is not None:
            self._calibration.record(tree, accepted)

    def settle(self) -> None:
        """Do nothing; a subclass may."""
        self._check_open()

    def checkpoint(self) -> int:
        """Tokens seen since open()."""
        self._check_open()
        return self._index.size - self.num_prompt

    def rollback(self, mark: int) -> None:
        """Forget all but the first `mark` tokens seen since open(). Raises ValueError."""
        num_seen = self.checkpoint()
        if not 0 <= mark <= num_seen:
            raise ValueError(f"mark {mark} is not in 0..{num_seen}")
        self._index.truncate(self.num_prompt + mark)

    def close(self) -> None:
        """Release the text. Idempotent."""
        self._closed = True
        self._index = TextIndex(0)
