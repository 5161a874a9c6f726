"""Checks on the host: a runner's sizes, and that a Batch's indices are within bounds."""

from __future__ import annotations

from typing import Any

from server.engine.batch import Batch, Int32
from server.types import ModelInfo


def check_sizes(config: Any, info: ModelInfo) -> None:
    """Raise ValueError for sizes that the model of this config does not have."""
    if info.max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {info.max_model_len} is above the model's "
            f"{config.max_position_embeddings} positions"
        )
    if info.block_size & (info.block_size - 1) or info.block_size < 1:
        raise ValueError(f"block_size must be a power of two, not {info.block_size}")


def check_batch(batch: Batch, info: ModelInfo, num_slots: int, num_ids: Int32 | int) -> None:
    """Raise ValueError for indices that would read or write outside the device's memory: on a GPU
    they would end the process. num_ids: that each row may have."""
    if batch.num_rows == 0:
        raise ValueError("a batch without rows")
    if int(batch.slots.min()) < 0 or int(batch.slots.max()) >= num_slots:
        raise ValueError("a row's slot is outside the KV cache")
    if int(batch.token_ids.min()) < 0 or (batch.token_ids >= num_ids).any():
        raise ValueError("a row's token id is outside the vocabulary")
    if int(batch.positions.min()) < 0 or int(batch.positions.max()) >= info.max_model_len:
        raise ValueError("a row's position is outside the model's length")
    tables = batch.block_tables
    if int(batch.seq_ids.max()) >= tables.shape[0] or int(tables.max()) >= info.num_blocks:
        raise ValueError("a row's sequence or block does not exist")
    if int(batch.prefix_len.max()) > tables.shape[1] * info.block_size:
        raise ValueError("a row's prefix is longer than its block table")
    if int((batch.path_start + batch.path_len).max()) > batch.path_slots.shape[0]:
        raise ValueError("a row's path ends outside path_slots")
    if batch.path_slots.shape[0] and int(batch.path_slots.max()) >= num_slots:
        raise ValueError("a path slot is outside the KV cache")
