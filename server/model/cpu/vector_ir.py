"""Building blocks of the CPU kernels: vector code as LLVM IR (llvmlite), for numba intrinsics.

Types, loads, stores, loops and exponentials on vectors of 16 float32 (8 float64) lanes. Each
function takes the IR builder `b` and returns an IR value. kernels.py combines them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic as numba_intrinsic

LANES = 16
"""float32 lanes of one IR vector; LLVM splits it in two on a CPU with 256-bit registers."""

F32 = ir.FloatType()
I64 = ir.IntType(64)
I32 = ir.IntType(32)
I16 = ir.IntType(16)
VEC = ir.VectorType(F32, LANES)
VECI = ir.VectorType(I32, LANES)

intrinsic: Any = numba_intrinsic


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z with one rounding, on a vector."""
    name = f"llvm.fma.v{LANES}f32"
    fn = b.module.globals.get(name)
    if fn is None:
        fn = ir.Function(b.module, ir.FunctionType(VEC, [VEC] * 3), name)
    return b.call(fn, [x, y, z])


def splat(b: Any, scalar: Any, vec: Any = VEC) -> Any:
    """All lanes of a vector set to one scalar."""
    one = b.insert_element(ir.Constant(vec, ir.Undefined), scalar, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return b.shuffle_vector(one, ir.Constant(vec, ir.Undefined), zeros)


def const(value: float) -> Any:
    """All lanes of a vector set to one number."""
    return ir.Constant(VEC, [value] * LANES)


def load(b: Any, base: Any, index: Any) -> Any:
    """One vector from float pointer `base` + `index` elements; any alignment."""
    value = b.load(b.bitcast(b.gep(base, [index]), VEC.as_pointer()))
    value.align = 4
    return value


def load_bf16(b: Any, base: Any, index: Any) -> Any:
    """One vector of bfloat16 (stored as uint16), widened to float32: exact."""
    vec16 = ir.VectorType(I16, LANES)
    raw = b.load(b.bitcast(b.gep(base, [index]), vec16.as_pointer()))
    raw.align = 2
    wide = b.zext(raw, VECI)
    return b.bitcast(b.shl(wide, ir.Constant(VECI, [16] * LANES)), VEC)


def load_f16(b: Any, base: Any, index: Any) -> Any:
    """One vector of float16 (stored as uint16), widened to float32: exact."""
    vec16 = ir.VectorType(I16, LANES)
    raw = b.load(b.bitcast(b.gep(base, [index]), vec16.as_pointer()))
    raw.align = 2
    return b.fpext(b.bitcast(raw, ir.VectorType(ir.HalfType(), LANES)), VEC)


def store(b: Any, value: Any, base: Any, index: Any) -> None:
    """Write one vector to float pointer `base` + `index` elements; any alignment."""
    stored = b.store(value, b.bitcast(b.gep(base, [index]), VEC.as_pointer()))
    stored.align = 4


def i64(value: int) -> Any:
    """An int64 constant."""
    return ir.Constant(I64, value)


def floats(b: Any, address: Any) -> Any:
    """An address (int64) as a pointer to float32."""
    return b.inttoptr(address, F32.as_pointer())


class Loop:
    """`for i in range(0, n, step)` with carried values; n >= 1 is the caller's promise."""

    def __init__(self, b: Any, num: Any, initial: list[Any], step: int = 1) -> None:
        self.b, self.num, self.step = b, num, step
        entry = b.block
        self.body = b.append_basic_block("loop")
        self.done = b.append_basic_block("done")
        b.branch(self.body)
        b.position_at_end(self.body)
        self.index = b.phi(I64)
        self.index.add_incoming(i64(0), entry)
        self.carried = []
        for value in initial:
            phi = b.phi(value.type)
            phi.add_incoming(value, entry)
            self.carried.append(phi)

    def close(self, new: list[Any]) -> list[Any]:
        """End the body; `new` are the carried values of the next round, and of what follows."""
        b = self.b
        following = b.add(self.index, i64(self.step))
        tail = b.block
        b.cbranch(b.icmp_signed("<", following, self.num), self.body, self.done)
        self.index.add_incoming(following, tail)
        for phi, value in zip(self.carried, new, strict=True):
            phi.add_incoming(value, tail)
        b.position_at_end(self.done)
        return new


def prefetch(b: Any, address: Any) -> None:
    """Have the cache line at an address (int64) brought into the L2 cache."""
    pointer, name = ir.IntType(8).as_pointer(), "llvm.prefetch.p0"
    fn = b.module.globals.get(name)
    if fn is None:
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        fn = ir.Function(b.module, kind, name)
    read_l2_data = [ir.Constant(I32, n) for n in (0, 2, 1)]
    b.call(fn, [b.inttoptr(address, pointer), *read_l2_data])


def product(
    b: Any,
    tile: tuple[int, int],
    inputs: tuple[Any, Any, Any],
    weights: Callable[[Any], list[Any]],
    out: tuple[Any, Any],
) -> None:
    """out[m, :] = sum over k in order of x[m, k] * weights(k), for the rows m of a tile.

    tile: (rows, vectors of outputs). inputs: (x address, its row stride, K >= 1), out: (address,
    row stride), strides in elements. weights: emits the vectors of input k's weights, once a k.
    """
    (num_rows, vectors), (x, ldx, k), (c, ldc) = tile, inputs, out
    xf, cf = floats(b, x), floats(b, c)
    rows = [b.gep(xf, [b.mul(ldx, i64(m))]) for m in range(num_rows)]
    loop = Loop(b, k, [const(0.0)] * (num_rows * vectors))
    w = weights(loop.index)
    new = []
    for m in range(num_rows):
        xv = splat(b, b.load(b.gep(rows[m], [loop.index])))
        new += [fma(b, xv, w[v], loop.carried[m * vectors + v]) for v in range(vectors)]
    acc = loop.close(new)
    for m in range(num_rows):
        for v in range(vectors):
            store(b, acc[m * vectors + v], cf, b.add(b.mul(ldc, i64(m)), i64(v * LANES)))


def exp(b: Any, x: Any) -> Any:
    """exp on a vector: Cephes' expf (2^n * polynomial on [-ln2/2, ln2/2]), |relative error| < 2e-7.

    Exactly 0 below -87.3; clamped at 88.
    """
    low = const(-87.3)
    x_clamped = b.select(b.fcmp_ordered("<", x, const(88.0)), x, const(88.0))
    x_clamped = b.select(b.fcmp_ordered(">", x_clamped, low), x_clamped, low)
    magic = const(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
    shifted = b.fadd(b.fmul(x_clamped, const(1.44269504088896341)), magic)
    n = b.fsub(shifted, magic)
    r = fma(b, n, const(-0.693359375), x_clamped)
    r = fma(b, n, const(2.12194440e-4), r)
    p = const(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(b, p, r, const(c))
    p = fma(b, p, b.fmul(r, r), b.fadd(r, const(1.0)))
    bits = b.shl(
        b.add(b.fptosi(n, VECI), ir.Constant(VECI, [127] * LANES)),
        ir.Constant(VECI, [23] * LANES),
    )
    value = b.fmul(p, b.bitcast(bits, VEC))
    return b.select(b.fcmp_ordered(">", x, low), value, const(0.0))


def lane_sum(b: Any, vec: Any) -> Any:
    """The lanes added in order 0..15."""
    total = b.extract_element(vec, ir.Constant(I32, 0))
    for lane in range(1, LANES):
        total = b.fadd(total, b.extract_element(vec, ir.Constant(I32, lane)))
    return total


def exp64(b: Any, x: Any) -> Any:
    """exp on 8 float64 lanes for x <= 0: Cephes' exp (rational, relative error < 3e-16); 0 below
    -700."""
    vec, bits = ir.VectorType(ir.DoubleType(), 8), ir.VectorType(I64, 8)

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
