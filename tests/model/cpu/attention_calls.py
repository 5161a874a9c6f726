"""Attention of many heads at once, and head by head, for test_attention_tiles.py."""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from drafters.jit import borrowing, entry
from server.model.cpu.kernels.attention import (
    Plane,
    add_blocks,
    add_weighted,
    block_scores,
)
from server.model.cpu.records import Int32

NUM_HEADS, WIDTH, NUM_BLOCKS, ROOM = 15, 64, 5, 96


@entry
@borrowing
def together(q: int, keys: Plane, values: Plane, blocks: Int32, s: int, acc: int) -> None:
    """All heads and blocks in one call."""
    table = blocks.ctypes.data
    block_scores(q, WIDTH, NUM_HEADS, keys, table, 0, NUM_BLOCKS, s, ROOM)
    add_blocks(s, ROOM, NUM_HEADS, values, table, NUM_BLOCKS, acc, WIDTH)


@entry
@borrowing
def one_by_one(q: int, keys: Plane, values: Plane, blocks: Int32, s: int, acc: int) -> None:
    """A head and a block a call."""
    table = blocks.ctypes.data
    for g in range(NUM_HEADS):
        own, to = s + g * ROOM * 4, acc + g * WIDTH * 4
        for i in range(NUM_BLOCKS):
            block, at = table + i * 4, own + i * 64
            block_scores(q + g * WIDTH * 4, WIDTH, 1, keys, block, 0, 1, at, ROOM)
        for i in range(NUM_BLOCKS):
            block, at = table + i * 4, own + i * 64
            add_weighted(at, ROOM, 1, values, block, 0, 1, block, 0, 16, to, WIDTH)
