"""The kernels of floats: matrix products and row operations whose bits do not depend on the batch.

These are compiled functions around a few vector kernels written as LLVM IR (ir.py). They promise
what libraries do not: *each row gets the same bits whatever the other rows are*. oneDNN's prepacked
linear was tried first. It is close in speed, but with AVX-512 it splits the sum of a 1536-wide
product differently for one row than for two (docs/benchmarks, "Why our own matrix product"), and
then speculation would change the text. Here every output is

    acc = 0;  for k in 0 .. K-1:  acc = fma(x[k], w[k], acc)

in that order, at every row count, for every thread count, on every CPU: lanes are *outputs*,
never parts of a sum. Weights are packed in panels [N / PANEL][K][PANEL], so one pass streams
memory once; MR rows share each load, which is where verification of a draft becomes cheap.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from drafters.jit import compiled
from server.model.cpu.kernels.ir import (
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    VECI,
    WIDE,
    Loop,
    choose,
    const,
    exp64,
    floats,
    fma,
    function,
    i32,
    i64,
    lane_sum,
    load,
    load_bf16,
    prefetch,
    splat,
    store,
    word,
)  # fmt: skip
from server.model.cpu.kernels.ir import exp as exp_vector
from server.model.cpu.kernels.ir import product as emit_product
from server.model.cpu.records import LANES, MAX_ROWS, PANEL, VECTORS_PER_PANEL

# --- kernels as intrinsics: addresses are intp, sizes are elements --------------------------------


class PanelTask(NamedTuple):
    """c[m, :] = x[m, :] @ panel for some rows: addresses, and strides of rows in elements.

    fetched, step: `step` bytes on from address `fetched` for every k, one line is asked of memory.
    """

    x: int
    ldx: int
    panel: int
    k: int
    c: int
    ldc: int
    fetched: int
    step: int


def _multiply(b: Any, num_rows: int, bf16: bool, vectors: int, task: Any) -> None:
    """c[m, 0:width] = sum_k x[m, k] * panel[k, 0:width], m < num_rows, width = 16 * vectors, of a
    PanelTask: a function of the module."""

    def define(b: Any, args: Any) -> None:
        x, ldx, panel, k, c, ldc, fetched, step = args
        pf = b.inttoptr(panel, (I16 if bf16 else F32).as_pointer())
        read = load_bf16 if bf16 else load

        def weights(index: Any) -> list[Any]:
            if vectors == VECTORS_PER_PANEL:
                prefetch(b, b.add(fetched, b.mul(index, step)))
            base = b.mul(index, i64(PANEL))
            return [read(b, pf, b.add(base, i64(v * LANES))) for v in range(vectors)]

        emit_product(b, (num_rows, vectors), (x, ldx, k), weights, (c, ldc))

    name = f"tailor_product_{num_rows}_{vectors}_{'bf16' if bf16 else 'f32'}"
    fn = function(b, name, [I64] * 8, ir.VoidType(), define)
    b.call(fn, [b.extract_value(task, i) for i in range(8)])


def _make_pass(rows: tuple[int, ...], vectors: int) -> Any:
    """A word: so many rows, one of `rows`, against 16 * vectors columns of a PanelTask's panel."""

    @word(None, int, PanelTask, bool)
    def multiply(b: Any, num: Any, task: Any, bf16: Any) -> None:
        cases = {
            2 * num_rows + narrow: partial(_multiply, b, num_rows, bool(narrow), vectors, task)
            for num_rows in rows
            for narrow in range(2)
        }
        choose(b, b.add(b.mul(num, i64(2)), b.zext(bf16, I64)), cases)

    return multiply


