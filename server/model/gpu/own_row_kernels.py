"""Triton kernels for rows of embedding and head of adapters' own: see own_rows.py.

One launch gathers a step's embedding; two make logits wide: products of own rows, and the rows of
all columns. A row's result is a function of that row and its adapter: rows are lines of one tile,
and no sum crosses them. Sums are float32. Nothing syncs. A span without rows, and a row without
place, pad a CUDA graph's.

tests/model/gpu/test_own_rows.py compares them with TorchOps in Triton's interpreter and compiles
them for sm_80 to sm_100; they were not run on a GPU. Block sizes were not tuned on one.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from server.model.gpu.lm_head import soft_capped
from server.model.gpu.lora import SPAN_ROWS
from server.model.gpu.lora_kernels import _span_at
from server.model.gpu.own_rows import HeadRows, OwnPart
from server.model.gpu.triton_kernels import FUSE

if TYPE_CHECKING:
    from server.model.gpu.decoder_ops import Rows

_ROWS = tl.constexpr(SPAN_ROWS)
BLOCK_N = 32
BLOCK_K = 64
BLOCK_COLUMNS = 1024


@triton.jit
def _own_embed(
    table, ids, places, at, rows, out, width, num_base, num_own,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): its own row for its id, or the table's."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row)
    place = tl.load(places + row).to(tl.int64)
    own = tl.load(at + place * width + token, mask=place >= 0, other=-1).to(tl.int64)
    i = tl.arange(0, BLOCK)
    is_own = i < tl.where(own >= 0, SIZE, 0)
    is_base = i < tl.where(own >= 0, 0, SIZE)
    base = tl.minimum(token, num_base - 1).to(tl.int64)
    theirs = tl.load(table + base * SIZE + i, mask=is_base, other=0.0)
    mine = tl.load(rows + (place * num_own + own) * SIZE + i, mask=is_own, other=0.0)
    tl.store(out + row * SIZE + i, tl.where(is_own, mine, theirs), mask=i < SIZE)


@triton.jit
def _own_products(
    hidden, spans, rows, out, stride_hidden, num_own,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (span, part): out[r, n] = hidden[r] @ rows[place, n] for BLOCK_N of its place's rows.

    out: float32 [n, num_own]."""
    first, num, place = _span_at(spans, tl.program_id(0).to(tl.int64))
    if num == 0:
        return
    r = tl.arange(0, _ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_own = r < num, n < num_own
    of_rows = hidden + (first + r[:, None]) * stride_hidden
    of_own = rows + (place * num_own + n[None, :]) * SIZE
    total = tl.zeros((_ROWS, BLOCK_N), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        inside = start + k < SIZE
        states = tl.load(
            of_rows + start + k[None, :], mask=is_row[:, None] & inside[None, :], other=0.0
        )
        weights = tl.load(
            of_own + start + k[:, None], mask=is_own[None, :] & inside[:, None], other=0.0
        )
        total = tl.dot(states, weights, total, input_precision="ieee")
    at = out + (first + r[:, None]) * num_own + n[None, :]
    tl.store(at, total, mask=is_row[:, None] & is_own[None, :])


@triton.jit
def _widen(
    logits, own, at, places, out, stride_logits, num_logits, num_own, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part): BLOCK columns of a row: own logits, the base's, or -inf."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + row).to(tl.int64)
    searched = column < tl.where(place >= 0, width, 0)
    which = tl.load(at + place * width + column, mask=searched, other=-1)
    theirs = tl.load(
        logits + row * stride_logits + column, mask=column < num_logits, other=float("-inf")
    )
    mine = tl.load(own + row * num_own + which, mask=which >= 0, other=0.0)
    tl.store(out + row * width + column, tl.where(which >= 0, mine, theirs), mask=column < width)


def own_embed(rows: Rows, places: torch.Tensor, part: OwnPart) -> torch.Tensor:
    """DecoderOps.own_embed."""
    ids = rows.ids
    assert ids is not None
    num, size = ids.shape[0], rows.table.shape[1]
    out = torch.empty((num, size), dtype=rows.table.dtype, device=rows.table.device)
    _own_embed[(num,)](
        rows.table, ids, places, part.at,
        part.rows, out, part.at.shape[1], rows.table.shape[0], part.rows.shape[1],
        SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    return out


def own_logits(
    hidden: torch.Tensor, logits: torch.Tensor, rows: HeadRows, out: torch.Tensor
) -> None:
    """DecoderOps.own_logits."""
    num, width = out.shape
    num_own, size = rows.part.rows.shape[1:]
    own = torch.empty((num, num_own), dtype=torch.float32, device=hidden.device)
    _own_products[(rows.spans.shape[0], triton.cdiv(num_own, BLOCK_N))](
        hidden, rows.spans, rows.part.rows, own, hidden.stride(0), num_own,
        SIZE=size, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, **FUSE,
    )  # fmt: skip
    _widen[(num, triton.cdiv(width, BLOCK_COLUMNS))](
        logits, soft_capped(own, rows.cap), rows.part.at, rows.places, out, logits.stride(0),
        logits.shape[1], num_own, width, BLOCK=BLOCK_COLUMNS, num_warps=4,
    )  # fmt: skip
