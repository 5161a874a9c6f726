"""Jobs of the integer kernels as bytes, for a driver that runs them on another CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from server.model.cpu.integers.forms import count_of
from server.model.cpu.integers.weights import pack
from server.model.cpu.linear import Arena
from tests.model.cpu.integers import reference
from tests.model.cpu.integers.cases import inputs, stored


@dataclass(frozen=True)
class Job:
    """All rows with all panels. head: form, rows, bytes between rows of x, and of figures,
    count (records.JOB_ITEMS), panels, bytes of a panel. data: x, figures, panels. want: what comes
    out."""

    head: tuple[int, ...]
    data: tuple[bytes, bytes, bytes]
    want: reference.Float32


def _figures(rows: reference.Inputs) -> npt.NDArray[np.int32]:
    """integer_rows.py's figures: int32 [rows, blocks or 1, 4]."""
    num, per_row = rows.scales.shape
    q = rows.q.reshape(num, per_row, -1).astype(np.int32)
    figures = np.zeros((num, per_row, 4), np.int32)
    scales = figures.view(np.float32)
    whole = q.sum(axis=2, dtype=np.int32)
    scales[..., 0], figures[..., 2] = rows.scales, whole
    figures[..., 1] = q[..., :16].sum(axis=2, dtype=np.int32)
    scales[..., 3] = rows.scales * whole.astype(np.float32)
    return figures


def job(form: str, num_rows: int, *, width: int = 512, outputs: int = 64) -> Job:
    """One of made-up numbers. outputs: a multiple of PANEL."""
    weights = stored(form, outputs, width, num_rows)
    rows = reference.inputs_of(inputs(num_rows, width, num_rows), per_row=weights.form.per_output)
    part = pack(weights, Arena())
    figures = _figures(rows)
    head = (
        weights.form.number, num_rows, width, figures[0].nbytes, count_of(weights.form, width),
        *part.panels.shape,
    )  # fmt: skip
    data = (rows.q.astype(np.int8).tobytes(), figures.tobytes(), part.panels.tobytes())
    return Job(head, data, reference.product(rows, weights))
