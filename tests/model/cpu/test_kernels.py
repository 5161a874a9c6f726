"""The CPU kernels: right against float64, and the same bits whatever stands beside a row."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from server.model.cpu import kernels, linear
from server.model.cpu.records import PANEL

SHAPES = [(576, 960), (576, 576), (1536, 576), (48, 128), (100, 70), (64, 33), (640, 2048)]


def _product(x: np.ndarray, panels: np.ndarray, threads: int) -> np.ndarray:
    out = np.full((x.shape[0], panels.shape[0] * PANEL), np.nan, np.float32)
    weights = linear.float_linear(panels)
    kernels.product(x, x.shape[0], weights, out, 0.0, linear.new_work(threads))
    return out


@pytest.mark.parametrize(("k", "num"), SHAPES)
def test_a_row_is_right_and_the_same_at_every_row_count_and_thread_count(k: int, num: int) -> None:
    rng = np.random.default_rng(k * 1000 + num)
    weight = rng.standard_normal((num, k), dtype=np.float32)
    panels, x = linear.packed(weight), rng.standard_normal((129, k), dtype=np.float32)
    alone = np.concatenate([_product(x[i : i + 1].copy(), panels, 1) for i in range(129)])
    want = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.abs(alone[:, :num] - want).max() < 1e-5 * k**0.5
    assert not alone[:, num:].any(), "columns past the last output are zero"
    for rows in [*range(1, 26), 31, 47, 48, 96, 97, 100, 129]:
        for threads in (1, 2):
            together = _product(x[:rows].copy(), panels, threads)
            assert np.array_equal(together, alone[:rows]), (rows, threads)


def test_bfloat16_weights_are_widened_exactly() -> None:
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((96, 80), dtype=np.float32)
    bits = (weight.view(np.uint32) >> 16).astype(np.uint16)
    rounded = (bits.astype(np.uint32) << 16).view(np.float32)
    x = rng.standard_normal((17, 80), dtype=np.float32)
    stored = _product(x, linear.packed(bits), 2)
    assert np.array_equal(stored, _product(x, linear.packed(rounded), 1))


def digest() -> str:
    """Of products whose bits are those of every instruction set (integers/test_same_text.py)."""
    rng = np.random.default_rng(11)
    parts = []
    for k, num in ((576, 192), (100, 70)):
        panels = linear.packed(rng.standard_normal((num, k), dtype=np.float32))
        x = rng.standard_normal((15, k), dtype=np.float32)
        parts.append(_product(x, panels, 1)[:, :num].tobytes())
    return hashlib.sha256(b"".join(parts)).hexdigest()
