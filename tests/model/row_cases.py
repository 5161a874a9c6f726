"""Rows of a step, however they got there, over any Runner with 64 blocks: in chunks, beside other
texts, in a draft tree, behind an accepted path and in a copied block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from server.engine.batch import Runner
from tests.model.batches import BLOCK_SIZE, BatchBuilder, Pages, leaf_paths
from tests.model.families import Logprobs, step, tokens

NUM_BLOCKS = 64

TREE = [-1, 0, -1, 2, 3, 3, 1, 4, 7]
"""Parents; the path to the last node is accepted, and its slots overlap those it is moved to."""

ROOTS = (0, 7, 14, 15)
"""Positions of a tree's root, on both sides of the window's and the blocks' edges."""


@dataclass(frozen=True)
class RowCases:
    """truth: log-softmax of a text's positions from one on. equal: holds what was got against it.

    The truth may come from the same runner, in any blocks: it is asked for at the end."""

    runner: Runner
    truth: Callable[[list[int], int], Logprobs]
    equal: Callable[[Logprobs, Logprobs], Any]

    def chunks(self, num: int, size: int) -> None:
        """A text of `num` ids in chunks."""
        ids, table = tokens(num, 3), Pages(NUM_BLOCKS, seed=size).sequence(num)
        got = []
        for start in range(0, num, size):
            builder = BatchBuilder()
            rows = builder.add_rows(table, ids[start : start + size], start)
            got.append(step(self.runner, builder, rows))
        self.equal(np.concatenate(got), self.truth(ids, 0))

    def neighbours(self) -> None:
        """A prompt chunk, two decode rows and a second chunk of another prompt, on scattered
        blocks."""
        pages = Pages(NUM_BLOCKS, seed=7)
        texts = [tokens(num, 10 + num) for num in (17, 21, 18, 38)]
        tables = [pages.sequence(len(ids)) for ids in texts]
        done = [0, 20, 17, 30]
        for i in (1, 2, 3):
            builder = BatchBuilder()
            builder.add_rows(tables[i], texts[i][: done[i]], 0)
            step(self.runner, builder, [])
        builder = BatchBuilder()
        rows = [builder.add_rows(tables[i], texts[i][done[i] :], done[i]) for i in range(4)]
        got = step(self.runner, builder, [row for part in rows for row in part])
        want = [self.truth(ids, start) for ids, start in zip(texts, done, strict=True)]
        self.equal(got, np.concatenate(want))

    def tree(self, root: int) -> None:
        """Every node of a tree off the last prompt row, in one batch with it; then KV of the
        accepted path is moved to its positions, and what follows reads it there."""
        ids, nodes = tokens(root + 1, 20 + root), tokens(len(TREE), 50 + root)
        table = Pages(NUM_BLOCKS, seed=root).sequence(root + 1 + len(TREE) + 3)
        builder = BatchBuilder()
        last = builder.add_rows(table, ids, 0)[-1]
        got = step(self.runner, builder, [*builder.add_tree(table, root, nodes, TREE), last])
        *_, accepted = paths = leaf_paths(TREE)
        self.runner.move_slots(
            np.asarray([table.slot(root + 1 + i) for i in accepted], np.int32),
            np.asarray([table.slot(root + 1 + i) for i in range(len(accepted))], np.int32),
        )
        text, after = [*ids, *(nodes[i] for i in accepted)], []
        for more in ([9], [8, 7]):
            builder = BatchBuilder()
            rows = builder.add_rows(table, more, len(text))
            after.append(step(self.runner, builder, rows))
            text += more
        for path in paths:
            want = self.truth([*ids, *(nodes[i] for i in path)], root)
            self.equal(got[[-1, *path]], want)
        self.equal(np.concatenate(after), self.truth(text, len(text) - 3))

    def fork(self) -> None:
        """The tail block is copied; both choices then write their own continuation."""
        ids, pages = tokens(20, 70), Pages(NUM_BLOCKS, seed=9)
        table = pages.sequence(32)
        fork = Pages.Table([table.blocks[0], pages.sequence(16).blocks[0]], BLOCK_SIZE)
        builder = BatchBuilder()
        builder.add_rows(table, ids, 0)
        step(self.runner, builder, [])
        self.runner.copy_blocks(
            np.asarray([table.blocks[1]], np.int32), np.asarray([fork.blocks[1]], np.int32)
        )
        builder = BatchBuilder()
        rows = builder.add_rows(table, [11], 20) + builder.add_rows(fork, [12], 20)
        got = step(self.runner, builder, rows)
        self.equal(got, np.concatenate([self.truth([*ids, i], 20) for i in (11, 12)]))
