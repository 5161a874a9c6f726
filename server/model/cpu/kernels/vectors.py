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
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    VEC,
    VECI,
    WIDE,
    Loop,
    choose,
    const,
    exp64,
    floats,
    fma,
    from_half,
    function,
    i32,
    i64,
    lane_sum,
    load,
    prefetch,
    splat,
    store,
    widened,
    word,
)  # fmt: skip
from server.model.cpu.kernels.ir import exp as exp_vector
from server.model.cpu.records import (
    ADAPTER_WIDE,
    FLOAT32,
    FLOAT_TYPES,
    LANES,
    MAX_ROWS,
    PANEL,
    VECTORS_PER_PANEL,
)

# --- kernels as intrinsics: addresses are intp, sizes are elements --------------------------------


class Product(NamedTuple):
    """c[m, :] = x[m, :] @ w for some rows: addresses, and strides of rows in elements. form: of w,
    its place in FLOAT_TYPES.

    fetched, step: `step` bytes on from address `fetched` for every k, one line is asked of memory.
    """

    x: int
    ldx: int
    w: int
    ldw: int
    k: int
    c: int
    ldc: int
    fetched: int
    step: int
    form: int


def _define_product(
    num_rows: int, vectors: int, form: int, is_panel: int, b: Any, args: Any
) -> None:
    """c[m, 0:width] = sum_k x[m, k] * w[k, 0:width], m < num_rows, width = 16 * vectors. is_panel:
    ldw is PANEL, which is then no number in a register."""
    x, ldx, w, ldw, k, c, ldc, fetched, step = args
    ldw = i64(PANEL) if is_panel else ldw
    size = 4 if form == FLOAT32 else 2
    xf, cf = floats(b, x), floats(b, c)
    rows = [b.gep(xf, [b.mul(ldx, i64(m))]) for m in range(num_rows)]
    loop = Loop(b, k, [const(0.0)] * (num_rows * vectors))
    if vectors == VECTORS_PER_PANEL:
        prefetch(b, b.add(fetched, b.mul(loop.index, step)))
    base = b.add(w, b.mul(b.mul(loop.index, ldw), i64(size)))
    weights = [
        widened(b, FLOAT_TYPES[form], b.add(base, i64(v * LANES * size))) for v in range(vectors)
    ]
    new = []
    for m in range(num_rows):
        xv = splat(b, b.load(b.gep(rows[m], [loop.index])))
        new += [fma(b, xv, weights[v], loop.carried[m * vectors + v]) for v in range(vectors)]
    acc = loop.close(new)
    for m in range(num_rows):
        for v in range(vectors):
            store(b, acc[m * vectors + v], cf, b.add(b.mul(ldc, i64(m)), i64(v * LANES)))


