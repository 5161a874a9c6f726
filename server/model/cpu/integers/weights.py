"""Weights in the integer forms: from ggml's rows, or quantised from floats, into panels.

What: blocks of a GGUF's types taken apart (kernels/blocks.py; the numbers stay what they are),
round-to-nearest quantisation of float rows, and `pack_rows`, which lays either out as forms.py
says; how weights are spread, and a cache folder of panels, mapped instead of made again. What not:
reading files (loader, gguf_file), multiplying (kernels/integers), which folder, when it is made and
checked (model/packed_folder.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drafters.json_text import object_in, parsed
from server.model.cpu.integers.forms import BLOCK, BY_NAME, PANEL, Form, padded_inputs, panels_of
from server.model.cpu.kernels import lay_out, spread_rows, take_apart
from server.model.cpu.linear import Arena
from server.model.cpu.records import Float32, UInt8


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

    def factors(self) -> tuple[Float32, Float32 | None]:
        """(what numbers less the zero point are multiplied by, what is added then or None), each
        float32 [N, K / inputs that share one], as gguf.quants computes them."""
        scales, minima = self.scales.astype(np.float32), None
        if self.tops is not None:
            tops = self.tops.astype(np.float32)
            scales = scales * np.repeat(tops, 256 // self.form.sub, axis=1)
        if self.minima is not None:
            minima = self.minima.astype(np.float32)
            if self.low_tops is not None:
                tops = self.low_tops.astype(np.float32)
                minima = -(minima * np.repeat(tops, 256 // BLOCK, axis=1))
        return scales, minima


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
    scale = (max - min) / 15 and min a block, both float16. The rounded scale is what numbers are
    divided by. Raises ValueError for a form that is not made here, and for values that are not
    finite.
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
    scales, minima = stored.factors()
    numbers = stored.numbers.astype(np.float32) - np.float32(stored.form.zero)
    values = numbers.reshape(*scales.shape, -1) * scales[..., None]
    if minima is not None:
        values += minima[..., None]
    result: Float32 = values.reshape(stored.numbers.shape)
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


# -- Spreading ------------------------------------------------------------------------------------
#
# A few inputs of a row are many times the others, and one scale would leave the others two or three
# levels. Two changes of W @ x, which floats would not notice, are made before both are rounded:
#   - input j is multiplied by a factor, and the weights of it are divided by that factor
#     (SmoothQuant, Xiao et al. 2023, arXiv 2211.10438, section 4): inputs that are always large;
#   - BLOCK neighbours become sums and differences of all of them, and so do their weights (a
#     Hadamard matrix: QuaRot, Ashkboos et al. 2024, arXiv 2404.00456): what one row has large.
# kernels/integer_rows.py has the function of one row, outliers.py which factors. Weights go through
# the same with 1 / factors and are divided by BLOCK, which is exact.


def spread(x: Float32, factors: Float32) -> Float32:
    """Rows [n, K] spread: float32 [n, K padded to whole blocks]. factors: float32 [padded K]."""
    padded = np.zeros((x.shape[0], factors.shape[0]), np.float32)
    padded[:, : x.shape[1]] = x
    out = np.empty_like(padded)
    spread_rows(padded, factors, out)
    return out


def spread_weights(weight: Float32, factors: Float32) -> Float32:
    """Weights [outputs, K] for inputs that are spread with these factors: float32 [outputs, padded
    K], whose products with `spread(x, factors)` are those of weight and x but for rounding."""
    return spread(weight, np.float32(1.0) / factors) * np.float32(1.0 / BLOCK)


# -- Kept in a folder -----------------------------------------------------------------------------
#
# It holds panels.bin, all panels one after the other, each on a cache line's boundary, layout.json:
# for every matrix its parts as [form, inputs, outputs, first byte], and which layers `int8` has in
# blocks; and factors.npz, what inputs are spread with, by matrix.

_PANELS, _LAYOUT, _FACTORS = "panels.bin", "layout.json", "factors.npz"
_LINE = 64


class Measured(NamedTuple):
    """What `int8` measured of a model's inputs (outliers.py).

    in_blocks: kind of product -> layers that are in blocks, for outliers; "head" -> (0,). factors:
    float32 [inputs in whole blocks] of other products, as `spread` has them, by layer and kind
    ("3.qkv") or "head"; ones where there are none.
    """

    in_blocks: Mapping[str, Sequence[int]] = {}
    factors: Mapping[str, Float32] = {}


class KeptWeights:
    """The parts of a folder, by name. The file is mapped read-only; processes share its pages.
    measured: of `int8`, what its first start found.

    Raises OSError, ValueError and KeyError for a folder that write_panels has not written.
    """

    def __init__(self, folder: Path) -> None:
        layout = parsed((folder / _LAYOUT).read_text(encoding="utf-8"))
        self._matrices: dict[str, list[list[int | str]]] = layout["matrices"]
        self._bytes = np.memmap(folder / _PANELS, np.uint8, "r")
        with np.load(folder / _FACTORS) as found:
            factors = {name: found[name] for name in found.files}
        self.measured = Measured(layout["in_blocks"], factors)

    def layer(self, layer: int) -> dict[str, list[Part]]:
        """The matrices of a layer, by kind."""
        prefix = f"{layer}."
        return {
            name.removeprefix(prefix): self.parts(name)
            for name in self._matrices
            if name.startswith(prefix)
        }

    def parts(self, name: str) -> list[Part]:
        """One matrix. Raises KeyError."""
        found = []
        for form_name, *numbers in self._matrices[name]:
            form = BY_NAME[str(form_name)]
            inputs, outputs, first = (int(number) for number in numbers)
            size, num = form.panel_bytes(inputs), panels_of(outputs)
            panels = self._bytes[first : first + num * size].reshape(num, size)
            found.append(Part(form, inputs, outputs, panels))
        return found


def layers_in_blocks(folder: Path) -> dict[str, list[int]]:
    """kind -> layers that `int8` keeps in blocks, of a folder; {} where it does not say."""
    told = object_in(folder / _LAYOUT).get("in_blocks")
    return told if isinstance(told, dict) else {}


def write_panels(folder: Path, matrices: Mapping[str, Sequence[Part]], measured: Measured) -> None:
    """Write a folder's three files. Raises OSError."""
    layout: dict[str, list[list[int | str]]] = {}
    at = 0
    with (folder / _PANELS).open("wb") as out:
        for name, parts in matrices.items():
            layout[name] = []
            for part in parts:
                layout[name].append([part.form.name, part.inputs, part.outputs, at])
                out.write(part.panels.data)
                pad = -part.panels.nbytes % _LINE
                out.write(bytes(pad))
                at += part.panels.nbytes + pad
    np.savez(folder / _FACTORS, **measured.factors)  # type: ignore[arg-type]
    blocks = {kind: list(layers) for kind, layers in measured.in_blocks.items()}
    told = json.dumps({"matrices": layout, "in_blocks": blocks})
    (folder / _LAYOUT).write_text(told, encoding="utf-8")


def told(in_blocks: Mapping[str, Sequence[int]], num_layers: int) -> str:
    """For the log and for people: `down, qkv of layers 0, 3-5, head`; "" for none."""
    lines = []
    for kind, layers in in_blocks.items():
        if len(layers) == num_layers or kind == "head":
            lines.append(kind)
        else:
            lines.append(f"{kind} of layers {_runs(layers)}")
    return ", ".join(lines)


def _runs(numbers: Sequence[int]) -> str:
    """1, 3-5"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
