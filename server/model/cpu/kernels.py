"""The CPU kernels: matrix products and row operations whose bits do not depend on the batch.

What: numba functions around a handful of vector kernels written as LLVM IR (llvmlite), for the
one thing libraries do not promise: *each row gets the same bits whatever the other rows are*.
Tried first: oneDNN's prepacked linear. It is close in speed, but with AVX-512 it splits the sum
of a 1536-wide product differently for one row than for two (loadtest/NOTES.md, "Why our own
matrix product"), and then speculation would change the text. Here every output is

    acc = 0;  for k in 0 .. K-1:  acc = fma(x[k], w[k], acc)

in that order, at every row count, for every thread count, on every CPU: lanes are *outputs*,
never parts of a sum. Weights are packed in panels [N / PANEL][K][PANEL], so one pass streams
memory once; MR rows share each load, which is where verification of a draft becomes cheap.

Not here: the shape of a model (cpu_runner.py), sampling (cpu_sampler.py).
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import config, njit, types
from numba.extending import intrinsic as numba_intrinsic

LANES = 16
"""float32 lanes of one IR vector; LLVM splits it in two on a CPU with 256-bit registers."""


def _has_avx512() -> bool:
    """Whether numba compiles for 512-bit registers (NUMBA_CPU_FEATURES overrides the host's)."""
    features: str | None = getattr(config, "CPU_FEATURES", None)
    if features is not None:
        return "+avx512f" in features.split(",")
    return bool(llvm.get_host_cpu_features().get("avx512f", False))


VECTORS_PER_PANEL = 4 if _has_avx512() else 1
"""Vectors of outputs in a panel. A kernel of 6 rows x 4 vectors fills 32 zmm registers, one of
6 x 1 (two ymm each) 16 ymm registers."""

MAX_ROWS = 6
"""Rows of the largest kernel."""

PANEL = LANES * VECTORS_PER_PANEL
"""Outputs per weight panel."""

_F32 = ir.FloatType()
_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_I16 = ir.IntType(16)
_VEC = ir.VectorType(_F32, LANES)
_VECI = ir.VectorType(_I32, LANES)


intrinsic: Any = numba_intrinsic

# --- IR building blocks ---------------------------------------------------------------------


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z with one rounding, on a vector."""
    name = f"llvm.fma.v{LANES}f32"
    fn = b.module.globals.get(name)
    if fn is None:
        fn = ir.Function(b.module, ir.FunctionType(_VEC, [_VEC] * 3), name)
    return b.call(fn, [x, y, z])


def _splat(b: Any, scalar: Any, vec: Any = _VEC) -> Any:
    one = b.insert_element(ir.Constant(vec, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return b.shuffle_vector(one, ir.Constant(vec, ir.Undefined), zeros)


def _const(value: float) -> Any:
    return ir.Constant(_VEC, [value] * LANES)


def _load(b: Any, base: Any, index: Any) -> Any:
    """One vector from float pointer `base` + `index` elements; any alignment."""
    value = b.load(b.bitcast(b.gep(base, [index]), _VEC.as_pointer()))
    value.align = 4
    return value


def _load_bf16(b: Any, base: Any, index: Any) -> Any:
    """One vector of bfloat16 (stored as uint16), widened to float32: exact."""
    vec16 = ir.VectorType(_I16, LANES)
    raw = b.load(b.bitcast(b.gep(base, [index]), vec16.as_pointer()))
    raw.align = 2
    wide = b.zext(raw, _VECI)
    return b.bitcast(b.shl(wide, ir.Constant(_VECI, [16] * LANES)), _VEC)


def _store(b: Any, value: Any, base: Any, index: Any) -> None:
    store = b.store(value, b.bitcast(b.gep(base, [index]), _VEC.as_pointer()))
    store.align = 4


def _i64(value: int) -> Any:
    return ir.Constant(_I64, value)


def _floats(b: Any, address: Any) -> Any:
    return b.inttoptr(address, _F32.as_pointer())


class _Loop:
    """`for i in range(0, n, step)` with carried values; n >= 1 is the caller's promise."""

    def __init__(self, b: Any, num: Any, initial: list[Any], step: int = 1) -> None:
        self.b, self.num, self.step = b, num, step
        entry = b.block
        self.body = b.append_basic_block("loop")
        self.done = b.append_basic_block("done")
        b.branch(self.body)
        b.position_at_end(self.body)
        self.index = b.phi(_I64)
        self.index.add_incoming(_i64(0), entry)
        self.carried = []
        for value in initial:
            phi = b.phi(value.type)
            phi.add_incoming(value, entry)
            self.carried.append(phi)

    def close(self, new: list[Any]) -> list[Any]:
        b = self.b
        following = b.add(self.index, _i64(self.step))
        tail = b.block
        b.cbranch(b.icmp_signed("<", following, self.num), self.body, self.done)
        self.index.add_incoming(following, tail)
        for phi, value in zip(self.carried, new, strict=True):
            phi.add_incoming(value, tail)
        b.position_at_end(self.done)
        return new


def _exp(b: Any, x: Any) -> Any:
    """exp on a vector: Cephes' expf (2^n * polynomial on [-ln2/2, ln2/2]), |relative error| < 2e-7.

    Exactly 0 below -87.3; clamped at 88.
    """
    low = _const(-87.3)
    x_clamped = b.select(b.fcmp_ordered("<", x, _const(88.0)), x, _const(88.0))
    x_clamped = b.select(b.fcmp_ordered(">", x_clamped, low), x_clamped, low)
    magic = _const(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
    shifted = b.fadd(b.fmul(x_clamped, _const(1.44269504088896341)), magic)
    n = b.fsub(shifted, magic)
    r = _fma(b, n, _const(-0.693359375), x_clamped)
    r = _fma(b, n, _const(2.12194440e-4), r)
    p = _const(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(b, p, r, _const(c))
    p = _fma(b, p, b.fmul(r, r), b.fadd(r, _const(1.0)))
    bits = b.shl(
        b.add(b.fptosi(n, _VECI), ir.Constant(_VECI, [127] * LANES)),
        ir.Constant(_VECI, [23] * LANES),
    )
    value = b.fmul(p, b.bitcast(bits, _VEC))
    return b.select(b.fcmp_ordered(">", x, low), value, _const(0.0))


def _lane_sum(b: Any, vec: Any) -> Any:
    """The lanes added in order 0..15."""
    total = b.extract_element(vec, ir.Constant(_I32, 0))
    for lane in range(1, LANES):
        total = b.fadd(total, b.extract_element(vec, ir.Constant(_I32, lane)))
    return total


# --- kernels as intrinsics: addresses are intp, sizes are elements --------------------------


def _make_product(num_rows: int, bf16: bool, vectors: int = VECTORS_PER_PANEL) -> Any:
    """c[m, 0:width] = sum_k x[m, k] * panel[k, 0:width], m < num_rows, width = 16 * vectors.

    (x address, x row stride, panel address, K, c address, c row stride).
    """

    @intrinsic
    def product(typingctx: Any, x: Any, ldx: Any, panel: Any, k: Any, c: Any, ldc: Any) -> Any:
        sig = types.void(*([types.intp] * 6))

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            x, ldx, panel, k, c, ldc = args
            xf, cf = _floats(b, x), _floats(b, c)
            pf = b.inttoptr(panel, (_I16 if bf16 else _F32).as_pointer())
            rows = [b.gep(xf, [b.mul(ldx, _i64(m))]) for m in range(num_rows)]
            loop = _Loop(b, k, [_const(0.0)] * (num_rows * vectors))
            base = b.mul(loop.index, _i64(PANEL))
            load = _load_bf16 if bf16 else _load
            w = [load(b, pf, b.add(base, _i64(v * LANES))) for v in range(vectors)]
            new = []
            for m in range(num_rows):
                xv = _splat(b, b.load(b.gep(rows[m], [loop.index])))
                new += [_fma(b, xv, w[v], loop.carried[m * vectors + v]) for v in range(vectors)]
            acc = loop.close(new)
            for m in range(num_rows):
                for v in range(vectors):
                    at = b.add(b.mul(ldc, _i64(m)), _i64(v * LANES))
                    _store(b, acc[m * vectors + v], cf, at)
            return context.get_dummy_value()

        return sig, codegen

    return product


_product1, _product2, _product4, _product6 = (_make_product(m, False) for m in (1, 2, 4, 6))
_bproduct1, _bproduct2, _bproduct4, _bproduct6 = (_make_product(m, True) for m in (1, 2, 4, 6))

_HALF = max(1, VECTORS_PER_PANEL // 2)
_half1, _half2, _half4 = (_make_product(m, False, _HALF) for m in (1, 2, 4))
_bhalf1, _bhalf2, _bhalf4 = (_make_product(m, True, _HALF) for m in (1, 2, 4))

HALVES = VECTORS_PER_PANEL // _HALF
"""Parts that a panel can be split into by columns when panels do not share out evenly."""


def _make_scores(num_heads: int) -> Any:
    """s[g, 0:16] = sum_d q[g, d] * k_block[d, 0:16], d in order: one block of 16 keys.

    (q address, q head stride, block address, head_dim, s address, s head stride).
    """

    @intrinsic
    def scores(typingctx: Any, q: Any, ldq: Any, k: Any, d: Any, s: Any, lds: Any) -> Any:
        sig = types.void(*([types.intp] * 6))

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            q, ldq, k, d, s, lds = args
            qf, kf, sf = _floats(b, q), _floats(b, k), _floats(b, s)
            heads = [b.gep(qf, [b.mul(ldq, _i64(g))]) for g in range(num_heads)]
            loop = _Loop(b, d, [_const(0.0)] * num_heads)
            key = _load(b, kf, b.mul(loop.index, _i64(LANES)))
            new = [
                _fma(b, _splat(b, b.load(b.gep(heads[g], [loop.index]))), key, loop.carried[g])
                for g in range(num_heads)
            ]
            acc = loop.close(new)
            for g in range(num_heads):
                _store(b, acc[g], sf, b.mul(lds, _i64(g)))
            return context.get_dummy_value()

        return sig, codegen

    return scores


_scores1, _scores2, _scores3, _scores4 = (_make_scores(g) for g in (1, 2, 3, 4))


def _make_weighted(num_heads: int, vectors: int) -> Any:
    """acc[g, :] += sum over keys of p[g, key] * v[key, :], keys in order; 16 * vectors columns.

    (p address, p head stride, v address, v key stride, keys, acc address, acc head stride).
    """

    @intrinsic
    def weighted(
        typingctx: Any, p: Any, ldp: Any, v: Any, ldv: Any, num: Any, acc: Any, lda: Any
    ) -> Any:
        sig = types.void(*([types.intp] * 7))

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            p, ldp, v, ldv, num, acc, lda = args
            pf, vf, af = _floats(b, p), _floats(b, v), _floats(b, acc)
            where = [
                b.add(b.mul(lda, _i64(g)), _i64(c * LANES))
                for g in range(num_heads)
                for c in range(vectors)
            ]
            loop = _Loop(b, num, [_load(b, af, at) for at in where])
            base = b.mul(loop.index, ldv)
            value = [_load(b, vf, b.add(base, _i64(c * LANES))) for c in range(vectors)]
            new = []
            for g in range(num_heads):
                at = b.add(b.mul(ldp, _i64(g)), loop.index)
                weight = _splat(b, b.load(b.gep(pf, [at])))
                new += [
                    _fma(b, weight, value[c], loop.carried[g * vectors + c]) for c in range(vectors)
                ]
            for at, result in zip(where, loop.close(new), strict=True):
                _store(b, result, af, at)
            return context.get_dummy_value()

        return sig, codegen

    return weighted


_weighted1x1, _weighted1x4 = _make_weighted(1, 1), _make_weighted(1, 4)
_weighted2x1, _weighted2x4 = _make_weighted(2, 1), _make_weighted(2, 4)
_weighted3x1, _weighted3x4 = _make_weighted(3, 1), _make_weighted(3, 4)
_weighted4x1, _weighted4x4 = _make_weighted(4, 1), _make_weighted(4, 4)


@intrinsic
def exp_shifted(typingctx: Any, s: Any, num: Any, scale: Any, shift: Any) -> Any:
    """s[i] = exp(s[i] * scale - shift) for 16 * num floats at address s; returns their sum.

    The sum has 16 partial sums, lane by lane, added in order: a function of the positions only.
    """
    sig = types.float32(types.intp, types.intp, types.float32, types.float32)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        s, num, scale, shift = args
        sf = _floats(b, s)
        scale_v, shift_v = _splat(b, scale), _splat(b, shift)
        loop = _Loop(b, num, [_const(0.0)])
        at = b.mul(loop.index, _i64(LANES))
        e = _exp(b, b.fsub(b.fmul(_load(b, sf, at), scale_v), shift_v))
        _store(b, e, sf, at)
        (total,) = loop.close([b.fadd(loop.carried[0], e)])
        return _lane_sum(b, total)

    return sig, codegen


@intrinsic
def exp_sum(typingctx: Any, s: Any, num: Any, shift: Any) -> Any:
    """sum of exp(s[i] - shift) over 16 * num floats at address s, lanes as in exp_shifted."""
    sig = types.float32(types.intp, types.intp, types.float32)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        s, num, shift = args
        sf = _floats(b, s)
        shift_v = _splat(b, shift)
        loop = _Loop(b, num, [_const(0.0)])
        e = _exp(b, b.fsub(_load(b, sf, b.mul(loop.index, _i64(LANES))), shift_v))
        (total,) = loop.close([b.fadd(loop.carried[0], e)])
        return _lane_sum(b, total)

    return sig, codegen


def _exp64(b: Any, x: Any) -> Any:
    """exp on 8 float64 lanes for x <= 0: Cephes' exp (rational, relative error < 3e-16); 0 below
    -700."""
    vec, bits = ir.VectorType(ir.DoubleType(), 8), ir.VectorType(_I64, 8)

    def const(value: float) -> Any:
        return ir.Constant(vec, [value] * 8)

    def poly(z: Any, coefficients: tuple[float, ...]) -> Any:
        value = const(coefficients[0])
        for c in coefficients[1:]:
            value = b.fadd(b.fmul(value, z), const(c))
        return value

    low = const(-700.0)
    clamped = b.select(b.fcmp_ordered(">", x, low), x, low)
    magic = const(6755399441055744.0)  # 1.5 * 2^52: adding it rounds to an integer
    n = b.fsub(b.fadd(b.fmul(clamped, const(1.4426950408889634)), magic), magic)
    r = b.fsub(clamped, b.fmul(n, const(6.93145751953125e-1)))
    r = b.fsub(r, b.fmul(n, const(1.42860682030941723212e-6)))
    z = b.fmul(r, r)
    p = b.fmul(r, poly(z, (1.26177193074810590878e-4, 3.02994407707441961300e-2, 1.0)))
    q = poly(
        z, (3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1, 2.0)
    )
    value = b.fadd(const(1.0), b.fmul(const(2.0), b.fdiv(p, b.fsub(q, p))))
    power = b.shl(
        b.add(b.fptosi(n, bits), ir.Constant(bits, [1023] * 8)), ir.Constant(bits, [52] * 8)
    )
    value = b.fmul(value, b.bitcast(power, vec))
    return b.select(b.fcmp_ordered(">", x, low), value, const(0.0))


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
        one = b.insert_element(ir.Constant(vec, ir.Undefined), shift, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, 8), [0] * 8)
        shift_v = b.shuffle_vector(one, ir.Constant(vec, ir.Undefined), zeros)
        loop = _Loop(b, num, [ir.Constant(vec, [0.0] * 8)])
        at = b.gep(base, [b.mul(loop.index, _i64(8))])
        value = b.load(b.bitcast(at, vec.as_pointer()))
        value.align = 8
        (total,) = loop.close([b.fadd(loop.carried[0], _exp64(b, b.fsub(value, shift_v)))])
        result = b.extract_element(total, ir.Constant(_I32, 0))
        for lane in range(1, 8):
            result = b.fadd(result, b.extract_element(total, ir.Constant(_I32, lane)))
        return result

    return sig, codegen


@intrinsic
def max_of(typingctx: Any, s: Any, num: Any) -> Any:
    """The largest of 16 * num floats at address s (no NaN among them)."""
    sig = types.float32(types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        s, num = args
        sf = _floats(b, s)
        loop = _Loop(b, num, [_const(float("-inf"))])
        v = _load(b, sf, b.mul(loop.index, _i64(LANES)))
        best = b.select(b.fcmp_ordered(">", v, loop.carried[0]), v, loop.carried[0])
        (lanes,) = loop.close([best])
        top = b.extract_element(lanes, ir.Constant(_I32, 0))
        for lane in range(1, LANES):
            x = b.extract_element(lanes, ir.Constant(_I32, lane))
            top = b.select(b.fcmp_ordered(">", x, top), x, top)
        return top

    return sig, codegen


@intrinsic
def sum_of_squares(typingctx: Any, x: Any, num: Any) -> Any:
    """sum of x[i]^2 over 16 * num floats at address x, lanes as in exp_shifted."""
    sig = types.float32(types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, num = args
        xf = _floats(b, x)
        loop = _Loop(b, num, [_const(0.0)])
        v = _load(b, xf, b.mul(loop.index, _i64(LANES)))
        (total,) = loop.close([_fma(b, v, v, loop.carried[0])])
        return _lane_sum(b, total)

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
            gf, uf, of = _floats(b, g), _floats(b, u), _floats(b, out)
            loop = _Loop(b, num, [])
            at = b.mul(loop.index, _i64(LANES))
            x = _load(b, gf, at)
            if gelu:
                cubic = b.fmul(b.fmul(x, x), b.fmul(x, _const(0.044715)))
                z = b.fmul(b.fadd(x, cubic), _const(-1.5957691216057308))
            else:
                z = b.fmul(x, _const(-1.0))
            act = b.fdiv(x, b.fadd(_const(1.0), _exp(b, z)))
            _store(b, b.fmul(act, _load(b, uf, at)), of, at)
            loop.close([])
            return context.get_dummy_value()

        return sig, codegen

    return gate


silu_gate = _make_gate(gelu=False)
gelu_gate = _make_gate(gelu=True)


@intrinsic
def fetch_add(typingctx: Any, address: Any) -> Any:
    """Atomically add 1 to the int64 at `address`; returns the value before: work is handed out
    panel by panel, so a core that the API process borrows does not hold the other one up."""
    sig = types.intp(types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], _I64.as_pointer()), _i64(1), "monotonic")

    return sig, codegen


# --- numba functions ------------------------------------------------------------------------

inline: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy")


@inline
def panel_product(x, ldx, num_rows, panel, k, c, ldc, bf16):
    """All rows against one panel, 6, 4, 2 and 1 rows at a time: the same bits each way."""
    m = 0
    if bf16:
        while num_rows - m >= 6:
            _bproduct6(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 6
        if num_rows - m >= 4:
            _bproduct4(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 4
        if num_rows - m >= 2:
            _bproduct2(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 2
        if num_rows - m >= 1:
            _bproduct1(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 1
    else:
        while num_rows - m >= 6:
            _product6(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 6
        if num_rows - m >= 4:
            _product4(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 4
        if num_rows - m >= 2:
            _product2(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 2
        if num_rows - m >= 1:
            _product1(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 1


@inline
def half_panel_product(x, ldx, num_rows, panel, k, c, ldc, bf16):
    """All rows against 1 / HALVES of a panel's columns, `panel` and `c` at the first of them."""
    m = 0
    if bf16:
        while num_rows - m >= 4:
            _bhalf4(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 4
        if num_rows - m >= 2:
            _bhalf2(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 2
        if num_rows - m >= 1:
            _bhalf1(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 1
    else:
        while num_rows - m >= 4:
            _half4(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 4
        if num_rows - m >= 2:
            _half2(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 2
        if num_rows - m >= 1:
            _half1(x + m * ldx * 4, ldx, panel, k, c + m * ldc * 4, ldc)
            m += 1


@inline
def block_scores(q, ldq, num_heads, block, head_dim, s, lds):
    """Scores of all query heads of one KV head against one block of 16 keys."""
    g = 0
    while num_heads - g >= 4:
        _scores4(q + g * ldq * 4, ldq, block, head_dim, s + g * lds * 4, lds)
        g += 4
    if num_heads - g == 3:
        _scores3(q + g * ldq * 4, ldq, block, head_dim, s + g * lds * 4, lds)
    elif num_heads - g == 2:
        _scores2(q + g * ldq * 4, ldq, block, head_dim, s + g * lds * 4, lds)
    elif num_heads - g == 1:
        _scores1(q + g * ldq * 4, ldq, block, head_dim, s + g * lds * 4, lds)


@inline
def _weighted_columns(p, ldp, num_heads, v, ldv, num_keys, acc, lda, wide):
    g = 0
    while num_heads - g >= 4:
        if wide:
            _weighted4x4(p + g * ldp * 4, ldp, v, ldv, num_keys, acc + g * lda * 4, lda)
        else:
            _weighted4x1(p + g * ldp * 4, ldp, v, ldv, num_keys, acc + g * lda * 4, lda)
        g += 4
    left = num_heads - g
    p, acc = p + g * ldp * 4, acc + g * lda * 4
    if left == 3:
        if wide:
            _weighted3x4(p, ldp, v, ldv, num_keys, acc, lda)
        else:
            _weighted3x1(p, ldp, v, ldv, num_keys, acc, lda)
    elif left == 2:
        if wide:
            _weighted2x4(p, ldp, v, ldv, num_keys, acc, lda)
        else:
            _weighted2x1(p, ldp, v, ldv, num_keys, acc, lda)
    elif left == 1:
        if wide:
            _weighted1x4(p, ldp, v, ldv, num_keys, acc, lda)
        else:
            _weighted1x1(p, ldp, v, ldv, num_keys, acc, lda)


@inline
def add_weighted(p, ldp, num_heads, v, ldv, num_keys, width, acc, lda):
    """acc[g, 0:width] += p[g, keys] @ v[keys, 0:width], keys in order; width % 16 == 0."""
    c = 0
    while width - c >= 4 * LANES:
        _weighted_columns(p, ldp, num_heads, v + c * 4, ldv, num_keys, acc + c * 4, lda, True)
        c += 4 * LANES
    while width - c >= LANES:
        _weighted_columns(p, ldp, num_heads, v + c * 4, ldv, num_keys, acc + c * 4, lda, False)
        c += LANES


@inline
def rms_norm(x, weight, out, n, eps):
    """out = x / sqrt(mean(x^2) + eps) * weight over 1-D float32 arrays of n elements."""
    whole = n // LANES
    total = np.float32(0.0)
    if whole > 0:
        total = sum_of_squares(x.ctypes.data, whole)
    for i in range(whole * LANES, n):
        total += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(n) + eps)
    for i in range(n):
        out[i] = (x[i] * scale) * weight[i]


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
