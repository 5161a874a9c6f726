"""The Triton kernel of grouped products (grouped.Grouped): adapters, and their own head rows.

A program has one span, up to SPAN_ROWS rows of one adapter, and BLOCK_N outputs. A row's result is
a function of that row and its adapter: rows are lines of one tile, and no sum crosses them. Sums
are float32. Grids are known on the host, and nothing syncs. A span without rows pads a CUDA
graph's, and ends at once.

tests/model/gpu/test_lora.py compares it with the reference in Triton's interpreter and compiles it
for sm_80 to sm_100; it was not run on a GPU. Block sizes were not tuned on one.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.model.gpu.grouped import SPAN_FIELDS, SPAN_ROWS
from server.model.gpu.triton_kernels import FUSE

_FIELDS = tl.constexpr(SPAN_FIELDS)
_ROWS = tl.constexpr(SPAN_ROWS)
BLOCK_N = 32


@triton.jit
def _grouped(
    x, spans, w, scales, y, stride_x, stride_y, stride_place, stride_k, stride_n, num_outputs,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ADDS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Program (span, part): BLOCK_N outputs of its rows, of SIZE inputs."""
    fields = spans + tl.program_id(0).to(tl.int64) * _FIELDS
    first = tl.load(fields).to(tl.int64)
    num = tl.load(fields + 1)
    place = tl.load(fields + 2).to(tl.int64)
    if num == 0:
        return
    r = tl.arange(0, _ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_output = r < num, n < num_outputs
    of_rows = x + (first + r[:, None]) * stride_x
    of_outputs = w + place * stride_place + n[None, :] * stride_n
    total = tl.zeros((_ROWS, BLOCK_N), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        inside = start + k < SIZE
        states = tl.load(
            of_rows + start + k[None, :], mask=is_row[:, None] & inside[None, :], other=0.0
        )
        weights = tl.load(
            of_outputs + (start + k[:, None]) * stride_k,
            mask=is_output[None, :] & inside[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(states, weights.to(states.dtype), total, input_precision="ieee")
    if HAS_SCALES:
        total = (
            total * tl.load(scales + place * num_outputs + n, mask=is_output, other=0.0)[None, :]
        )
    at = y + (first + r[:, None]) * stride_y + n[None, :]
    mask = is_row[:, None] & is_output[None, :]
    if ADDS:
        total = tl.load(at, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(at, total.to(y.dtype.element_ty), mask=mask)


def block_k(dtype: torch.dtype) -> int:
    """Inputs that are multiplied at once: products of float32 fill the registers."""
    return 32 if dtype == torch.float32 else 64


def grouped_triton(
    x: torch.Tensor,
    spans: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    scales: torch.Tensor | None = None,
    *,
    adds: bool = False,
) -> None:
    """grouped.Grouped by the kernel above."""
    size, outputs = w.shape[1:]
    _grouped[(spans.shape[0], triton.cdiv(outputs, BLOCK_N))](
        x, spans, w, y if scales is None else scales, y, x.stride(0), y.stride(0), *w.stride(),
        outputs, SIZE=size, BLOCK_N=BLOCK_N, BLOCK_K=block_k(x.dtype), ADDS=adds,
        HAS_SCALES=scales is not None, num_warps=4, **FUSE,
    )  # fmt: skip
