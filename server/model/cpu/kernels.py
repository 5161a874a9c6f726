"""The CPU kernels: matrix products and row operations whose bits do not depend on the batch.

These are numba functions around a few vector kernels written as LLVM IR (llvmlite). They promise
what libraries do not: *each row gets the same bits whatever the other rows are*. oneDNN's prepacked
linear was tried first. It is close in speed, but with AVX-512 it splits the sum of a 1536-wide
product differently for one row than for two (docs/benchmarks, "Why our own matrix product"), and
then speculation would change the text. Here every output is

    acc = 0;  for k in 0 .. K-1:  acc = fma(x[k], w[k], acc)

in that order, at every row count, for every thread count, on every CPU: lanes are *outputs*,
never parts of a sum. Weights are packed in panels [N / PANEL][K][PANEL], so one pass streams
memory once; MR rows share each load, which is where verification of a draft becomes cheap.

vector_ir.py has the vector code they are made of.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import config, njit, types

from server.model.cpu.vector_ir import (
    F32,
    I16,
    I32,
    LANES,
    VECI,
    Loop,
    const,
    exp64,
    floats,
    fma,
    i64,
    intrinsic,
    lane_sum,
    load,
    load_bf16,
    prefetch,
    splat,
    store,
)
from server.model.cpu.vector_ir import exp as exp_vector
from server.model.cpu.vector_ir import product as emit_product


def has_avx512() -> bool:
    """Whether numba compiles for 512-bit registers (NUMBA_CPU_FEATURES overrides the host's)."""
    features: str | None = getattr(config, "CPU_FEATURES", None)
    if features is not None:
        return "+avx512f" in features.split(",")
    return bool(llvm.get_host_cpu_features().get("avx512f", False))


VECTORS_PER_PANEL = 4 if has_avx512() else 1
"""Vectors of outputs in a panel. A kernel of 6 rows x 4 vectors fills 32 zmm registers, one of
6 x 1 (two ymm each) 16 ymm registers."""

MAX_ROWS = 6
"""Rows of the largest kernel."""

PANEL = LANES * VECTORS_PER_PANEL
"""Outputs per weight panel."""

# --- kernels as intrinsics: addresses are intp, sizes are elements --------------------------


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


def _make_product(num_rows: int, bf16: bool, vectors: int = VECTORS_PER_PANEL) -> Any:
    """c[m, 0:width] = sum_k x[m, k] * panel[k, 0:width], m < num_rows, width = 16 * vectors, of a
    PanelTask."""

    @intrinsic
    def product(typingctx: Any, task: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            x, ldx, panel, k, c, ldc, fetched, step = (
                b.extract_value(args[0], i) for i in range(8)
            )
            pf = b.inttoptr(panel, (I16 if bf16 else F32).as_pointer())
            read = load_bf16 if bf16 else load

            def weights(index: Any) -> list[Any]:
                if vectors == VECTORS_PER_PANEL:
                    prefetch(b, b.add(fetched, b.mul(index, step)))
                base = b.mul(index, i64(PANEL))
                return [read(b, pf, b.add(base, i64(v * LANES))) for v in range(vectors)]

            emit_product(b, (num_rows, vectors), (x, ldx, k), weights, (c, ldc))
            return context.get_dummy_value()

        return types.void(task), codegen

    return product


_product1, _product2, _product4, _product6 = (_make_product(m, False) for m in (1, 2, 4, 6))
_bproduct1, _bproduct2, _bproduct4, _bproduct6 = (_make_product(m, True) for m in (1, 2, 4, 6))

_HALF = max(1, VECTORS_PER_PANEL // 2)
_half1, _half2, _half4 = (_make_product(m, False, _HALF) for m in (1, 2, 4))
_bhalf1, _bhalf2, _bhalf4 = (_make_product(m, True, _HALF) for m in (1, 2, 4))

HALVES = VECTORS_PER_PANEL // _HALF
"""Parts that a panel can be split into by columns when panels do not share out evenly."""

_LINE = 64
_MOST_FETCHED = 512 << 10
"""Bytes of a panel that is fetched while another is multiplied: both must fit into an L2 cache."""


@intrinsic
def fetch(typingctx: Any, address: Any, num_bytes: Any) -> Any:
    """Ask memory for num_bytes (at least 1) from an address, into the L2 cache."""
    sig = types.void(types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        loop = Loop(b, args[1], [], step=64)
        prefetch(b, b.add(args[0], loop.index))
        loop.close([])
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def exp_shifted(typingctx: Any, s: Any, num: Any, scale: Any, shift: Any) -> Any:
    """s[i] = exp(s[i] * scale - shift) for 16 * num floats at address s; returns their sum.

    The sum has 16 partial sums, lane by lane, added in order: a function of the positions only.
    """
    sig = types.float32(types.intp, types.intp, types.float32, types.float32)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        s, num, scale, shift = args
        sf = floats(b, s)
        scale_v, shift_v = splat(b, scale), splat(b, shift)
        loop = Loop(b, num, [const(0.0)])
        at = b.mul(loop.index, i64(LANES))
        e = exp_vector(b, b.fsub(b.fmul(load(b, sf, at), scale_v), shift_v))
        store(b, e, sf, at)
        (total,) = loop.close([b.fadd(loop.carried[0], e)])
        return lane_sum(b, total)

    return sig, codegen


@intrinsic
def exp_sum(typingctx: Any, s: Any, num: Any, shift: Any) -> Any:
    """sum of exp(s[i] - shift) over 16 * num floats at address s, lanes as in exp_shifted."""
    sig = types.float32(types.intp, types.intp, types.float32)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        s, num, shift = args
        sf = floats(b, s)
        shift_v = splat(b, shift)
        loop = Loop(b, num, [const(0.0)])
        e = exp_vector(b, b.fsub(load(b, sf, b.mul(loop.index, i64(LANES))), shift_v))
        (total,) = loop.close([b.fadd(loop.carried[0], e)])
        return lane_sum(b, total)

    return sig, codegen


@intrinsic
def exp_sum64(typingctx: Any, s: Any, num: Any, shift: Any) -> Any:
    """sum of exp(s[i] - shift) over 8 * num float64 at address s, none above shift.

    The sum has 8 partial sums, lane by lane, added in order.
    """
    sig = types.float64(types.intp, types.intp, types.float64)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        s, num, shift = args
        vec = ir.VectorType(ir.DoubleType(), 8)
        base = b.inttoptr(s, ir.DoubleType().as_pointer())
        one = b.insert_element(ir.Constant(vec, ir.Undefined), shift, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, 8), [0] * 8)
        shift_v = b.shuffle_vector(one, ir.Constant(vec, ir.Undefined), zeros)
        loop = Loop(b, num, [ir.Constant(vec, [0.0] * 8)])
        at = b.gep(base, [b.mul(loop.index, i64(8))])
        value = b.load(b.bitcast(at, vec.as_pointer()))
        value.align = 8
        (total,) = loop.close([b.fadd(loop.carried[0], exp64(b, b.fsub(value, shift_v)))])
        result = b.extract_element(total, ir.Constant(I32, 0))
        for lane in range(1, 8):
            result = b.fadd(result, b.extract_element(total, ir.Constant(I32, lane)))
        return result

    return sig, codegen


@intrinsic
def max_of(typingctx: Any, s: Any, num: Any) -> Any:
    """The largest of 16 * num floats at address s (no NaN among them)."""
    sig = types.float32(types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        s, num = args
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
        return b.extract_element(lanes, ir.Constant(I32, 0))

    return sig, codegen


@intrinsic
def sum_of_squares(typingctx: Any, x: Any, num: Any) -> Any:
    """sum of x[i]^2 over 16 * num floats at address x, lanes as in exp_shifted."""
    sig = types.float32(types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, num = args
        xf = floats(b, x)
        loop = Loop(b, num, [const(0.0)])
        v = load(b, xf, b.mul(loop.index, i64(LANES)))
        (total,) = loop.close([fma(b, v, v, loop.carried[0])])
        return lane_sum(b, total)

    return sig, codegen


def _make_gate(gelu: bool) -> Any:
    """out[i] = act(g[i]) * u[i] for 16 * num floats; act = SiLU, or GELU's tanh form.

    Both are g / (1 + exp(-z)): z = g for SiLU, z = 2 * sqrt(2/pi) * (g + 0.044715 g^3) for GELU.
    """

    @intrinsic
    def gate(typingctx: Any, g: Any, u: Any, out: Any, num: Any) -> Any:
        sig = types.void(*([types.intp] * 4))

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            g, u, out, num = args
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
            return context.get_dummy_value()

        return sig, codegen

    return gate


silu_gate = _make_gate(gelu=False)
gelu_gate = _make_gate(gelu=True)


@intrinsic
def scaled_product(typingctx: Any, x: Any, scale: Any, y: Any, out: Any, num: Any) -> Any:
    """out[i] = (x[i] * scale) * y[i] for 16 * num floats at addresses x, y and out."""
    i = types.intp
    sig = types.void(i, types.float32, i, i, i)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, scale, y, out, num = args
        xf, yf, of = floats(b, x), floats(b, y), floats(b, out)
        scale_v = splat(b, scale)
        loop = Loop(b, num, [])
        at = b.mul(loop.index, i64(LANES))
        store(b, b.fmul(b.fmul(load(b, xf, at), scale_v), load(b, yf, at)), of, at)
        loop.close([])
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def float_at(typingctx: Any, address: Any, index: Any) -> Any:
    """The float32 number `index` of those at an address."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(b.gep(floats(b, args[0]), [args[1]]))

    return types.float32(types.intp, types.intp), codegen


@intrinsic
def set_float(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Write the float32 number `index` of those at an address."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[2], b.gep(floats(b, args[0]), [args[1]]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), codegen


# --- numba functions ------------------------------------------------------------------------

inline: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy")

_UNCOUNTED: dict[str, Any] = {"_nrt": False}
borrows: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy", **_UNCOUNTED)
"""Compiles a function of a team's share that makes no arrays and counts no references to those that
it is given: threads that count references of the same arrays wait for each other, microseconds
between two barriers. Whoever runs the job holds the arrays. What it calls is compiled so too,
unless that says otherwise. Such a function returns no array."""


@inline
def _pass(num, task, bf16):
    """num rows against a panel: 6, 4, 2 or 1."""
    if bf16:
        if num == 6:
            _bproduct6(task)
        elif num == 4:
            _bproduct4(task)
        elif num == 2:
            _bproduct2(task)
        else:
            _bproduct1(task)
    else:
        if num == 6:
            _product6(task)
        elif num == 4:
            _product4(task)
        elif num == 2:
            _product2(task)
        else:
            _product1(task)


@inline
def _half_pass(num, task, bf16):
    """num rows against a part of a panel: 4, 2 or 1."""
    if bf16:
        if num == 4:
            _bhalf4(task)
        elif num == 2:
            _bhalf2(task)
        else:
            _bhalf1(task)
    else:
        if num == 4:
            _half4(task)
        elif num == 2:
            _half2(task)
        else:
            _half1(task)


@inline
def _rows_of_pass(left, most):
    """Rows of the next pass when so many are left."""
    if left >= most:
        return most
    return 4 if left >= 4 else 2 if left >= 2 else 1


@inline
def _rows_from(task, m, fetched, step):
    """The task of the rows from m on."""
    return PanelTask(
        task.x + m * task.ldx * 4, task.ldx, task.panel, task.k, task.c + m * task.ldc * 4,
        task.ldc, fetched, step,
    )  # fmt: skip


@inline
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


@inline
def half_panel_product(task, num_rows, bf16):
    """All rows against 1 / HALVES of a panel's columns, panel and c at the first of them."""
    m = 0
    while m < num_rows:
        num = _rows_of_pass(num_rows - m, 4)
        _half_pass(num, _rows_from(task, m, task.panel, 0), bf16)
        m += num


@inline
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


def pack_panels(weight: npt.NDArray[Any], out: npt.NDArray[Any], *, first_panel: int = 0) -> None:
    """Write `weight` [N, K] into `out` [panels, K, PANEL] from panel `first_panel` on.

    Both float32, or both uint16 holding bfloat16 bits. Columns past N are zero.
    """
    num, k = weight.shape
    for p in range(-(-num // PANEL)):
        rows = weight[p * PANEL : (p + 1) * PANEL]
        target = out[first_panel + p]
        target[:, : rows.shape[0]] = rows.T
        target[:, rows.shape[0] :] = 0
    assert out.shape[1:] == (k, PANEL)
