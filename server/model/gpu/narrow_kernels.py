"""The Triton kernel of products with weights in 8 bits, for few rows (narrow.py).

A program has BLOCK_N outputs of BLOCK_M rows and reads its weights as they are stored; they become
the rows' dtype in registers, where 8 bits lose nothing. Sums are float32. A row's result is a
function of that row alone, the same whatever rows are beside it in tiles of the same height.

tests/model/gpu/test_narrow.py compares it in Triton's interpreter and compiles it for GPUs; it was
not run on one, and its block sizes were not tuned on one.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.model.gpu.narrow import FEW_ROWS, NarrowWeight, multiply
from server.model.gpu.triton_kernels import FUSE

_BLOCK_N = 32
_BLOCK_K = 128


@triton.jit
def _multiply(
    x, values, scales, bias, y, num_rows, stride_x,
    N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (outputs, rows): y = x @ values.T * scales + bias."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    in_rows, in_outputs = r < num_rows, n < N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        states = tl.load(
            x + r[:, None].to(tl.int64) * stride_x + start + k[None, :],
            mask=in_rows[:, None] & inside[None, :],
            other=0.0,
        )
        weights = tl.load(
            values + n[None, :].to(tl.int64) * K + start + k[:, None],
            mask=in_outputs[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(states, weights.to(states.dtype), total, input_precision="ieee")
    total = total * tl.load(scales + n, mask=in_outputs, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + r[:, None].to(tl.int64) * N + n[None, :],
        total.to(y.dtype.element_ty),
        mask=in_rows[:, None] & in_outputs[None, :],
    )


def block_m(num_rows: int) -> int:
    """Rows of a tile: those of a tensor core's, or four of them."""
    return 16 if num_rows <= 16 else 64


def multiply_few(x: torch.Tensor, weight: NarrowWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """narrow.multiply; the kernel for up to FEW_ROWS rows. x: rows may be apart."""
    num_rows, inner = x.shape
    if num_rows > FEW_ROWS:
        return multiply(x, weight, bias)
    size = weight.values.shape[0]
    y = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    height = block_m(num_rows)
    _multiply[(triton.cdiv(size, _BLOCK_N), triton.cdiv(num_rows, height))](
        x, weight.values, weight.scales, weight.scales if bias is None else bias, y, num_rows,
        x.stride(0), N=size, K=inner, HAS_BIAS=bias is not None, BLOCK_M=height,
        BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, num_warps=4, **FUSE,
    )  # fmt: skip
    return y
