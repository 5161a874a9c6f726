"""From a Plan and its trees to a Batch.

The order of rows: sequence by sequence, positions ascending, then the sequence's tree nodes in
their order. The order of draws: sequence by sequence; the root's (one per choice that forks off
it), then one per node.

There is no attention mask: tree attention is written as path_slots, the slots of a node's
ancestors, which a kernel reads after the sequence's own prefix (batch.py). A mask here is always a
grammar's: the ids that a draw may give.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from server.engine.batch import Batch, DrawParams, Int32, UInt32
from server.engine.drafting import CheckedTree
from server.engine.plan import Built, Scheduled, Span

_NO_MASKS = np.empty((0, 0), np.uint32)
_NO_IDS: Int32 = np.empty(0, np.int32)


def build_batch(
    items: SequenceOf[Scheduled],
    trees: SequenceOf[CheckedTree | None],
    num_prefill_rows: int,
    masks: SequenceOf[UInt32 | None] | None = None,
    num_likely: int = 0,
) -> Built:
    """All rows of one step. trees[i] hangs off the last row of items[i], or is None.

    masks[i]: the grammar's, uint32 [1 + nodes, words]: the root's row (all choices that fork off it
    share it), then one per node; or None. num_likely: see Batch.
    """
    if masks is None and all(map(_is_plain, items, trees)):
        return _decode_batch(items, num_prefill_rows, num_likely)
    num_nodes = sum(len(t.token_ids) for t in trees if t is not None)
    num_rows = sum(item.num_rows for item in items) + num_nodes
    rows = _Rows(num_rows, len(items), max(item.sequence.num_blocks for item in items))
    draws, scores = _Draws(), _Scores()
    spans: list[Span] = []
    for s, item in enumerate(items):
        first = rows.add_positions(s, item)
        root_row = rows.num - 1
        num_scores = scores.add_prompt(item, first)
        labels = item.sequence.request.label_ids if item.draws else ()
        if labels:
            scores.add_labels(root_row, labels)
        first_score = len(scores.rows) - num_scores - len(labels)
        spans.append(Span(len(draws.rows), first_score, num_scores, len(labels)))
        if not item.draws or item.sequence.rules.max_output == 0:
            continue
        root_draw = len(draws.rows)
        draws.add_roots(item, root_row)
        tree = trees[s]
        draws.add_masks(
            len(draws.rows) - root_draw,
            0 if tree is None else len(tree.token_ids),
            None if masks is None else masks[s],
        )
        if tree is not None:
            draws.add_nodes(tree, rows.num, root_draw, item.start + item.num_rows - 1)
            rows.add_nodes(s, item, tree)
    batch = _batch(rows, draws, scores, (num_prefill_rows, num_nodes), num_likely)
    num_keys = int(rows.prefix_len.sum()) + len(rows.path_slots)
    return Built(_with_adapters(batch, items), spans, num_keys)


def _is_plain(item: Scheduled, tree: CheckedTree | None) -> bool:
    """Whether an item is one row that one token is drawn from, and nothing else is told of."""
    sequence = item.sequence
    return (
        tree is None
        and item.num_rows == 1
        and item.draws
        and not sequence.siblings
        and not sequence.request.label_ids
        and sequence.request.echo_logprobs is None
        and sequence.rules.max_output > 0
    )


def _decode_batch(items: SequenceOf[Scheduled], num_prefill_rows: int, num_likely: int) -> Built:
    """The Batch of plain items: what most steps are, with less of the host's time. Arrays that are
    the same in all such steps are made once."""
    same = _same(len(items))
    tables: Int32 = np.zeros((len(items), max(i.sequence.num_blocks for i in items)), np.int32)
    token_ids, slots, starts, behind, params = [], [], [], [], []
    for item, row in zip(items, tables, strict=True):
        sequence, start = item.sequence, item.start
        size, num_blocks = sequence.block_size, sequence.num_blocks
        row[:num_blocks] = sequence.table[:num_blocks]
        starts.append(start)
        behind.append(start + 1)
        slots.append(int(row[start // size]) * size + start % size)
        token_ids.append(int(sequence.ids[start]))
        params.append(sequence.draw_params())
    columns = np.array((token_ids, starts, slots, behind), np.int32)
    batch = Batch(
        token_ids=columns[0],
        token_from=same.minus,
        positions=columns[1],
        seq_ids=same.places,
        slots=columns[2],
        prefix_len=columns[3],
        path_start=same.zeros,
        path_len=same.zeros,
        path_slots=_NO_IDS,
        block_tables=tables,
        draw_rows=same.places,
        draw_params=same.places,
        draw_parent=same.minus,
        draw_positions=columns[3],
        draw_mask=same.minus,
        masks=_NO_MASKS,
        params=tuple(params),
        score_rows=_NO_IDS,
        score_targets=_NO_IDS,
        score_top=_NO_IDS,
        num_prefill_rows=num_prefill_rows,
        num_likely=num_likely,
    )
    return Built(_with_adapters(batch, items), same.spans, sum(behind), columns)


class _Same(NamedTuple):
    """What Batches of n plain items have in common. int32 [n]: 0, 1, ...; -1; 0. Read only."""

    places: Int32
    minus: Int32
    zeros: Int32
    spans: list[Span]


@cache
def _same(num: int) -> _Same:
    places = np.arange(num, dtype=np.int32)
    spans = [Span(draw, 0, 0) for draw in range(num)]
    return _Same(places, np.full(num, -1, np.int32), np.zeros(num, np.int32), spans)


def _with_adapters(batch: Batch, items: SequenceOf[Scheduled]) -> Batch:
    """The Batch with the places of its sequences' adapters, if any has one."""
    if all(item.sequence.adapter is None for item in items):
        return batch
    return replace(batch, seq_adapters=np.array([_place(item) for item in items], np.int32))


