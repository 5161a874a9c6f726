"""`suffix`: prompt and own output, all match lengths, one tree by estimated chance.

Needs nothing but the sequence itself: no corpus, no settings, no state between requests.
Suffix decoding (Oliaro et al., arXiv 2411.04975) keeps a suffix tree and drafts from the longest
match; here every match length counts (drafters.auto.gather), so that short contexts fill the part
of the budget that long ones leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drafters.auto.cells import SOURCES
from drafters.auto.tree_builder import Workspace
from drafters.auto.trust import Trust
from drafters.auto.views import ANY_SURVIVAL, NO_MARKS, NOTHING, Limits
from drafters.session import TextSession
from drafters.tree import DraftTree

MIN_SURVIVAL = 0.01
"""Nodes whose path is accepted more rarely than this are not proposed."""


class SuffixDrafter:
    """Makes SuffixSessions.

    eos_token_ids: never proposed, because the bonus token brings an EOS without a draft.
    """

    name = "suffix"
    sources = SOURCES

    def __init__(self, *, eos_token_ids: Sequence[int] = ()) -> None:
        self.eos_token_ids = np.asarray(tuple(eos_token_ids), np.int32)
        self.trust = Trust()
        self.workspace = Workspace()

    def open(self, prompt_ids: Sequence[int], **_: Any) -> SuffixSession:
        """A session over the whole prompt; nothing else is used."""
        return SuffixSession(self, prompt_ids)


class SuffixSession(TextSession):
    """One Sequence's text, indexed. The prompt is indexed in open(): about 0.1 ms for 2,000 ids.
    Nothing is learned across requests. Survival is the estimated chance; no node below
    MIN_SURVIVAL is in a tree."""

    def __init__(self, drafter: SuffixDrafter, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids)
        self._drafter = drafter

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        drafter, index = self._drafter, self._index
        if index.size == 0:
            return DraftTree.empty()
        context = NOTHING._replace(
            own=index.view(NO_MARKS),
            num_output=index.size - self.num_prompt,
            ends=drafter.eos_token_ids,
        )
        limits = Limits(budget, max_depth, MIN_SURVIVAL, ANY_SURVIVAL)
        return drafter.workspace.grow(limits, context, drafter.trust.fields)
