"""What the integer kernels must give, in numpy, operation by operation.

float32 multiply-add with one rounding is not in numpy: it is computed in float64, where the
product is exact and the sum is rounded to odd (Boldo and Melquiond, "Emulation of FMA and
correctly rounded sums", 2008), so that the last rounding to float32 is the only one that counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from server.model.cpu.integers.forms import BLOCK
from server.model.cpu.integers.weights import Stored

Float32 = npt.NDArray[np.float32]


def fma(x: Any, y: Any, z: Any) -> Float32:
    """x * y + z, float32, one rounding."""
    product = np.asarray(x, np.float64) * np.asarray(y, np.float64)
    addend = np.asarray(z, np.float64)
    with np.errstate(invalid="ignore"):
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
    shape = np.shape(total)
    bits = np.atleast_1d(total).view(np.int64).copy()
    error, total = np.atleast_1d(np.broadcast_to(error, total.shape)), np.atleast_1d(total)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    # Towards the exact value when that lies beyond, else the even number's odd neighbour below.
    away = (error > 0) == (total > 0)
    bits = np.where(inexact, np.where(away, bits + 1, bits - 1), bits)
    with np.errstate(over="ignore"):
        return bits.view(np.float64).astype(np.float32).reshape(shape)


@dataclass(frozen=True)
class Inputs:
    """Activations: q int64 [rows, blocks, 32]; scales float32 [rows, blocks] (one if per row)."""

    q: npt.NDArray[np.int64]
    scales: Float32


def spread(x: Float32, factors: Float32) -> Float32:
    """weights.spread's rule: x float32 [rows, whole blocks]."""
    y = (x * factors).reshape(-1, BLOCK)
    for stride in (1, 2, 4, 8, 16):
        pairs = y.reshape(-1, BLOCK // (2 * stride), 2, stride)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        y = np.stack([low + high, low - high], axis=2).reshape(-1, BLOCK)
    return y.reshape(x.shape)


def inputs_of(x: Float32, *, per_row: bool, factors: Float32 | None = None) -> Inputs:
    """integer_rows.py's rule. factors: of a row with one scale, ones when None."""
    num, width = x.shape
    padded = np.zeros((num, -(-width // BLOCK) * BLOCK), np.float32)
    padded[:, :width] = x
    if per_row:
        ones = np.ones(padded.shape[1], np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            padded = spread(padded, ones if factors is None else factors)
    blocks = padded.reshape(num, 1 if per_row else -1, padded.shape[1] if per_row else BLOCK)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        top = np.abs(blocks).max(axis=2)
        finite = np.isfinite(top)
        known = finite & (top >= np.float32(1e-30))
        factor = np.where(known, np.float32(127.0) / top, np.float32(0.0)).astype(np.float32)
        scales = np.where(known, top / np.float32(127.0), np.float32(0.0)).astype(np.float32)
        scaled = np.where(known[..., None], blocks * factor[..., None], np.float32(0.0))
    scales[~finite] = np.nan
    q = np.rint(scaled).astype(np.int64).reshape(num, -1, BLOCK)
    return Inputs(q, scales)


def product(inputs: Inputs, stored: Stored) -> Float32:
    """float32 [rows, N], as kernels/integer_linear.py's docstring says."""
    form = stored.form
    num = inputs.q.shape[0]
    numbers = stored.numbers.astype(np.int64) - form.zero
    if form.per_output:
        sums = inputs.q.reshape(num, -1) @ numbers.T
        factors: Float32 = stored.scales[:, 0] * inputs.scales
        return sums.astype(np.float32) * factors
    per_block = BLOCK // form.sub
    scales = stored.scales.astype(np.float32)
    if stored.tops is not None:
        scales = scales * np.repeat(stored.tops.astype(np.float32), 256 // form.sub, axis=1)
    minima = None
    if stored.minima is not None:
        minima = stored.minima.astype(np.float32)
        if stored.low_tops is not None:
            minima = -(minima * np.repeat(stored.low_tops.astype(np.float32), 8, axis=1))
    acc = np.zeros((num, numbers.shape[0]), np.float32)
    for block in range(inputs.q.shape[1]):
        x_scale = inputs.scales[:, block : block + 1]
        for part in range(per_block):
            at = slice(part * form.sub, (part + 1) * form.sub)
            k = slice(block * BLOCK + at.start, block * BLOCK + at.stop)
            sums = inputs.q[:, block, at] @ numbers[:, k].T
            w_scale = scales[None, :, block * per_block + part]
            acc = fma(sums.astype(np.float32), w_scale * x_scale, acc)
        if minima is not None:
            whole = inputs.q[:, block].sum(axis=1, keepdims=True).astype(np.float32)
            acc = fma(np.broadcast_to(minima[None, :, block], acc.shape), x_scale * whole, acc)
    return acc
