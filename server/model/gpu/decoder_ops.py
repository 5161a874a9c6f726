"""The operations of a decoder layer beside its attention, and their reference.

DecoderOps declares the operations. Those on the residual stream are products together with what
stands between them (`read`, `gated`, `add`, `leave`); SeparateOps makes each of its parts, a launch
each. TorchOps has the parts in plain torch, on any device, as the reference of the kernels in
decoder_kernels.py and stream_kernels.py. All sums are float32; what is stored has the model's
dtype. An operation rounds once, where transformers' modules round after every step of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from server.model.gpu.convolution import FIRST_ROW, Inputs
from server.model.gpu.lora import LoraTable
from server.model.gpu.narrow import NarrowWeight, multiply
from server.model.gpu.own_rows import HeadRows, OwnPart, own_embed, own_logits


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """How q, k and v of a row are divided: num_heads, then num_kv_heads twice, head_dim each.

    rotary_dim: leading dimensions that rotate. interleaved: the rotation pairs neighbours, not
    halves. norm_after_rope: q and k are normed after the rotation. eps: of their norm.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    norm_after_rope: bool
    eps: float


class Rotation(NamedTuple):
    """cos, sin: float32 [positions, rotary_dim / 2]. query_scales: float32 [positions], or None."""

    cos: torch.Tensor
    sin: torch.Tensor
    query_scales: torch.Tensor | None


class Places(NamedTuple):
    """Where a step's rows are: positions, slots: int32 [R]; keys, values: a layer's cache,
    [num_slots, num_kv_heads, head_dim]."""

    positions: torch.Tensor
    slots: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class Rows(NamedTuple):
    """Rows of an embedding table [n, hidden_size]: those of ids int32 [R], or all where ids is
    None. scale: factor on a row."""

    table: torch.Tensor
    ids: torch.Tensor | None
    scale: float


class Residual(NamedTuple):
    """post: float32 [H], norm of what is added, or None. scale: of what is added. following:
    float32 [H], norm of the sum, or None. eps: of both."""

    post: torch.Tensor | None
    scale: float
    following: torch.Tensor | None
    eps: float


class Product(NamedTuple):
    """x -> x @ weight.T + bias. weight: [outputs, inputs], as it is or in 8 bits. bias: [outputs],
    or None."""

    weight: torch.Tensor | NarrowWeight
    bias: torch.Tensor | None

    @property
    def values(self) -> torch.Tensor:
        """The weight's own, of any dtype: [outputs, inputs]."""
        return self.weight.values if isinstance(self.weight, NarrowWeight) else self.weight

    @property
    def num_outputs(self) -> int:
        """Rows of the weight."""
        return self.values.shape[0]


class Adapted(NamedTuple):
    """The adapters of a step's rows in one product. spans: int32 [n, SPAN_FIELDS], as lora_spans
    has them."""

    spans: torch.Tensor
    table: LoraTable


class Stream(NamedTuple):
    """The residual stream between an operation that adds to it and the one that reads it.

    x: [R, H]. normed: the norm of it, [R, H], or None: then `after` says what is still to be done,
    `y` [R, H] is what is to be normed and added to x (None: it was added), and `parts` are sums of
    squares of y, or of x, float32 [R, any number].
    """

    x: torch.Tensor
    normed: torch.Tensor | None
    after: Residual | None = None
    y: torch.Tensor | None = None
    parts: torch.Tensor | None = None


