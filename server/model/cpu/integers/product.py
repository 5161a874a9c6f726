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

from server.model.cpu.arena import Arena
from server.model.cpu.integers.forms import BLOCK, PANEL, Form, padded_inputs, panels_of
from server.model.cpu.integers.kernels import JOB_ITEMS, call_kernel, kernel_address
from server.model.cpu.integers.tile_kernels import TILES
from server.model.cpu.integers.weights import Stored, pack_rows
from server.model.cpu.kernels import borrows, float_at
from server.model.cpu.team import own_words, take_near, take_run

__all__ = [
    "FEW_ROWS", "ROW_SPAN", "IntegerMatrix", "Part", "begin_job", "count_of", "even_span",
    "matrix_of", "next_item", "num_panels", "own_first", "pack", "product_share", "set_rows",
]  # fmt: skip

ROW_SPAN = 96
"""Most rows of one work item: their inputs stay in a core's L2."""

_WHOLE_ROWS = 32 if TILES else 12
"""Of the largest kernels, or a multiple; ROW_SPAN is one of it."""

FEW_ROWS = 4
"""So many rows are multiplied faster than a panel comes from memory: the core's own prefetcher is
always ahead, and asking for the next panel gets in its way."""

_MOST_AHEAD = 128 << 10
"""Bytes of its panels that a thread asks of memory while it waits for the inputs."""


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


def matrix_of(parts: Sequence[Part]) -> IntegerMatrix:
    """The matrix of these outputs, one part after the other; it points into their panels.

    The parts have the same inputs. Raises ValueError when per-output forms stand beside others.
    """
    per_row = {part.form.per_output for part in parts}
    if len(per_row) != 1:
        raise ValueError("int8 with one scale an output does not mix with forms in blocks")
    rows, first = [], 0
    inputs = parts[0].inputs
    for part in parts:
        if part.inputs != inputs:
            raise ValueError(f"parts have {inputs} and {part.inputs} inputs")
        kernel, count = kernel_address(part.form), count_of(part.form, inputs)
        size = part.form.panel_bytes(inputs)
        rows.append((part.panels.ctypes.data, kernel, size, count, first, part.outputs))
        first += part.outputs
    return IntegerMatrix(np.array(rows, np.int64), inputs, first, per_row.pop())


def count_of(form: Form, num_inputs: int) -> int:
    """What a kernel's loop runs over: blocks, or super-blocks."""
    return padded_inputs(form, num_inputs) // (BLOCK * form.blocks_per_super)


@borrows
def begin_job(job, weights, out):
    """Fill what all panels share into a kernel's job (kernels.py): strides, and when to use tiles.
    weights: IntegerLinear."""
    job[1] = weights.rows.q.shape[1]
    job[3] = weights.rows.figures.shape[1] * 16
    job[8] = out.shape[1] * 4
    job[10] = weights.tile_rows


@borrows
def set_rows(job, q, figures, first, num):
    """Rows first .. first + num - 1; q, figures: addresses of all rows' numbers and figures."""
    job[0] = q + first * job[1]
    job[2] = figures + first * job[3]
    job[4] = num


@borrows
def even_span(num_rows):
    """(rows of a span, spans): at most ROW_SPAN rows, all but the last alike and of whole kernels:
    the fewer rows of a kernel, the longer its sums wait for each other."""
    spans = (num_rows + ROW_SPAN - 1) // ROW_SPAN
    span = (num_rows + spans - 1) // spans
    if spans > 1:
        span = (span + _WHOLE_ROWS - 1) // _WHOLE_ROWS * _WHOLE_ROWS
    return span, (num_rows + span - 1) // span


@borrows
def next_item(work, item, end, total, spans):
    """(item, end of its run) that this thread takes after `item` of a run; equal: all are taken."""
    if item + 1 < end:
        return item + 1, end
    if spans == 1:
        return take_run(work, total)
    following = take_near(work, total)
    return following, following + 1 if following >= 0 else following


@borrows
def num_panels(parts, layer, part):
    """Panels of one part. parts: IntegerLinear.parts, int64 [layers, parts, 6]."""
    return (parts[layer, part, 5] + PANEL - 1) // PANEL


@borrows
def _find_panel(parts, layer, p):
    """(part, panel in it) of panel p of all parts."""
    part = 0
    num = num_panels(parts, layer, 0)
    while p >= num:
        p -= num
        part += 1
        num = num_panels(parts, layer, part)
    return part, p


@borrows
def _set_panels(job, parts, layer, part, p, following):
    """Panel p of a part, and panel `following` of all parts to fetch, or -1."""
    size = parts[layer, part, 2]
    job[5] = parts[layer, part, 0] + p * size
    job[6] = parts[layer, part, 3]
    job[9] = 0
    if following >= 0:
        then, place = _find_panel(parts, layer, following)
        if parts[layer, then, 2] == size:
            job[9] = parts[layer, then, 0] + place * size


@borrows
def _narrow_panel(job, kernel, width, out, first, column, work):
    """A last panel, `width` columns wide, by way of this thread's buffer."""
    pairs, whole = work.pairs.ctypes.data + work.thread * work.pairs.shape[1] * 4, job[8]
    job[7], job[8] = pairs, PANEL * 4
    call_kernel(kernel, job.ctypes.data)
    job[8] = whole
    for m in range(job[4]):
        for i in range(width):
            out[first + m, column + i] = float_at(pairs, m * PANEL + i)


@borrows
def product_share(weights, layer, num_rows, out, work):
    """One thread's share of out[:num_rows, :outputs] = W @ rows. weights: IntegerLinear.

    Views of arrays are not made here (kernels.rms_norm).
    """
    parts = weights.parts
    span, spans = even_span(num_rows)
    q, figures = weights.rows.q.ctypes.data, weights.rows.figures.ctypes.data
    words = own_words(work)
    job = work.sync[words : words + JOB_ITEMS]
    begin_job(job, weights, out)
    total = 0
    for part in range(parts.shape[1]):
        total += num_panels(parts, layer, part) * spans
    item, end = next_item(work, 0, 0, total, spans)
    while item < end:
        following, following_end = next_item(work, item, end, total, spans)
        first = item % spans * span
        set_rows(job, q, figures, first, min(span, num_rows - first))
        part, p = _find_panel(parts, layer, item // spans)
        then = -1
        if following < following_end and num_rows > FEW_ROWS:
            then = following // spans
        _set_panels(job, parts, layer, part, p, then)
        width = min(PANEL, parts[layer, part, 5] - p * PANEL)
        column = parts[layer, part, 4] + p * PANEL
        if width < PANEL:
            _narrow_panel(job, parts[layer, part, 1], width, out, first, column, work)
        else:
            job[7] = out.ctypes.data + first * job[8] + column * 4
            call_kernel(parts[layer, part, 1], job.ctypes.data)
        item, end = following, following_end


@borrows
def own_first(weights, layer, num_parts, work):
    """(address, end) of what this thread multiplies first, as far as it lies in one stretch: of the
    first num_parts parts, at most _MOST_AHEAD bytes."""
    parts, total = weights.parts, 0
    for part in range(num_parts):
        total += num_panels(parts, layer, part)
    first = total * work.thread // work.threads
    last = total * (work.thread + 1) // work.threads
    if first >= last:
        return 0, 0
    part, p = _find_panel(parts, layer, first)
    size = parts[layer, part, 2]
    num = min(last - first, num_panels(parts, layer, part) - p)
    address = parts[layer, part, 0] + p * size
    return address, address + min(num * size, _MOST_AHEAD)
