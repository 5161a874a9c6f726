"""Instruction sets of the integer kernels: how u8 x s8 is summed in fours, how bits are unpacked.

Which is used follows from the features of the CPU that is compiled for (sizes.integer_kernel):
`vpdpbusd` where there is one (AVX-512 VNNI, AVX-VNNI); else even and odd bytes are widened to int16
for `vpmaddwd` (AVX2, AVX-512BW), which cannot saturate as `vpmaddubsw` does; on AArch64 `usdot`
(i8mm) or `sdot`, which takes 8-bit weights less 128; else plain int32 multiplications, which LLVM
makes for any CPU. All give the same sums. Emitters of IR: panels.py puts them together.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from drafters.target import chosen
from server.model.cpu.integers.forms import PANEL, Form
from server.model.cpu.kernels.ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    at,
    call,
    const,
    i32,
    put,
    splat,
)
from server.model.cpu.sizes import INTEGER_KERNEL as KERNEL

LANES = 16 if KERNEL.startswith("avx512") else 4 if KERNEL.startswith("neon") else 8
"""Outputs of one vector."""

INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)
_SHORTS = ir.VectorType(I16, 2 * LANES)


def ints(value: int) -> Any:
    """The same int32 in every lane."""
    return const(value - (1 << 32) if value >= 1 << 31 else value, INTS)


def store(b: Any, value: Any, address: Any, offset: int) -> None:
    """Write a vector of floats at address + offset bytes."""
    put(b, value, address, offset, 4)


# --- sums of four products ------------------------------------------------------------------------

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
        return [b.and_(pairs, const(0xFF, _SHORTS)), b.lshr(pairs, const(8, _SHORTS))]
    return [b.and_(b.lshr(w, ints(8 * j)), ints(0xFF)) for j in range(4)]


def input_parts(b: Any, x: Any) -> list[Any]:
    """What dot needs of four int8 activations (an int32)."""
    if _VNNI:
        return [splat(b, x, INTS)]
    if _NEON is not None:
        return [b.bitcast(splat(b, x, INTS), _BYTES)]
    if _MADD:
        pairs = b.bitcast(splat(b, x, INTS), _SHORTS)
        eight = const(8, _SHORTS)
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
    if {"f16c", "avx512f", "neon"} & chosen().features:
        return b.fpext(at(b, address, offset, ir.VectorType(F16, LANES), 2), FLOATS)
    bits = b.zext(at(b, address, offset, ir.VectorType(I16, LANES), 2), INTS)
    sign = b.shl(b.and_(bits, ints(0x8000)), ints(16))
    rest = b.bitcast(b.shl(b.and_(bits, ints(0x7FFF)), ints(13)), FLOATS)
    scaled = b.fmul(rest, const(2.0**112, FLOATS))
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
