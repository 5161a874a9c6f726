"""`prompt`: prompt lookup decoding as in transformers, the baseline.

The last tokens of the sequence, `max_ngram` of them and then fewer, are looked up in prompt and
output; the *first* earlier occurrence that has a continuation gives the draft, `num_tokens` long
(A. Saxena, "Prompt Lookup Decoding", 2023; transformers' PromptLookupCandidateGenerator with its
defaults). The draft ends before an EOS id, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from drafters.arrays import Int32
from drafters.calibration import Calibration
from drafters.jit import compiled, entry
from drafters.session import TextSession
from drafters.tree import DraftTree


@entry
@compiled
def first_occurrence(text: Int32, size: int, length: int) -> int:
    """Where the first earlier occurrence of the last `length` tokens ends, or -1.

    The end is the index of the token that follows the occurrence; it lies before `size`.
    """
    last = text[size - 1]
    for end in range(length, size):
        if text[end - 1] != last:
            continue
        equal = 1
        while equal < length and text[end - 1 - equal] == text[size - 1 - equal]:
            equal += 1
        if equal == length:
            return end
    return -1


class PromptDrafter:
    """Makes PromptSessions.

    num_tokens: longest draft. max_ngram: longest lookup. eos_token_ids: a draft ends before them.
    """

    name = "prompt"
    sources = ("prompt",)

    def __init__(
        self,
        *,
        num_tokens: int = 10,
        max_ngram: int = 2,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, not {num_tokens}")
        if max_ngram < 1:
            raise ValueError(f"max_ngram must be at least 1, not {max_ngram}")
        self.num_tokens = num_tokens
        self.max_ngram = max_ngram
        self.eos_token_ids = frozenset(eos_token_ids)
        self.calibration = Calibration(self.sources)

    def open(self, prompt_ids: Sequence[int], **_: Any) -> PromptSession:
        """A session over the whole prompt; nothing else is used."""
        return PromptSession(self, prompt_ids)


class PromptSession(TextSession):
    """Looks its own text up. O(text) a propose, about a microsecond for a thousand tokens."""

    def __init__(self, drafter: PromptDrafter, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids, drafter.calibration)
        self._drafter = drafter

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        drafter = self._drafter
        for length in range(min(drafter.max_ngram, self.size - 1), 0, -1):
            start = first_occurrence(self.text, self.size, length)
            if start < 0:
                continue
            end = min(start + min(drafter.num_tokens, budget, max_depth), self.size)
            text: list[int] = self.text[start:end].tolist()
            chosen = [*takewhile(lambda token: token not in drafter.eos_token_ids, text)]
            num = len(chosen)
            if num == 0:
                return DraftTree.empty()
            tokens, parents = np.asarray(chosen, np.int32), np.arange(-1, num - 1, dtype=np.int32)
            # The rule gives no chances; the calibration learns them by match length and depth.
            return drafter.calibration.tree(tokens, parents, 0, length + np.arange(num), 0.75)
        return DraftTree.empty()
