"""KeptWeights: quantised weights in a folder of the cache, mapped instead of made again.

A folder holds panels.bin, all panels one after the other, each on a cache line's boundary,
layout.json: for every matrix its parts as [form, inputs, outputs, first byte], and which layers
`int8` has in blocks; and factors.npz, what inputs are spread with (spread.py), by matrix. What not:
which folder, when it is made and checked (model/packed_folder.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from drafters.json_text import parsed
from server.model.cpu.integers.forms import BY_NAME, panels_of
from server.model.cpu.integers.weights import Part
from server.model.cpu.records import Float32

__all__ = ["KeptWeights", "Measured", "layers_in_blocks", "told", "write_panels"]

_PANELS, _LAYOUT, _FACTORS = "panels.bin", "layout.json", "factors.npz"
_LINE = 64


class Measured(NamedTuple):
    """What `int8` measured of a model's inputs (outliers.py).

    in_blocks: kind of product -> layers that are in blocks, for outliers; "head" -> (0,). factors:
    float32 [inputs in whole blocks] of other products, as spread.py has them, by layer and kind
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
    try:
        layout = parsed((folder / _LAYOUT).read_text(encoding="utf-8"))
        return dict(layout["in_blocks"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


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
