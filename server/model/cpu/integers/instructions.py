"""Instruction sets of the integer kernels: how u8 x s8 is summed in fours, how bits are unpacked.

Which is used is decided at import from the features that numba compiles for: `vpdpbusd` where there
is one (AVX-512 VNNI, AVX-VNNI); else even and odd bytes are widened to int16 for `vpmaddwd` (AVX2,
AVX-512BW), which cannot saturate as `vpmaddubsw` does; on AArch64 `usdot` (i8mm) or `sdot`, which
takes 8-bit weights less 128; else plain int32 multiplications, which LLVM makes for any CPU. All
give the same sums. Emitters of IR: kernels.py puts them together.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config

from server.model.cpu.integers.emit import F16, I8, at, call, i32, i64, splat
from server.model.cpu.integers.forms import PANEL, Form
from server.model.cpu.vector_ir import F32, I16, I32


def _features() -> set[str]:
    """Features that numba compiles for (NUMBA_CPU_FEATURES overrides the host's)."""
    override: str | None = getattr(config, "CPU_FEATURES", None)
    if override is not None:
        return {f[1:] for f in override.split(",") if f.startswith("+")}
    return {name for name, has in llvm.get_host_cpu_features().items() if has}


_FEATURES = _features()


def choose(features: set[str]) -> str:
    """The kernel for a CPU: the widest that it has all instructions of."""
    if {"avx512f", "avx512bw", "avx512vnni"} <= features:
        return "avx512-vnni"
    if {"avx2", "avxvnni"} <= features:
        return "avx-vnni"
    if {"avx512f", "avx512bw"} <= features:
        return "avx512"
    if "avx2" in features:
        return "avx2"
    if {"neon", "i8mm"} <= features:
        return "neon-i8mm"
    return "neon-dotprod" if {"neon", "dotprod"} <= features else "plain"


KERNEL = choose(_FEATURES)
"""Name of the kernel in use, for the log and /metrics."""

TILES = KERNEL == "avx512-vnni" and {"amx-tile", "amx-int8"} <= _FEATURES
"""Whether kernels have a part for AMX tiles; amx.py finds out whether this machine runs it."""

LANES = 16 if KERNEL.startswith("avx512") else 4 if KERNEL.startswith("neon") else 8
"""Outputs of one vector."""

INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)
_SHORTS = ir.VectorType(I16, 2 * LANES)


def ints(value: int) -> Any:
    """The same int32 in every lane."""
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return ir.Constant(INTS, [signed] * LANES)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, f"llvm.fma.v{LANES}f32", FLOATS, [x, y, z])


def store(b: Any, value: Any, address: Any, offset: int) -> None:
    where = b.add(address, i64(offset)) if offset else address
    b.store(value, b.inttoptr(where, FLOATS.as_pointer())).align = 4


# --- sums of four products ------------------------------------------------------------------

_VNNI = KERNEL.endswith("vnni")
_MADD = KERNEL in ("avx512", "avx2")
_NEON = {"neon-i8mm": "usdot", "neon-dotprod": "sdot"}.get(KERNEL)


def taken_off(form: Form) -> int:
    """What weight_parts takes off every stored number: 0 where bytes are multiplied unsigned."""
    return 128 if _NEON == "sdot" and form.bits == 8 else 0


def weight_parts(b: Any, w: Any, form: Form) -> list[Any]:
    """What dot needs of LANES x 4 stored bytes (int32 lanes), made once for all rows."""
    if _VNNI:
        return [w]
    if _NEON is not None:
        return [b.bitcast(b.xor(w, ints(0x80808080)) if taken_off(form) else w, _BYTES)]
    if _MADD:
        pairs = b.bitcast(w, _SHORTS)
        low = ir.Constant(_SHORTS, [0xFF] * (2 * LANES))
        eight = ir.Constant(_SHORTS, [8] * (2 * LANES))
        return [b.and_(pairs, low), b.lshr(pairs, eight)]
    return [b.and_(b.lshr(w, ints(8 * j)), ints(0xFF)) for j in range(4)]


