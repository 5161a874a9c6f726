"""Batches that TorchRunner.warm_up runs, so that kernels are compiled before the first request."""

from __future__ import annotations

import numpy as np

from server.engine.batch import Batch, DrawParams
from server.model.gpu import attention as paged
from server.model.gpu.graphs import ROW_BUCKETS, split_level
from server.types import SamplingParams


def warm_up_shapes(
    longest: int, shape: paged.TileShape, graph_rows: int
) -> list[tuple[int, int, int]]:
    """(sequences, rows of each, length): every kernel that serving needs, then every graph.

    Rows of decode and of trees, of ends of prompts and of long runs, each with its keys in one part
    and in several.
    """
    in_parts = min(longest, 2 * shape.split_size)
    tree = min(paged.MAX_SPLIT_RUN, paged.MAX_TREE_RUN + 1)
    shapes = [(1, 1, 1), (1, 2, 2), (1, 1, longest), (1, 2, longest)]
    shapes += [(1, tree, max(tree, 2)), (1, tree, in_parts), (1, tree, longest)]
    shapes.append((1, paged.MAX_SPLIT_RUN + 1, paged.MAX_SPLIT_RUN + 1))
    levels = {split_level(n + 1, shape.max_splits) for n in range(shape.max_splits)}
    # The largest first: smaller ones fit into the memory that it took.
    for bucket in reversed([b for b in ROW_BUCKETS if b <= graph_rows]):
        num_seqs = -(-bucket // paged.MAX_TREE_RUN)
        rows = bucket // num_seqs
        for level in sorted(levels, reverse=True):
            shapes.append((num_seqs, rows, max(rows, min(longest, shape.split_size * level))))
    return shapes


def warm_up_batch(
    num_seqs: int, rows: int, length: int, max_blocks: int, *, draws: bool = True
) -> Batch:
    """`rows` last positions of num_seqs sequences of `length` that all read block 0; the last of
    each draws greedily, if any draws."""
    total = num_seqs * rows
    nth = np.tile(np.arange(rows, dtype=np.int32), num_seqs)
    positions = (length - rows + nth).astype(np.int32)
    zeros, none = np.zeros(total, np.int32), np.empty(0, np.int32)
    last = np.arange(rows - 1, total, rows, dtype=np.int32) if draws else none
    params = DrawParams(SamplingParams(temperature=0.0), 0, none, none, none, none, 0)
    return Batch(
        token_ids=zeros,
        token_from=np.full(total, -1, np.int32),
        positions=positions,
        seq_ids=np.repeat(np.arange(num_seqs, dtype=np.int32), rows),
        slots=np.arange(total, dtype=np.int32),
        prefix_len=positions + 1,
        path_start=zeros,
        path_len=zeros,
        block_tables=np.zeros((num_seqs, max_blocks), np.int32),
        draw_rows=last,
        draw_params=np.zeros_like(last),
        draw_parent=np.full_like(last, -1),
        draw_positions=positions[last] + 1,
        draw_mask=np.full_like(last, -1),
        params=(params,),
    )
