"""Words of LLVM IR that the kernels are written in: types, loads, stores, loops, exponentials.

Each function takes the IR builder `b` and returns an IR value. Addresses are int64 or pointers to
float; VEC and VECI are vectors of 16 lanes, which LLVM splits on a CPU with narrower registers.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, Signature

from drafters.ahead import numba_type
from drafters.target import chosen
from server.model.cpu.records import LANES

F16 = ir.HalfType()
F32 = ir.FloatType()
F64 = ir.DoubleType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VEC = ir.VectorType(F32, LANES)
VECI = ir.VectorType(I32, LANES)


class Word:
    """A word of compiled functions: see word."""

    def __init__(self, define: Callable[..., Any]) -> None:
        self.__name__, self.__doc__ = define.__name__, define.__doc__
        self._numba_type_: Any = None

    def __call__(self, *_: Any) -> Any:
        raise TypeError(f"{self.__name__} is called from compiled code")


def word(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """What some IR is called by in compiled functions. result, kinds: types as entries have them
    (drafters/jit.py). The function below takes the builder and LLVM values, and gives one, or None.
    """

    def decorate(define: Callable[..., Any]) -> Any:
        kinds_ = [numba_type(kind) for kind in kinds]
        found = Word(define)
        template: Any = type(define.__name__, (ConcreteTemplate,), {})
        template.key, template.cases = found, [Signature(numba_type(result), tuple(kinds_), None)]
        found._numba_type_ = types.Function(template)

        def lower(context: Any, b: Any, _: Any, args: Any) -> Any:
            value = define(b, *args)
            return context.get_dummy_value() if value is None else value

        lower_builtin(found, *kinds_)(lower)
        return found

    return decorate


def i32(value: int) -> Any:
    """A constant."""
    return ir.Constant(I32, value)


def i64(value: int) -> Any:
    """A constant."""
    return ir.Constant(I64, value)


def const(value: float, kind: Any = VEC) -> Any:
    """A constant of a type, in all lanes where that is a vector."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def call(b: Any, name: str, result: Any, arguments: list[Any], *, var_arg: bool = False) -> Any:
    """A call of a function by name, LLVM's or the C library's; declared on first use. var_arg: it
    takes any number of arguments behind the first."""
    fn = b.module.globals.get(name)
    if fn is None:
        kinds = [a.type for a in arguments]
        kind = ir.FunctionType(result, kinds[:1] if var_arg else kinds, var_arg=var_arg)
        fn = ir.Function(b.module, kind, name)
    return b.call(fn, arguments)


def keep_order(b: Any, *addresses: Any) -> None:
    """Loads before this come before loads behind it, as the compiler puts them. addresses: of own
    memory, which the compiler must believe to have been read and written here."""
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in addresses])
    constraints = ",".join(["r" for _ in addresses] + ["~{memory}"])
    b.call(ir.InlineAsm(kind, "", constraints, side_effect=True), list(addresses))


def at(b: Any, address: Any, offset: int, kind: Any, align: int) -> Any:
    """The value of type `kind` at address (int64) + offset bytes."""
    where = b.add(address, i64(offset)) if offset else address
    value = b.load(b.inttoptr(where, kind.as_pointer()))
    value.align = align
    return value


def put(b: Any, value: Any, address: Any, offset: int, align: int) -> None:
    """Write a value at address (int64) + offset bytes."""
    where = b.add(address, i64(offset)) if offset else address
    b.store(value, b.inttoptr(where, value.type.as_pointer())).align = align


def splat(b: Any, scalar: Any, vector: Any = VEC) -> Any:
    """The scalar in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    one = b.insert_element(undefined, scalar, i32(0))
    zeros = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return b.shuffle_vector(one, undefined, zeros)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z with one rounding, on vectors of floats."""
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])


def floats(b: Any, address: Any) -> Any:
    """An address (int64) as a pointer to float32."""
    return b.inttoptr(address, F32.as_pointer())


def load(b: Any, base: Any, index: Any) -> Any:
    """One vector from float pointer `base` + `index` elements; any alignment."""
    value = b.load(b.bitcast(b.gep(base, [index]), VEC.as_pointer()))
    value.align = 4
    return value


HAS_HALVES = bool({"f16c", "avx512f", "neon"} & chosen().features)
"""Whether the CPU turns float16 into float32 and back. Where it does not, LLVM would call what is
nowhere."""


def like(kind: Any, scalar: Any) -> Any:
    """The scalar type, or a vector of it where `kind` is a vector."""
    return ir.VectorType(scalar, kind.count) if isinstance(kind, ir.VectorType) else scalar


def from_half(b: Any, bits: Any) -> Any:
    """Float16, whose bits are int16, as float32: exact. One number or a vector, as in to_half."""
    number, whole = like(bits.type, F32), like(bits.type, I32)
    if HAS_HALVES:
        return b.fpext(b.bitcast(bits, like(bits.type, F16)), number)
    wide = b.zext(bits, whole)
    sign = b.shl(b.and_(wide, const(0x8000, whole)), const(16, whole))
    rest = b.bitcast(b.shl(b.and_(wide, const(0x7FFF, whole)), const(13, whole)), number)
    value = b.bitcast(b.fmul(rest, const(2.0**112, number)), whole)
    exponent = const(0x7C00, whole)
    is_finite = b.icmp_signed("!=", b.and_(wide, exponent), exponent)
    value = b.select(is_finite, value, b.or_(value, const(0x7F800000, whole)))
    return b.bitcast(b.or_(value, sign), number)


