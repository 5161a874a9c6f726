"""The largest logit without most of the LM head: a coarse head of 4 bits bounds every logit, and
of the head itself only those rows are multiplied whose logit may be the largest.

Of each output the coarse head has W', and what lies between it and the head's row W is the rest R.
With the inputs x as the head's product has them, and x' as the coarse one's has them
(Cauchy-Schwarz):

    W x  <=  W' x' + |R| |x| + |W'| |x' - x|

Inputs are sorted by size, so that a block of 32 has inputs alike, and the largest ones come twice:
the second time with what 4 bits have left of their weights. |R| and |x| count these _LESS times and
by its inverse, which changes no product of the two. What float32 rounds in sums is far less than
_ROUNDING of the norms. So a row's argmax is the head's own, ties included, and so are all logits
that may be as large; the others are the coarse head's. Where a step's logits are so flat that too
many may be, the head is multiplied as if it had no Screen.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from drafters.jit import borrowing, entry_run_by, inlined
from server.model.cpu.integers.forms import BLOCK, BY_NAME, COARSE, PANEL
from server.model.cpu.kernels.blocks import block_row
from server.model.cpu.kernels.integer_linear import integer_linear, quantise
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
from server.model.cpu.kernels.sampling import likeliest_allowed
from server.model.cpu.kernels.team import barrier, run
from server.model.cpu.kernels.vectors import fetch, float_at, half_at, set_float
from server.model.cpu.records import FAILED, LANES, Float32x2, Head, Screen, UInt32x2, Work

_LESS = 16.0  # is left of the weights of inputs that come twice than of the others'
_ROUNDING = 1e-4
_UP = 1.0 + 1e-4  # by which norms are rounded up
_RECORD, _LOW, _ZERO = COARSE.record_bytes, COARSE.low_bytes, COARSE.zero
_STORED = BY_NAME["q8_0"].number


@word(int, int, int, int, np.float32, np.float32, np.float32)
def _reaching(
    b: Any, logits: Any, rests: Any, sizes: Any, size: Any, off: Any, least: Any
) -> Any:  # fmt: skip
    """Which of 16 coarse logits at an address may be `least` or more, as bits; NaN may."""
    x, r, s = (load(b, floats(b, address), i64(0)) for address in (logits, rests, sizes))
    most = fma(b, r, splat(b, size), fma(b, s, splat(b, off), x))
    reaches = b.fcmp_unordered(">=", most, splat(b, least))
    return b.zext(b.bitcast(reaches, ir.IntType(LANES)), I64)


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


@entry_run_by(run)
@borrowing
def build(
    thread: int, num_rows: int, num: int, screen: Screen, room: Float32x2, work: Work
) -> None:
    """Write a Screen's panels, which are zeroed, and bounds. num_rows, num: rows of the head, and
    inputs. room: float32 [threads, 32 * (2 * num + 3) + num]."""
    order, bounds = screen.order, screen.bounds
    at, sums = room[thread].ctypes.data, 2 * num * PANEL
    twice = order.shape[0] - num
    row = room[thread, sums + 3 * PANEL :]
    for p in range(thread, screen.panels.shape[0], work.threads):
        for o in range(PANEL):
            output = min(p * PANEL + o, num_rows - 1)  # what pads the last panel is never drawn
            own = screen.head_rows + output * screen.row_bytes
            block_row(own, _STORED, np.float32(1.0), row)
            for j in range(num):
                set_float(at, j * PANEL + o, row[j])
        for o in range(3 * PANEL):
            set_float(at, sums + o, np.float32(0.0))
        for block in range(order.shape[0] // BLOCK):
            _coarse_block(order, block, num, screen.panels[p], block * _RECORD, at, sums)
        for o in range(PANEL):
            total = 0.0
            for j in range(num):
                rest = float_at(at, (num + j) * PANEL + o) * (_LESS if j < twice else 1.0)
                total += rest * rest
            bounds[0, p * PANEL + o] = math.sqrt(total) * _UP
            bounds[1, p * PANEL + o] = math.sqrt(float_at(at, sums + 2 * PANEL + o)) * _UP


@borrowing
def _coarse_inputs(row, head, screen):
    """A row of the coarse head's inputs, from those of the head, which are integers."""
    weights, order = head.weights, screen.order
    q, figures = weights.rows.q, weights.rows.figures
    scales = figures.ctypes.data + row * figures.shape[1] * 16
    for j in range(order.shape[0]):
        k = order[j]
        screen.states[row, j] = float_at(scales, 4 * (k // BLOCK)) * q[row, k]


@borrowing
def _bound(row, head, screen):
    """(|x|, |x' - x|) of a row, for the bounds of its logits."""
    rows, num = screen.weights.rows, head.weights.inputs
    twice = screen.order.shape[0] - num
    scales = rows.figures.ctypes.data + row * rows.figures.shape[1] * 16
    size, off, whole = 0.0, 0.0, 0.0
    for j in range(screen.order.shape[0]):
        x = screen.states[row, j]
        away = x - float_at(scales, 4 * (j // BLOCK)) * rows.q[row, j]
        off += away * away
        whole += x * x
        if j < num:
            x = x / _LESS if j < twice else x
            size += x * x
    return math.sqrt(size) * _UP, math.sqrt(off) * _UP + _ROUNDING * math.sqrt(whole)


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
def _exact_logit(row, output, head):
    """Logit of an output, as the head's product gives it."""
    rows, screen = head.weights.rows, head.screen
    figures = rows.figures.ctypes.data + row * rows.figures.shape[1] * 16
    q = rows.q.ctypes.data + row * rows.q.shape[1]
    own = screen.head_rows + output * screen.row_bytes
    return _exact(own, q, figures, rows.figures.shape[1])


@inlined
def _allows_few(words, row, limit):
    """Whether a row of Wanted.words allows no more than `limit` ids."""
    num = 0
    for w in range(words.shape[1]):
        left = words[row, w]
        while left != 0 and num <= limit:
            left &= left - np.uint32(1)
            num += 1
    return num <= limit


@borrowing
def _candidates(row, head, words, work, num, limit):
    """Write where a row's largest logit may be, of this thread's outputs, behind the first `num` of
    Screen.found, and ask memory for these rows of the head, which lie anywhere; how many there are
    then, or more than `limit`. words: of Wanted."""
    screen = head.screen
    size, off = screen.row_bounds[row, 0], screen.row_bounds[row, 1]
    least, found = screen.row_bounds[row, 2], screen.found[work.thread]
    logits = head.logits[row].ctypes.data
    rests = screen.bounds.ctypes.data
    sizes = rests + screen.bounds.shape[1] * 4
    for v in range(work.thread, screen.bounds.shape[1] // LANES, work.threads):
        output, allowed = LANES * v, 0xFFFF
        if words.shape[0] > 0:
            allowed = int(words[row, output // 32]) >> (output % 32) & 0xFFFF
            if allowed == 0:
                continue
        here = 4 * output
        bits = _reaching(logits + here, rests + here, sizes + here, size, off, least) & allowed
        while bits != 0 and output < head.vocab_size:
            if bits & 1:
                if num >= limit:
                    return limit + 1
                fetch(screen.head_rows + output * screen.row_bytes, screen.row_bytes)
                found[num] = row << 32 | output
                num += 1
            bits >>= 1
            output += 1
    return num


@borrowing
def screened_linear(num_rows, head, words, work):
    """Logits of the first num_rows of a Head's states: the head's own wherever one may be the
    largest that its row may give (words: of Wanted), elsewhere those of its Screen. Where no row
    may give many, these are all that are computed; the others are -inf. Called as linear.linear
    is."""
    screen, logits = head.screen, head.logits
    quantise(head.states, num_rows, head.weights, 0, work)
    few = words.shape[0] > 0
    for i in range(num_rows if few else 0):
        few = few and _allows_few(words, i, screen.limit)
    if not few:
        for i in range(work.thread, num_rows, work.threads):
            _coarse_inputs(i, head, screen)
        integer_linear(screen.states, num_rows, screen.weights, 0, logits, work)
    for i in range(work.thread, num_rows, work.threads):
        for j in range(0 if few else head.vocab_size, logits.shape[1]):
            logits[i, j] = -np.inf
        size, off, least = np.float32(0.0), np.float32(0.0), np.float32(-np.inf)
        if not few:
            size, off = _bound(i, head, screen)
            top = likeliest_allowed(logits[i], words, i, head.vocab_size)
            if top != FAILED:
                least = _exact_logit(i, top, head)
        screen.row_bounds[i, 0], screen.row_bounds[i, 1], screen.row_bounds[i, 2] = size, off, least
    barrier(work)
    limit, num = screen.limit * num_rows, 0
    for i in range(num_rows):
        if num <= limit:
            num = _candidates(i, head, words, work, num, limit)
    screen.num_found[8 * work.thread] = num
    barrier(work)
    most = 0
    for thread in range(work.threads):
        most = max(most, screen.num_found[8 * thread])
    if most > limit:
        integer_linear(head.states, num_rows, head.weights, 0, logits, work)
        return
    found = screen.found[work.thread]
    for k in range(num):
        row, output = found[k] >> 32, found[k] & 0xFFFFFFFF
        logits[row, output] = _exact_logit(row, output, head)
    barrier(work)


@entry_run_by(run)
@borrowing
def screened(thread: int, num_rows: int, head: Head, words: UInt32x2, work: Work) -> None:
    """`screened_linear` alone."""
    screened_linear(num_rows, head, words, Work(work.sync, work.pairs, work.threads, thread))
