"""FusedDecoder: a decoder's layers in six launches each, for the families of families.py.

A decode step of a small model on a GPU is as long as its launches: transformers' modules make 39 to
84 a layer. Here a layer is: norm and one product for q, k and v; one kernel for their norm, their
rotation and the write to the cache; attention (a second launch where keys are split); the product
back to the residual stream; norm, one product for gate and up, and the activation; the product back
again. A short convolution (LFM2) is one kernel in the place of rotation and attention. Embedding
and first norm are one launch before the layers, the last norm is one behind them.

So it is for few rows (stream_kernels.py). For more, products are torch's (cuBLAS), and norms and
activations have launches of their own: nine a layer. DecoderOps has both. The differences between
families are those of ModelShape, as on the CPU (cpu/forward.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from server.model.families import family_of
from server.model.gpu.attention import Masked
from server.model.gpu.convolution import Inputs
from server.model.gpu.decoder_ops import (
    Adapted,
    DecoderOps,
    HeadSizes,
    Places,
    Product,
    Residual,
    Rotation,
    Rows,
)
from server.model.gpu.lora import KINDS, LoraBank
from server.model.gpu.narrow import narrowed
from server.model.gpu.own_rows import OwnRows
from server.model.shape import ModelShape, query_scales, rope_tables, shape_of
from server.types import NarrowForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from server.model.gpu.attention import PagedStep, StepTensors
    from server.model.gpu.body import StepIds
    from server.model.gpu.delta import PagedDeltaNet


_Makes = Callable[[Sequence[nn.Module]], Product]


class Kept(NamedTuple):
    """What a body keeps of a position. layers: with K and V. convolutions: with a vector of `width`
    numbers instead, of which a row reads its last `taps` positions'; 0 taps for gated delta nets,
    whose sequences have states of `state` numbers beside."""

    layers: int
    convolutions: int = 0
    width: int = 0
    taps: int = 0
    state: int = 0


def kept_by(shape: ModelShape) -> Kept:
    """What FusedDecoder keeps of a position."""
    convolutions = sum(shape.convolutions)
    if not convolutions:
        return Kept(shape.num_layers)
    layers = shape.num_layers - convolutions
    return Kept(layers, convolutions, shape.kept_width, shape.conv_taps)


@dataclass(frozen=True, slots=True, eq=False)
class _Attention:
    """What is attention's alone. head_norms: float32 [2, head_dim] or None. whole_norms: of all q,
    of all k. masked: how its scores are made. rope: its table."""

    head_norms: torch.Tensor | None
    whole_norms: tuple[torch.Tensor, torch.Tensor] | None
    masked: Masked
    rope: int


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer. mix: products of q, k and v, or of a convolution's B, C and x. place: in the
    cache, among its layers of one kind. taps: of a convolution, float32 [taps, H]. norms: float32
    [H] each, in the order of WeightNames.norms, None = not there."""

    mix: Product
    out: Product
    gate_up: Product
    down: Product
    norms: tuple[torch.Tensor | None, ...]
    place: int
    attention: _Attention | None
    taps: torch.Tensor | None


def not_covered(module: PreTrainedModel) -> str | None:
    """Why FusedDecoder does not compute a model; None: it does."""
    try:
        family_of(module.config)
    except KeyError:
        return "it is none of our families"
    down: Any = module.get_submodule(f"model.layers.0.{shape_of(module.config).names.down}")
    return None if down.bias is None else "its MLP has biases"


