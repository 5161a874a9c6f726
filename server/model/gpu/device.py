"""What a CUDA device tells of itself, how full and how busy it is, for /metrics; and Trials,
batches that TorchRunner runs before the first request, so that kernels are compiled, graphs
captured, and the KV cache takes its share of what steps leave free (build.py).

tests/model/gpu/test_warm_up.py counts what is compiled or captured after them. Not met here:
adapters, whose kernels and graphs come with the first one that is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from server.engine.batch import Batch, DrawParams
from server.model.gpu import attention as paged
from server.model.gpu.body import ROW_BUCKETS, split_level
from server.types import DeviceFigures, ModelInfo, SamplingParams


def device_figures(device: torch.device) -> DeviceFigures:
    """What torch and the driver tell of a device; syncs nothing."""
    free, total = torch.cuda.mem_get_info(device)
    used = None  # the share of the last sample period in which a kernel ran
    with contextlib.suppress(Exception):  # pynvml's own kinds, known only where it is installed
        used = torch.cuda.utilization(device) / 100
    return DeviceFigures(
        reserved=torch.cuda.memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
        free=free,
        total=total,
        utilisation=used,
    )


_SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, num_logprobs=20)
"""Draws that take the most memory: float64 logits, their order, and logprobs."""


@dataclass(frozen=True, slots=True)
class Trials:
    """What a runner of these sizes may be given. shape: how its attention is divided. graph_rows:
    of its largest graph, 0 for none. max_blocks: of a row of its block tables."""

    info: ModelInfo
    shape: paged.TileShape
    graph_rows: int
    max_blocks: int

    def kernels(self) -> Iterator[Batch]:
        """One for every kernel that serving needs, and for every graph. Rows of decode and of
        trees, with their keys in one part and in several, and of long runs."""
        longest, long, graph = self.info.max_model_len, paged.MAX_TREE_RUN + 1, self.graph_rows + 1
        shapes = [(1, 1, 1), (1, 2, 2), (1, 1, longest), (1, 2, longest), (1, long, long)]
        if self.graph_rows:
            shapes.append((1, graph, graph))  # the shortest run without a graph
        yield from self._of(shapes)
        # The largest first: smaller ones fit into the memory that it took.
        yield from self._graphs([b for b in reversed(ROW_BUCKETS) if b <= self.graph_rows])

    def graphs(self) -> Iterator[Batch]:
        """One for each of the largest graphs: smaller ones fit into the memory that they took."""
        yield from self._graphs([b for b in ROW_BUCKETS if b <= self.graph_rows][-1:])

    def largest(self) -> Iterator[Batch]:
        """The steps that take the most memory: all rows are of prompts. In the
        first every row draws greedily, in the second one for each sequence is sampled."""
        info = self.info
        rows = min(info.max_num_batched_tokens, info.max_model_len)
        num_seqs = min(info.max_num_seqs, info.max_num_batched_tokens // rows)
        whole = warm_up_batch(num_seqs, rows, rows, self.max_blocks)
        # Slots are written more than once: the KV memory is smaller than the step.
        whole = replace(whole, slots=whole.slots % (info.num_blocks * info.block_size))
        yield _drawing(whole, whole.num_rows, SamplingParams(temperature=0.0))
        yield _drawing(whole, min(whole.num_rows, info.max_num_seqs), _SAMPLED)

    def _graphs(self, buckets: list[int]) -> Iterator[Batch]:
        """The graphs of these numbers of rows, of the most splits first."""
        shape, longest = self.shape, self.info.max_model_len
        levels = {split_level(n + 1, shape.max_splits) for n in range(shape.max_splits)}
        for bucket in buckets:
            num_seqs = -(-bucket // paged.MAX_TREE_RUN)
            rows = bucket // num_seqs
            lengths = [min(longest, shape.split_size * n) for n in sorted(levels, reverse=True)]
            yield from self._of([(num_seqs, rows, max(rows, length)) for length in lengths])

    def _of(self, shapes: list[tuple[int, int, int]]) -> Iterator[Batch]:
        """Those of the shapes (sequences, rows of each, length) that fit."""
        info, num_slots = self.info, self.info.num_blocks * self.info.block_size
        for num_seqs, rows, length in shapes:
            total = num_seqs * rows
            fits = total <= info.max_num_batched_tokens and num_seqs <= info.max_num_seqs
            if fits and rows <= length <= info.max_model_len and total <= num_slots:
                yield warm_up_batch(num_seqs, rows, length, self.max_blocks)


def _drawing(batch: Batch, num_draws: int, sampling: SamplingParams) -> Batch:
    """The batch with draws of its first rows in the place of its own."""
    rows = np.arange(num_draws, dtype=np.int32)
    zeros, none = np.zeros_like(rows), np.full_like(rows, -1)
    (params,) = batch.params
    return replace(
        batch, draw_rows=rows, draw_params=zeros, draw_parent=none, draw_mask=none,
        draw_positions=batch.positions[rows] + 1, params=(replace(params, sampling=sampling),),
    )  # fmt: skip


def warm_up_batch(num_seqs: int, rows: int, length: int, max_blocks: int) -> Batch:
    """`rows` last positions of num_seqs sequences of `length` that all read block 0; the last of
    each draws greedily."""
    total = num_seqs * rows
    nth = np.tile(np.arange(rows, dtype=np.int32), num_seqs)
    positions = (length - rows + nth).astype(np.int32)
    zeros, none = np.zeros(total, np.int32), np.empty(0, np.int32)
    last = np.arange(rows - 1, total, rows, dtype=np.int32)
    params = DrawParams(SamplingParams(temperature=0.0), 0, none, none, none, none, 0)
    return Batch(
        token_ids=zeros,
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
