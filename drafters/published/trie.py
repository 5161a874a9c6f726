"""`trie`: N-Gram-Trie speculative decoding, as published.

"Faster In-Context Learning for LLMs via N-Gram Trie Speculative Decoding", EMNLP 2025 main, section
3. Every n-gram of the prompt's context is split at L_p, and every sub-prefix with the n-gram's
rest, gram[j:] for j in 0..L_p-1, is inserted into a trie, which adds to the frequency of every node
passed. To draft, the last L_p *generated* tokens are matched from the root, one fewer at a time
until they match, and the sub-tree below is reduced to its `num_draft` most frequent nodes.

Where the paper leaves it open: n-grams at the text's end are shorter, down to L_p tokens; a span of
the text that two n-grams yield counts once; exactly num_draft nodes are kept when there are that
many, ties going to the shallower and then to the earlier node, so that a kept node's parent is
kept. (The authors' code drops the longest branches first and so keeps fewer.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drafters.arrays import Int32, Int32x2, Int64
from drafters.auto.text_index import find_child
from drafters.calibration import Calibration
from drafters.catalog import TrieOptions
from drafters.heap import pop, push
from drafters.jit import compiled, entry
from drafters.options import check_options
from drafters.session import TextSession
from drafters.tree import DraftTree

HeapFields = tuple[Int64, Int32, Int32, Int32]


@entry
@compiled
def build_trie(context: Int32, n: int, prefix_length: int, nodes: Int32x2, table: Int32) -> int:
    """Insert all n-grams of `context`; returns the number of nodes (node 0 is the root). nodes,
    table: see NGramTrie and find_child."""
    size = context.shape[0]
    nodes[:, 0] = -1
    nodes[2, 0] = 0
    nodes[5, 0] = 0
    num = 1
    for start in range(size):
        # Spans that start here: from the n-grams at start - j, j < L_p, when these exist. Their
        # ends differ except at the text's end; equal spans count once.
        longest = min(start + n, size) - start
        fewest = longest + 1
        spans = np.zeros(prefix_length, np.int32)
        num_spans = 0
        for j in range(prefix_length):
            first = start - j
            if first < 0 or size - first < prefix_length:
                continue
            length = min(first + n, size) - start
            if length >= 1 and length < fewest:
                fewest = length
                spans[num_spans] = length
                num_spans += 1
        if num_spans == 0:
            continue
        node = 0
        for depth in range(spans[0]):
            token = context[start + depth]
            slot = find_child(nodes, table, node, token)
            child = table[slot]
            if child < 0:
                child = num
                num += 1
                table[slot] = child
                nodes[0, child] = token
                nodes[1, child] = node
                nodes[2, child] = 0
                nodes[3, child] = -1
                nodes[4, child] = nodes[3, node]
                nodes[3, node] = child
                nodes[5, child] = depth + 1
            for i in range(num_spans):
                if spans[i] > depth:
                    nodes[2, child] += 1
            node = child
    return num


@compiled
def _rank(nodes: Int32, node: int) -> int:
    """Nodes are kept by this, the largest first: more frequent, then shallower, then earlier."""
    deep, late = (1 << 8) - 1 - nodes[5, node], (1 << 30) - node
    rank: int = (np.int64(nodes[2, node]) << 38) | (deep << 30) | late
    return rank


@entry
@compiled
def frequent_subtree(
    nodes: Int32x2, top: int, num_draft: int, max_depth: int, out: Int32x2, heap: HeapFields
) -> int:
    """The `num_draft` most frequent nodes below `top`: by (frequency, shallow, early).

    out: int32 [3, num_draft]: node, parent in out, depth below top. heap: scratch, of the capacity
    of nodes: drafters.heap's keys and places, node and its parent in out. Returns the number kept.
    """
    keys, places, waiting, parents = heap
    num = 0
    size = 0
    at = top
    kept = -1
    while True:
        depth = 0 if kept < 0 else out[2, kept]
        child = nodes[3, at] if depth < max_depth else -1
        while child >= 0:
            place = push(keys, places, size, _rank(nodes, child))
            size += 1
            waiting[place], parents[place] = child, kept
            child = nodes[4, child]
        if num >= num_draft or size == 0:
            return num
        place = pop(keys, places, size)
        size -= 1
        at = waiting[place]
        out[0, num] = at
        out[1, num] = parents[place]
        out[2, num] = nodes[5, at] - nodes[5, top]
        kept = num
        num += 1


class NGramTrie:
    """The trie over one context. Built at once, never changed.

    nodes: int32 [6, num_nodes]: token, parent, frequency, first child, next sibling, depth;
    node 0 is the root.
    """

    def __init__(self, context_ids: Sequence[int] | Int32, n: int, prefix_length: int) -> None:
        context = np.asarray(context_ids, np.int32)
        capacity = min(context.shape[0] * n + 1, 1 << 30)
        slots = 64
        while slots < 2 * capacity:
            slots *= 2
        self.nodes: Int32 = np.empty((6, capacity), np.int32)
        self._table: Int32 = np.full(slots, -1, np.int32)
        self.num_nodes = build_trie(context, n, prefix_length, self.nodes, self._table)
        self.nodes = self.nodes[:, : self.num_nodes].copy()
        self._heap: HeapFields = (
            np.empty(self.num_nodes, np.int64),
            np.arange(self.num_nodes, dtype=np.int32),
            np.empty(self.num_nodes, np.int32),
            np.empty(self.num_nodes, np.int32),
        )

    def find(self, token_ids: Sequence[int]) -> int:
        """The node at the end of the path `token_ids` from the root, or -1."""
        node = 0
        for token in token_ids:
            node = int(self._table[find_child(self.nodes, self._table, node, token)])
            if node < 0:
                return -1
        return node

    def subtree(self, node: int, num_draft: int, max_depth: int) -> Int32:
        """int32 [3, kept]: nodes below `node`, their parents (index here, -1) and depths."""
        out = np.empty((3, num_draft), np.int32)
        return out[:, : frequent_subtree(self.nodes, node, num_draft, max_depth, out, self._heap)]


class TrieDrafter:
    """Makes TrieSessions.

    n: length of the n-grams in tokens. prefix_length: the paper's L_p. num_draft: most nodes kept
    per draft.
    """

    name = "trie"
    sources = ("trie",)

    def __init__(
        self,
        *,
        n: int = TrieOptions.n,
        prefix_length: int = TrieOptions.prefix_length,
        num_draft: int = TrieOptions.num_draft,
    ) -> None:
        given = {"n": n, "prefix_length": prefix_length, "num_draft": num_draft}
        check_options(TrieOptions, given)
        self.n = n
        self.prefix_length = prefix_length
        self.num_draft = num_draft
        self.calibration = Calibration(self.sources)

    def open(
        self, prompt_ids: Sequence[int], *, context_span: tuple[int, int] | None = None, **_: Any
    ) -> TrieSession:
        """A session over prompt_ids[context_span], or over the whole prompt.

        Raises ValueError for a span outside the prompt.
        """
        if context_span is not None:
            start, end = context_span
            if not 0 <= start <= end <= len(prompt_ids):
                raise ValueError(f"context span {start}..{end} is not inside the prompt")
        return TrieSession(self, prompt_ids, context_span)


class TrieSession(TextSession):
    """Drafts from the prompt's trie. The trie is built in settle(), or at the first draft."""

    def __init__(
        self,
        drafter: TrieDrafter,
        prompt_ids: Sequence[int],
        context_span: tuple[int, int] | None,
    ) -> None:
        super().__init__(prompt_ids, drafter.calibration)
        self._drafter = drafter
        self._span = context_span or (0, self.num_prompt)
        self._trie: NGramTrie | None = None

    def settle(self) -> None:
        """Build the trie if that has not been done."""
        self._check_open()
        self._built()

    def _built(self) -> NGramTrie:
        if self._trie is None:
            drafter = self._drafter
            start, end = self._span
            self._trie = NGramTrie(self.text[start:end], drafter.n, drafter.prefix_length)
        return self._trie

    def close(self) -> None:
        """Release text and trie. Idempotent."""
        super().close()
        self._trie = None

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        drafter = self._drafter
        trie = self._built()
        num_generated = self.size - self.num_prompt
        for length in range(min(drafter.prefix_length, num_generated), 0, -1):
            node = trie.find(self.text[self.size - length : self.size].tolist())
            if node <= 0 or trie.nodes[3, node] < 0:
                continue
            kept = trie.subtree(node, min(budget, drafter.num_draft), max_depth)
            tokens, frequency, parents = trie.nodes[0, kept[0]], trie.nodes[2, kept[0]], kept[1]
            below = np.where(parents < 0, trie.nodes[2, node], frequency[parents])
            # An n-gram's last tokens belong to fewer spans, so shares fall there by rule, not by
            # evidence; the calibration sees the share and the match's length with the path.
            share, lengths = frequency / below, length + kept[2] - 1
            return drafter.calibration.tree(tokens, parents, 0, lengths, share).preorder()
        return DraftTree.empty()
