"""From a step's rows and trees to its Batch.

The order of rows: choice by choice, positions ascending, then the nodes of its tree. The order of
draws: choice by choice; the root's (one per choice that forks off it), then one per node.

There is no attention mask: tree attention is written as path_slots, the slots of a node's
ancestors, which a kernel reads after the choice's own prefix (batch.py). A mask here is always a
grammar's: the ids that a draw may give.

While the same choices decode, a step differs from the one before in the ids, positions and slots of
its rows. So the last Batch is written anew in place, and is the same object. A step's weights push
the host's code and data out of the core's caches: what a step does not touch costs it nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from drafters.arrays import Int32, Int32x2
from server.engine.batch import Batch, UInt32
from server.engine.grammar import fill_masks
from server.engine.plan import Rows
from server.engine.sequence import Sequence
from server.engine.table import Table, widest
from server.engine.trees import (
    CHOICES,
    FIRST_ROW,
    ITEM,
    MASK,
    NUM,
    NUM_CHOICE_LINES,
    NUM_FOUND_LINES,
    NUM_ITEM_LINES,
    SEAT,
    START,
    Trees,
    arrange,
    lay,
)

_log = logging.getLogger(__name__)

_WIDTH = 8
"""Block tables are a multiple of so many blocks wide: the next steps may need one more."""

_NO_MASKS = np.empty((0, 0), np.uint32)
_NO_SCORES = np.empty(0, np.int32)


class Scored(NamedTuple):
    """Whose logprobs a step computes: an item's first score, of its prompt, and right after the
    num_prompt of these those of its num_labels label ids."""

    item: int
    first: int
    num_prompt: int
    num_labels: int


@dataclass(slots=True)
class Built:
    """A Batch and where its results lie.

    items: int32 [NUM_ITEM_LINES, items]. choices: int32 [NUM_CHOICE_LINES, choices] that draw, and
    `drawing`, who they are; the choices of one prompt follow each other, the first of them last.
    item_of: the item of each. num_keys: KV entries that all rows attend to. row_columns,
    draw_columns: the lines that `lay` writes. runs, found, moves, came: space for what `follow`
    writes.
    """

    batch: Batch
    items: Int32x2
    choices: Int32x2
    drawing: SequenceOf[Sequence]
    item_of: list[int]
    scored: list[Scored]
    row_columns: Int32x2
    draw_columns: Int32x2
    runs: Int32x2
    found: Int32x2
    moves: Int32x2
    came: Int32
    num_keys: int = 0


class Builder:
    """Makes the Batches of one engine."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._seats: Int32 | None = None  # of `_last`, a step of plain choices
        self._last: Built | None = None

    def build(self, rows: Rows, trees: Trees) -> Built:
        """The Batch of a step."""
        table, built = self._table, self._last if self._seats is rows.seats else None
        width = widest(table.numbers, rows.seats)
        if (
            built is None
            or trees.nodes.shape[1] + built.batch.num_draft_rows
            or trees.num_likely != built.batch.num_likely
            or width > built.batch.block_tables.shape[1]
        ):
            built = self._new(rows, trees, width, built)
            if rows.is_plain:
                self._seats, self._last = rows.seats, built
        batch = built.batch
        built.num_keys = lay(
            table.numbers, table.blocks, table.block_size, rows.start, built.items, trees.start,
            trees.nodes, built.row_columns, batch.path_slots, built.draw_columns,
            batch.block_tables,
        )  # fmt: skip
        return built

    def _new(self, rows: Rows, trees: Trees, width: int, last: Built | None) -> Built:
        """A Batch whose rows and draws are still to be laid. last: of the same plain choices."""
        num_items, num_total = len(rows.sequences), trees.nodes.shape[1]
        # With room for the next steps.
        width = min(self._table.blocks.shape[1], (width // _WIDTH + 1) * _WIDTH)
        drawing: SequenceOf[Sequence]
        if last is None:
            items, drawing = self._items(rows)
            choices: Int32x2 = np.empty((NUM_CHOICE_LINES, len(drawing)), np.int32)
            choices[SEAT] = [choice.seat for choice in drawing]
            adapters = self._table.adapter[rows.seats]
            own = adapters if (adapters >= 0).any() else None
            params = tuple([choice.params or choice.draw_params() for choice in drawing])
        else:
            items, drawing, choices = last.items.copy(), last.drawing, last.choices.copy()
            own, params = last.batch.seq_adapters, last.batch.params
        num_path_slots = arrange(items, trees.start, trees.nodes, choices)
        of_rows: Int32x2 = np.empty((7, rows.num_rows + num_total), np.int32)
        of_draws: Int32x2 = np.empty((5, len(drawing) + num_total), np.int32)
        masks, scores, scored = _NO_MASKS, (_NO_SCORES,) * 3, list[Scored]()
        if last is None:
            for i in np.flatnonzero((rows.num > 1) | (rows.draws == 0)).tolist():
                start, num, row = items[START, i], items[NUM, i], items[FIRST_ROW, i]
                of_rows[0, row : row + num] = rows.sequences[i].ids[start : start + num]
        if not rows.is_plain:
            masks = _masks(rows, trees, items)
            scores, scored = _scores(rows, items)
        batch = Batch(
            token_ids=of_rows[0],
            positions=of_rows[1],
            seq_ids=of_rows[2],
            slots=of_rows[3],
            prefix_len=of_rows[4],
            path_start=of_rows[5],
            path_len=of_rows[6],
            path_slots=np.empty(num_path_slots, np.int32),
            block_tables=np.empty((num_items, width), np.int32),
            draw_rows=of_draws[0],
            draw_params=of_draws[1],
            draw_parent=of_draws[2],
            draw_positions=of_draws[3],
            draw_mask=of_draws[4],
            masks=masks,
            params=params,
            score_rows=scores[0],
            score_targets=scores[1],
            score_top=scores[2],
            num_draft_rows=num_total,
            seq_adapters=own,
            num_likely=trees.num_likely,
        )
        of_nodes: Int32x2 = np.empty((3, num_total), np.int32)
        return Built(
            batch,
            items,
            choices,
            drawing,
            choices[ITEM].tolist(),
            scored,
            of_rows,
            of_draws,
            runs=np.empty((3, len(drawing) + num_total), np.int32),
            found=np.empty((len(drawing), NUM_FOUND_LINES), np.int32),
            moves=of_nodes[:2],
            came=of_nodes[2],
        )

    def _items(self, rows: Rows) -> tuple[Int32x2, list[Sequence]]:
        """The items of a step, before its rows and draws have places, and who draws."""
        items: Int32x2 = np.empty((NUM_ITEM_LINES, len(rows.sequences)), np.int32)
        items[SEAT], items[START], items[NUM] = rows.seats, rows.start, rows.num
        items[MASK] = -1
        drawing: list[Sequence] = []
        draws_one = (rows.draws > 0) & (self._table.max_output[rows.seats] > 0)
        for i, (sequence, draws) in enumerate(zip(rows.sequences, draws_one.tolist(), strict=True)):
            of_item = (*sequence.siblings, sequence) if draws else ()
            items[CHOICES, i] = len(of_item)
            drawing += of_item
        return items, drawing


def _scores(rows: Rows, items: Int32x2) -> tuple[tuple[Int32, Int32, Int32], list[Scored]]:
    """A step's scored (row, token) pairs, as Batch has them, and whose they are: the prompt tokens
    whose logprobs a request asks for (that of prompt token p comes from the row of p - 1), and its
    label ids, as the next token after the prompt."""
    of_rows, targets, top, scored = list[int](), list[int](), list[int](), list[Scored]()
    for i, sequence in enumerate(rows.sequences):
        start, num, first_row = (int(items[line, i]) for line in (START, NUM, FIRST_ROW))
        before = len(of_rows)
        if sequence.scores_prompt:
            first = max(len(sequence.prompt_logprobs), start + 1)
            last = min(start + num, sequence.prompt_len - 1)
            of_rows += range(first_row + first - 1 - start, first_row + last - start)
            targets += sequence.ids[first : last + 1].tolist()
            top += [sequence.request.echo_logprobs or 0] * max(0, last - first + 1)
        num_prompt = len(of_rows) - before
        labels = sequence.request.label_ids if rows.draws[i] else ()
        of_rows += [first_row + num - 1] * len(labels)
        targets += labels
        top += [0] * len(labels)
        if num_prompt or labels:
            scored.append(Scored(i, before, num_prompt, len(labels)))
    columns = np.array(of_rows, np.int32), np.array(targets, np.int32), np.array(top, np.int32)
    return columns, scored


def _masks(rows: Rows, trees: Trees, items: Int32x2) -> UInt32:
    """The grammars' masks of a step, uint32 [masks, words]. Of an item the root's comes first,
    which all choices that fork off it share, then its nodes'; the first is noted in `items`."""
    masks: list[UInt32] = []
    num = 0
    for i, sequence in enumerate(rows.sequences):
        grammar = sequence.grammar
        if grammar is None or not items[CHOICES, i]:
            continue
        nodes = trees.nodes[:, trees.start[i] : trees.start[i + 1]]
        try:
            masks.append(fill_masks(grammar, nodes))
        except Exception as error:  # its draws fail, and so does its request alone
            _log.exception("a grammar failed", exc_info=error)
            grammar.problem = "an internal error"
            masks.append(np.zeros((1 + nodes.shape[1], grammar.num_words), np.uint32))
        items[MASK, i] = num
        num += masks[-1].shape[0]
    return as_wide(masks)


def as_wide(masks: SequenceOf[UInt32]) -> UInt32:
    """All masks as one array as wide as the widest: adapters may have ids of their own."""
    width = max((mask.shape[1] for mask in masks), default=0)
    wide = [np.pad(mask, ((0, 0), (0, width - mask.shape[1]))) for mask in masks]
    return np.concatenate(wide) if wide else _NO_MASKS
