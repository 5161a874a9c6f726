"""Soft-capping of scores and logits as a vector kernel."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from server.model.cpu.vector_ir import (
    F32,
    LANES,
    Loop,
    const,
    floats,
    i64,
    intrinsic,
    load,
    splat,
    store,
)
from server.model.cpu.vector_ir import exp as exp_vector


@intrinsic
def soft_cap(typingctx: Any, s: Any, num: Any, scale: Any, cap: Any) -> Any:
    """s[i] = cap * tanh(s[i] * scale / cap) for 16 * num floats at address s (Gemma 2, arXiv
    2408.00118, section 2); tanh(x) = 1 - 2 / (exp(2 x) + 1), absolute error < 3e-7."""
    sig = types.void(types.intp, types.intp, types.float32, types.float32)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        s, num, scale, cap = args
        sf = floats(b, s)
        cap_v = splat(b, cap)
        factor = splat(b, b.fdiv(b.fmul(scale, ir.Constant(F32, 2.0)), cap))
        loop = Loop(b, num, [])
        at = b.mul(loop.index, i64(LANES))
        grown = exp_vector(b, b.fmul(load(b, sf, at), factor))
        tanh = b.fsub(const(1.0), b.fdiv(const(2.0), b.fadd(grown, const(1.0))))
        store(b, b.fmul(tanh, cap_v), sf, at)
        loop.close([])
        return context.get_dummy_value()

    return sig, codegen
