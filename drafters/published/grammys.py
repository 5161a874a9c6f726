"""`grammys`: N-Grammys, learning-free batched speculation (arXiv 2411.03786), TASC's baseline.

`bigram`: a table taken from the target model names, for every vocabulary id, its most probable
next tokens; each of the first `num_drafts` of them starts a draft that the likeliest next token
continues. `mixed`: drafts from the request's own text come first (what followed the last `query`
tokens, most frequent first), and the bigram table fills the rest. The drafts that the paper
verifies as a batch of sequences are merged into one tree here; common beginnings cost one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from drafters.array_file import ArrayFormat, Column
from drafters.arrays import Float32, Int32
from drafters.calibration import Calibration
from drafters.catalog import GrammysOptions
from drafters.options import check_options
from drafters.session import TextSession
from drafters.tree import DraftTree

MOST_CONTINUATIONS = 64
_FORMAT = ArrayFormat(
    "target bigram table",
    1,
    {
        "next_ids": Column("int32", ("ids", "likeliest"), low=0, high="ids"),
        "chances": Column("float32", ("ids", "likeliest"), low=0),
    },
)


@dataclass(frozen=True, slots=True)
class BigramTable:
    """The target's most probable next tokens after every single token.

    next_ids: int32 [vocab, k], likeliest first. chances: float32 [vocab, k], their probabilities.
    fingerprint: of the *model* they were taken from.
    """

    fingerprint: str
    next_ids: Int32
    chances: Float32

    def __post_init__(self) -> None:
        if self.next_ids.ndim != 2 or self.next_ids.shape != self.chances.shape:
            raise ValueError("next_ids and chances must both be [vocab, k]")
        num, k = self.next_ids.shape
        if k < 1 or (num and not 0 <= int(self.next_ids.min()) <= int(self.next_ids.max()) < num):
            raise ValueError("next_ids must be ids of the vocabulary, at least one for each")

    def save(self, path: Path | str) -> None:
        """Write atomically."""
        arrays = {"next_ids": self.next_ids, "chances": self.chances}
        _FORMAT.write(path, arrays, fingerprint=self.fingerprint)

    @classmethod
    def load(cls, path: Path | str, *, fingerprint: str | None) -> BigramTable:
        """Map what save() wrote; raises as ArrayFormat.read does."""
        meta, arrays, _ = _FORMAT.read(path, fingerprint=fingerprint)
        return cls(str(meta["fingerprint"]), arrays["next_ids"], arrays["chances"])


def context_drafts(text: Int32, query: int, length: int) -> Counter[tuple[int, ...]]:
    """How often each continuation of up to `length` tokens followed the last `query` tokens before;
    of MOST_CONTINUATIONS at most, the newest first. The text is longer than that."""
    size = text.shape[0]
    equal = text[query - 1 : size - 1] == text[size - 1]
    for i in range(2, query + 1):
        equal &= text[query - i : size - i] == text[size - i]
    found: Counter[tuple[int, ...]] = Counter()
    for end in (query + np.flatnonzero(equal))[::-1].tolist():
        draft = tuple(text[end : end + length].tolist())
        if draft in found or len(found) < MOST_CONTINUATIONS:
            found[draft] += 1
    return found


class GrammysDrafter:
    """Makes GrammysSessions.

    table: the target's bigrams; without it only `mixed` has anything to draft, from the text.
    strategy: "bigram" or "mixed". num_drafts, length: the paper's batch, k drafts of w tokens.
    query: tokens looked up in the text by "mixed".
    """

    name = "grammys"
    sources = ("bigram", "context")

    def __init__(
        self,
        *,
        table: BigramTable | None = None,
        strategy: Literal["bigram", "mixed"] = GrammysOptions.strategy,
        num_drafts: int = 10,
        length: int = 10,
        query: int = 1,
    ) -> None:
        check_options(GrammysOptions, {"table": table, "strategy": strategy})
        for name, value in (("num_drafts", num_drafts), ("length", length), ("query", query)):
            if not 1 <= value <= 64:
                raise ValueError(f"{name} must be in 1..64, not {value}")
        self.table = table
        self.strategy = strategy
        self.num_drafts = num_drafts
        self.length = length
        self.query = query
        self.calibration = Calibration(self.sources)

    def open(self, prompt_ids: Sequence[int], **_: Any) -> GrammysSession:
        """A session over the whole prompt; nothing else is used."""
        return GrammysSession(self, prompt_ids)


class GrammysSession(TextSession):
    """Merges the drafts of a step into one tree; the budget goes to the likeliest nodes."""

    def __init__(self, drafter: GrammysDrafter, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids, drafter.calibration)
        self._drafter = drafter

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        drafter = self._drafter
        length = min(drafter.length, max_depth)
        if self.size == 0:
            return DraftTree.empty()
        # (tokens, source, shares) of each draft, in the paper's order of preference.
        drafts: list[tuple[list[int], int, list[float]]] = []
        if drafter.strategy == "mixed" and self.size > drafter.query:
            counts = context_drafts(self.text[: self.size], drafter.query, length)
            for draft, count in counts.most_common(drafter.num_drafts):
                share = count / counts.total()
                drafts.append(([*draft], 1, [share] + [0.8] * (len(draft) - 1)))
        table = drafter.table
        last = int(self.text[self.size - 1])
        if table is not None and last < table.next_ids.shape[0]:
            for first, share in zip(
                table.next_ids[last].tolist(), table.chances[last].tolist(), strict=True
            ):
                if len(drafts) >= drafter.num_drafts:
                    break
                tokens, shares = [first], [share]
                while len(tokens) < length:
                    shares.append(float(table.chances[tokens[-1], 0]))
                    tokens.append(int(table.next_ids[tokens[-1], 0]))
                drafts.append((tokens, 0, shares))
        return self._merge(drafts).prune(budget)

    def _merge(self, drafts: list[tuple[list[int], int, list[float]]]) -> DraftTree:
        """One tree of the drafts; a shared node keeps its first source, siblings by survival."""
        children: dict[tuple[int, int], int] = {}
        nodes: list[tuple[int, int, int, int, float]] = []
        for tokens, source, shares in drafts:
            parent = -1
            for depth, (token, share) in enumerate(zip(tokens, shares, strict=True)):
                node = children.setdefault((parent, token), len(nodes))
                if node == len(nodes):
                    nodes.append((token, parent, source, depth, share))
                parent = node
        if not nodes:
            return DraftTree.empty()
        token_ids, parents, *cells = zip(*nodes, strict=True)
        ids, above = np.asarray(token_ids, np.int32), np.asarray(parents, np.int32)
        return self._drafter.calibration.tree(ids, above, *cells).preorder()
