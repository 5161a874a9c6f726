"""From a Plan and its trees to a Batch.

The order of rows: sequence by sequence, positions ascending, then the sequence's tree nodes in
their order. The order of draws: sequence by sequence; the root's (one per choice that forks off
it), then one per node.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from server.engine.batch import Batch, DrawParams, UInt32
from server.engine.drafting import CheckedTree
from server.engine.scheduler import Scheduled

__all__ = ["Built", "Span", "build_batch"]

_NO_MASKS = np.empty((0, 0), np.uint32)


@dataclass(frozen=True, slots=True)
class Span:
    """Where one item's results lie: its root draw, its scores [score, score + num_scores), and
    right after them the scores of its num_labels label ids."""

    draw: int
    score: int
    num_scores: int
    num_labels: int = 0


@dataclass(frozen=True, slots=True)
class Built:
    """A Batch, a Span per item, and the KV entries its rows attend to."""

    batch: Batch
    spans: list[Span]
    num_keys: int


def build_batch(
    items: SequenceOf[Scheduled],
    trees: SequenceOf[CheckedTree | None],
    *,
    num_prefill_rows: int,
    masks: SequenceOf[UInt32 | None] | None = None,
) -> Built:
    """All rows of one step. trees[i] hangs off the last row of items[i], or is None.

    masks[i]: the grammar's, uint32 [1 + nodes, words]: the root's row (all choices that fork off it
    share it), then one per node; or None.
    """
    num_nodes = sum(len(t.token_ids) for t in trees if t is not None)
    num_rows = sum(item.num_rows for item in items) + num_nodes
    num_blocks = max(item.sequence.num_blocks for item in items)

    columns = np.zeros((8, num_rows), np.int32)
    token_ids, token_from, positions, seq_ids, slots, prefix_len, path_start, path_len = columns
    token_from[:] = -1
    tables = np.zeros((len(items), num_blocks), np.int32)
    path_slots: list[int] = []
    params: list[DrawParams] = []
    draw_rows: list[int] = []
    draw_params: list[int] = []
    draw_parent: list[int] = []
    draw_positions: list[int] = []
    draw_mask: list[int] = []
    given_masks: list[UInt32] = []
    num_masks = 0
    score_rows: list[int] = []
    score_targets: list[int] = []
    score_top: list[int] = []
    spans: list[Span] = []

    r = 0
    for s, item in enumerate(items):
        sequence, start, num = item.sequence, item.start, item.num_rows
        size, table = sequence.block_size, sequence.table
        tables[s, : sequence.num_blocks] = table[: sequence.num_blocks]
        if num == 1:
            token_ids[r] = sequence.ids[start]
            positions[r] = start
            seq_ids[r] = s
            slots[r] = int(table[start // size]) * size + start % size
            prefix_len[r] = start + 1
        else:
            at = slice(r, r + num)
            where = np.arange(start, start + num, dtype=np.int32)
            token_ids[at] = sequence.ids[start : start + num]
            positions[at] = where
            seq_ids[at] = s
            slots[at] = table[where // size] * size + where % size
            prefix_len[at] = where + 1

        first_score, num_scores = len(score_rows), 0
        if sequence.scores_prompt:
            # The logprob of prompt token p comes from the row of p - 1.
            first = max(len(sequence.prompt_logprobs), start + 1)
            last = min(start + num, sequence.prompt_len - 1)
            num_scores = max(0, last - first + 1)
            score_rows.extend(range(r + first - 1 - start, r + last - start))
            score_targets.extend(sequence.ids[first : last + 1].tolist())
            score_top.extend([sequence.request.echo_logprobs or 0] * num_scores)

        root_row, root = r + num - 1, start + num - 1
        draw = len(draw_rows)
        labels = sequence.request.label_ids if item.draws else ()
        score_rows.extend([root_row] * len(labels))
        score_targets.extend(labels)
        score_top.extend([0] * len(labels))
        spans.append(Span(draw, first_score, num_scores, len(labels)))
        r += num
        if not item.draws or sequence.rules.max_output == 0:
            continue
        for choice in (sequence, *sequence.siblings):
            draw_rows.append(root_row)
            draw_params.append(len(params))
            draw_parent.append(-1)
            draw_positions.append(root + 1)
            params.append(choice.draw_params())
        own_masks = masks[s] if masks is not None else None
        draw_mask.extend([-1 if own_masks is None else num_masks] * (len(draw_rows) - draw))

        tree = trees[s]
        if own_masks is not None:
            given_masks.append(own_masks)
            num_nodes_of = own_masks.shape[0] - 1
            draw_mask.extend(range(num_masks + 1, num_masks + 1 + num_nodes_of))
            num_masks += 1 + num_nodes_of
        elif tree is not None:
            draw_mask.extend([-1] * len(tree.token_ids))
        if tree is None:
            continue
        num = len(tree.token_ids)
        at = slice(r, r + num)
        where = np.arange(root + 1, root + 1 + num, dtype=np.int32)
        node_slots = table[where // size] * size + where % size
        token_ids[at] = tree.token_ids
        positions[at] = [root + d for d in tree.depths]
        seq_ids[at] = s
        slots[at] = node_slots
        prefix_len[at] = root + 1
        path_len[at] = tree.depths
        paths: list[list[int]] = []
        starts: list[int] = []
        for parent, slot in zip(tree.parents, node_slots.tolist(), strict=True):
            path = [*paths[parent], slot] if parent >= 0 else [slot]
            paths.append(path)
            starts.append(len(path_slots))
            path_slots.extend(path)
        path_start[at] = starts
        draw_rows.extend(range(r, r + num))
        draw_params.extend([len(params) - 1] * num)
        draw_parent.extend([draw + 1 + p for p in tree.parents])
        draw_positions.extend([root + 1 + d for d in tree.depths])
        r += num

    batch = Batch(
        token_ids=token_ids,
        token_from=token_from,
        positions=positions,
        seq_ids=seq_ids,
        slots=slots,
        prefix_len=prefix_len,
        path_start=path_start,
        path_len=path_len,
        path_slots=np.array(path_slots, np.int32),
        block_tables=tables,
        draw_rows=np.array(draw_rows, np.int32),
        draw_params=np.array(draw_params, np.int32),
        draw_parent=np.array(draw_parent, np.int32),
        draw_positions=np.array(draw_positions, np.int32),
        draw_mask=np.array(draw_mask, np.int32),
        masks=np.concatenate(given_masks) if given_masks else _NO_MASKS,
        params=tuple(params),
        score_rows=np.array(score_rows, np.int32),
        score_targets=np.array(score_targets, np.int32),
        score_top=np.array(score_top, np.int32),
        num_prefill_rows=num_prefill_rows,
        num_draft_rows=num_nodes,
    )
    return Built(batch, spans, int(prefix_len.sum()) + len(path_slots))