class DecoderOps(Protocol):
    """Of one step's rows. What a `read` or a `gated` takes comes from the `enter` or `add` before
    it; x of a Stream is theirs alone."""

    def enter(self, rows: Rows, norm: torch.Tensor | None, eps: float) -> Stream:
        """The residual stream of embedded rows, in the table's dtype."""

    def read(
        self, stream: Stream, product: Product, adapted: Adapted | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x of the stream, the product of its norm [R, outputs])."""

    def gated(
        self, stream: Stream, product: Product, gelu: bool, adapted: Adapted | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x of the stream, activation(gate) * up [R, n]). product: of 2 n outputs, those of gate
        first. SiLU, or GELU's tanh form."""

    def add(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        product: Product,
        after: Residual,
        adapted: Adapted | None,
    ) -> Stream:
        """The stream x with the product of states [R, inputs] as `after` says."""

    def leave(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        product: Product,
        after: Residual,
        adapted: Adapted | None,
    ) -> torch.Tensor:
        """The same at the end of all layers: the sum's norm [R, H]."""

    def norm_heads(self, values: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """RMSNorm of every row of values [R, n] (a view: rows may be apart), in place."""

    def place(
        self,
        qkv: torch.Tensor,
        sizes: HeadSizes,
        norms: torch.Tensor | None,
        rotation: Rotation,
        places: Places,
    ) -> None:
        """q of qkv [R, (num_heads + 2 * num_kv_heads) * head_dim] normed and rotated in place; k
        the same, and v, to their slots. norms: float32 [2, head_dim], of q and of k, or None."""

    def convolve(self, projected: torch.Tensor, taps: torch.Tensor, at: Inputs) -> torch.Tensor:
        """C * sum over taps of (B * x), the oldest position first: [R, H]; each row's own B * x to
        its slot. projected: [R, 3 H]: B, C, x. taps: float32 [taps, H]."""

    def own_embed(self, rows: Rows, places: torch.Tensor, part: OwnPart) -> torch.Tensor:
        """[R, H], not scaled: of each row with a place (int32 [R], -1: none) its own row for its
        id, where `part` has one, else the table's. rows: with ids."""

    def own_logits(
        self, hidden: torch.Tensor, logits: torch.Tensor, rows: HeadRows, out: torch.Tensor
    ) -> None:
        """Wide logits of hidden [n, H] into out, float32 [n, W]: products of own rows in their
        ids' columns, else logits (float32 [n, V]), else -inf. Two launches, soft-capping apart."""


class SeparateOps(ABC):
    """The operations on the residual stream, a launch for each of their parts."""

    def enter(self, rows: Rows, norm: torch.Tensor | None, eps: float) -> Stream:
        """See DecoderOps."""
        return Stream(*self.embed(rows, norm, eps))

    def read(
        self, stream: Stream, product: Product, adapted: Adapted | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderOps."""
        assert stream.normed is not None
        return stream.x, self._adapted(stream.normed, product, adapted)

    def gated(
        self, stream: Stream, product: Product, gelu: bool, adapted: Adapted | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderOps."""
        assert stream.normed is not None
        return stream.x, self.gate(self._adapted(stream.normed, product, adapted), gelu)

    def add(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        product: Product,
        after: Residual,
        adapted: Adapted | None,
    ) -> Stream:
        """See DecoderOps."""
        return Stream(x, self.leave(x, states, product, after, adapted))

    def leave(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        product: Product,
        after: Residual,
        adapted: Adapted | None,
    ) -> torch.Tensor:
        """See DecoderOps."""
        return self.add_norm(x, self._adapted(states, product, adapted), after)

    def _adapted(self, x: torch.Tensor, product: Product, adapted: Adapted | None) -> torch.Tensor:
        y = self.multiply(x, product)
        if adapted is not None:
            self.lora(x, y, *adapted)
        return y

    @abstractmethod
    def embed(
        self, rows: Rows, norm: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the residual stream [R, H], its RMSNorm or a copy of it), in the table's dtype."""

    @abstractmethod
    def multiply(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        """The product of x [R, inputs]."""

    @abstractmethod
    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norms: Residual) -> torch.Tensor:
        """x [R, H] += norm(y) * scale in place; the sum's norm [R, H], or a copy of it."""

    @abstractmethod
    def gate(self, gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
        """activation(gate) * up of gate_up [R, 2 n]: [R, n]. SiLU, or GELU's tanh form."""

    @abstractmethod
    def lora(self, x: torch.Tensor, y: torch.Tensor, spans: torch.Tensor, table: LoraTable) -> None:
        """y [R, outputs] += ((x [R, K] @ A) * scale) @ B in place, for the rows of the spans. Two
        launches. y may be of another dtype than x."""


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension of float32 x (Zhang, Sennrich, arXiv 1910.07467)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def mm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [R, inputs] @ weight.T + bias by torch. weight: [outputs, inputs]. bias: [outputs]."""
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


class TorchOps(SeparateOps):
    """DecoderOps in plain torch."""

    def embed(
        self, rows: Rows, norm: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See SeparateOps."""
        ids, x = rows.ids, rows.table
        if ids is not None:
            x = x.index_select(0, ids)
        x = (x.float() * rows.scale).to(rows.table.dtype)
        return x, x.clone() if norm is None else rms(x.float(), norm, eps).to(x.dtype)

    def norm_heads(self, values: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """See DecoderOps."""
        values.copy_(rms(values.float(), weight, eps))

    def place(
        self,
        qkv: torch.Tensor,
        sizes: HeadSizes,
        norms: torch.Tensor | None,
        rotation: Rotation,
        places: Places,
    ) -> None:
        """See DecoderOps."""
        count = sizes.num_heads + sizes.num_kv_heads
        heads = qkv.view(qkv.shape[0], count + sizes.num_kv_heads, sizes.head_dim)
        turned = heads[:, :count].float()
        if norms is not None:
            of_head = [sizes.num_heads, sizes.num_kv_heads]
            weights = norms.repeat_interleave(torch.tensor(of_head, device=norms.device), 0)
        if norms is not None and not sizes.norm_after_rope:
            turned = rms(turned, weights, sizes.eps)
        at = places.positions.long()
        cos, sin = rotation.cos[at][:, None], rotation.sin[at][:, None]
        half = sizes.rotary_dim // 2
        first = slice(0, sizes.rotary_dim, 2) if sizes.interleaved else slice(0, half)
        second = slice(1, sizes.rotary_dim, 2) if sizes.interleaved else slice(half, 2 * half)
        a, b = turned[..., first], turned[..., second]
        turned = turned.clone()
        turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
        if norms is not None and sizes.norm_after_rope:
            turned = rms(turned, weights, sizes.eps)
        if rotation.query_scales is not None:
            turned[:, : sizes.num_heads] *= rotation.query_scales[at][:, None, None]
        heads[:, : sizes.num_heads] = turned[:, : sizes.num_heads].to(qkv.dtype)
        slots = places.slots.long()
        places.keys[slots] = turned[:, sizes.num_heads :].to(qkv.dtype)
        places.values[slots] = heads[:, count:]

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norms: Residual) -> torch.Tensor:
        """See SeparateOps."""
        added = y.float()
        if norms.post is not None:
            added = rms(added, norms.post, norms.eps)
        x.copy_(x.float() + added * norms.scale)
        if norms.following is None:
            return x.clone()
        return rms(x.float(), norms.following, norms.eps).to(x.dtype)

    def gate(self, gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
        """See SeparateOps."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        return (gate * up).to(gate_up.dtype)

    def convolve(self, projected: torch.Tensor, taps: torch.Tensor, at: Inputs) -> torch.Tensor:
        """See DecoderOps."""
        b, c, x = projected.float().chunk(3, dim=-1)
        own = (b * x).to(projected.dtype)
        at.kept[at.slots.long()] = own
        total = torch.zeros_like(c)
        for source, weight in zip(at.sources.long().t(), taps, strict=True):
            row = FIRST_ROW - source
            value = at.kept[source.clamp(min=0)].float() * (source >= 0)[:, None]
            value = torch.where((row >= 0)[:, None], own[row.clamp(min=0)].float(), value)
            total += weight * value
        return (total * c).to(projected.dtype)

    def multiply(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        """See SeparateOps."""
        if isinstance(product.weight, NarrowWeight):
            return multiply(x, product.weight, product.bias)
        return mm(x, product.weight, product.bias)

    def lora(self, x: torch.Tensor, y: torch.Tensor, spans: torch.Tensor, table: LoraTable) -> None:
        """See SeparateOps."""
        for first, num, place in spans.tolist():
            rows = slice(first, first + num)
            t = (x[rows].float() @ table.a[place].float()) * table.scales[place]
            y[rows] = (y[rows].float() + t @ table.b[place].float()).to(y.dtype)

    def own_embed(self, rows: Rows, places: torch.Tensor, part: OwnPart) -> torch.Tensor:
        """See DecoderOps."""
        return own_embed(rows, places, part)

    def own_logits(
        self, hidden: torch.Tensor, logits: torch.Tensor, rows: HeadRows, out: torch.Tensor
    ) -> None:
        """See DecoderOps."""
        own_logits(hidden, logits, rows, out)
