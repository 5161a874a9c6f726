"""Products with quantised weights: which panel and which rows a thread takes next.

What: IntegerMatrix, weights in panels as compiled code takes them, and one thread's share of its
product. What not: the arithmetic (kernels.py, quantise.py), the seam to the forward pass
(linear.py).
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from server.model.cpu.integers.forms import BLOCK, PANEL, Form, padded_inputs, panels_of
from server.model.cpu.integers.kernels import JOB_ITEMS, call_kernel, kernel_address
from server.model.cpu.integers.weights import Stored, pack_rows
from server.model.cpu.team import take

__all__ = ["ROW_SPAN", "IntegerMatrix", "aligned", "count_of", "pack", "product_share"]

_serial = njit(nogil=True, cache=True, error_model="numpy")

ROW_SPAN = 96
"""Most rows of one work item: their inputs stay in a core's L2."""


class IntegerMatrix(NamedTuple):
    """A matrix of weights whose outputs are cut into parts, each in a form of its own.

    parts: int64 [parts, 6]: address of the panels, of the form's kernel, bytes of a panel, count
    (the kernel's argument), first output, outputs. inputs: K. outputs: N. per_row: whether
    activations have one scale a row (`int8`) and not one a block.
    """

    parts: npt.NDArray[np.int64]
    inputs: int
    outputs: int
    per_row: bool


def aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes on a cache line's boundary."""
    arena = np.zeros(num_bytes + 64, np.uint8)
    skip = -arena.ctypes.data % 64
    return arena[skip : skip + num_bytes]


def pack(stored: Sequence[Stored]) -> tuple[IntegerMatrix, list[npt.NDArray[np.uint8]]]:
    """(the matrix of these rows, one part after the other; the memory that it points into).

    The parts have the same inputs. Raises ValueError when per-output forms stand beside others.
    """
    per_row = {s.form.per_output for s in stored}
    if len(per_row) != 1:
        raise ValueError("int8 with one scale an output does not mix with forms in blocks")
    rows, arenas, first = [], [], 0
    inputs = stored[0].numbers.shape[1]
    for part in stored:
        num, k = part.numbers.shape
        if k != inputs:
            raise ValueError(f"parts have {inputs} and {k} inputs")
        size = part.form.panel_bytes(k)
        arena = aligned(panels_of(num) * size)
        pack_rows(part, arena.reshape(-1, size))
        arenas.append(arena)
        kernel, count = kernel_address(part.form), count_of(part.form, k)
        rows.append((arena.ctypes.data, kernel, size, count, first, num))
        first += num
    return IntegerMatrix(np.array(rows, np.int64), inputs, first, per_row.pop()), arenas


def count_of(form: Form, num_inputs: int) -> int:
    """What a kernel's loop runs over: blocks, or super-blocks."""
    return padded_inputs(form, num_inputs) // (BLOCK * form.blocks_per_super)


@_serial
def num_panels(part):
    """Panels of one part (a line of IntegerMatrix.parts)."""
    return (part[5] + PANEL - 1) // PANEL


@_serial
def set_job(job, rows, first, num, out, ldo):
    """A kernel's job for `num` rows from row `first`: all but panels and count (kernels.py).

    rows: Activations. out: address; ldo: bytes between its rows.
    """
    ldq = rows.q.shape[1]
    ldf = rows.figures.shape[1] * 16
    job[0] = rows.q.ctypes.data + first * ldq
    job[1] = ldq
    job[2] = rows.figures.ctypes.data + first * ldf
    job[3] = ldf
    job[4] = num
    job[7] = out
    job[8] = ldo


@_serial
def _find_panel(p, parts):
    """(part, panel in it) of panel p of all parts."""
    part = 0
    while p >= num_panels(parts[part]):
        p -= num_panels(parts[part])
        part += 1
    return part, p


@_serial
def _one_item(item, following, span, rows, num_rows, matrix, out, short, job):
    """One panel for one span of rows: its columns of out, float32 [*, >= outputs].

    following: the item that this thread takes next, or -1. short: float32 [span, PANEL], where a
    last panel goes that has columns past the outputs.
    """
    spans = (num_rows + span - 1) // span
    first = item % spans * span
    num = min(span, num_rows - first)
    part, p = _find_panel(item // spans, matrix.parts)
    line = matrix.parts[part]
    job[9] = 0
    if following >= 0:
        then, place = _find_panel(following // spans, matrix.parts)
        if matrix.parts[then, 2] == line[2]:
            job[9] = matrix.parts[then, 0] + place * line[2]
    width = min(PANEL, line[5] - p * PANEL)
    column = line[4] + p * PANEL
    ldo = out.shape[1] * 4
    if width < PANEL:
        set_job(job, rows, first, num, short.ctypes.data, PANEL * 4)
    else:
        set_job(job, rows, first, num, out.ctypes.data + first * ldo + column * 4, ldo)
    job[5] = line[0] + p * line[2]
    job[6] = line[3]
    call_kernel(line[1], job.ctypes.data)
    if width < PANEL:
        for m in range(num):
            for i in range(width):
                out[first + m, column + i] = short[m, i]


@_serial
def product_share(rows, num_rows, matrix, out, work):
    """One thread's share of out[:num_rows, :outputs] = W @ rows."""
    spans = (num_rows + ROW_SPAN - 1) // ROW_SPAN
    span = (num_rows + spans - 1) // spans
    short = work.pairs[work.thread].reshape(-1, PANEL)
    job = np.empty(JOB_ITEMS, np.int64)
    total = 0
    for part in range(matrix.parts.shape[0]):
        total += num_panels(matrix.parts[part]) * spans
    item = take(work)
    while item < total:
        following = take(work)
        wanted = following if following < total else -1
        _one_item(item, wanted, span, rows, num_rows, matrix, out, short, job)
        item = following
