"""Weights in the integer forms: from ggml's rows, or quantised from floats, into panels.

What: blocks of a GGUF's types taken apart (the numbers stay what they are), round-to-nearest
quantisation of float rows, and `pack_rows`, which lays either out as forms.py says. What not:
reading files (loader, gguf_file) and multiplying (kernels/integers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from server.model.cpu.arena import Arena
from server.model.cpu.integers.forms import BLOCK, BY_NAME, PANEL, Form, padded_inputs, panels_of

UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

# Bytes of a block (a super-block of the K forms) in a GGUF, and the inputs in it.
_GGML_BLOCK: dict[str, tuple[int, int]] = {
    "q8_0": (34, 32), "q4_0": (18, 32), "q4_1": (20, 32), "q5_0": (22, 32), "q5_1": (24, 32),
    "q4_k": (144, 256), "q5_k": (176, 256), "q6_k": (210, 256),
}  # fmt: skip


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


def _half(raw: UInt8) -> npt.NDArray[np.float16]:
    """The float16 in the first two bytes of the last axis."""
    return np.ascontiguousarray(raw[..., :2]).view("<f2")[..., 0]


def _nibbles(raw: UInt8) -> UInt8:
    """[..., 16] bytes -> [..., 32] numbers: the low halves first."""
    return np.concatenate((raw & 0x0F, raw >> 4), axis=-1)


def _fifth_bits(raw: UInt8) -> UInt8:
    """[..., 4] bytes, one bit a number -> [..., 32] of 0 or 16."""
    bits: UInt8 = np.unpackbits(raw, axis=-1, bitorder="little") * np.uint8(16)
    return bits


def _six_bit_pairs(raw: UInt8) -> tuple[UInt8, UInt8]:
    """12 bytes of a K form -> (8 scales, 8 minima), 6 bits each."""
    d, m, md = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scales = np.concatenate((d & 0x3F, (md & 0x0F) | ((d >> 2) & 0x30)), axis=-1)
    minima = np.concatenate((m & 0x3F, (md >> 4) | ((m >> 2) & 0x30)), axis=-1)
    return scales, minima


def _six_bits(raw: UInt8) -> UInt8:
    """[N, blocks, 210] bytes of q6_k -> [N, blocks, 8, 32] numbers."""
    num, blocks = raw.shape[:2]
    low = np.right_shift(
        raw[..., :128].reshape(num, blocks, 2, 1, 64), np.array([0, 4], np.uint8)[:, None]
    ) & np.uint8(0x0F)
    high = np.right_shift(
        raw[..., 128:192].reshape(num, blocks, 2, 1, 32), np.array([0, 2, 4, 6], np.uint8)[:, None]
    ) & np.uint8(0x03)
    numbers: UInt8 = low.reshape(num, blocks, 8, 32)
    return numbers | (high.reshape(num, blocks, 8, 32) * np.uint8(16))


def from_ggml(name: str, raw: UInt8) -> Stored:
    """Rows as a GGUF holds them. name: a form's; raw: uint8 [N, bytes of a row].

    Raises ValueError for rows that are no whole number of blocks.
    """
    form = BY_NAME[name]
    size, _ = _GGML_BLOCK[name]
    if raw.ndim != 2 or raw.shape[1] % size:
        raise ValueError(f"{name} rows have a multiple of {size} bytes, not {raw.shape}")
    num, blocks = raw.shape[0], raw.shape[1] // size
    raw = np.ascontiguousarray(raw).reshape(num, blocks, size)
    if name == "q8_0":
        return Stored(form, _flat(raw[..., 2:] ^ 0x80), _half(raw))
    if name == "q4_0":
        return Stored(form, _flat(_nibbles(raw[..., 2:])), _half(raw))
    if name == "q4_1":
        return Stored(form, _flat(_nibbles(raw[..., 4:])), _half(raw), _half(raw[..., 2:]))
    if name == "q5_0":
        numbers = _nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])
        return Stored(form, _flat(numbers), _half(raw))
    if name == "q5_1":
        numbers = _nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])
        return Stored(form, _flat(numbers), _half(raw), _half(raw[..., 2:]))
    if name == "q6_k":
        scales = np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
        return Stored(form, _flat(_six_bits(raw)), _flat(scales), tops=_half(raw[..., 208:]))
    factors, minima = _six_bit_pairs(raw[..., 4:16])
    packed = raw[..., 16:] if name == "q4_k" else raw[..., 48:]
    numbers = _nibbles(packed.reshape(num, blocks, 4, 32)).reshape(num, blocks, 8, 32)
    if name == "q5_k":
        high: UInt8 = raw[..., 16:48].reshape(num, blocks, 1, 32)
        fifth = np.right_shift(high, np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
        numbers = numbers | (fifth * np.uint8(16))
    return Stored(
        form, _flat(numbers), _flat(factors), _flat(minima), _half(raw), _half(raw[..., 2:])
    )


def _flat(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array.reshape(array.shape[0], -1))


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
    form = stored.form
    num, inputs = stored.numbers.shape
    panels, blocks = out.shape[0], inputs // BLOCK
    whole = panels * PANEL

    def lanes(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[N, ...] -> [panels, PANEL, ...], zero past N."""
        if array.shape[0] != whole:
            rest = np.zeros((whole - num, *array.shape[1:]), array.dtype)
            array = np.concatenate((array, rest))
        return array.reshape(panels, PANEL, *array.shape[1:])

    # Groups of four inputs are moved as one: [panels, lanes, blocks, groups] of uint32.
    words = lanes(stored.numbers).view("<u4").reshape(panels, PANEL, blocks, 8)
    words = words.transpose(0, 2, 3, 1)  # [panels, blocks, groups, lanes]
    if form.per_output:
        scales = lanes(stored.scales.astype("<f4"))[..., 0]
        out[:, : form.header_bytes] = np.ascontiguousarray(scales).view(np.uint8)
        out[:, form.header_bytes :] = np.ascontiguousarray(words).view(np.uint8).reshape(panels, -1)
        return
    supers = blocks // form.blocks_per_super
    body = out.reshape(panels, supers, -1)
    records = body[..., form.header_bytes :].reshape(
        panels, supers, form.blocks_per_super, form.record_bytes
    )

    def columns(array: npt.NDArray[Any], width: int) -> UInt8:
        """[N, blocks * k] -> [panels, supers, blocks per super, k * PANEL numbers] as bytes."""
        k = array.shape[1] // blocks
        own = lanes(array).reshape(panels, PANEL, blocks, k).transpose(0, 2, 3, 1)
        as_bytes = np.ascontiguousarray(own).view(np.uint8)
        return as_bytes.reshape(panels, supers, form.blocks_per_super, width)

    at = form.low_bytes
    if form.bits == 8:
        low: npt.NDArray[Any] = words
    else:
        nibbles = words & np.uint32(0x0F0F0F0F)
        low = nibbles[:, :, :4] | (nibbles[:, :, 4:] << np.uint32(4))
    records[..., :at] = np.ascontiguousarray(low).view(np.uint8).reshape(*records.shape[:3], at)
    if form.high_bytes:
        high = _high_words(form, words)
        records[..., at : at + form.high_bytes] = high.view(np.uint8).reshape(
            *records.shape[:3], form.high_bytes
        )
        at += form.high_bytes
    records[..., at : at + form.scale_bytes] = columns(stored.scales, form.scale_bytes)
    at += form.scale_bytes
    if stored.minima is not None:
        records[..., at:] = columns(stored.minima, form.scale_bytes)
    for i, top in enumerate((stored.tops, stored.low_tops)):
        if top is not None:
            own = np.ascontiguousarray(lanes(top).transpose(0, 2, 1)).view(np.uint8)
            body[..., 2 * PANEL * i : 2 * PANEL * (i + 1)] = own


def _high_words(form: Form, words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The bits above the fourth as forms.py lays them out: [panels, blocks, 1 or 2, lanes]."""
    panels, blocks, _, lanes = words.shape
    planes = 1 if form.bits == 5 else 2
    out = np.zeros((panels, blocks, planes, lanes), np.uint32)
    for step in range(8):
        above = words[:, :, step] >> np.uint32(4)
        if form.bits == 5:
            out[:, :, 0] |= (above & np.uint32(0x01010101)) << np.uint32(step)
        else:
            moved = (above & np.uint32(0x03030303)) << np.uint32(2 * (step % 4))
            out[:, :, step // 4] |= moved
    return out


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
