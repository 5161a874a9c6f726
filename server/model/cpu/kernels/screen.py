"""The largest logit without most of the LM head. Where no row of a step may give many ids
(Wanted.words), theirs are all that is multiplied. Else a coarse head of 4 bits bounds every logit,
and of the head itself only those rows are multiplied whose logit may be the largest.

Of each output the coarse head has W', and what lies between it and the head's row W is the rest R.
With the inputs x as the head's product has them, and x' as the coarse one's has them
(Cauchy-Schwarz):

    W x  <=  W' x' + |R| |x| + |W'| |x' - x|

Inputs are sorted by size, so that a block of 32 has inputs alike, and the largest ones come twice:
the second time with what 4 bits have left of their weights. |R| counts an input so many times, and
|x| by the inverse, as Screen.less says, which changes no product of the two. What float32 rounds in
sums is less than _ROUNDING of the norms, an input. So a row's argmax is the head's own, ties
included, and so are all logits that may be as large; the others are the coarse head's. Where a
step's logits are so flat that too many may be, the head is multiplied as if it had no Screen.

W is what the head's panels hold, of any form, and the logits that may be the largest are made of
these panels by the head's own kernels, 16 at a time: a line of memory has 16 outputs. A row of a
GGUF in q8_0 lies in a tenth as many lines, and is multiplied there.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from drafters.jit import borrowing, entry_run_by, inlined
from server.model.cpu.integers.forms import BLOCK, COARSE, PANEL
from server.model.cpu.kernels.integer_linear import call_kernel, integer_linear, quantise
from server.model.cpu.kernels.integer_rows import quantise_rows, spread_blocks
from server.model.cpu.kernels.ir import (
    F32,
    I8,
    I32,
    I64,
    Loop,
    at,
    call,
    floats,
    fma,
    i32,
    i64,
    load,
    load_halves,
    splat,
    to_half,
    word,
)
from server.model.cpu.kernels.linear import linear, outputs_of
from server.model.cpu.kernels.sampling import likeliest_allowed
from server.model.cpu.kernels.team import barrier, own_words, run
from server.model.cpu.kernels.vectors import bfloat_at, fetch, float_at, half_at, set_float
from server.model.cpu.records import (
    FLOAT32,
    INTEGERS,
    JOB_ITEMS,
    LANES,
    NO_TILES,
    Activations,
    Float32x2,
    Head,
    UInt32x2,
    Work,
)
from server.model.cpu.records import PANEL as FLOAT_PANEL

_ROUNDING = 2.0**-23
_UP = 1.0 + 1e-4  # by which norms are rounded up
_SCATTERED = 6  # times a line of the head takes longer that lies anywhere, with some to spare
_RECORD, _LOW, _ZERO = COARSE.record_bytes, COARSE.low_bytes, COARSE.zero


@word(int, int, int, int, np.float32, np.float32, np.float32, np.float32)
def _reaching(
    b: Any, logits: Any, rests: Any, sizes: Any, size: Any, off: Any, least: Any, near: Any
) -> Any:  # fmt: skip
    """Which of 16 coarse logits at an address may be `least` or more, or are less than `near` below
    it, as bits; NaN may."""
    x, r, s = (load(b, floats(b, address), i64(0)) for address in (logits, rests, sizes))
    most = fma(b, r, splat(b, size), fma(b, s, splat(b, off), x))
    reaches = b.fcmp_unordered(">=", most, splat(b, least))
    is_near = b.fcmp_ordered(">", x, b.fsub(splat(b, least), splat(b, near)))
    return b.zext(b.bitcast(b.or_(reaches, is_near), ir.IntType(LANES)), I64)


@word(int, np.float32)
def _half_bits(b: Any, x: Any) -> Any:
    """Those of the float16 nearest to x."""
    return b.zext(to_half(b, x), I64)


@borrowing
def _coarse_block(order, block, num_inputs, out, at, room, own):
    """Write a block of a coarse panel, whose record begins at byte `at` of `out`. room: address of
    the head's rows [num_inputs, PANEL], of the rests in order [num_inputs, PANEL], of PANEL scales,
    PANEL inverse ones and PANEL sums of squares; own: where these begin."""
    for o in range(PANEL):
        set_float(room, own + o, np.float32(0.0))
    for j in range(block * BLOCK, (block + 1) * BLOCK):
        row = order[j] if j < num_inputs else j
        for o in range(PANEL):
            x, top = float_at(room, row * PANEL + o), float_at(room, own + o)
            set_float(room, own + o, x if abs(x) > abs(top) else top)
    for o in range(PANEL):
        bits = _half_bits(float_at(room, own + o) * np.float32(-1.0 / _ZERO))
        out[at + _LOW + 2 * o] = bits & 255
        out[at + _LOW + 2 * o + 1] = bits >> 8
        scale = half_at(out.ctypes.data + at + _LOW, o)
        set_float(room, own + o, scale)
        inverse = np.float32(1.0) / scale if scale != 0.0 else np.float32(0.0)
        set_float(room, own + PANEL + o, inverse)
    for i in range(BLOCK):
        j = block * BLOCK + i
        row = order[j] if j < num_inputs else j
        rest = num_inputs + (j if j < num_inputs else j - num_inputs)
        byte, shift = at + i % 16 // 4 * 4 * PANEL + i % 4, i // 16 * 4
        for o in range(PANEL):
            x, scale = float_at(room, row * PANEL + o), float_at(room, own + o)
            n = np.rint(x * float_at(room, own + PANEL + o))
            n = max(np.float32(-_ZERO), min(np.float32(_ZERO - 1), n))
            near = n * scale
            set_float(room, rest * PANEL + o, x - near)
            total = float_at(room, own + 2 * PANEL + o)
            set_float(room, own + 2 * PANEL + o, total + near * near)
            out[byte + 4 * o] |= (int(n) + _ZERO) << shift


@borrowing
def _integer_panel(p, weights, units, room, own, work):
    """Write the weights of a panel of integers to address `room`, float32 [inputs, PANEL]: the
    form's kernel multiplies its records by unit rows, one after the other, each as a panel of its
    own, which is put together at address `own`."""
    parts, num = weights.parts, units.q.shape[0]
    header = 4 * PANEL if weights.per_row[0] else 0
    panel, count = parts[0, 0, 0] + p * parts[0, 0, 2], parts[0, 0, 3]
    each = (parts[0, 0, 2] - header) // count
    words = own_words(work)
    job = work.sync[words : words + JOB_ITEMS]
    job[0], job[1], job[2], job[3] = units.q.ctypes.data, num, units.figures.ctypes.data, num // 2
    job[4], job[5], job[6], job[8], job[9], job[10] = num, own, 1, 4 * PANEL, 0, NO_TILES
    for i in range(header // 4):
        set_float(own, i, float_at(panel, i))
    for s in range(count):
        for i in range(each // 4):
            set_float(own + header, i, float_at(panel + header + s * each, i))
        job[7] = room + 4 * PANEL * num * s
        call_kernel(parts[0, 0, 1], job.ctypes.data)


@borrowing
def _float_panel(p, weights, room):
    """Write the weights of PANEL outputs of floats to address `room`, float32 [inputs, PANEL]."""
    size = 4 if weights.kind == FLOAT32 else 2
    for o in range(0, PANEL, LANES):
        first = p * PANEL + o
        if first >= weights.outputs:
            continue
        at = first // FLOAT_PANEL * FLOAT_PANEL * weights.inputs + first % FLOAT_PANEL
        at = weights.parts[0, 0, 0] + at * size
        for k in range(weights.inputs):
            for lane in range(LANES):
                if weights.kind == FLOAT32:
                    x = float_at(at, k * FLOAT_PANEL + lane)
                else:
                    x = bfloat_at(at, k * FLOAT_PANEL + lane)
                set_float(room, k * PANEL + o + lane, x)


@entry_run_by(run)
@borrowing
def build(
    thread: int, head: Head, units: Float32x2, rows: Activations, room: Float32x2, work: Work
) -> None:
    """Write the panels, which are zeroed, and bounds of a head's Screen. units: float32 [n, n],
    rows that give n inputs' weights of integers (of a super-block, or a block). rows: a buffer for
    them. room: float32 [threads, PANEL * (2 * inputs + 3) + bytes of a panel / 4], zeros.
    """
    weights, screen = head.weights, head.screen
    order, bounds = screen.order, screen.bounds
    num = (weights.inputs + BLOCK - 1) // BLOCK * BLOCK
    work = Work(work.sync, work.pairs, work.threads, thread)
    if weights.kind == INTEGERS:
        quantise_rows(thread, work.threads, units.shape[0], units, units.shape[0], 0, rows, 0)
    barrier(work)
    at, sums = room[thread].ctypes.data, 2 * num * PANEL
    for p in range(thread, screen.panels.shape[0], work.threads):
        if weights.kind == INTEGERS:
            _integer_panel(p, weights, rows, at, at + 4 * (sums + 3 * PANEL), work)
        else:
            _float_panel(p, weights, at)
        for o in range(3 * PANEL):
            set_float(at, sums + o, np.float32(0.0))
        for block in range(order.shape[0] // BLOCK):
            _coarse_block(order, block, num, screen.panels[p], block * _RECORD, at, sums)
        for o in range(PANEL):
            total = 0.0
            for j in range(num):
                rest = float_at(at, (num + j) * PANEL + o) * screen.less[j]
                total += rest * rest
            bounds[0, p * PANEL + o] = math.sqrt(total) * _UP
            bounds[1, p * PANEL + o] = math.sqrt(float_at(at, sums + 2 * PANEL + o)) * _UP


@borrowing
def _coarse_inputs(row, head, work):
    """A row of the coarse head's inputs, from those of the head's product."""
    weights, screen = head.weights, head.screen
    room, num = work.pairs.ctypes.data + work.thread * work.pairs.shape[1] * 4, weights.inputs
    if weights.kind == INTEGERS:
        q, figures = weights.rows.q, weights.rows.figures
        scales = figures.ctypes.data + row * figures.shape[1] * 16
        for k in range(num):
            block = 0 if weights.per_row[0] else k // BLOCK
            set_float(room, k, float_at(scales, 4 * block) * q[row, k])
        if weights.per_row[0]:  # see make_screen
            spread_blocks(room, screen.ones.ctypes.data, num // BLOCK, room)
    else:
        for k in range(num):
            set_float(room, k, head.states[row, k])
    for j in range(screen.order.shape[0]):
        k = screen.order[j]
        screen.states[row, j] = float_at(room, k) if k < num else np.float32(0.0)


@borrowing
def _bound(row, head, screen):
    """(|x|, |x' - x|) of a row, for the bounds of its logits."""
    rows = screen.weights.rows
    num = (head.weights.inputs + BLOCK - 1) // BLOCK * BLOCK
    scales = rows.figures.ctypes.data + row * rows.figures.shape[1] * 16
    size, off, whole = 0.0, 0.0, 0.0
    for j in range(screen.order.shape[0]):
        x = screen.states[row, j]
        away = x - float_at(scales, 4 * (j // BLOCK)) * rows.q[row, j]
        off += away * away
        whole += x * x
        if j < num:
            x = x / screen.less[j]
            size += x * x
    return math.sqrt(size) * _UP, math.sqrt(off) * _UP + _ROUNDING * num * math.sqrt(whole)


@word(np.float32, int, int, int, int)
def _exact(b: Any, row: Any, q: Any, figures: Any, num: Any) -> Any:
    """A row of the head, `num` blocks of ggml's q8_0, times a row of inputs: all are addresses. The
    bits are those of the form's kernel (integers/vectors.py)."""
    loop = Loop(b, num, [ir.Constant(F32, 0.0)])
    block = b.add(row, b.mul(loop.index, i64(2 + BLOCK)))
    bytes_, wide = ir.VectorType(I8, BLOCK), ir.VectorType(I32, BLOCK)
    inputs = at(b, b.add(q, b.mul(loop.index, i64(BLOCK))), 0, bytes_, 1)
    products = b.mul(b.sext(at(b, block, 2, bytes_, 1), wide), b.sext(inputs, wide))
    total = call(b, f"llvm.vector.reduce.add.v{BLOCK}i32", I32, [products])
    scale = b.extract_element(load_halves(b, block, 0, 1), i32(0))
    factor = b.fmul(scale, at(b, b.add(figures, b.mul(loop.index, i64(16))), 0, F32, 4))
    operands = [b.sitofp(total, F32), factor, loop.carried[0]]
    (found,) = loop.close([call(b, "llvm.fma.f32", F32, operands)])
    return found


@borrowing
def _multiply(row, v, bits, head, work):
    """Give a row the logits of those of the 16 outputs from 16 v on that `bits` names, as the
    head's product gives them; others may get theirs."""
    weights = head.weights
    if head.rows == 0:
        outputs_of(head.states, row, v * LANES, weights, head.logits, work)
        return
    q, figures = weights.rows.q, weights.rows.figures
    at_q, at_figures = q.ctypes.data + row * q.shape[1], figures.shape[1] * 16 * row
    at_figures += figures.ctypes.data
    for output in range(v * LANES, min(v * LANES + LANES, head.vocab_size)):
        if bits >> (output - v * LANES) & 1:
            own = head.rows + output * head.row_bytes
            head.logits[row, output] = _exact(own, at_q, at_figures, figures.shape[1])


@inlined
def _allowed(words, row, v):
    """Which of the 16 ids from 16 v on a row may give, as bits. words: of Wanted."""
    if words.shape[0] == 0:
        return 0xFFFF
    return int(words[row, v // 2]) >> (v % 2 * LANES) & 0xFFFF


@borrowing
def allowed_linear(num_rows, head, words, work):
    """Logits of the ids that the first num_rows of a Head's states may give (words: of Wanted),
    -inf for others, where this takes fewer lines of the head than would pay; else False, and
    nothing is done. Called as linear.linear is."""
    weights, logits = head.weights, head.logits
    num_lines, num = (head.vocab_size + LANES - 1) // LANES, 0
    if words.shape[0] == 0:
        return False
    for i in range(num_rows):
        for v in range(num_lines):
            num += _allowed(words, i, v) != 0
        if num * _SCATTERED > num_lines:
            return False
    if weights.kind == INTEGERS:
        quantise(head.states, num_rows, weights, 0, work)
    for i in range(work.thread, num_rows, work.threads):
        for j in range(logits.shape[1]):
            logits[i, j] = -np.inf
    barrier(work)
    for v in range(work.thread, num_lines, work.threads):
        for i in range(num_rows):
            bits = _allowed(words, i, v)
            if bits != 0:
                _multiply(i, v, bits, head, work)
    barrier(work)
    return True


@borrowing
def _candidates(num_rows, head, words, near, work):
    """Write where rows' largest logits may be, of this thread's outputs, to Screen.found; how many
    there are, or more than there is room for. words, near: as of screened_linear."""
    screen = head.screen
    limit, num, row_bytes = screen.limit * num_rows, 0, 4 * head.logits.shape[1]
    logits, rests = head.logits.ctypes.data, screen.bounds.ctypes.data
    sizes = rests + screen.bounds.shape[1] * 4
    for row in range(num_rows):
        size, off = screen.row_bounds[row, 0], screen.row_bounds[row, 1]
        least, own = screen.row_bounds[row, 2], logits + row * row_bytes
        for v in range(work.thread, (head.vocab_size + LANES - 1) // LANES, work.threads):
            here = 4 * LANES * v
            bits = _reaching(
                own + here, rests + here, sizes + here, size, off, least, near
            )  # fmt: skip
            bits &= _allowed(words, row, v)
            if bits != 0:
                if num == limit:
                    return limit + 1
                screen.found[work.thread, num] = v << 32 | row << 16 | bits
                num += 1
                for o in range(LANES if head.rows != 0 else 0):
                    if bits >> o & 1:
                        fetch(head.rows + (v * LANES + o) * head.row_bytes, head.row_bytes)
    return num


@borrowing
def screened_linear(num_rows, head, words, near, work):
    """Logits of the first num_rows of a Head's states: the head's own wherever one may be the
    largest that its row may give (words: of Wanted), or is less than `near` below that by the
    Screen, elsewhere those of the Screen. Called as linear.linear is."""
    weights, screen, logits = head.weights, head.screen, head.logits
    if weights.kind == INTEGERS:
        quantise(head.states, num_rows, weights, 0, work)
    for i in range(work.thread, num_rows, work.threads):
        _coarse_inputs(i, head, work)
    integer_linear(screen.states, num_rows, screen.weights, 0, logits, work)
    for i in range(work.thread, num_rows, work.threads):
        for j in range(head.vocab_size, logits.shape[1]):
            logits[i, j] = -np.inf
        size, off = _bound(i, head, screen)
        screen.row_bounds[i, 0], screen.row_bounds[i, 1] = size, off
        best = max(likeliest_allowed(logits[i], words, i, head.vocab_size), 0)
        _multiply(i, best // LANES, 1 << best % LANES, head, work)
        screen.row_bounds[i, 2] = logits[i, best]
    barrier(work)
    num = _candidates(num_rows, head, words, np.float32(near), work)
    screen.num_found[8 * work.thread] = num
    barrier(work)
    most = 0
    for thread in range(work.threads):
        most = max(most, screen.num_found[8 * thread])
    if most > screen.limit * num_rows:
        linear(head.states, num_rows, weights, 0, logits, work)
        return
    for k in range(num):
        found = screen.found[work.thread, k]
        _multiply(found >> 16 & 0xFFFF, found >> 32, found & 0xFFFF, head, work)
    barrier(work)


@entry_run_by(run)
@borrowing
def screened(
    thread: int, num_rows: int, head: Head, words: UInt32x2, near: float, work: Work
) -> None:
    """`screened_linear` alone."""
    own = Work(work.sync, work.pairs, work.threads, thread)
    screened_linear(num_rows, head, words, near, own)


@entry_run_by(run)
@borrowing
def allowed(thread: int, num_rows: int, head: Head, words: UInt32x2, work: Work) -> None:
    """`allowed_linear` alone; where it does nothing all logits stay as they are."""
    allowed_linear(num_rows, head, words, Work(work.sync, work.pairs, work.threads, thread))
