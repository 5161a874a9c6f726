"""Triton kernels of a decoder layer, between its products, one launch each; TritonOps.

A program has one row, or one head of one row, and no other's sums: a row's result is a function of
that row alone. Grids are known on the host, nothing syncs, so a CUDA graph can hold them. Sums are
float32; a value is rounded when it is stored.

tests/model/gpu/test_decoder.py compares them with TorchOps in Triton's interpreter and compiles
them for sm_80 to sm_100; they were not run on a GPU. Block sizes were not tuned on one.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.model.gpu import stream_kernels
from server.model.gpu.convolution import Inputs
from server.model.gpu.decoder_ops import (
    Adapted,
    HeadSizes,
    Places,
    Product,
    Residual,
    Rotation,
    Rows,
    SeparateOps,
    Stream,
    mm,
)
from server.model.gpu.lora import LoraTable
from server.model.gpu.lora_kernels import add_lora
from server.model.gpu.narrow import NarrowWeight
from server.model.gpu.narrow_kernels import multiply_few
from server.model.gpu.own_row_kernels import own_embed, own_logits
from server.model.gpu.own_rows import HeadRows, OwnPart
from server.model.gpu.stream_kernels import FEW_ROWS, gated
from server.model.gpu.triton_kernels import FUSE

_GATE_BLOCK = 1024
_CONVOLUTION_BLOCK = 512


@triton.jit
def _rms_factor(x, size, eps):
    """1 / root of the mean square of x; lanes beyond `size` hold zeros."""
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)


@triton.jit
def _head_factor(a, b, c, size, eps):
    """_rms_factor of a head in three parts."""
    squares = tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0) + tl.sum(c * c, axis=0)
    return 1.0 / tl.sqrt(squares / size + eps)


@triton.jit
def _store_normed(out, x, norm, i, SIZE: tl.constexpr, eps, HAS_NORM: tl.constexpr):
    """A row of the residual stream, normed with HAS_NORM, to `out`."""
    inside = i < SIZE
    value = x.to(tl.float32)
    if HAS_NORM:
        weight = tl.load(norm + i, mask=inside, other=0.0)
        value = value * _rms_factor(value, SIZE, eps) * weight
    tl.store(out + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _embed_rows(
    table, ids, norm, x, out, scale, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_IDS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Program (row): its row of the table, scaled, to x; normed, to out."""
    row = tl.program_id(0).to(tl.int64)
    at = row
    if HAS_IDS:
        at = tl.load(ids + row).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    value = tl.load(table + at * SIZE + i, mask=inside, other=0.0).to(tl.float32) * scale
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + row * SIZE + i, rounded, mask=inside)
    _store_normed(out + row * SIZE, rounded, norm, i, SIZE, eps, HAS_NORM)


