"""Products with integer weights: which panel and which rows a thread takes next.

Inputs come as float32, are made integers once a product (integer_rows.py), and multiplied by a
form's kernel (integers/), which is called by its address. linear.py calls this for weights of the
kind INTEGERS.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

from llvmlite import ir

from drafters.jit import borrowing
from server.model.cpu.integers.forms import BLOCK, PANEL
from server.model.cpu.kernels.integer_rows import quantise_rows
from server.model.cpu.kernels.ir import I64, word
from server.model.cpu.kernels.team import (
    barrier,
    barrier_reading,
    begin_items,
    own_words,
    take_near,
    take_run,
)  # fmt: skip
from server.model.cpu.kernels.vectors import fetch, float_at, gate_rows
from server.model.cpu.records import INTEGER_KERNEL, JOB_ITEMS, NO_TILES, ROW_SPAN, TILES

# Rows of the largest kernels, or a multiple; ROW_SPAN is one of it.
_WHOLE_ROWS, _WHOLE_TILES = 12, 32

_FEW_ROWS = 0 if TILES or INTEGER_KERNEL == "avx2" else 4
"""So many rows are multiplied faster than a panel comes from memory, and where the core's own
prefetcher is then always ahead, asking for the next panel gets in its way. Where it is asked for, a
step of one row takes a quarter less on CPUs with tiles (Sapphire Rapids), and steps of one to four
rows an eighth less with AVX2 alone (Zen 3), which multiplies for longer."""

_MOST_AHEAD = 128 << 10
"""Bytes of its panels that a thread asks of memory while it waits for the inputs."""
_FIRST_BYTES = 8192  # that it asks for before it makes inputs


@word(None, int, int)
def call_kernel(b: Any, kernel: Any, job: Any) -> None:
    """Rows of int8 activations against one panel: out[:, 0:PANEL].

    kernel: address of a form's kernel. job: address of JOB_ITEMS int64.
    """
    kind = ir.FunctionType(ir.VoidType(), [I64]).as_pointer()
    b.call(b.inttoptr(kernel, kind), [job])


@borrowing
def _begin_job(job, weights, out):
    """Fill what all panels share into a kernel's job (records.JOB_ITEMS): strides, and when to use
    tiles. weights: Linear."""
    job[1] = weights.rows.q.shape[1]
    job[3] = weights.rows.figures.shape[1] * 16
    job[8] = out.shape[1] * 4
    job[10] = weights.tile_rows


@borrowing
def _set_rows(job, q, figures, first, num):
    """Rows first .. first + num - 1; q, figures: addresses of all rows' numbers and figures."""
    job[0] = q + first * job[1]
    job[2] = figures + first * job[3]
    job[4] = num


@borrowing
def even_span(num_rows, whole):
    """(rows of a span, spans): at most ROW_SPAN rows, all but the last alike and of whole kernels
    of `whole` rows: the fewer rows of a kernel, the longer its sums wait for each other. Items go
    panel by panel, so that a panel is read from memory once and then from the cache for the other
    spans."""
    spans = (num_rows + ROW_SPAN - 1) // ROW_SPAN
    span = (num_rows + spans - 1) // spans
    if spans > 1:
        span = (span + whole - 1) // whole * whole
    return span, (num_rows + span - 1) // span


@borrowing
def _whole_rows(weights):
    return _WHOLE_ROWS if weights.tile_rows == NO_TILES else _WHOLE_TILES


@borrowing
def _next_item(work, item, end, total, spans):
    """(item, end of its run) that this thread takes after `item` of a run; equal: all are taken."""
    if item + 1 < end:
        return item + 1, end
    if spans == 1:
        return take_run(work, total)
    following = take_near(work, total)
    return following, following + 1 if following >= 0 else following


@borrowing
def _num_panels(parts, layer, part):
    """Panels of one part. parts: Linear.parts, int64 [layers, parts, 6]."""
    return (parts[layer, part, 5] + PANEL - 1) // PANEL


@borrowing
def _find_panel(parts, layer, p):
    """(part, panel in it) of panel p of all parts."""
    part = 0
    num = _num_panels(parts, layer, 0)
    while p >= num:
        p -= num
        part += 1
        num = _num_panels(parts, layer, part)
    return part, p


@borrowing
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


@borrowing
def _narrow_panel(job, kernel, width, out, first, column, work):
    """A last panel, `width` columns wide, by way of this thread's buffer."""
    pairs, whole = work.pairs.ctypes.data + work.thread * work.pairs.shape[1] * 4, job[8]
    job[7], job[8] = pairs, PANEL * 4
    call_kernel(kernel, job.ctypes.data)
    job[8] = whole
    for m in range(job[4]):
        for i in range(width):
            out[first + m, column + i] = float_at(pairs, m * PANEL + i)


