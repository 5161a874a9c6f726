"""IntegerHead: an LM head in quantised panels, from which rows can be copied for slices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from server.model.cpu.arena import aligned
from server.model.cpu.integers.amx import tile_rows
from server.model.cpu.integers.forms import PANEL, Form, count_of, kernel_address
from server.model.cpu.integers.weights import Part
from server.model.cpu.kernels import copy_bytes
from server.model.cpu.records import INTEGERS, Activations, Float32, Int64, Linear

UInt8 = npt.NDArray[np.uint8]


def _runs(form: Form, num_inputs: int) -> Int64:
    """Every run of PANEL lanes in a panel: [(first byte, bytes of a lane, lanes)]; see forms.py."""
    small = 1 if form.two_level else 2
    runs: list[tuple[int, int, int]] = []
    at = 0

    def add(num_bytes: int, lane: int) -> None:
        nonlocal at
        for _ in range(num_bytes // (PANEL * lane)):
            runs.append((at, lane, PANEL))
            at += PANEL * lane

    blocks = num_inputs // 32
    if form.per_output:
        add(form.header_bytes, 4)
        add(blocks * form.record_bytes, 4)
        return np.array(runs, np.int64)
    for block in range(blocks):
        if block % form.blocks_per_super == 0:
            add(form.header_bytes, 2)
        add(form.low_bytes + form.high_bytes, 4)
        add(form.scale_bytes * (1 + form.has_min), small)
    return np.array(runs, np.int64)


class IntegerHead:
    """The full head [panels, bytes of a panel], and what slices need of it (slices.PackedHead).

    rows: the buffer of quantised inputs that products use. factors: of a head with one scale an
    output, what its inputs are spread with (float32 [1, num_inputs]), else [1, 0].
    """

    outputs_per_panel = PANEL
    in_file = False

    def __init__(self, part: Part, width: int, rows: Activations, factors: Float32) -> None:
        self.width = width
        self.panels = part.panels
        self._form = form = part.form
        self._num_inputs = num_inputs = part.inputs
        self._factors = factors
        self._rows = rows
        self._runs = _runs(form, num_inputs)
        self.row_bytes = form.panel_bytes(num_inputs) // PANEL

    def empty(self, num_rows: int) -> UInt8:
        """Zeroed panels for num_rows rows, on a cache line's boundary."""
        num_panels = -(-num_rows // PANEL)
        size = self._form.panel_bytes(self._num_inputs)
        return aligned(num_panels * size).reshape(num_panels, size)

    def copy_rows(self, token_ids: Int64, out: UInt8, places: Int64) -> None:
        """Row token_ids[i] of the head to row places[i] of `out`, from `empty`."""
        copy_bytes(self.panels, token_ids, out, places, self._runs)

    def record(self, panels: UInt8, num_panels: int) -> Linear:
        """The first num_panels panels as a product's weights."""
        form = self._form
        line = (
            panels.ctypes.data, kernel_address(form), form.panel_bytes(self._num_inputs),
            count_of(form, self._num_inputs), 0, num_panels * PANEL,
        )  # fmt: skip
        parts = np.array([[line]], np.int64)
        return Linear(
            INTEGERS, parts, self._num_inputs, num_panels * PANEL, np.array([form.per_output]),
            self._rows, self._factors, tile_rows(),
        )  # fmt: skip

    def pieces(self) -> Iterator[Linear]:
        """One, the whole."""
        yield self.record(self.panels, self.panels.shape[0])
