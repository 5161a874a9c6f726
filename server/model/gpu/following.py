"""Following: steps of TorchRunner that take what the step before draws, which nobody knows yet.

A row's id is a number: the body takes it from where the step before leaves it. Behind trees the
device itself finds the rows (ahead_rows.py says how). Where it cannot, the host waits for the step
before and resolves the Batch: models that keep more of a position than K and V, the torch
attention, embeddings in CPU memory, and draws that change with the tokens before them (penalties,
min_tokens, grammars, slices).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from server.engine.ahead import resolve
from server.engine.batch import Batch
from server.model.gpu.ahead_rows import AheadRows, Padded, ahead_rows
from server.model.gpu.body_run import BodyRun
from server.model.gpu.head_plan import Slab
from server.model.gpu.kv_cache import KvCache
from server.model.gpu.results import Step

Array = npt.NDArray[Any]


class Following:
    """on_device: whether the device may find rows. vocab_size: ids that a row may have."""

    def __init__(self, body: BodyRun, cache: KvCache, vocab_size: int, *, on_device: bool) -> None:
        self.on_device = on_device
        self._body, self._cache = body, cache
        self._vocab_size = vocab_size

    def lay_out(self, step: Step, before: Step | None, num_previous: int) -> AheadRows | None:
        """Make step.batch one that can be planned; its rows, if the device is to find them.

        before: the step before, which left num_previous draws. Raises ValueError for a Batch that
        takes draws which that step does not have.
        """
        batch, size = step.batch, self._cache.block_size
        if batch.ahead is None and not (batch.token_from >= 0).any():
            return None
        if before is None:
            raise ValueError("a row takes its token from a draw that the previous batch lacks")
        if batch.ahead is None:
            places = before.places()
            if places is not None:
                if int(batch.token_from.max()) >= places.shape[0]:
                    raise ValueError("a row takes its token from a draw that is not there")
                taken = places[np.maximum(batch.token_from, 0)]
                source = np.where(batch.token_from >= 0, taken, np.int32(-1))
                step.batch = replace(batch, token_from=source)
            return None
        if not (self.on_device and _is_plain(batch)):
            resolved = resolve(batch, before.drawn_ids(), size)
            self._cache.move_slots(resolved.src, resolved.dst)
            step.batch = resolved.batch
            return None
        rows = ahead_rows(batch)
        arrays, places = rows.arrays, before.places()
        if places is not None:
            arrays["root_draws"] = places[arrays["root_draws"]]
        last = arrays["root_draws"] + np.diff(arrays["tree_start"])
        if int(arrays["root_draws"].min()) < 0 or int(last.max()) >= num_previous:
            raise ValueError("a tree hangs on draws that the previous batch lacks")
        tokens = arrays["node_tokens"]
        if tokens.shape[0] and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise ValueError("a prepared token id is outside the vocabulary")
        step.batch = rows.batch
        step.ahead = Padded(batch, arrays["row_start"], before.drawn_ids, size)
        return rows

    def arrays(self, rows: AheadRows, slabs: Sequence[Slab], *, in_graph: bool) -> dict[str, Array]:
        """What `accept` reads. The block tables are whole: a graph has those of its keys alone.
        in_graph: whether a graph draws the sampled rows, whose noise has a row for each draw."""
        made: dict[str, Array] = {f"ahead.{name}": array for name, array in rows.arrays.items()}
        made["ahead.block_tables"] = rows.batch.block_tables
        made["ahead.unwritten"] = self._unwritten(rows)
        return made | _sampled(slabs, in_graph=in_graph)

    def accept(
        self, rows: AheadRows, slabs: Sequence[Slab], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Queue what finds the step's rows, moves the KV of accepted nodes and tells the noise of
        sampled draws their positions."""
        from server.model.gpu.ahead_kernels import RowTensors, accept_trees

        src, dst = accept_trees(
            self._body.previous_ids,
            {name: tensors[f"ahead.{name}"] for name in rows.arrays},
            tensors["ahead.block_tables"],
            RowTensors(*(tensors[name] for name in RowTensors._fields)),
            block_size=self._cache.block_size,
            trash_slot=self._cache.void_slot,
        )
        unwritten = tensors["ahead.unwritten"]
        src = torch.cat([src, torch.full_like(unwritten, self._cache.void_slot)])
        if src.shape[0]:
            self._cache.copy_slots(src.long(), torch.cat([dst, unwritten]).long())
        for i in range(len(slabs)):
            if f"sampled.{i}.at" in tensors:
                drawn = tensors["positions"].index_select(0, tensors[f"sampled.{i}.rows"]) + 1
                at = tensors[f"sampled.{i}.at"].long()
                tensors[f"{i}.noise"][:, 1].index_copy_(0, at, drawn.long())

    def _unwritten(self, rows: AheadRows) -> Array:
        """int32: slots that are read with weight 0, though nobody may have written them: behind a
        chain, that of the row after its last node. They are given the void slot's numbers."""
        batch, size = rows.batch, self._cache.block_size
        roots = rows.arrays["row_start"][:-1]
        num_nodes = np.diff(rows.arrays["tree_start"])
        at = rows.arrays["first_positions"] + num_nodes
        chains = np.flatnonzero((num_nodes > 0) & (batch.prefix_len[roots] == at + 1))
        block = batch.block_tables[chains, at[chains] // size]
        return (block * size + at[chains] % size).astype(np.int32)


def _is_plain(batch: Batch) -> bool:
    """Whether no draw changes with the tokens before it, but by its position."""
    return (
        batch.draw_slice is None
        and batch.draw_keep is None
        and not (batch.draw_mask >= 0).any()
        and not batch.score_rows.shape[0]
        and not any(
            params.sampling.has_penalties or params.num_generated < params.sampling.min_tokens
            for params in batch.params
        )
    )


def _sampled(slabs: Sequence[Slab], *, in_graph: bool) -> dict[str, Array]:
    """int32, of each slab with sampled draws: `at`, their rows of DrawPlan's noise or of a graph's,
    and `rows`, those of the step, whose positions the device finds."""
    made: dict[str, Array] = {}
    for i, slab in enumerate(slabs):
        if slab.plan.noisy:
            at = np.flatnonzero(slab.plan.arrays["noise"][:, 2])
            draws = slab.plan.arrays["at"][at]
            made[f"sampled.{i}.at"] = (draws if in_graph else at).astype(np.int32)
            made[f"sampled.{i}.rows"] = slab.draw_ids[draws].astype(np.int32)  # a draw a row
    return made