@borrowing
def _product_share(weights, layer, num_rows, out, work):
    """One thread's share of out[:num_rows, :outputs] = W @ rows. weights: Linear.

    Views of arrays are not made here (vectors.rms_norm).
    """
    parts = weights.parts
    span, spans = even_span(num_rows, _whole_rows(weights))
    q, figures = weights.rows.q.ctypes.data, weights.rows.figures.ctypes.data
    words = own_words(work)
    job = work.sync[words : words + JOB_ITEMS]
    _begin_job(job, weights, out)
    total = 0
    for part in range(parts.shape[1]):
        total += _num_panels(parts, layer, part) * spans
    item, end = _next_item(work, 0, 0, total, spans)
    while item < end:
        following, following_end = _next_item(work, item, end, total, spans)
        first = item % spans * span
        _set_rows(job, q, figures, first, min(span, num_rows - first))
        part, p = _find_panel(parts, layer, item // spans)
        then = -1
        if following < following_end and num_rows > _FEW_ROWS:
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


@borrowing
def _own_first(weights, layer, num_parts, work):
    """(address, end) of what this thread multiplies first, as far as it lies in one stretch: of the
    first num_parts parts, at most _MOST_AHEAD bytes."""
    parts, total = weights.parts, 0
    for part in range(num_parts):
        total += _num_panels(parts, layer, part)
    first = total * work.thread // work.threads
    last = total * (work.thread + 1) // work.threads
    if first >= last:
        return 0, 0
    part, p = _find_panel(parts, layer, first)
    size = parts[layer, part, 2]
    num = min(last - first, _num_panels(parts, layer, part) - p)
    address = parts[layer, part, 0] + p * size
    return address, address + min(num * size, _MOST_AHEAD)


@borrowing
def _gated_share(weights, layer, num_rows, out, gelu, work):
    """One thread's share of out = act(gate) * up: the panel of the same outputs of both parts."""
    parts = weights.parts
    span, spans = even_span(num_rows, _whole_rows(weights))
    q, figures = weights.rows.q.ctypes.data, weights.rows.figures.ctypes.data
    words = own_words(work)
    job = work.sync[words : words + JOB_ITEMS]
    _begin_job(job, weights, out)
    job[8] = 8 * PANEL
    pairs = work.pairs.ctypes.data + work.thread * work.pairs.shape[1] * 4
    total = _num_panels(parts, layer, 0) * spans
    alike = num_rows > _FEW_ROWS and parts[layer, 0, 2] == parts[layer, 1, 2]
    item, end = _next_item(work, 0, 0, total, spans)
    while item < end:
        following, following_end = _next_item(work, item, end, total, spans)
        p = item // spans
        first = item % spans * span
        num = min(span, num_rows - first)
        _set_rows(job, q, figures, first, num)
        for half in range(2):
            size = parts[layer, half, 2]
            job[9] = 0
            if half == 0 and alike:
                job[9] = parts[layer, 1, 0] + p * size
            elif alike and following < following_end:
                job[9] = parts[layer, 0, 0] + following // spans * size
            job[5] = parts[layer, half, 0] + p * size
            job[6] = parts[layer, half, 3]
            job[7] = pairs + half * PANEL * 4
            call_kernel(parts[layer, half, 1], job.ctypes.data)
        target = out.ctypes.data + (first * out.shape[1] + p * PANEL) * 4
        gate_rows(pairs, PANEL, num, target, out.shape[1], gelu)
        item, end = following, following_end


@borrowing
def quantise(x, num_rows, weights, layer, work):
    """This thread's rows of a product's inputs as integers: r % threads == thread."""
    if num_rows > weights.rows.q.shape[0]:
        raise ValueError("more rows than the buffer of quantised inputs has")
    factors = 0
    if weights.per_row[layer]:
        if work.pairs.shape[1] < weights.inputs + BLOCK:
            raise ValueError("a thread has no room for a row of spread inputs")
        factors = weights.factors.ctypes.data + layer * weights.inputs * 4
    width = min(weights.inputs, x.shape[1])
    pad = work.pairs.ctypes.data + work.thread * work.pairs.shape[1] * 4
    quantise_rows(work.thread, work.threads, num_rows, x, width, factors, weights.rows, pad)


@borrowing
def integer_outputs(row, first, weights, out, work):
    """linear.outputs_of, of integers, which `quantise` has made."""
    words, parts = own_words(work), weights.parts
    job = work.sync[words : words + JOB_ITEMS]
    _begin_job(job, weights, out)
    _set_rows(job, weights.rows.q.ctypes.data, weights.rows.figures.ctypes.data, row, 0)
    _set_panels(job, parts, 0, 0, first // PANEL, -1)
    job[10] = first % PANEL
    job[7] = out.ctypes.data + row * job[8] + (first - job[10]) * 4
    call_kernel(parts[0, 0, 1], job.ctypes.data)


@borrowing
def _prepare(x, num_rows, weights, layer, num_parts, work):
    """The inputs of all rows as integers, while this thread's first panels (_own_first) are
    on their way."""
    begin_items(work)
    ahead, end = _own_first(weights, layer, num_parts, work)
    early = min(ahead + _FIRST_BYTES, end)
    if early > ahead:
        fetch(ahead, early - ahead)
    quantise(x, num_rows, weights, layer, work)
    barrier_reading(work, early, end)


@borrowing
def integer_linear(x, num_rows, weights, layer, out, work):
    """linear.linear, of integers."""
    _prepare(x, num_rows, weights, layer, weights.parts.shape[1], work)
    _product_share(weights, layer, num_rows, out, work)
    barrier(work)


@borrowing
def integer_gated_linear(x, num_rows, weights, layer, out, gelu, work):
    """linear.gated_linear, of integers."""
    _prepare(x, num_rows, weights, layer, 1, work)
    _gated_share(weights, layer, num_rows, out, gelu, work)
    barrier(work)
