"""Batches for tests of Runners: sequences on scattered blocks, rows, trees, draws and scores.

Nothing here knows how a Runner works: the same cases run over every implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from server.engine.batch import Batch, Drawn, DrawParams, Runner
from server.types import SamplingParams

BLOCK_SIZE = 16

_ROW = ("token_ids", "positions", "seq_ids", "slots", "prefix_len", "path_start", "path_len")
_DRAW = ("draw_rows", "draw_params", "draw_parent", "draw_positions", "draw_mask")
_SCORE = ("score_rows", "score_targets", "score_top")
"""Fields of a Batch that a row, a draw and a score have a number each in."""


def draw_params(
    sampling: SamplingParams | None = None,
    *,
    choice_id: int = 0,
    banned_until: Sequence[int] = (),
    counts: dict[int, tuple[int, int]] | None = None,
    num_generated: int = 0,
) -> DrawParams:
    """DrawParams; greedy by default. counts: id -> (times generated, in prompt 0/1)."""
    known = sorted((counts or {}).items())
    return DrawParams(
        sampling or SamplingParams(temperature=0.0),
        choice_id,
        np.asarray(banned_until, np.int32),
        np.asarray([i for i, _ in known], np.int32),
        np.asarray([c[0] for _, c in known], np.int32),
        np.asarray([c[1] for _, c in known], np.int32),
        num_generated,
    )


class Pages:
    """Hands out blocks in a shuffled order, so that no sequence's slots are contiguous."""

    def __init__(self, num_blocks: int, seed: int = 0, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()

    def sequence(self, num_positions: int) -> Pages.Table:
        """A table with room for num_positions."""
        num = -(-num_positions // self.block_size)
        return Pages.Table([self._free.pop() for _ in range(num)], self.block_size)

    @dataclass(frozen=True)
    class Table:
        """The blocks of one sequence."""

        blocks: list[int]
        block_size: int

        def slot(self, position: int) -> int:
            """Slot of a position."""
            block = self.blocks[position // self.block_size]
            return block * self.block_size + position % self.block_size


@dataclass
class BatchBuilder:
    """Collects rows of several sequences; every method returns the indices of what it added."""

    tables: list[Pages.Table] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    path_slots: list[int] = field(default_factory=list)
    draws: list[tuple[int, ...]] = field(default_factory=list)
    params: list[DrawParams] = field(default_factory=list)
    masks: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    scores: list[tuple[int, int, int]] = field(default_factory=list)
    num_draft_rows: int = 0

    def _seq_id(self, table: Pages.Table) -> int:
        for i, known in enumerate(self.tables):
            if known is table:
                return i
        self.tables.append(table)
        return len(self.tables) - 1

    def add_rows(
        self,
        table: Pages.Table,
        token_ids: Sequence[int],
        start: int,
    ) -> list[int]:
        """Prompt or last-token rows at positions start, start + 1, ..."""
        first = len(self.rows)
        seq_id = self._seq_id(table)
        for i, token in enumerate(token_ids):
            position = start + i
            self.rows.append((token, position, seq_id, table.slot(position), position + 1, 0, 0))
        return list(range(first, len(self.rows)))

    def add_tree(
        self, table: Pages.Table, root: int, token_ids: Sequence[int], parents: Sequence[int]
    ) -> list[int]:
        """Tree nodes under a root at position `root`; node i lives in the slot of root + 1 + i."""
        first = len(self.rows)
        seq_id = self._seq_id(table)
        paths: list[list[int]] = []
        for i, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            slot = table.slot(root + 1 + i)
            path = [*(paths[parent] if parent >= 0 else []), slot]
            paths.append(path)
            start = len(self.path_slots)
            self.path_slots.extend(path)
            self.rows.append((token, root + len(path), seq_id, slot, root + 1, start, len(path)))
        self.num_draft_rows += len(token_ids)
        return list(range(first, len(self.rows)))

    def add_params(self, params: DrawParams) -> int:
        """Index of DrawParams."""
        self.params.append(params)
        return len(self.params) - 1

    def add_mask(self, allowed: Sequence[int], vocab_size: int) -> int:
        """A grammar mask that allows these ids."""
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[list(allowed)] = 1
        self.masks.append(np.packbits(bits, bitorder="little").view(np.uint32))
        return len(self.masks) - 1

    def draw(self, row: int, params: int, parent: int = -1, mask: int = -1) -> int:
        """A draw from a row's logits; parent: the draw of the tree parent."""
        self.draws.append((row, params, parent, self.rows[row][1] + 1, mask))
        return len(self.draws) - 1

    def score(self, row: int, target: int, num_top: int) -> int:
        """A scored target with its num_top most likely ids."""
        self.scores.append((row, target, num_top))
        return len(self.scores) - 1

    def build(self) -> Batch:
        """The Batch."""
        width = max(len(t.blocks) for t in self.tables)
        tables = np.zeros((len(self.tables), width), np.int32)
        for i, table in enumerate(self.tables):
            tables[i, : len(table.blocks)] = table.blocks
        return Batch(
            **_columns(_ROW, self.rows),
            **_columns(_DRAW, self.draws),
            **_columns(_SCORE, self.scores),
            path_slots=np.asarray(self.path_slots, np.int32),
            block_tables=tables,
            masks=np.stack(self.masks) if self.masks else np.empty((0, 0), np.uint32),
            params=tuple(self.params),
            num_draft_rows=self.num_draft_rows,
        )


def _columns(names: tuple[str, ...], lines: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    columns = np.asarray(lines, np.int32).reshape(-1, len(names)).T
    return dict(zip(names, np.ascontiguousarray(columns), strict=True))


def run(runner: Runner, batch: Batch) -> Drawn:
    """A step from its launch to its end."""
    runner.launch(batch)
    return runner.wait()


def prompt_step(
    tables: Sequence[Pages.Table],
    texts: Iterable[Sequence[int]],
    start: int = 0,
    own: Mapping[int, SamplingParams] = MappingProxyType({}),
) -> Batch:
    """Rows of each sequence from `start` on, whose last one is drawn from: greedily, or by what
    `own` has for the sequence's place."""
    builder = BatchBuilder()
    for i, (table, ids) in enumerate(zip(tables, texts, strict=True)):
        row = builder.add_rows(table, ids, start)[-1]
        builder.draw(row, builder.add_params(draw_params(own.get(i))))
    return builder.build()


def decode_step(
    tables: Sequence[Pages.Table],
    ids: Sequence[int],
    position: int,
    own: Mapping[int, SamplingParams] = MappingProxyType({}),
) -> Batch:
    """The same of one id of each sequence."""
    return prompt_step(tables, ([token] for token in ids), position, own)


def leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """Of each leaf of a tree, the nodes that lead to it, itself last."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return [path for node, path in enumerate(paths) if node not in parents]


def all_logprobs(drawn: Drawn, vocab_size: int) -> npt.NDArray[np.float32]:
    """float32 [C, V]: log-softmax of whole rows, from scores that asked for V top ids."""
    result = np.full((len(drawn.score_top), vocab_size), np.nan, np.float32)
    for i, top in enumerate(drawn.score_top):
        ids, values = zip(*top, strict=True)
        result[i, list(ids)] = values
    if np.isnan(result).any():
        raise ValueError("a score did not ask for all ids")
    return result