def to_half(b: Any, x: Any) -> Any:
    """The bits, int16, of the nearest float16, of two the even one. x: float32, 65504 at most."""
    number, whole = x.type, like(x.type, I32)
    if HAS_HALVES:
        return b.bitcast(b.fptrunc(x, like(number, F16)), like(number, I16))
    bits = b.bitcast(x, whole)
    sign = b.and_(bits, const(-(1 << 31), whole))
    size = b.xor(bits, sign)
    # A sum with 0.5 rounds a number below 2^-14 to the lowest bits, which are those wanted.
    small = b.bitcast(b.fadd(b.bitcast(size, number), const(0.5, number)), whole)
    small = b.sub(small, const(126 << 23, whole))
    odd = b.and_(b.lshr(size, const(13, whole)), const(1, whole))
    large = b.add(b.add(size, const(0xFFF - (112 << 23), whole)), odd)
    is_small = b.icmp_signed("<", size, const(113 << 23, whole))
    value = b.select(is_small, small, b.lshr(large, const(13, whole)))
    value = b.select(b.fcmp_unordered("uno", x, x), const(0x7E00, whole), value)
    return b.trunc(b.or_(value, b.lshr(sign, const(16, whole))), like(number, I16))


def load_halves(b: Any, address: Any, offset: int, num: int) -> Any:
    """num float16 at address (int64) + offset bytes as float32."""
    return from_half(b, at(b, address, offset, ir.VectorType(I16, num), 2))


def widened(b: Any, name: str, address: Any) -> Any:
    """16 numbers of a type at an address (int64) as float32: exact."""
    if name == "float32":
        return at(b, address, 0, VEC, 4)
    if name == "float16":
        return load_halves(b, address, 0, LANES)
    raw = at(b, address, 0, ir.VectorType(I8 if name == "int8" else I16, LANES), 1)
    if name == "int8":
        return b.sitofp(b.sext(raw, VECI), VEC)
    return b.bitcast(b.shl(b.zext(raw, VECI), const(16, VECI)), VEC)  # the upper half of a float32


def store(b: Any, value: Any, base: Any, index: Any) -> None:
    """Write one vector to float pointer `base` + `index` elements; any alignment."""
    stored = b.store(value, b.bitcast(b.gep(base, [index]), VEC.as_pointer()))
    stored.align = 4


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
    read_l2_data = [i32(n) for n in (0, 2, 1)]
    pointer = b.inttoptr(address, I8.as_pointer())
    call(b, "llvm.prefetch.p0", ir.VoidType(), [pointer, *read_l2_data])


def function(module: Any, name: str, num: int, define: Callable[[Any, Any], None]) -> Any:
    """A function of a module, void of `num` int64, that is compiled once, however often it is
    called. define: emits what it does, by (builder, arguments)."""
    fn = module.globals.get(name)
    if fn is None:
        fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * num), name)
        fn.linkage = "linkonce_odr"
        fn.attributes.add("noinline")
        b = ir.IRBuilder(fn.append_basic_block("entry"))
        define(b, fn.args)
        b.ret_void()
    return fn


def choose(b: Any, number: Any, cases: Mapping[int, Callable[[], None]]) -> None:
    """Emit what each case of an int64 does; nothing happens in others."""
    end = b.append_basic_block("end")
    switch = b.switch(number, end)
    for value, emit in cases.items():
        block = b.append_basic_block("case")
        switch.add_case(i64(value), block)
        b.position_at_end(block)
        emit()
        b.branch(end)
    b.position_at_end(end)


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
    bits = b.shl(b.add(b.fptosi(n, VECI), const(127, VECI)), const(23, VECI))
    value = b.fmul(p, b.bitcast(bits, VEC))
    return b.select(b.fcmp_ordered(">", x, low), value, const(0.0))


def lane_sum(b: Any, vec: Any) -> Any:
    """The lanes added in order."""
    total = b.extract_element(vec, i32(0))
    for lane in range(1, vec.type.count):
        total = b.fadd(total, b.extract_element(vec, i32(lane)))
    return total


WIDE = ir.VectorType(F64, 8)
"""8 float64 lanes."""


def exp64(b: Any, x: Any) -> Any:
    """exp on 8 float64 lanes for x <= 0: Cephes' exp (rational, relative error < 3e-16); 0 below
    -700."""
    bits = ir.VectorType(I64, 8)

    def poly(z: Any, coefficients: tuple[float, ...]) -> Any:
        value = const(coefficients[0], WIDE)
        for c in coefficients[1:]:
            value = b.fadd(b.fmul(value, z), const(c, WIDE))
        return value

    low = const(-700.0, WIDE)
    clamped = b.select(b.fcmp_ordered(">", x, low), x, low)
    magic = const(6755399441055744.0, WIDE)  # 1.5 * 2^52: adding it rounds to an integer
    n = b.fsub(b.fadd(b.fmul(clamped, const(1.4426950408889634, WIDE)), magic), magic)
    r = b.fsub(clamped, b.fmul(n, const(6.93145751953125e-1, WIDE)))
    r = b.fsub(r, b.fmul(n, const(1.42860682030941723212e-6, WIDE)))
    z = b.fmul(r, r)
    p = b.fmul(r, poly(z, (1.26177193074810590878e-4, 3.02994407707441961300e-2, 1.0)))
    q = poly(
        z, (3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1, 2.0)
    )
    twice = b.fmul(const(2.0, WIDE), b.fdiv(p, b.fsub(q, p)))
    power = b.shl(b.add(b.fptosi(n, bits), const(1023, bits)), const(52, bits))
    value = b.fmul(b.fadd(const(1.0, WIDE), twice), b.bitcast(power, WIDE))
    return b.select(b.fcmp_ordered(">", x, low), value, const(0.0, WIDE))
