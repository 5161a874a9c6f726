"""KeptWeights: quantised weights in a folder of the cache, mapped instead of made again.

A folder holds panels.bin, all panels one after the other, each on a cache line's boundary, and
layout.json: for every matrix its parts as [form, inputs, outputs, first byte], and which layers
`int8` has in blocks. What not: which folder, when it is made and checked (model/packed_folder.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from server.model.cpu.integers.forms import BY_NAME, panels_of
from server.model.cpu.integers.product import Part

__all__ = ["KeptWeights", "layers_in_blocks", "told", "write_panels"]

_PANELS, _LAYOUT = "panels.bin", "layout.json"
_LINE = 64


class KeptWeights:
    """The parts of a folder, by name. The file is mapped read-only; processes share its pages.

    Raises OSError, ValueError and KeyError for a folder that write_panels has not written.
    """

    def __init__(self, folder: Path) -> None:
        layout = json.loads((folder / _LAYOUT).read_text(encoding="utf-8"))
        self._matrices: dict[str, list[list[int | str]]] = layout["matrices"]
        self._bytes = np.memmap(folder / _PANELS, np.uint8, "r")

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
        layout = json.loads((folder / _LAYOUT).read_text(encoding="utf-8"))
        return dict(layout["in_blocks"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_panels(
    folder: Path, matrices: Mapping[str, Sequence[Part]], in_blocks: Mapping[str, Sequence[int]]
) -> None:
    """Write a folder's two files. Raises OSError."""
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
    blocks = {kind: list(layers) for kind, layers in in_blocks.items()}
    told = json.dumps({"matrices": layout, "in_blocks": blocks})
    (folder / _LAYOUT).write_text(told, encoding="utf-8")


def told(in_blocks: Mapping[str, Sequence[int]], num_layers: int) -> str:
    """For the log and for people: `down, qkv of layers 0, 3-5`; "" for none."""
    lines = []
    for kind, layers in in_blocks.items():
        if len(layers) == num_layers:
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