HALF = max(1, VECTORS_PER_PANEL // 2)
"""Vectors of the parts that a panel can be split into by columns when panels do not share out
evenly."""


@word(None, int, int, Product)
def _pass(b: Any, num: Any, vectors: Any, task: Any) -> None:
    """So many rows of a Product against 16 * vectors columns."""
    *given, form = (b.extract_value(task, i) for i in range(10))

    def emit(*size: int) -> None:
        name = "_".join(["tailor_product", *map(str, size)])
        define = partial(_define_product, *size)
        b.call(function(b.module, name, len(given), define), given)

    cases = {
        ((8 * num_rows + width) * 4 + of) * 2 + panel: partial(emit, num_rows, width, of, panel)
        for width in {1, HALF, VECTORS_PER_PANEL, ADAPTER_WIDE}
        for num_rows in (1, 2, 4, *([MAX_ROWS] if width == VECTORS_PER_PANEL else []))
        for of in range(len(FLOAT_TYPES))
        for panel in range(2)
    }
    is_panel = b.zext(b.icmp_signed("==", given[3], i64(PANEL)), I64)
    case = b.add(b.mul(b.add(b.mul(num, i64(8)), vectors), i64(4)), form)
    choose(b, b.add(b.mul(case, i64(2)), is_panel), cases)


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


ROUGH_EXP = 1.0, 0.69324846, 0.24221082, 0.05517749
"""Coefficients of 2^x for -1/2 <= x <= 1/2 with the least relative error, 1.1e-4, and none at 0: of
an id that is sure the chance is 1."""


@word(np.float32, int, int, np.float32)
def rough_exp_sum(b: Any, s: Any, num: Any, shift: Any) -> Any:
    """`exp_sum` to 1 in 9,000, none of the floats above shift, in a third of the time: for chances
    that drafts are made of."""
    sf = floats(b, s)
    shift_v, magic = splat(b, shift), const(12582912.0)  # adding it rounds to an integer
    loop = Loop(b, num, [const(0.0)])
    x = b.fsub(load(b, sf, b.mul(loop.index, i64(LANES))), shift_v)
    x = b.select(b.fcmp_ordered(">", x, const(-86.0)), x, const(-86.0))
    shifted = fma(b, x, const(1.44269504), magic)
    part = fma(b, x, const(1.44269504), b.fsub(magic, shifted))  # of the power of 2, to a half
    value = const(ROUGH_EXP[-1])
    for c in reversed(ROUGH_EXP[:-1]):
        value = fma(b, value, part, const(c))
    whole = b.shl(b.bitcast(shifted, VECI), const(23, VECI))
    power_of_2 = b.bitcast(b.add(b.bitcast(value, VECI), whole), VEC)
    (total,) = loop.close([b.fadd(loop.carried[0], power_of_2)])
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


@word(None, int, int, int, int, bool)
def gate(b: Any, g: Any, u: Any, out: Any, num: Any, gelu: Any) -> None:
    """out[i] = act(g[i]) * u[i] for 16 * num floats; act = SiLU, or GELU's tanh form.

    Both are g / (1 + exp(-z)): z = g for SiLU, z = 2 * sqrt(2/pi) * (g + 0.044715 g^3) for GELU.
    """
    gf, uf, of = floats(b, g), floats(b, u), floats(b, out)

    def emit(is_gelu: bool) -> None:
        loop = Loop(b, num, [])
        at = b.mul(loop.index, i64(LANES))
        x = load(b, gf, at)
        if is_gelu:
            cubic = b.fmul(b.fmul(x, x), b.fmul(x, const(0.044715)))
            z = b.fmul(b.fadd(x, cubic), const(-1.5957691216057308))
        else:
            z = b.fmul(x, const(-1.0))
        act = b.fdiv(x, b.fadd(const(1.0), exp_vector(b, z)))
        store(b, b.fmul(act, load(b, uf, at)), of, at)
        loop.close([])

    choose(b, b.zext(gelu, I64), {case: partial(emit, bool(case)) for case in range(2)})


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
            return from_half(b, bits)
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
    return Product(
        task.x + m * task.ldx * 4, task.ldx, task.w, task.ldw, task.k, task.c + m * task.ldc * 4,
        task.ldc, fetched, step, task.form,
    )  # fmt: skip


@compiled
def panel_product(task, num_rows):
    """All rows against one panel, 6, 4, 2 and 1 rows at a time: the same bits each way.

    task.fetched: the panel that is multiplied next, 0: none. While the first rows are multiplied
    this panel may still come from memory; while others are, memory fetches lines of the next, one
    a k, so that loads of this panel need not wait.
    """
    k, following, wide = task.k, task.fetched, task.form == FLOAT32
    lines = PANEL * (4 if wide else 2) // _LINE  # of one k
    # Two passes of float32 multiply for less time than memory needs for their own panel.
    if num_rows <= (2 if wide else 1) * MAX_ROWS or lines * _LINE * k > _MOST_FETCHED:
        following = 0
    first = 0 if num_rows <= 2 * MAX_ROWS else 1
    m = number = 0
    while m < num_rows:
        num = _rows_of_pass(num_rows - m, MAX_ROWS)
        fetched, step = task.w, 0
        if following != 0 and first <= number < first + lines:
            fetched, step = following + (number - first) * _LINE * k, _LINE
        _pass(num, VECTORS_PER_PANEL, _rows_from(task, m, fetched, step))
        m += num
        number += 1


@compiled
def columns_product(task, num_rows, vectors, most):
    """All rows against 16 * vectors columns, `most` rows (4 or 2) and fewer at a time: the same
    bits each way."""
    m = 0
    while m < num_rows:
        num = _rows_of_pass(num_rows - m, most)
        _pass(num, vectors, _rows_from(task, m, task.w, 0))
        m += num


@compiled
def gate_rows(pairs, width, num, out, ldo, gelu):
    """out[m] = act(gate) * up for m < num: `width` outputs of each, which lie one behind the other
    in a row of `pairs`. pairs, out: addresses; ldo: out's row stride in elements."""
    for m in range(num):
        left, target = pairs + m * 2 * width * 4, out + m * ldo * 4
        gate(left, left + width * 4, target, width // LANES, gelu)


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
