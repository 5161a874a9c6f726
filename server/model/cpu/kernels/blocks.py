"""ggml's blocks, taken apart: the one place that knows how their bytes lie.

A matrix comes from its file as rows of blocks, of 32 inputs or, the K forms, of 256, which are cut
into parts of 32. Here a row becomes numbers (an embedding's), or what a product's panels are made
of (integers/weights.py), which `lay_out` puts in the panels' order (integers/forms.py). The forms
of ggml: ggml-quants.c, `dequantize_row_*`; the values are those of gguf.quants to the last bit.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np

from drafters.jit import borrowing, entry, inlined
from server.model.cpu.integers.forms import BLOCK, FORMS, PANEL
from server.model.cpu.kernels.vectors import byte_at, half_at
from server.model.cpu.records import UInt8x2, UInt32x2

_, _Q8_0, _Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q4_K, _Q5_K, _Q6_K = (form.number for form in FORMS)
# By a form's number: bytes of a block, parts of 32 inputs in it, where its numbers begin, where
# their fifth bits do, bits of a number, the number that means 0, whether there are minima.
_BYTES = tuple(form.block_bytes for form in FORMS)
_PARTS = tuple(form.blocks_per_super for form in FORMS)
_NUMBERS = (0, 2, 2, 4, 6, 8, 16, 48, 0)
_FIFTHS = (0, 0, 0, 0, 2, 4, 0, 16, 0)
_BITS = tuple(form.bits for form in FORMS)
_ZEROS = tuple(np.float32(form.zero) for form in FORMS)
_HAS_MINIMA = tuple(form.has_min for form in FORMS)
_SIX_HIGH, _SIX_SCALES, _SIX_TOP = 128, 192, 208  # where q6_k has what is not its low bits


@inlined
def _number(at, form, part, i):
    """The stored number i of a part of the block at an address."""
    if form == _Q8_0:
        return byte_at(at + 2 + i) ^ 128
    if form == _Q6_K:
        low = byte_at(at + part // 4 * 64 + part % 2 * 32 + i) >> (part % 4 // 2 * 4) & 15
        return low | (byte_at(at + _SIX_HIGH + part // 4 * 32 + i) >> (part % 4 * 2) & 3) << 4
    if form in (_Q4_K, _Q5_K):
        low = byte_at(at + _NUMBERS[form] + part // 2 * 32 + i) >> (part % 2 * 4) & 15
        if form == _Q5_K:
            low |= (byte_at(at + _FIFTHS[form] + i) >> part & 1) << 4
        return low
    low = byte_at(at + _NUMBERS[form] + i % 16) >> (i // 16 * 4) & 15
    if _BITS[form] == 5:
        low |= (byte_at(at + _FIFTHS[form] + i // 8) >> (i % 8) & 1) << 4
    return low


@inlined
def _six_bits(at, part, minimum):
    """The 6-bit scale of a part of a q4_k or q5_k block, or its minimum."""
    own = byte_at(at + 4 + minimum * 4 + part % 4)
    if part < 4:
        return own & 63
    return byte_at(at + 12 + part % 4) >> (minimum * 4) & 15 | own >> 2 & 48


@inlined
def _small_scale(at, form, part, i):
    """The whole number that a K form's block scale is multiplied by for number i of a part."""
    if form == _Q6_K:
        return (byte_at(at + _SIX_SCALES + part * 2 + i // 16) ^ 128) - 128
    return _six_bits(at, part, 0)


@borrowing
def block_row(row, form, factor, out):
    """out float32 [inputs] = factor * the values of a row of blocks at an address."""
    for b in range(out.shape[0] // BLOCK):
        at, part = row + b // _PARTS[form] * _BYTES[form], b % _PARTS[form]
        k_form = _PARTS[form] > 1
        top = half_at(at + (_SIX_TOP if form == _Q6_K else 0), 0)
        minimum = np.float32(0.0)
        if _HAS_MINIMA[form]:
            minimum = half_at(at, 1)
            if k_form:
                minimum = -(np.float32(_six_bits(at, part, 1)) * minimum)
        for i in range(BLOCK):
            scale = top
            if k_form:
                scale = np.float32(_small_scale(at, form, part, i)) * top
            value = (np.float32(_number(at, form, part, i)) - _ZEROS[form]) * scale
            if _HAS_MINIMA[form]:
                value += minimum
            out[b * BLOCK + i] = value * factor


@inlined
def _take_row(row, form, out):
    """take_apart of one row, at an address."""
    numbers, scales, minima, tops = out
    halves = 4 if _HAS_MINIMA[form] else 2
    for b in range(numbers.shape[0] // BLOCK):
        at, part = row + b // _PARTS[form] * _BYTES[form], b % _PARTS[form]
        for i in range(BLOCK):
            numbers[b * BLOCK + i] = _number(at, form, part, i)
        if _PARTS[form] == 1:
            for k in range(2):
                scales[b * 2 + k] = byte_at(at + k)
                if _HAS_MINIMA[form]:
                    minima[b * 2 + k] = byte_at(at + 2 + k)
            continue
        if form == _Q6_K:
            for k in range(2):
                scales[b * 2 + k] = byte_at(at + _SIX_SCALES + part * 2 + k)
        else:
            scales[b], minima[b] = _six_bits(at, part, 0), _six_bits(at, part, 1)
        if part == 0:
            top = at + (_SIX_TOP if form == _Q6_K else 0)
            for k in range(halves):
                tops[b // _PARTS[form] * halves + k] = byte_at(top + k)


@entry
@borrowing
def take_apart(
    form: int, raw: UInt8x2, numbers: UInt8x2, scales: UInt8x2, minima: UInt8x2, tops: UInt8x2
) -> None:
    """Rows of blocks, uint8 [N, bytes of a row], as weights.Stored has them, in bytes: numbers
    [N, K], scales and minima; tops has `d` and `dmin` of a block side by side. form: its number;
    what a form has not is [N, 0]."""
    for n in range(raw.shape[0]):
        row, own = raw.ctypes.data + n * raw.shape[1], (numbers[n], scales[n], minima[n], tops[n])
        # One loop a form: the compiler makes vectors of what it knows when it compiles.
        if form == _Q8_0:
            _take_row(row, _Q8_0, own)
        elif form == _Q4_0:
            _take_row(row, _Q4_0, own)
        elif form == _Q4_1:
            _take_row(row, _Q4_1, own)
        elif form == _Q5_0:
            _take_row(row, _Q5_0, own)
        elif form == _Q5_1:
            _take_row(row, _Q5_1, own)
        elif form == _Q4_K:
            _take_row(row, _Q4_K, own)
        elif form == _Q5_K:
            _take_row(row, _Q5_K, own)
        else:
            _take_row(row, _Q6_K, own)


@inlined
def _columns(values, first, size, num_rows, p, out, at):
    """For each lane of a panel `size` bytes of its row from `first` on; where the next goes."""
    for lane in range(PANEL):
        row = p * PANEL + lane
        for k in range(size):
            out[p, at + lane * size + k] = values[row, first + k] if row < num_rows else 0
    return at + PANEL * size


@entry
@borrowing
def lay_out(
    form: int, words: UInt32x2, scales: UInt8x2, minima: UInt8x2, tops: UInt8x2,
    panels: UInt8x2, panel_words: UInt32x2,
) -> None:  # fmt: skip
    """Panels of rows that are taken apart (integers/forms.py says what lies where). words: four
    numbers each, [N, K / 4]; scales, minima, tops: bytes, [N, 0] where there are none; panels: of
    as many rows as need be, 0 past N; panel_words: the same memory."""
    num_rows, blocks = words.shape[0], words.shape[1] // 8
    bits, parts, per_output = _BITS[form], _PARTS[form], form == 0
    # Bytes of a block's scale in a row and how many of them lie side by side.
    size = 4 if per_output else scales.shape[1] // max(blocks, 1)
    runs = 2 if form == _Q6_K else 1
    for p in range(panels.shape[0]):
        at = 0
        if per_output:
            at = _columns(scales, 0, 4, num_rows, p, panels, at)
        for b in range(blocks):
            if parts > 1 and b % parts == 0:
                width = tops.shape[1] * parts // blocks // 2
                for k in range(width):
                    at = _columns(tops, (b // parts * width + k) * 2, 2, num_rows, p, panels, at)
            here = at // 4
            for lane in range(PANEL):
                row = p * PANEL + lane
                high, higher = np.uint32(0), np.uint32(0)
                for g in range(8):
                    word = words[row, b * 8 + g] if row < num_rows else np.uint32(0)
                    if bits == 8:
                        panel_words[p, here + g * PANEL + lane] = word
                        continue
                    low = word & np.uint32(0x0F0F0F0F)
                    if g < 4:
                        panel_words[p, here + g * PANEL + lane] = low
                    else:
                        panel_words[p, here + (g - 4) * PANEL + lane] |= low << np.uint32(4)
                    above = word >> np.uint32(4)
                    if bits == 5:
                        high |= (above & np.uint32(0x01010101)) << np.uint32(g)
                    elif g < 4:
                        high |= (above & np.uint32(0x03030303)) << np.uint32(2 * g)
                    else:
                        higher |= (above & np.uint32(0x03030303)) << np.uint32(2 * (g - 4))
                if bits == 5 or bits == 6:
                    panel_words[p, here + 4 * PANEL + lane] = high
                if bits == 6:
                    panel_words[p, here + 5 * PANEL + lane] = higher
            at += PANEL * (32 if bits == 8 else 16 + 4 * (bits - 4))
            if per_output:
                continue
            for k in range(runs):
                width = size // runs
                at = _columns(scales, b * size + k * width, width, num_rows, p, panels, at)
            if minima.shape[1] > 0:
                at = _columns(minima, b * size, size, num_rows, p, panels, at)
