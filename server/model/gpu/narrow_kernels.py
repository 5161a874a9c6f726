"""The Triton kernels of products with weights in 8 or 4 bits, for few rows (narrow.py).

A program has BLOCK_N outputs of BLOCK_M rows and reads its weights as they are stored; they become
the rows' dtype in registers: 8 bits with one scale an output lose nothing, those in blocks are
rounded as narrow.widened does. Sums are float32. A row's result is a function of that row alone,
the same whatever rows are beside it in tiles of the same height.

tests/model/gpu/test_narrow.py compares them in Triton's interpreter and compiles them for GPUs;
they were not run on one, and their block sizes were not tuned on one.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.model.gpu.narrow import BLOCK, FEW_ROWS, NarrowWeight, multiply
from server.model.gpu.triton_kernels import FUSE

_BLOCK_N = 32
_BLOCK_K = 128
_BLOCK_BYTES = 32  # of an output that a turn reads, in blocks; 64 spill with 64 rows
_WIDE_BYTES = 1024
_INPUTS = tl.constexpr(BLOCK)


@triton.jit
def _store(total, bias, y, r, n, num_rows, N: tl.constexpr, HAS_BIAS: tl.constexpr):
    """y[r, n] = total + bias, of the rows and outputs that there are."""
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + r[:, None].to(tl.int64) * N + n[None, :],
        total.to(y.dtype.element_ty),
        mask=(r < num_rows)[:, None] & (n < N)[None, :],
    )


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
    _store(total, bias, y, r, n, num_rows, N, HAS_BIAS)


@triton.jit
def _multiply_blocks(
    x, values, scales, minima, bias, y, num_rows, stride_x,
    N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, HALVES: tl.constexpr,
    HAS_MIN: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """Program (outputs, rows): y = x @ (values * scales + minima).T + bias. HALVES: two numbers a
    byte: those in the low halves are multiplied first, then those in the high ones."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    each: tl.constexpr = _INPUTS // 2 if HALVES else _INPUTS  # bytes of a block
    in_rows, in_outputs = r < num_rows, n < N
    rows = x + r[:, None].to(tl.int64) * stride_x
    outputs = n[None, :].to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, BLOCKS * each, BLOCK_BYTES):
        at = start + tl.arange(0, BLOCK_BYTES)
        block = at // each
        there = in_outputs[None, :] & (block < BLOCKS)[:, None]
        stored = tl.load(values + outputs * (BLOCKS * each) + at[:, None], mask=there, other=0)
        scale = tl.load(scales + outputs * BLOCKS + block[:, None], mask=there, other=0.0)
        scale = scale.to(tl.float32)
        least = tl.zeros_like(scale)
        if HAS_MIN:
            own = tl.load(minima + outputs * BLOCKS + block[:, None], mask=there, other=0.0)
            least = own.to(tl.float32)
        k = block * _INPUTS + at % each
        mask = in_rows[:, None] & (k < K)[None, :]
        states = tl.load(rows + k[None, :], mask=mask, other=0.0)
        low = (stored & 15) if HALVES else stored
        weights = (low.to(tl.float32) * scale + least).to(states.dtype)
        total = tl.dot(states, weights, total, input_precision="ieee")
        if HALVES:
            k += each
            mask = in_rows[:, None] & (k < K)[None, :]
            states = tl.load(rows + k[None, :], mask=mask, other=0.0)
            weights = ((stored >> 4).to(tl.float32) * scale + least).to(states.dtype)
            total = tl.dot(states, weights, total, input_precision="ieee")
    _store(total, bias, y, r, n, num_rows, N, HAS_BIAS)


@triton.jit
def _widen(
    values, scales, minima, out,
    BLOCKS: tl.constexpr, HALVES: tl.constexpr, HAS_MIN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program (output, part of its bytes): out = values * scales + minima."""
    each: tl.constexpr = _INPUTS // 2 if HALVES else _INPUTS
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    block = at // each
    there = block < BLOCKS
    stored = tl.load(values + n * (BLOCKS * each) + at, mask=there, other=0)
    scale = tl.load(scales + n * BLOCKS + block, mask=there, other=0.0).to(tl.float32)
    least = tl.zeros_like(scale)
    if HAS_MIN:
        own = tl.load(minima + n * BLOCKS + block, mask=there, other=0.0)
        least = own.to(tl.float32)
    to = out + n * (BLOCKS * _INPUTS) + block * _INPUTS + at % each
    kind = out.dtype.element_ty
    low = (stored & 15) if HALVES else stored
    tl.store(to, (low.to(tl.float32) * scale + least).to(kind), mask=there)
    if HALVES:
        high = (stored >> 4).to(tl.float32) * scale + least
        tl.store(to + each, high.to(kind), mask=there)


def block_m(num_rows: int) -> int:
    """Rows of a tile: those of a tensor core's, or four of them."""
    return 16 if num_rows <= 16 else 64


def widened(weight: NarrowWeight, dtype: torch.dtype) -> torch.Tensor:
    """narrow.widened, in one launch."""
    size, blocks = weight.scales.shape
    out = torch.empty((size, blocks * BLOCK), dtype=dtype, device=weight.values.device)
    _widen[(size, triton.cdiv(weight.values.shape[1], _WIDE_BYTES))](
        weight.values, weight.scales, weight.scales if weight.minima is None else weight.minima,
        out, BLOCKS=blocks, HALVES=weight.values.dtype == torch.uint8,
        HAS_MIN=weight.minima is not None, SIZE=_WIDE_BYTES, num_warps=4, **FUSE,
    )  # fmt: skip
    return out


def multiply_few(x: torch.Tensor, weight: NarrowWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """narrow.multiply; the kernel for up to FEW_ROWS rows. x: rows may be apart."""
    num_rows, inner = x.shape
    if num_rows > FEW_ROWS:
        matrix = widened(weight, x.dtype) if weight.in_blocks else None
        return multiply(x, weight, bias, matrix)
    size = weight.values.shape[0]
    y = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    height = block_m(num_rows)
    grid = triton.cdiv(size, _BLOCK_N), triton.cdiv(num_rows, height)
    if weight.in_blocks:
        least, scales = weight.minima, weight.scales
        _multiply_blocks[grid](
            x, weight.values, scales, scales if least is None else least,
            scales if bias is None else bias, y, num_rows, x.stride(0), N=size, K=inner,
            BLOCKS=scales.shape[1], HALVES=weight.values.dtype == torch.uint8,
            HAS_MIN=least is not None, HAS_BIAS=bias is not None, BLOCK_M=height,
            BLOCK_N=_BLOCK_N, BLOCK_BYTES=_BLOCK_BYTES, num_warps=4, **FUSE,
        )  # fmt: skip
        return y
    _multiply[grid](
        x, weight.values, weight.scales, weight.scales if bias is None else bias, y, num_rows,
        x.stride(0), N=size, K=inner, HAS_BIAS=bias is not None, BLOCK_M=height,
        BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, num_warps=4, **FUSE,
    )  # fmt: skip
    return y
