"""`grammys`: N-Grammys, learning-free batched speculation (arXiv 2411.03786), TASC's baseline.

`bigram`: a table taken from the target model names, for every vocabulary id, its most probable
next tokens; each of the first `num_drafts` of them starts a draft that the likeliest next token
continues. `mixed`: drafts from the request's own text come first (what followed the last `query`
tokens, most frequent first), and the bigram table fills the rest. The drafts that the paper
verifies as a batch of sequences are merged into one tree here; common beginnings cost one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from drafters.array_file import ArrayFormat, Column
from drafters.arrays import Float32, Int32, Int32x2
from drafters.calibration import Calibration
from drafters.catalog import GrammysOptions
from drafters.jit import compiled, entry
from drafters.options import check_options
from drafters.session import TextSession
from drafters.tree import DraftTree

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


@entry
@compiled
def context_drafts(
    text: Int32, size: int, query: int, length: int, drafts: Int32x2, counts: Int32
) -> int:
    """Distinct continuations of up to `length` tokens after the last `query` tokens, with counts.

    drafts: int32 [max, length] out, -1 padded; counts: int32 [max] out. Newest occurrences are
    seen first. Returns their number.
    """
    num = 0
    for end in range(size - 1, query - 1, -1):
        equal = True
        for i in range(query):
            if text[end - 1 - i] != text[size - 1 - i]:
                equal = False
                break
        if not equal:
            continue
        long = min(length, size - end)
        found = -1
        for d in range(num):
            same = True
            for i in range(long):
                if drafts[d, i] != text[end + i]:
                    same = False
                    break
            if same:
                found = d
                break
        if found >= 0:
            counts[found] += 1
        elif num < drafts.shape[0]:
            for i in range(drafts.shape[1]):
                drafts[num, i] = text[end + i] if i < long else -1
            counts[num] = 1
            num += 1
    return num


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
            found = np.empty((64, length), np.int32)
            counts = np.zeros(64, np.int32)
            num = context_drafts(self.text, self.size, drafter.query, length, found, counts)
            total = max(1, int(counts[:num].sum()))
            order = np.argsort(-counts[:num], kind="stable")[: drafter.num_drafts].tolist()
            for d in order:
                tokens = [t for t in found[d].tolist() if t >= 0]
                drafts.append((tokens, 1, [int(counts[d]) / total] + [0.8] * (len(tokens) - 1)))
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