@triton.jit
def _norm_rows(values, weight, stride_row, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): RMSNorm of SIZE values in place."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    value = tl.load(values + row * stride_row + i, mask=inside, other=0.0).to(tl.float32)
    value = value * _rms_factor(value, SIZE, eps) * tl.load(weight + i, mask=inside, other=0.0)
    tl.store(values + row * stride_row + i, value.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _place_heads(
    qkv, norms, cos, sin, query_scales, positions, slots, keys, values, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM_BEFORE: tl.constexpr, NORM_AFTER: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Program (row, head): a q head back to qkv, a k or v head to its slot.

    A head is read as the pairs that rotate, a and b, HALF of each, and REST dimensions behind.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    base = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    h = tl.arange(0, BLOCK)
    in_half = h < HALF
    if INTERLEAVED:
        at_a = 2 * h
        at_b = 2 * h + 1
    else:
        at_a = h
        at_b = HALF + h
    r = tl.arange(0, BLOCK_REST)
    in_rest = r < REST
    at_c = 2 * HALF + r
    a = tl.load(base + at_a, mask=in_half, other=0.0).to(tl.float32)
    b = tl.load(base + at_b, mask=in_half, other=0.0).to(tl.float32)
    c = tl.load(base + at_c, mask=in_rest, other=0.0).to(tl.float32)

    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    slot = tl.load(slots + row).to(tl.int64) * NUM_KV_HEADS
    target = base
    if is_value:
        target = values + (slot + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    else:
        if not is_query:
            target = keys + (slot + head - NUM_HEADS) * HEAD_DIM
        if NORM_BEFORE or NORM_AFTER:
            weights = norms + tl.where(is_query, 0, HEAD_DIM)
            weight_a = tl.load(weights + at_a, mask=in_half, other=0.0)
            weight_b = tl.load(weights + at_b, mask=in_half, other=0.0)
            weight_c = tl.load(weights + at_c, mask=in_rest, other=0.0)
        if NORM_BEFORE:
            factor = _head_factor(a, b, c, HEAD_DIM, eps)
            a = a * factor * weight_a
            b = b * factor * weight_b
            c = c * factor * weight_c
        position = tl.load(positions + row).to(tl.int64)
        cosine = tl.load(cos + position * HALF + h, mask=in_half, other=0.0)
        sine = tl.load(sin + position * HALF + h, mask=in_half, other=0.0)
        rotated = a * cosine - b * sine
        b = b * cosine + a * sine
        a = rotated
        if NORM_AFTER:
            factor = _head_factor(a, b, c, HEAD_DIM, eps)
            a = a * factor * weight_a
            b = b * factor * weight_b
            c = c * factor * weight_c
        if SCALES:
            scale = tl.where(is_query, tl.load(query_scales + position), 1.0)
            a = a * scale
            b = b * scale
            c = c * scale
    kind: tl.constexpr = qkv.dtype.element_ty
    tl.store(target + at_a, a.to(kind), mask=in_half)
    tl.store(target + at_b, b.to(kind), mask=in_half)
    tl.store(target + at_c, c.to(kind), mask=in_rest)


@triton.jit
def _add_norm_rows(
    x, y, post, following, out, scale, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_POST: tl.constexpr, HAS_FOLLOWING: tl.constexpr,
):  # fmt: skip
    """Program (row): x += norm(y) * scale, and the sum's norm to out."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    added = tl.load(y + row * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_POST:
        weight = tl.load(post + i, mask=inside, other=0.0)
        added = added * _rms_factor(added, SIZE, eps) * weight
    value = tl.load(x + row * SIZE + i, mask=inside, other=0.0).to(tl.float32) + added * scale
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + row * SIZE + i, rounded, mask=inside)
    _store_normed(out + row * SIZE, rounded, following, i, SIZE, eps, HAS_FOLLOWING)


@triton.jit
def _gate_rows(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Program (row, part): activation(gate) * up of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=inside, other=0.0).to(tl.float32)
    value = gated(gate, up, GELU).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + i, value, mask=inside)


@triton.jit
def _convolve_rows(
    projected, taps, slots, sources, kept, out,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NUM_TAPS: tl.constexpr,
):  # fmt: skip
    """Program (row, part): BLOCK channels of a row's filter, and its own input to its slot.

    Inputs of rows of this step are computed again from `projected`: their slots are written now.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    kind: tl.constexpr = projected.dtype.element_ty
    base = projected + row * (3 * SIZE) + i
    own = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    own = own * tl.load(base + 2 * SIZE, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(kept + slot * SIZE + i, own.to(kind), mask=inside)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(NUM_TAPS):
        source = tl.load(sources + row * NUM_TAPS + j).to(tl.int64) + tl.zeros([BLOCK], tl.int64)
        in_step = inside & (source <= -2)  # FIRST_ROW - r
        at = kept + tl.maximum(source, 0) * SIZE + i
        before = tl.load(at, mask=inside & (source >= 0), other=0.0)
        other = projected + tl.maximum(-2 - source, 0) * (3 * SIZE) + i
        now = tl.load(other, mask=in_step, other=0.0).to(tl.float32)
        now = now * tl.load(other + 2 * SIZE, mask=in_step, other=0.0).to(tl.float32)
        value = tl.where(in_step, now.to(kind), before).to(tl.float32)
        total += tl.load(taps + j * SIZE + i, mask=inside, other=0.0) * value
    gate = tl.load(base + SIZE, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, (total * gate).to(kind), mask=inside)


def _warps(block: int) -> int:
    """Warps of a program over `block` lanes."""
    return 8 if block >= 4096 else 4 if block >= 512 else 1


class TritonOps(SeparateOps):
    """DecoderOps by the kernels above, and for up to few_rows rows by those of stream_kernels.py.

    few_rows: at most FEW_ROWS; 0: never. Rows beside others with adapters have the bits that they
    have without: the sums are made by the same kernels in the same order.
    """

    def __init__(self, few_rows: int = FEW_ROWS) -> None:
        self._few_rows = few_rows

    def read(
        self, stream: Stream, product: Product, adapted: Adapted | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderOps."""
        if stream.x.shape[0] > self._few_rows:
            return super().read(stream, product, adapted)
        return self._read(stream, product, adapted, stream.x.dtype)

    def _read(
        self, stream: Stream, product: Product, adapted: Adapted | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed, made = stream.x, stream.normed, None
        out = torch.empty((x.shape[0], product.num_outputs), dtype=dtype, device=x.device)
        if adapted is not None and normed is None:
            normed = made = torch.empty_like(x)
        x = stream_kernels.read(stream, product, out, normed=made)
        if adapted is not None:
            assert normed is not None
            self.lora(normed, out, *adapted)
        return x, out

    def gated(
        self, stream: Stream, product: Product, gelu: bool, adapted: Adapted | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderOps."""
        x = stream.x
        if x.shape[0] > self._few_rows:
            return super().gated(stream, product, gelu, adapted)
        if adapted is not None:
            x, whole = self._read(stream, product, adapted, torch.float32)
            return x, self.gate(whole, gelu, x.dtype)
        out = torch.empty((x.shape[0], product.num_outputs // 2), dtype=x.dtype, device=x.device)
        return stream_kernels.read(stream, product, out, gelu), out

    def add(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        product: Product,
        after: Residual,
        adapted: Adapted | None,
    ) -> Stream:
        """See DecoderOps."""
        if x.shape[0] > self._few_rows:
            return super().add(x, states, product, after, adapted)
        added = None
        if adapted is not None:
            added = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            self.lora(states, added, *adapted)
        return stream_kernels.add(x, states, product, after, added)

    def multiply(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        """See SeparateOps."""
        if x.shape[0] <= self._few_rows:
            out = torch.empty((x.shape[0], product.num_outputs), dtype=x.dtype, device=x.device)
            stream_kernels.read(Stream(x, x), product, out)
            return out
        if isinstance(product.weight, NarrowWeight):
            return multiply_few(x, product.weight, product.bias)
        return mm(x, product.weight, product.bias)

    def embed(
        self, rows: Rows, norm: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See SeparateOps."""
        table, ids = rows.table, rows.ids
        num, size = (table if ids is None else ids).shape[0], table.shape[1]
        x = torch.empty((num, size), dtype=table.dtype, device=table.device)
        out = torch.empty_like(x)
        block = triton.next_power_of_2(size)
        # What is not there is not read; a pointer must be one.
        _embed_rows[(num,)](
            table, table if ids is None else ids, table if norm is None else norm, x, out,
            rows.scale, eps,
            SIZE=size, BLOCK=block, HAS_IDS=ids is not None, HAS_NORM=norm is not None,
            num_warps=_warps(block), **FUSE,
        )  # fmt: skip
        return x, out

    def norm_heads(self, values: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """See DecoderOps."""
        num, size = values.shape
        block = triton.next_power_of_2(size)
        _norm_rows[(num,)](
            values,
            weight,
            values.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            num_warps=_warps(block),
            **FUSE,
        )

    def place(
        self,
        qkv: torch.Tensor,
        sizes: HeadSizes,
        norms: torch.Tensor | None,
        rotation: Rotation,
        places: Places,
    ) -> None:
        """See DecoderOps."""
        half = sizes.rotary_dim // 2
        rest = sizes.head_dim - 2 * half
        _place_heads[(qkv.shape[0], sizes.num_heads + 2 * sizes.num_kv_heads)](
            qkv, rotation.cos if norms is None else norms, rotation.cos, rotation.sin,
            rotation.cos if rotation.query_scales is None else rotation.query_scales,
            places.positions, places.slots, places.keys, places.values, sizes.eps,
            NUM_HEADS=sizes.num_heads, NUM_KV_HEADS=sizes.num_kv_heads, HEAD_DIM=sizes.head_dim,
            HALF=half, BLOCK=triton.next_power_of_2(half),
            REST=rest, BLOCK_REST=triton.next_power_of_2(max(1, rest)),
            INTERLEAVED=sizes.interleaved,
            NORM_BEFORE=norms is not None and not sizes.norm_after_rope,
            NORM_AFTER=norms is not None and sizes.norm_after_rope,
            SCALES=rotation.query_scales is not None, num_warps=1, **FUSE,
        )  # fmt: skip

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norms: Residual) -> torch.Tensor:
        """See SeparateOps."""
        out = torch.empty_like(x)
        num, size = x.shape
        block = triton.next_power_of_2(size)
        _add_norm_rows[(num,)](
            x, y, x if norms.post is None else norms.post,
            x if norms.following is None else norms.following, out, norms.scale, norms.eps,
            SIZE=size, BLOCK=block, HAS_POST=norms.post is not None,
            HAS_FOLLOWING=norms.following is not None, num_warps=_warps(block), **FUSE,
        )  # fmt: skip
        return out

    def gate(
        self, gate_up: torch.Tensor, gelu: bool, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See SeparateOps. dtype: of the result, where it is not that of gate_up."""
        num, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num, size), dtype=dtype or gate_up.dtype, device=gate_up.device)
        block = min(_GATE_BLOCK, triton.next_power_of_2(size))
        _gate_rows[(num, triton.cdiv(size, block))](
            gate_up, out, SIZE=size, BLOCK=block, GELU=gelu, num_warps=_warps(block), **FUSE
        )
        return out

    def convolve(self, projected: torch.Tensor, taps: torch.Tensor, at: Inputs) -> torch.Tensor:
        """See DecoderOps."""
        num_taps, size = taps.shape
        num = projected.shape[0]
        out = torch.empty((num, size), dtype=projected.dtype, device=projected.device)
        block = min(_CONVOLUTION_BLOCK, triton.next_power_of_2(size))
        _convolve_rows[(num, triton.cdiv(size, block))](
            projected, taps, at.slots, at.sources, at.kept, out, SIZE=size, BLOCK=block,
            NUM_TAPS=num_taps, num_warps=_warps(block), **FUSE,
        )  # fmt: skip
        return out

    def lora(self, x: torch.Tensor, y: torch.Tensor, spans: torch.Tensor, table: LoraTable) -> None:
        """See SeparateOps."""
        add_lora(x, y, spans, table)

    def own_embed(self, rows: Rows, places: torch.Tensor, part: OwnPart) -> torch.Tensor:
        """See DecoderOps."""
        return own_embed(rows, places, part)

    def own_logits(
        self, hidden: torch.Tensor, logits: torch.Tensor, rows: HeadRows, out: torch.Tensor
    ) -> None:
        """See DecoderOps."""
        own_logits(hidden, logits, rows, out)
