"""`suffix`: prompt and own output, all match lengths, one tree by estimated chance.

Needs nothing but the sequence itself: no corpus, no settings, no state between requests.
Suffix decoding (Oliaro et al., arXiv 2411.04975) keeps a suffix tree and drafts from the longest
match; here every match length counts (drafters.auto.gather), so that short contexts fill the part
of the budget that long ones leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafters.auto.cells import SOURCES
from drafters.auto.drafter import AutoDrafter, AutoSession

MIN_SURVIVAL = 0.01
"""Nodes whose path is accepted more rarely than this are not proposed."""


class SuffixDrafter:
    """Makes sessions of `auto` that know their text alone; nothing is learned across requests.

    eos_token_ids: never proposed, because the bonus token brings an EOS without a draft.
    """

    name = "suffix"
    sources = SOURCES

    def __init__(self, *, eos_token_ids: Sequence[int] = ()) -> None:
        self._auto = AutoDrafter(
            eos_token_ids=eos_token_ids, min_survival=MIN_SURVIVAL, num_likely=0, learn=False
        )
        self.trust = self._auto.trust

    def open(self, prompt_ids: Sequence[int], **_: Any) -> AutoSession:
        """A session over the whole prompt; nothing else is used. The prompt is indexed here: about
        0.1 ms for 2,000 ids."""
        return self._auto.open(prompt_ids)