def input_parts(b: Any, x: Any) -> list[Any]:
    """What dot needs of four int8 activations (an int32)."""
    if _VNNI:
        return [splat(b, x, INTS)]
    if _NEON is not None:
        return [b.bitcast(splat(b, x, INTS), _BYTES)]
    if _MADD:
        pairs = b.bitcast(splat(b, x, INTS), _SHORTS)
        eight = ir.Constant(_SHORTS, [8] * (2 * LANES))
        return [b.ashr(b.shl(pairs, eight), eight), b.ashr(pairs, eight)]
    top = i32(24)
    return [splat(b, b.ashr(b.shl(x, i32(24 - 8 * j)), top), INTS) for j in range(4)]


def dot(b: Any, total: Any, weight: list[Any], inputs: list[Any]) -> Any:
    """total + the sum of four products in every lane, exact."""
    if _VNNI:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
        # Up to LLVM 20 the bytes were passed as int32 lanes.
        as_bytes = llvm.llvm_version_info[0] > 20
        operands = [b.bitcast(v, _BYTES) if as_bytes else v for v in (weight[0], inputs[0])]
        return call(b, name, INTS, [total, *operands])
    if _NEON is not None:
        return call(b, f"llvm.aarch64.neon.{_NEON}.v4i32.v16i8", INTS, [total, *weight, *inputs])
    for w, x in zip(weight, inputs, strict=True):
        if _MADD:
            name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
            total = b.add(total, call(b, name, INTS, [w, x]))
        else:
            total = b.add(total, b.mul(w, x))
    return total


# --- unpacking ------------------------------------------------------------------------------


def load_halves(b: Any, address: Any, offset: int) -> Any:
    """LANES float16, widened: exact."""
    if {"f16c", "avx512f", "neon"} & _FEATURES:
        return b.fpext(at(b, address, offset, ir.VectorType(F16, LANES), 2), FLOATS)
    bits = b.zext(at(b, address, offset, ir.VectorType(I16, LANES), 2), INTS)
    sign = b.shl(b.and_(bits, ints(0x8000)), ints(16))
    rest = b.bitcast(b.shl(b.and_(bits, ints(0x7FFF)), ints(13)), FLOATS)
    scaled = b.fmul(rest, ir.Constant(FLOATS, [2.0**112] * LANES))
    return b.bitcast(b.or_(b.bitcast(scaled, INTS), sign), FLOATS)


def load_small(b: Any, address: Any, offset: int, signed: bool) -> Any:
    """LANES 8-bit numbers as floats."""
    raw = at(b, address, offset, ir.VectorType(I8, LANES), 1)
    wide = b.sext(raw, INTS) if signed else b.zext(raw, INTS)
    return b.sitofp(wide, FLOATS)


def _shifted(b: Any, value: Any, left: int) -> Any:
    """value << left, or >> -left, in every int32 lane."""
    if left == 0:
        return value
    return b.shl(value, ints(left)) if left > 0 else b.lshr(value, ints(-left))


def load_stored(b: Any, form: Form, record: Any, step: int, vector: int) -> Any:
    """The stored numbers of inputs 4 * step .. 4 * step + 3: LANES x 4 bytes as int32 lanes."""
    column = 4 * LANES * vector
    if form.bits == 8:
        return at(b, record, 4 * PANEL * step + column, INTS, 4)
    low = at(b, record, 4 * PANEL * (step % 4) + column, INTS, 4)
    value = b.and_(_shifted(b, low, 0 if step < 4 else -4), ints(0x0F0F0F0F))
    if form.bits == 5:
        high = at(b, record, form.low_bytes + column, INTS, 4)
        value = b.or_(value, b.and_(_shifted(b, high, 4 - step), ints(0x10101010)))
    if form.bits == 6:
        high = at(b, record, form.low_bytes + 4 * PANEL * (step // 4) + column, INTS, 4)
        value = b.or_(value, b.and_(_shifted(b, high, 4 - 2 * (step % 4)), ints(0x30303030)))
    return value