class FusedDecoder:
    """server.model.gpu.body.Body over a module's weights.

    adapters: those that are held beside the model; in a step that has some (StepIds.adapters) every
    product has two or three launches more. module: on its device; q, k and v, and gate and up
    become views of one matrix each, so that no weight is there twice, and the module stays usable.
    num_positions: the longest sequence. form: of the layers' products, whose weights the module
    then has no longer; None: as they are. Final states are divided by shape.logit_divisor, because
    the LM head knows nothing of it.
    """

    name = "fused"

    def __init__(
        self,
        module: nn.Module,
        shape: ModelShape,
        num_positions: int,
        ops: DecoderOps,
        form: NarrowForm | None = None,
    ) -> None:
        self._ops = ops
        self._shape = shape
        self.kept = kept_by(shape)
        self.nets: Sequence[PagedDeltaNet] = ()
        self._sizes = HeadSizes(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.rotary_dim,
            shape.interleaved, shape.qk_norm == "head_after_rope", shape.norm_eps,
        )  # fmt: skip
        embed: Any = module.get_submodule("model.embed_tokens")
        self._table: torch.Tensor = embed.weight
        any_norm: Any = module.get_submodule(shape.names.final_norm)
        weight: torch.Tensor = any_norm.weight
        device = weight.device  # the embedding may lie elsewhere

        def made(linears: Sequence[nn.Module]) -> Product:
            return _fused(linears) if form is None else _narrow(linears, form)

        self._layers = [_layer(module, shape, i, made) for i in range(shape.num_layers)]
        own = OwnRows(shape.vocab_size, shape.hidden_size, weight.dtype, device, ops)
        self.adapters: LoraBank | None = LoraBank(shape, weight.dtype, device, own)
        # Gemma's scale is rounded to the model's dtype, as transformers' own embedding does.
        scale = torch.tensor(shape.embedding_scale)
        rounds = getattr(embed, "embed_scale", None) is not None
        self._scale = float(scale.to(weight.dtype) if rounds else scale)
        final = _norm(module, shape.names.final_norm, shape)
        self._final = final / shape.logit_divisor
        tables = rope_tables(module.config, shape, num_positions)
        cos, sin = (torch.from_numpy(table).to(device) for table in tables)
        scales = torch.from_numpy(query_scales(shape, num_positions)).to(device)
        self._rotations = [
            Rotation(cos[i], sin[i], scales if scales.shape[0] else None)
            for i in range(cos.shape[0])
        ]

    def __call__(self, ids: StepIds, step: StepTensors, paged_step: PagedStep) -> torch.Tensor:
        """See Body. The attention's `attend` is called once a layer that has some; K and V are
        written here."""
        ops, s = self._ops, self._shape
        rows = Rows(self._table, ids.token_ids, self._scale)
        if ids.embeds is not None:
            rows = Rows(ids.embeds, None, self._scale)
        elif ids.own_places is not None and self.adapters is not None:
            embeds = self.adapters.own.embed(rows, ids.own_places)
            rows = Rows(embeds, None, self._scale)
        stream = ops.enter(rows, self._layers[0].norms[0], s.norm_eps)
        for i, layer in enumerate(self._layers):
            mix, out, gate_up, down = self._adapted(i, ids.adapters)
            x, mixed = ops.read(stream, layer.mix, mix)
            if layer.attention is None:
                mixed = self._convolved(layer, mixed, step, paged_step)
            else:
                mixed = self._attended(layer, layer.attention, mixed, step, paged_step)
            after = Residual(layer.norms[1], s.residual_scale, layer.norms[2], s.norm_eps)
            stream = ops.add(x, mixed, layer.out, after, out)
            x, gated = ops.gated(stream, layer.gate_up, s.activation == "gelu_tanh", gate_up)
            if i + 1 < len(self._layers):
                following = self._layers[i + 1].norms[0]
                after = Residual(layer.norms[3], s.residual_scale, following, s.norm_eps)
                stream = ops.add(x, gated, layer.down, after, down)
        after = Residual(layer.norms[3], s.residual_scale, self._final, s.norm_eps)
        return ops.leave(x, gated, layer.down, after, down)

    def _adapted(self, i: int, spans: torch.Tensor | None) -> list[Adapted | None]:
        """The adapters in layer i's products, by the number of their kind."""
        if spans is None or self.adapters is None:
            return [None] * len(KINDS)
        return [Adapted(spans, table) for table in self.adapters.tables(i)]

    def _convolved(
        self, layer: _Layer, projected: torch.Tensor, step: StepTensors, paged_step: PagedStep
    ) -> torch.Tensor:
        """[R, H]: the gated filter of a layer over its row's path, its own input included."""
        assert step.sources is not None and layer.taps is not None
        at = Inputs(step.slots, step.sources, paged_step.cache.inputs[layer.place])
        return self._ops.convolve(projected, layer.taps, at)

    def _attended(
        self,
        layer: _Layer,
        own: _Attention,
        qkv: torch.Tensor,
        step: StepTensors,
        paged_step: PagedStep,
    ) -> torch.Tensor:
        """[R, num_heads * head_dim]: attention of a layer over its keys, those of this step
        included."""
        sizes = self._sizes
        width = sizes.num_heads * sizes.head_dim
        if own.whole_norms is not None:
            q_norm, k_norm = own.whole_norms
            keys_end = width + sizes.num_kv_heads * sizes.head_dim
            self._ops.norm_heads(qkv[:, :width], q_norm, sizes.eps)
            self._ops.norm_heads(qkv[:, width:keys_end], k_norm, sizes.eps)
        keys, values = paged_step.cache.layer(layer.place)
        places = Places(step.positions, step.slots, keys, values)
        self._ops.place(qkv, sizes, own.head_norms, self._rotations[own.rope], places)
        query = qkv.view(qkv.shape[0], -1, sizes.head_dim)[:, : sizes.num_heads]
        return paged_step.attention.attend(query, keys, values, own.masked).flatten(1)


