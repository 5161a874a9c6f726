"""Triton kernels that add adapters to a product: two launches, whatever the number of adapters.

A program has one span: up to SPAN_ROWS rows of one adapter. A row's result is a function of that
row and its adapter: rows are lines of one tile, and no sum crosses them. Sums are float32. Grids
are known on the host, and nothing syncs. A span without rows pads a CUDA graph's, and ends at once.

tests/model/gpu/test_lora.py compares them with TorchOps in Triton's interpreter and compiles them
for sm_80 to sm_100; they were not run on a GPU. Block sizes were not tuned on one.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.model.gpu.lora import SPAN_FIELDS, SPAN_ROWS, LoraTable
from server.model.gpu.triton_kernels import FUSE

_FIELDS = tl.constexpr(SPAN_FIELDS)
_ROWS = tl.constexpr(SPAN_ROWS)
_BLOCK_N = 64
_CHUNK = 16
"""Columns of B that a program multiplies at once: float32 products of more fill the registers."""
_TILE_VALUES = 8192
"""Of A in one block: several stages of it fit the shared memory of the smallest devices."""


@triton.jit
def _span_at(spans, span):
    """(first row, rows, place) of a span."""
    fields = spans + span * _FIELDS
    return tl.load(fields).to(tl.int64), tl.load(fields + 1), tl.load(fields + 2).to(tl.int64)


@triton.jit
def _shrink(
    x, spans, a, scales, t, stride_x,
    K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (span): t = (x @ A) * scale for its rows. t: float32 [spans, SPAN_ROWS, COLUMNS]."""
    span = tl.program_id(0).to(tl.int64)
    first, num, place = _span_at(spans, span)
    if num == 0:
        return
    r = tl.arange(0, _ROWS)
    c = tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK_K)
    of_rows = x + (first + r[:, None]) * stride_x
    of_columns = a + place * K * COLUMNS + c[None, :]
    total = tl.zeros((_ROWS, COLUMNS), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        states = tl.load(
            of_rows + start + k[None, :], mask=(r[:, None] < num) & inside[None, :], other=0.0
        )
        weights = tl.load(
            of_columns + (start + k[:, None]) * COLUMNS, mask=inside[:, None], other=0.0
        )
        total = tl.dot(states, weights, total, input_precision="ieee")
    total = total * tl.load(scales + place * COLUMNS + c)[None, :]
    tl.store(t + (span * _ROWS + r[:, None]) * COLUMNS + c[None, :], total)


@triton.jit
def _expand(
    t, spans, b, y, stride_y,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (span, part): y += t @ B for its rows and BLOCK_N outputs."""
    span = tl.program_id(0).to(tl.int64)
    first, num, place = _span_at(spans, span)
    if num == 0:
        return
    r = tl.arange(0, _ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < SIZE
    added = tl.zeros((_ROWS, BLOCK_N), tl.float32)
    for start in range(0, COLUMNS, CHUNK):
        c = start + tl.arange(0, CHUNK)
        states = tl.load(t + (span * _ROWS + r[:, None]) * COLUMNS + c[None, :])
        weights = tl.load(
            b + (place * COLUMNS + c[:, None]) * SIZE + n[None, :], mask=inside[None, :], other=0.0
        )
        added = tl.dot(states, weights.to(tl.float32), added, input_precision="ieee")
    at = y + (first + r[:, None]) * stride_y + n[None, :]
    mask = (r[:, None] < num) & inside[None, :]
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32) + added
    tl.store(at, value.to(y.dtype.element_ty), mask=mask)


def block_k(columns: int, dtype: torch.dtype) -> int:
    """Inputs that a program of _shrink multiplies at once."""
    return max(16, min(64, _TILE_VALUES // columns // (dtype.itemsize // 2)))


def add_lora(x: torch.Tensor, y: torch.Tensor, spans: torch.Tensor, table: LoraTable) -> None:
    """DecoderOps.lora."""
    num, size = spans.shape[0], y.shape[1]
    inner, columns = table.a.shape[1:]
    t = torch.empty((num, SPAN_ROWS, columns), dtype=torch.float32, device=x.device)
    _shrink[(num,)](
        x, spans, table.a, table.scales, t, x.stride(0),
        K=inner, COLUMNS=columns, BLOCK_K=block_k(columns, x.dtype), num_warps=4, **FUSE,
    )  # fmt: skip
    _expand[(num, triton.cdiv(size, _BLOCK_N))](
        t, spans, table.b, y, y.stride(0),
        SIZE=size, COLUMNS=columns, CHUNK=_CHUNK, BLOCK_N=_BLOCK_N, num_warps=4, **FUSE,
    )  # fmt: skip
