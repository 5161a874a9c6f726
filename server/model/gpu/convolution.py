"""Short convolutions on a GPU (LFM2): where each row finds the inputs of the positions before it.

As on a CPU (cpu/convolution.py), a layer's input B * x of a position is kept in its KV slot, so
that a tree row reads its own ancestors' and a rejected draft leaves nothing behind. Which slots
those are is the same in every layer and known on the host: `input_sources` says it once a step. A
row of the same step is named itself, and its B * x computed again: so one launch writes and reads.
The operation is DecoderOps.convolve.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from server.engine.batch import Batch, Int32

NOTHING = -1
"""The source of a position before the text."""

FIRST_ROW = -2
"""FIRST_ROW - r is the source that is row r of the step; 0 and above are slots."""


class Inputs(NamedTuple):
    """Where a step's rows have a layer's inputs. slots: int32 [R], their own. sources: int32
    [R, taps], as of input_sources. kept: [num_slots, H], by slot."""

    slots: torch.Tensor
    sources: torch.Tensor
    kept: torch.Tensor


def input_slots(batch: Batch, taps: int, block_size: int) -> Int32:
    """int32 [R, taps]: the slots of a row's last positions on its path, its own last, or
    NOTHING."""
    last = batch.prefix_len + batch.path_len - 1
    at = last[:, None] - np.arange(taps - 1, -1, -1, dtype=np.int32)
    block = np.clip(at // block_size, 0, batch.block_tables.shape[1] - 1)
    slots = batch.block_tables[batch.seq_ids[:, None], block] * block_size + at % block_size
    if batch.path_slots.shape[0]:
        nth = at - batch.prefix_len[:, None]
        which = np.clip(batch.path_start[:, None] + nth, 0, batch.path_slots.shape[0] - 1)
        slots = np.where(nth >= 0, batch.path_slots[which], slots)
    return np.where(at < 0, NOTHING, slots).astype(np.int32)


def input_sources(batch: Batch, taps: int, block_size: int) -> Int32:
    """int32 [R, taps]: where the inputs of a row's last positions are, its own last: a slot that no
    row of the step writes, FIRST_ROW - r for row r of the step, or NOTHING."""
    slots = input_slots(batch, taps, block_size)
    order = np.argsort(batch.slots, kind="stable")
    found = np.searchsorted(batch.slots, slots, sorter=order)
    row = order[np.minimum(found, batch.num_rows - 1)]
    return np.where(batch.slots[row] == slots, FIRST_ROW - row, slots).astype(np.int32)
