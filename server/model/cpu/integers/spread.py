"""Spreading: a row of inputs made even in size before one scale turns all of it into integers.

A few inputs of a row are many times the others, and one scale would leave the others two or three
levels. Two changes of W @ x, which floats would not notice, are made before both are rounded:
  - input j is multiplied by a factor, and the weights of it are divided by that factor
    (SmoothQuant, Xiao et al. 2023, arXiv 2211.10438, section 4): inputs that are always large;
  - BLOCK neighbours become sums and differences of all of them, and so do their weights (a
    Hadamard matrix: QuaRot, Ashkboos et al. 2024, arXiv 2404.00456): what one row has large.
What: that function of one row, in vectors, the same bits on every CPU, and the weights that belong
to it. What not: which factors (outliers.py), the integers (quantise.py).

    y = x * factors;  for s in 1, 2, 4, 8, 16: y[i], y[i + s] = y[i] + y[i + s], y[i] - y[i + s]
for every i of a block without bit s; all float32, each operation rounded once. Weights go through
the same with 1 / factors and are divided by BLOCK, which is exact.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types

from server.model.cpu.integers.emit import F32, I32, Loop, at, call, i64
from server.model.cpu.integers.forms import BLOCK
from server.model.cpu.kernels import has_avx512
from server.model.cpu.vector_ir import LANES, fma, intrinsic

__all__ = ["FLOATS", "INTS", "larger", "largest", "spread", "spread_blocks", "spread_weights"]

Float32 = npt.NDArray[np.float32]

INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)


def larger(b: Any, best: Any, value: Any) -> Any:
    """The larger of `best` and the bits of |value|, by lane: without their sign, floats compare as
    their bits do, and NaN is above infinity, whatever the order."""
    bits = b.and_(b.bitcast(value, INTS), ir.Constant(INTS, [0x7FFFFFFF] * LANES))
    return call(b, f"llvm.umax.v{LANES}i32", INTS, [bits, best])


def largest(b: Any, bits: Any) -> Any:
    """The largest lane of what `larger` gives, a float."""
    return b.bitcast(call(b, f"llvm.vector.reduce.umax.v{LANES}i32", I32, [bits]), F32)


def _mixed(b: Any, value: Any, stride: int) -> Any:
    """Sums and differences of lanes that are `stride` apart."""
    swapped = ir.Constant(INTS, [i ^ stride for i in range(LANES)])
    other = b.shuffle_vector(value, ir.Constant(FLOATS, ir.Undefined), swapped)
    if has_avx512():  # the same numbers: a product with 1 or -1 rounds nothing
        ones = ir.Constant(FLOATS, [-1.0 if i & stride else 1.0 for i in range(LANES)])
        return fma(b, value, ones, other)
    signs = ir.Constant(INTS, [-(1 << 31) if i & stride else 0 for i in range(LANES)])
    return b.fadd(other, b.bitcast(b.xor(b.bitcast(value, INTS), signs), FLOATS))


@intrinsic
def spread_blocks(typingctx: Any, x: Any, factors: Any, blocks: Any, out: Any) -> Any:
    """BLOCK * blocks floats at address x, spread, to address out; their largest magnitude, NaN
    where there is one. factors: address of as many floats."""
    sig = types.float32(*([types.intp] * 4))

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, factors, blocks, out = args
        loop = Loop(b, blocks, [ir.Constant(INTS, [0] * LANES)])
        here = b.mul(loop.index, i64(4 * BLOCK))
        parts = []
        for offset in range(0, 4 * BLOCK, 4 * LANES):
            value = at(b, b.add(x, here), offset, FLOATS, 4)
            value = b.fmul(value, at(b, b.add(factors, here), offset, FLOATS, 4))
            for stride in (1, 2, 4, 8):
                value = _mixed(b, value, stride)
            parts.append(value)
        best = loop.carried[0]
        for part, value in enumerate((b.fadd(*parts), b.fsub(*parts))):
            where = b.add(b.add(out, here), i64(4 * LANES * part))
            b.store(value, b.inttoptr(where, FLOATS.as_pointer())).align = 4
            best = larger(b, best, value)
        (best,) = loop.close([best])
        return largest(b, best)

    return sig, codegen


@njit(nogil=True, cache=True, error_model="numpy")
def _spread_rows(x, factors, out):
    for r in range(x.shape[0]):
        row, to = r * x.shape[1] * 4, r * out.shape[1] * 4
        blocks = x.shape[1] // BLOCK
        spread_blocks(x.ctypes.data + row, factors.ctypes.data, blocks, out.ctypes.data + to)


def spread(x: Float32, factors: Float32) -> Float32:
    """Rows [n, K] spread: float32 [n, K padded to whole blocks]. factors: float32 [padded K]."""
    padded = np.zeros((x.shape[0], factors.shape[0]), np.float32)
    padded[:, : x.shape[1]] = x
    out = np.empty_like(padded)
    _spread_rows(padded, factors, out)
    return out


def spread_weights(weight: Float32, factors: Float32) -> Float32:
    """Weights [outputs, K] for inputs that are spread with these factors: float32 [outputs, padded
    K], whose products with `spread(x, factors)` are those of weight and x but for rounding."""
    return spread(weight, np.float32(1.0) / factors) * np.float32(1.0 / BLOCK)
