"""Attention of many heads at once has the bits of one head alone, in every type of cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from server.model.cpu.attention_kernels import (
    KV_TYPES,
    Plane,
    add_blocks,
    add_weighted,
    block_scores,
    one_score,
)

NUM_HEADS, WIDTH, NUM_BLOCKS, ROOM = 15, 64, 5, 96


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _together(q, keys, values, table, s, acc):  # type: ignore[no-untyped-def]
    block_scores(q, WIDTH, NUM_HEADS, keys, table, NUM_BLOCKS, s, ROOM)
    add_blocks(s, ROOM, NUM_HEADS, values, table, NUM_BLOCKS, acc, WIDTH)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _one_by_one(q, keys, values, blocks, s, acc):  # type: ignore[no-untyped-def]
    for g in range(NUM_HEADS):
        own = s + g * ROOM * 4
        for i in range(NUM_BLOCKS):
            one_score(q + g * WIDTH * 4, WIDTH, 1, keys, blocks[i], own + i * 64, ROOM)
        for i in range(NUM_BLOCKS):
            slot, to = blocks[i] * 16, acc + g * WIDTH * 4
            add_weighted(own + i * 64, ROOM, 1, values, slot, 16, to, WIDTH)


@pytest.mark.parametrize("dtype", sorted(KV_TYPES))
def test_heads_together_have_the_bits_of_each_alone(dtype: str) -> None:
    draws = np.random.default_rng(3)

    def plane(shape: tuple[int, ...]) -> tuple[Plane, list[Any]]:
        numbers: Any = draws.standard_normal(shape).astype(np.float32)
        if dtype == "float16":
            numbers = numbers.astype(np.float16).view(np.uint16)
        elif dtype == "int8":
            numbers = (40 * numbers).clip(-127, 127).astype(np.int8)
        scales = draws.random((shape[0], 16), np.float32)
        zero = numbers.dtype.type(0)
        return Plane(numbers.ctypes.data, scales.ctypes.data, WIDTH, zero), [numbers, scales]

    keys, kept_keys = plane((8, WIDTH, 16))
    values, kept_values = plane((8, 16, WIDTH))
    blocks = np.array([6, 0, 3, 7, 2], np.int32)
    q = draws.standard_normal((NUM_HEADS, WIDTH)).astype(np.float32)
    results = []
    for function, table in ((_together, blocks.ctypes.data), (_one_by_one, blocks)):
        s = np.zeros((NUM_HEADS, ROOM), np.float32)
        acc = np.ones((NUM_HEADS, WIDTH), np.float32)
        function(q.ctypes.data, keys, values, table, s.ctypes.data, acc.ctypes.data)
        results.append((s, acc))
    assert kept_keys and kept_values  # the planes are addresses
    for together, alone in zip(*results, strict=True):
        np.testing.assert_array_equal(together.view(np.int32), alone.view(np.int32))
    assert np.abs(results[0][1] - 1.0).max() > 1.0