def _layer(module: nn.Module, shape: ModelShape, i: int, made: _Makes) -> _Layer:
    """Layer i over the module's weights, its products as they are made."""
    names, prefix = shape.names, f"model.layers.{i}."

    def product(modules: Sequence[str]) -> Product:
        return made([module.get_submodule(prefix + name) for name in modules])

    attention, taps, mix, out = None, None, names.qkv, names.out
    if shape.convolutions[i]:
        mix, out = (names.conv[0],), names.conv[2]
        filters: Any = module.get_submodule(prefix + names.conv[1])
        taps = filters.weight.detach().float()[:, 0].t().contiguous()  # of [H, 1, taps]
    else:
        attention = _attention(module, shape, i)
    return _Layer(
        mix=product(mix),
        out=product([out]),
        gate_up=product(names.gate_up),
        down=product([names.down]),
        norms=tuple(
            None if name is None else _norm(module, prefix + name, shape) for name in names.norms
        ),
        place=shape.convolutions[:i].count(shape.convolutions[i]),
        attention=attention,
        taps=taps,
    )


def _attention(module: nn.Module, shape: ModelShape, i: int) -> _Attention:
    head_norms = whole_norms = None
    if shape.qk_norm != "none":
        names = [f"model.layers.{i}.{name}" for name in shape.names.qk_norms]
        q_norm, k_norm = (_norm(module, name, shape) for name in names)
        if shape.qk_norm == "whole":
            whole_norms = q_norm, k_norm
        else:
            head_norms = torch.stack([q_norm, k_norm])
    masked = Masked(shape.attention_scale, shape.windows[i] or None, shape.attention_cap)
    return _Attention(head_norms, whole_norms, masked, shape.rope_ids[i])


def _norm(module: nn.Module, name: str, shape: ModelShape) -> torch.Tensor:
    """A norm's weight as a factor, float32."""
    own: Any = module.get_submodule(name)
    weight: torch.Tensor = own.weight.float() + shape.norm_offset
    return weight


def _fused(linears: Sequence[nn.Module]) -> Product:
    """One product with the outputs of all; their own weights become views of it."""
    parts: dict[str, torch.Tensor | None] = {}
    for leaf in ("weight", "bias"):
        own = [getattr(linear, leaf, None) for linear in linears]
        if any(part is None for part in own):
            parts[leaf] = None
        elif len(own) == 1:
            parts[leaf] = own[0]
        else:
            parts[leaf] = whole = torch.cat(own)  # type: ignore[arg-type]
            ends = torch.cumsum(torch.tensor([len(part) for part in own]), 0).tolist()  # type: ignore[arg-type]
            for linear, first, end in zip(linears, [0, *ends], ends, strict=False):
                setattr(linear, leaf, nn.Parameter(whole[first:end], requires_grad=False))
    weight = parts["weight"]
    assert weight is not None
    return Product(weight.detach(), None if parts["bias"] is None else parts["bias"].detach())


def _narrow(linears: Sequence[nn.Module], form: NarrowForm) -> Product:
    """The same in 8 bits; the modules are left without their weights."""
    weight, bias = _fused(linears)
    assert isinstance(weight, torch.Tensor)
    product = Product(narrowed(weight, form), bias)
    for linear in linears:
        linear.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return product