_HALF = max(1, VECTORS_PER_PANEL // 2)
_pass = _make_pass((1, 2, 4, MAX_ROWS), VECTORS_PER_PANEL)
_half_pass = _make_pass((1, 2, 4), _HALF)

HALVES = VECTORS_PER_PANEL // _HALF
"""Parts that a panel can be split into by columns when panels do not share out evenly."""

_LINE = 64
_MOST_FETCHED = 512 << 10
"""Bytes of a panel that is fetched while another is multiplied: both must fit into an L2 cache."""


@word(None, int, int)
def fetch(b: Any, address: Any, num_bytes: Any) -> None:
    """Ask memory for num_bytes (at least 1) from an address, into the L2 cache."""
    loop = Loop(b, num_bytes, [], step=64)
    prefetch(b, b.add(address, loop.index))
    loop.close([])


@word(np.float32, int, int, np.float32, np.float32)
def exp_shifted(b: Any, s: Any, num: Any, scale: Any, shift: Any) -> Any:
    """s[i] = exp(s[i] * scale - shift) for 16 * num floats at address s; returns their sum.

    The sum has 16 partial sums, lane by lane, added in order: a function of the positions only.
    """
    sf = floats(b, s)
    scale_v, shift_v = splat(b, scale), splat(b, shift)
    loop = Loop(b, num, [const(0.0)])
    at = b.mul(loop.index, i64(LANES))
    e = exp_vector(b, b.fsub(b.fmul(load(b, sf, at), scale_v), shift_v))
    store(b, e, sf, at)
    (total,) = loop.close([b.fadd(loop.carried[0], e)])
    return lane_sum(b, total)


@word(np.float32, int, int, np.float32)
def exp_sum(b: Any, s: Any, num: Any, shift: Any) -> Any:
    """sum of exp(s[i] - shift) over 16 * num floats at address s, lanes as in exp_shifted."""
    sf = floats(b, s)
    shift_v = splat(b, shift)
    loop = Loop(b, num, [const(0.0)])
    e = exp_vector(b, b.fsub(load(b, sf, b.mul(loop.index, i64(LANES))), shift_v))
    (total,) = loop.close([b.fadd(loop.carried[0], e)])
    return lane_sum(b, total)


@word(float, int, int, float)
def exp_sum64(b: Any, s: Any, num: Any, shift: Any) -> Any:
    """sum of exp(s[i] - shift) over 8 * num float64 at address s, none above shift.

    The sum has 8 partial sums, lane by lane, added in order.
    """
    base = b.inttoptr(s, F64.as_pointer())
    shift_v = splat(b, shift, WIDE)
    loop = Loop(b, num, [const(0.0, WIDE)])
    at = b.gep(base, [b.mul(loop.index, i64(8))])
    value = b.load(b.bitcast(at, WIDE.as_pointer()))
    value.align = 8
    (total,) = loop.close([b.fadd(loop.carried[0], exp64(b, b.fsub(value, shift_v)))])
    return lane_sum(b, total)


@word(np.float32, int, int)
def max_of(b: Any, s: Any, num: Any) -> Any:
    """The largest of 16 * num floats at address s (no NaN among them)."""
    sf = floats(b, s)
    loop = Loop(b, num, [const(float("-inf"))])
    v = load(b, sf, b.mul(loop.index, i64(LANES)))
    best = b.select(b.fcmp_ordered(">", v, loop.carried[0]), v, loop.carried[0])
    (lanes,) = loop.close([best])
    width = LANES
    while width > 1:  # halves against each other: any order gives the same number
        width //= 2
        order = [i % width + width for i in range(LANES)]
        other = b.shuffle_vector(lanes, lanes, ir.Constant(VECI, order))
        lanes = b.select(b.fcmp_ordered(">", other, lanes), other, lanes)
    return b.extract_element(lanes, i32(0))


@word(np.float32, int, int)
def sum_of_squares(b: Any, x: Any, num: Any) -> Any:
    """sum of x[i]^2 over 16 * num floats at address x, lanes as in exp_shifted."""
    xf = floats(b, x)
    loop = Loop(b, num, [const(0.0)])
    v = load(b, xf, b.mul(loop.index, i64(LANES)))
    (total,) = loop.close([fma(b, v, v, loop.carried[0])])
    return lane_sum(b, total)


def _make_gate(gelu: bool) -> Any:
    """out[i] = act(g[i]) * u[i] for 16 * num floats; act = SiLU, or GELU's tanh form.

    Both are g / (1 + exp(-z)): z = g for SiLU, z = 2 * sqrt(2/pi) * (g + 0.044715 g^3) for GELU.
    """

    @word(None, int, int, int, int)
    def gate(b: Any, g: Any, u: Any, out: Any, num: Any) -> Any:
        gf, uf, of = floats(b, g), floats(b, u), floats(b, out)
        loop = Loop(b, num, [])
        at = b.mul(loop.index, i64(LANES))
        x = load(b, gf, at)
        if gelu:
            cubic = b.fmul(b.fmul(x, x), b.fmul(x, const(0.044715)))
            z = b.fmul(b.fadd(x, cubic), const(-1.5957691216057308))
        else:
            z = b.fmul(x, const(-1.0))
        act = b.fdiv(x, b.fadd(const(1.0), exp_vector(b, z)))
        store(b, b.fmul(act, load(b, uf, at)), of, at)
        loop.close([])

    return gate


silu_gate = _make_gate(gelu=False)
gelu_gate = _make_gate(gelu=True)


@word(None, int, np.float32, int, int, int)
def scaled_product(b: Any, x: Any, scale: Any, y: Any, out: Any, num: Any) -> Any:
    """out[i] = (x[i] * scale) * y[i] for 16 * num floats at addresses x, y and out."""
    xf, yf, of = floats(b, x), floats(b, y), floats(b, out)
    scale_v = splat(b, scale)
    loop = Loop(b, num, [])
    at = b.mul(loop.index, i64(LANES))
    store(b, b.fmul(b.fmul(load(b, xf, at), scale_v), load(b, yf, at)), of, at)
    loop.close([])


@word(np.float32, int, int)
def float_at(b: Any, address: Any, index: Any) -> Any:
    """The float32 number `index` of those at an address."""
    return b.load(b.gep(floats(b, address), [index]))


@word(None, int, int, np.float32)
def set_float(b: Any, address: Any, index: Any, value: Any) -> Any:
    """Write the float32 number `index` of those at an address."""
    b.store(value, b.gep(floats(b, address), [index]))


@word(int, int, int)
def int32_at(b: Any, address: Any, index: Any) -> Any:
    """The int32 number `index` of those at an address."""
    entry = b.gep(b.inttoptr(address, I32.as_pointer()), [index])
    return b.sext(b.load(entry), I64)


@word(int, int)
def byte_at(b: Any, address: Any) -> Any:
    """The byte at an address, 0 to 255."""
    return b.zext(b.load(b.inttoptr(address, I8.as_pointer())), I64)


def _narrow_at(half: bool) -> Any:
    """An intrinsic: number `index` of the 16-bit floats at an address as float32."""

    @word(np.float32, int, int)
    def at(b: Any, address: Any, index: Any) -> Any:
        bits = b.load(b.gep(b.inttoptr(address, I16.as_pointer()), [index]))
        if half:
            return b.fpext(b.bitcast(bits, F16), F32)
        return b.bitcast(b.shl(b.zext(bits, I32), i32(16)), F32)

    return at


half_at, bfloat_at = _narrow_at(half=True), _narrow_at(half=False)


@word(None, int, int, np.float32, np.float32)
def soft_cap(b: Any, s: Any, num: Any, scale: Any, cap: Any) -> Any:
    """s[i] = cap * tanh(s[i] * scale / cap) for 16 * num floats at address s (Gemma 2, arXiv
    2408.00118, section 2); tanh(x) = 1 - 2 / (exp(2 x) + 1), absolute error < 3e-7."""
    sf = floats(b, s)
    cap_v = splat(b, cap)
    factor = splat(b, b.fdiv(b.fmul(scale, ir.Constant(F32, 2.0)), cap))
    loop = Loop(b, num, [])
    at = b.mul(loop.index, i64(LANES))
    grown = exp_vector(b, b.fmul(load(b, sf, at), factor))
    tanh = b.fsub(const(1.0), b.fdiv(const(2.0), b.fadd(grown, const(1.0))))
    store(b, b.fmul(tanh, cap_v), sf, at)
    loop.close([])


# --- compiled functions ---------------------------------------------------------------------------


@compiled
def _rows_of_pass(left, most):
    """Rows of the next pass when so many are left."""
    if left >= most:
        return most
    return 4 if left >= 4 else 2 if left >= 2 else 1


@compiled
def _rows_from(task, m, fetched, step):
    """The task of the rows from m on."""
    return PanelTask(
        task.x + m * task.ldx * 4, task.ldx, task.panel, task.k, task.c + m * task.ldc * 4,
        task.ldc, fetched, step,
    )  # fmt: skip


@compiled
def panel_product(task, num_rows, bf16):
    """All rows against one panel, 6, 4, 2 and 1 rows at a time: the same bits each way.

    task.fetched: the panel that is multiplied next, 0: none. While the first rows are multiplied
    this panel may still come from memory; while others are, memory fetches lines of the next, one
    a k, so that loads of this panel need not wait.
    """
    k, following = task.k, task.fetched
    lines = PANEL * (2 if bf16 else 4) // _LINE  # of one k
    # Two passes of float32 multiply for less time than memory needs for their own panel.
    if num_rows <= (1 if bf16 else 2) * MAX_ROWS or lines * _LINE * k > _MOST_FETCHED:
        following = 0
    first = 0 if num_rows <= 2 * MAX_ROWS else 1
    m = number = 0
    while m < num_rows:
        num = _rows_of_pass(num_rows - m, MAX_ROWS)
        fetched, step = task.panel, 0
        if following != 0 and first <= number < first + lines:
            fetched, step = following + (number - first) * _LINE * k, _LINE
        _pass(num, _rows_from(task, m, fetched, step), bf16)
        m += num
        number += 1


@compiled
def half_panel_product(task, num_rows, bf16):
    """All rows against 1 / HALVES of a panel's columns, panel and c at the first of them."""
    m = 0
    while m < num_rows:
        num = _rows_of_pass(num_rows - m, 4)
        _half_pass(num, _rows_from(task, m, task.panel, 0), bf16)
        m += num


@compiled
def gate_rows(pairs, width, num, out, ldo, gelu):
    """out[m] = act(gate) * up for m < num: `width` outputs of each, which lie one behind the other
    in a row of `pairs`. pairs, out: addresses; ldo: out's row stride in elements."""
    for m in range(num):
        left, target = pairs + m * 2 * width * 4, out + m * ldo * 4
        if gelu:
            gelu_gate(left, left + width * 4, target, width // LANES)
        else:
            silu_gate(left, left + width * 4, target, width // LANES)


@compiled
def rms_norm(x, weight, out, n, eps):
    """out = x / sqrt(mean(x^2) + eps) * weight over n float32 at addresses x, weight and out.

    Addresses, here and in attention: a view of an array in compiled code counts its references,
    and threads that count the same array's wait for each other.
    """
    whole = n // LANES
    total = np.float32(0.0)
    if whole > 0:
        total = sum_of_squares(x, whole)
    for i in range(whole * LANES, n):
        total += float_at(x, i) * float_at(x, i)
    scale = np.float32(1.0) / np.sqrt(total / np.float32(n) + eps)
    if whole > 0:
        scaled_product(x, scale, weight, out, whole)
    for i in range(whole * LANES, n):
        set_float(out, i, (float_at(x, i) * scale) * float_at(weight, i))
