"""Whether a corpus is worth its nodes, by chances first and by trees once there are enough.

At some steps `auto` grows its tree twice, with the corpus and without. One is verified. What the
other would have brought needs no model: both are followed by the tokens that come, each with as
many of its likeliest nodes as the step had room for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from drafters.tree import DraftTree, followed


@dataclass(slots=True)
class CorpusFit:
    """Whether a corpus (or what was learned) helps: drafts with it beside drafts without it.

    Every emitted token is given both chances. num_tokens: how many were compared, decayed. gain:
    sum of log(chance with + FLOOR) - log(chance without + FLOOR), decayed alike. Chances are known
    soon, but a better chance is not always a better tree: steps decide once there are enough of
    them (Rivals). num_steps: compared, decayed; tokens_with, tokens_without: what they
    would have emitted. One writer: the sessions of the drafter that owns the trust.
    """

    FLOOR: ClassVar[float] = 0.05  # below it a token is not drafted either way
    MIN_TOKENS: ClassVar[int] = 100
    MEMORY: ClassVar[float] = 4000.0
    MARGIN: ClassVar[float] = 0.002  # a token: differences below it are none
    MIN_STEPS: ClassVar[int] = 24
    STEP_MEMORY: ClassVar[float] = 4000.0

    num_tokens: float = 0.0
    gain: float = 0.0
    num_steps: float = 0.0
    tokens_with: float = 0.0
    tokens_without: float = 0.0

    def compare(self, with_it: float, without_it: float) -> None:
        """Count a token by the chances it was given."""
        self.num_tokens += 1.0
        self.gain += math.log((with_it + self.FLOOR) / (without_it + self.FLOOR))
        if self.num_tokens > self.MEMORY:
            self.num_tokens *= 0.5
            self.gain *= 0.5

    def compare_steps(self, with_it: int, without_it: int) -> None:
        """Count a step by the nodes that were accepted of the tree with the corpus and of the one
        without, of equal size."""
        self.num_steps += 1.0
        self.tokens_with += 1.0 + with_it
        self.tokens_without += 1.0 + without_it
        if self.num_steps > self.STEP_MEMORY:
            self.num_steps *= 0.5
            self.tokens_with *= 0.5
            self.tokens_without *= 0.5

    @property
    def helps(self) -> bool:
        """Whether to draft from the corpus; true until enough was compared."""
        if self.num_steps >= self.MIN_STEPS:
            # Few steps say little: 2 % is believed of 24, 0.3 % of 400.
            margin = self.MARGIN + 0.5 / self.num_steps
            return self.tokens_with >= (1.0 - margin) * self.tokens_without
        num = self.num_tokens
        return num < self.MIN_TOKENS or self.gain >= -self.MARGIN * num


class Rivals:
    """The trees of one step, and the tokens that came since."""

    def __init__(self, trees: Sequence[DraftTree], num_nodes: int) -> None:
        """num_nodes: of each tree at most, its likeliest."""
        self._children = [tree.prune(num_nodes).children() for tree in trees]
        self._tokens: list[int] = []

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Go on by tokens that came; whether any tree still holds the text."""
        self._tokens += token_ids
        return max(self.accepted) == len(self._tokens)

    @property
    def accepted(self) -> list[int]:
        """Nodes that were followed so far, of each."""
        return [len(followed(children, self._tokens)) for children in self._children]