class _Rows:
    """The rows of a Batch as they are added. num: rows added so far."""

    def __init__(self, num_rows: int, num_sequences: int, num_blocks: int) -> None:
        self.num = 0
        columns = np.zeros((8, num_rows), np.int32)
        (
            self.token_ids,
            self.token_from,
            self.positions,
            self.seq_ids,
            self.slots,
            self.prefix_len,
            self.path_start,
            self.path_len,
        ) = columns
        self.token_from[:] = -1
        self.tables: Int32 = np.zeros((num_sequences, num_blocks), np.int32)
        self.path_slots: list[int] = []

    def add_positions(self, s: int, item: Scheduled) -> int:
        """Add the item's rows [start, start + num_rows); returns the row of the first of them."""
        sequence, start, num, r = item.sequence, item.start, item.num_rows, self.num
        size, table = sequence.block_size, sequence.table
        self.tables[s, : sequence.num_blocks] = table[: sequence.num_blocks]
        if num == 1:
            self.token_ids[r] = sequence.ids[start]
            self.positions[r] = start
            self.seq_ids[r] = s
            self.slots[r] = int(table[start // size]) * size + start % size
            self.prefix_len[r] = start + 1
        else:
            at = slice(r, r + num)
            where = np.arange(start, start + num, dtype=np.int32)
            self.token_ids[at] = sequence.ids[start : start + num]
            self.positions[at] = where
            self.seq_ids[at] = s
            self.slots[at] = table[where // size] * size + where % size
            self.prefix_len[at] = where + 1
        self.num += num
        return r

    def add_nodes(self, s: int, item: Scheduled, tree: CheckedTree) -> None:
        """Add the nodes of a tree. Tree attention: a node sees its sequence up to the root, and
        through path_slots its ancestors and itself, wherever these lie in the KV cache."""
        size, table = item.sequence.block_size, item.sequence.table
        root, num = item.start + item.num_rows - 1, len(tree.token_ids)
        at = slice(self.num, self.num + num)
        where = np.arange(root + 1, root + 1 + num, dtype=np.int32)
        slots = table[where // size] * size + where % size
        self.token_ids[at] = tree.token_ids
        self.positions[at] = [root + d for d in tree.depths]
        self.seq_ids[at] = s
        self.slots[at] = slots
        self.prefix_len[at] = root + 1
        self.path_len[at] = tree.depths
        paths: list[list[int]] = []
        starts: list[int] = []
        for parent, slot in zip(tree.parents, slots.tolist(), strict=True):
            path = [*paths[parent], slot] if parent >= 0 else [slot]
            paths.append(path)
            starts.append(len(self.path_slots))
            self.path_slots.extend(path)
        self.path_start[at] = starts
        self.num += num


class _Draws:
    """The draws of a Batch as they are added."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.params_of: list[int] = []
        self.parents: list[int] = []
        self.positions: list[int] = []
        self.mask_of: list[int] = []
        self.params: list[DrawParams] = []
        self.masks: list[UInt32] = []
        self._num_masks = 0

    def add_roots(self, item: Scheduled, root_row: int) -> None:
        """One draw per choice that draws from the item's last row."""
        for choice in (item.sequence, *item.sequence.siblings):
            self.rows.append(root_row)
            self.params_of.append(len(self.params))
            self.parents.append(-1)
            self.positions.append(item.start + item.num_rows)
            self.params.append(choice.draw_params())

    def add_masks(self, num_roots: int, num_nodes: int, masks: UInt32 | None) -> None:
        """The grammar's masks of the roots just added, which share one, and of a tree's nodes."""
        if masks is None:
            self.mask_of.extend([-1] * (num_roots + num_nodes))
            return
        first = self._num_masks
        self.masks.append(masks)
        self.mask_of.extend([first] * num_roots)
        self.mask_of.extend(range(first + 1, first + masks.shape[0]))
        self._num_masks += masks.shape[0]

    def add_nodes(self, tree: CheckedTree, first_row: int, root_draw: int, root: int) -> None:
        """One draw per node of a tree whose first row is first_row, under position `root`."""
        num = len(tree.token_ids)
        self.rows.extend(range(first_row, first_row + num))
        self.params_of.extend([len(self.params) - 1] * num)
        self.parents.extend([root_draw + 1 + p for p in tree.parents])
        self.positions.extend([root + 1 + d for d in tree.depths])


class _Scores:
    """The scored (row, token) pairs of a Batch as they are added."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.targets: list[int] = []
        self.top: list[int] = []

    def add_prompt(self, item: Scheduled, first_row: int) -> int:
        """Add the prompt tokens whose logprobs the request asks for; returns how many. The logprob
        of prompt token p comes from the row of p - 1."""
        sequence, start = item.sequence, item.start
        if not sequence.scores_prompt:
            return 0
        first = max(len(sequence.prompt_logprobs), start + 1)
        last = min(start + item.num_rows, sequence.prompt_len - 1)
        num = max(0, last - first + 1)
        self.rows.extend(range(first_row + first - 1 - start, first_row + last - start))
        self.targets.extend(sequence.ids[first : last + 1].tolist())
        self.top.extend([sequence.request.echo_logprobs or 0] * num)
        return num

    def add_labels(self, root_row: int, labels: SequenceOf[int]) -> None:
        """Add the request's label ids, as the next token after the prompt."""
        self.rows.extend([root_row] * len(labels))
        self.targets.extend(labels)
        self.top.extend([0] * len(labels))


def _place(item: Scheduled) -> int:
    """The place of the sequence's adapter at the runner, -1 for the base model."""
    adapter = item.sequence.adapter
    return -1 if adapter is None else adapter.place


def _together(masks: SequenceOf[UInt32]) -> UInt32:
    """All masks as one array as wide as the widest: adapters may have ids of their own."""
    if not masks:
        return _NO_MASKS
    width = max(mask.shape[1] for mask in masks)
    return np.concatenate(
        [
            mask if mask.shape[1] == width else np.pad(mask, ((0, 0), (0, width - mask.shape[1])))
            for mask in masks
        ]
    )


def _batch(
    rows: _Rows, draws: _Draws, scores: _Scores, counts: tuple[int, int], num_likely: int
) -> Batch:
    """counts: of prefill rows and of draft rows."""
    return Batch(
        token_ids=rows.token_ids,
        token_from=rows.token_from,
        positions=rows.positions,
        seq_ids=rows.seq_ids,
        slots=rows.slots,
        prefix_len=rows.prefix_len,
        path_start=rows.path_start,
        path_len=rows.path_len,
        path_slots=np.array(rows.path_slots, np.int32),
        block_tables=rows.tables,
        draw_rows=np.array(draws.rows, np.int32),
        draw_params=np.array(draws.params_of, np.int32),
        draw_parent=np.array(draws.parents, np.int32),
        draw_positions=np.array(draws.positions, np.int32),
        draw_mask=np.array(draws.mask_of, np.int32),
        masks=_together(draws.masks),
        params=tuple(draws.params),
        score_rows=np.array(scores.rows, np.int32),
        score_targets=np.array(scores.targets, np.int32),
        score_top=np.array(scores.top, np.int32),
        num_prefill_rows=counts[0],
        num_draft_rows=counts[1],
        num_likely=num_likely,
    )
