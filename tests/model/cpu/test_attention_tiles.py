"""Attention of many heads at once has the bits of one head alone, in every type of cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from drafters.jit import entry_of
from server.model.cpu.records import KV_TYPES

NUM_HEADS, WIDTH, ROOM = 15, 64, 96

_together = entry_of("tests.model.cpu.attention_calls", "together")
_one_by_one = entry_of("tests.model.cpu.attention_calls", "one_by_one")


@pytest.mark.parametrize("dtype", sorted(KV_TYPES))
def test_heads_together_have_the_bits_of_each_alone(dtype: str) -> None:
    draws = np.random.default_rng(3)

    def plane(shape: tuple[int, ...]) -> tuple[tuple[int, ...], list[Any]]:
        numbers: Any = draws.standard_normal(shape).astype(np.float32)
        if dtype == "float16":
            numbers = numbers.astype(np.float16).view(np.uint16)
        elif dtype == "int8":
            numbers = (40 * numbers).clip(-127, 127).astype(np.int8)
        scales = draws.random((shape[0], 16), np.float32)
        kind = list(KV_TYPES).index(dtype)
        stride = numbers.strides[0]
        own = np.zeros((shape[0], stride // 4), np.float32)  # scales are as far apart
        own[:, :16] = scales
        return (numbers.ctypes.data, own.ctypes.data, stride, WIDTH, kind), [numbers, own]

    keys, kept_keys = plane((8, WIDTH, 16))
    values, kept_values = plane((8, 16, WIDTH))
    blocks = np.array([6, 0, 3, 7, 2], np.int32)
    q = draws.standard_normal((NUM_HEADS, WIDTH)).astype(np.float32)
    results = []
    for function in (_together, _one_by_one):
        s = np.zeros((NUM_HEADS, ROOM), np.float32)
        acc = np.ones((NUM_HEADS, WIDTH), np.float32)
        function(q.ctypes.data, keys, values, blocks, s.ctypes.data, acc.ctypes.data)
        results.append((s, acc))
    assert kept_keys and kept_values  # the planes are addresses
    for together, alone in zip(*results, strict=True):
        np.testing.assert_array_equal(together.view(np.int32), alone.view(np.int32))
    assert np.abs(results[0][1] - 1.0).max() > 1.0
