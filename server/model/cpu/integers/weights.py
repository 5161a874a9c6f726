"""Weights in the integer forms: from ggml's rows, or quantised from floats, into panels.

What: blocks of a GGUF's types taken apart (kernels/blocks.py; the numbers stay what they are),
round-to-nearest quantisation of float rows, and `pack_rows`, which lays either out as forms.py
says. What not: reading files (loader, gguf_file) and multiplying (kernels/integers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from server.model.cpu.arena import Arena
from server.model.cpu.integers.forms import BLOCK, BY_NAME, PANEL, Form, padded_inputs, panels_of
from server.model.cpu.kernels import lay_out, take_apart

UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Stored:
    """Rows of a matrix, taken apart. N outputs, K inputs (padded), all blocks of 32 in order.

    numbers: uint8 [N, K], the stored numbers, zero point included. scales: float32 [N, 1] of the
    form `int8`; float16 [N, K / 32]; or, two-level, int8 or uint8 [N, K / sub]. minima: float16 or
    uint8 [N, K / 32], or None. tops, low_tops: float16 [N, K / 256], `d` and `dmin` of two-level
    forms.
    """

    form: Form
    numbers: UInt8
    scales: npt.NDArray[Any]
    minima: npt.NDArray[Any] | None = None
    tops: npt.NDArray[np.float16] | None = None
    low_tops: npt.NDArray[np.float16] | None = None


def from_ggml(name: str, raw: UInt8) -> Stored:
    """Rows as a GGUF holds them. name: a form's; raw: uint8 [N, bytes of a row].

    Raises ValueError for rows that are no whole number of blocks.
    """
    form = BY_NAME[name]
    if raw.ndim != 2 or raw.shape[1] % form.block_bytes:
        told = f"{name} rows have a multiple of {form.block_bytes} bytes, not {raw.shape}"
        raise ValueError(told)
    num, supers = raw.shape[0], raw.shape[1] // form.block_bytes
    blocks, halves = supers * form.blocks_per_super, 1 + form.has_min
    numbers = np.empty((num, blocks * BLOCK), np.uint8)
    size = blocks * form.scale_bytes // PANEL
    scales = np.empty((num, size), np.uint8)
    minima = np.empty((num, size if form.has_min else 0), np.uint8)
    tops = np.empty((num, supers * halves * 2 if form.two_level else 0), np.uint8)
    take_apart(form.number, np.ascontiguousarray(raw), numbers, scales, minima, tops)
    if form.two_level:
        own = tops.view("<f2").reshape(num, supers, halves)
        if form.has_min:
            return Stored(form, numbers, scales, minima, own[..., 0], own[..., 1])
        return Stored(form, numbers, scales.view(np.int8), tops=own[..., 0])
    return Stored(form, numbers, scales.view("<f2"), minima.view("<f2") if form.has_min else None)


def quantised(form: Form, weight: Float32) -> Stored:
    """Float rows [N, inputs] rounded to a form, inputs padded with zeros.

    `int8`: scale = max |w| / 127 an output. q8_0: the same a block, the scale a float16. q4_1:
    scale = (max - min) / 15 and min a block, both float16. q4_0: scale = the value of largest
    magnitude / -8. The rounded scale is what numbers are divided by. Raises ValueError for a form
    that is not made here, and for values that are not finite.
    """
    if not np.isfinite(weight).all():
        raise ValueError("weights that are not finite cannot be quantised")
    num, inputs = weight.shape
    padded = padded_inputs(form, inputs)
    if padded != inputs:
        weight = np.concatenate((weight, np.zeros((num, padded - inputs), np.float32)), axis=1)
    if form.per_output:
        tops = np.abs(weight).max(axis=1, keepdims=True, initial=0.0)
        scales = (tops / np.float32(127.0)).astype(np.float32)
        return Stored(form, _round(weight, scales, 128, 255), scales)
    blocks = weight.reshape(num, -1, BLOCK)
    if form.name == "q8_0":
        halves = (np.abs(blocks).max(axis=2) / np.float32(127.0)).astype(np.float16)
        numbers = _round(blocks, halves.astype(np.float32)[..., None], 128, 255)
        return Stored(form, numbers.reshape(num, -1), halves)
    if form.name == "q4_0":
        at = np.abs(blocks).argmax(axis=2)[..., None]
        extreme = np.take_along_axis(blocks, at, axis=2)[..., 0]
        halves = (extreme / np.float32(-8.0)).astype(np.float16)
        numbers = _round(blocks, halves.astype(np.float32)[..., None], 8, 15)
        return Stored(form, numbers.reshape(num, -1), halves)
    if form.name == "q4_1":
        low, high = blocks.min(axis=2), blocks.max(axis=2)
        minima = low.astype(np.float16)
        halves = ((high - low) / np.float32(15.0)).astype(np.float16)
        above = blocks - minima.astype(np.float32)[..., None]
        numbers = _round(above, halves.astype(np.float32)[..., None], 0, 15)
        return Stored(form, numbers.reshape(num, -1), halves, minima)
    raise ValueError(f"weights are not quantised to {form.name} here")


def _round(values: Float32, scales: Float32, zero: int, most: int) -> UInt8:
    """round(values / scales) + zero, within 0..most (1.. for 8 bits: -128 has no opposite)."""
    inverse = np.divide(np.float32(1.0), scales, out=np.zeros_like(scales), where=scales != 0)
    numbers = np.rint(values * inverse) + np.float32(zero)
    clipped: UInt8 = np.clip(numbers, 1 if most == 255 else 0, most).astype(np.uint8)
    return clipped


def dequantised(stored: Stored) -> Float32:
    """float32 [N, K]: the values that the numbers stand for, as gguf.quants computes them."""
    form, num = stored.form, stored.numbers.shape[0]
    numbers = stored.numbers.astype(np.float32) - np.float32(form.zero)
    if form.per_output:
        plain: Float32 = numbers * stored.scales
        return plain
    parts = numbers.reshape(num, -1, form.sub)
    scales, minima = stored.scales.astype(np.float32), None
    if stored.minima is not None:
        minima = stored.minima.astype(np.float32)
    if stored.tops is not None:
        scales = scales * np.repeat(stored.tops.astype(np.float32), 256 // form.sub, axis=1)
    if minima is not None and stored.low_tops is not None:
        minima = -(minima * np.repeat(stored.low_tops.astype(np.float32), 256 // BLOCK, axis=1))
    values = parts * scales[..., None]
    if minima is not None:
        values = values + minima[..., None]
    result: Float32 = values.reshape(num, -1)
    return result


def pack_rows(stored: Stored, out: UInt8) -> None:
    """Lay rows out in panels: out uint8 [panels, form.panel_bytes(K)]. Outputs past N are zero."""
    tops = [half for half in (stored.tops, stored.low_tops) if half is not None]
    lay_out(
        stored.form.number,
        stored.numbers.view("<u4"),
        _bytes(stored.scales, stored),
        _bytes(stored.minima, stored),
        _bytes(np.stack(tops, axis=2) if tops else None, stored),
        out,
        out.view("<u4"),
    )


def _bytes(array: npt.NDArray[Any] | None, stored: Stored) -> UInt8:
    """uint8 [N, bytes of a row]"""
    num = stored.numbers.shape[0]
    if array is None:
        return np.empty((num, 0), np.uint8)
    return np.ascontiguousarray(array).reshape(num, -1).view(np.uint8)


class Part(NamedTuple):
    """Outputs of a matrix that are in one form: panels uint8 [panels, form.panel_bytes(inputs)]."""

    form: Form
    inputs: int
    outputs: int
    panels: npt.NDArray[np.uint8]


def pack(stored: Stored, arena: Arena) -> Part:
    """Rows in panels, in memory of the arena."""
    num, k = stored.numbers.shape
    size = stored.form.panel_bytes(k)
    panels = arena.take(panels_of(num) * size).reshape(-1, size)
    pack_rows(stored, panels)
    return Part(stored.form, k, num, panels)
