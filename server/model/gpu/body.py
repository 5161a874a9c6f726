"""The body of a step on a GPU: transformers' own modules between token ids and the LM head.

It turns a step's token ids (or their embeddings) into the last hidden states, with paged attention:
attention.py says how a module's layers reach our cache. Convolutions and gated delta nets read
their own memory, adapters are added by hooks (adapters.py). body_run.py chooses rows, tiles and
graphs; head_run.py has the LM head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from server.model.families import family_of
from server.model.gpu import attention as paged
from server.model.gpu.adapters import Grouped, LoraBank
from server.model.gpu.recurrent import (
    PagedDeltaNet,
    kept_width,
    replace_convolutions,
    state_size,
)
from server.model.shape import ModelShape, shape_of


class Kept(NamedTuple):
    """What a body keeps of a position. layers: with K and V. convolutions: with a vector of `width`
    numbers instead, of which a row reads its last `taps` positions'; 0 taps for gated delta nets,
    whose sequences have states of `state` numbers beside."""

    layers: int
    convolutions: int = 0
    width: int = 0
    taps: int = 0
    state: int = 0


def delta_nets(module: nn.Module) -> list[PagedDeltaNet]:
    """The gated delta nets of a module that was taken over (generic.take_over)."""
    return [part for part in module.modules() if isinstance(part, PagedDeltaNet)]


def _shape(module: Any) -> ModelShape | None:
    """A family's; None of the generic path."""
    try:
        family_of(module.config)
    except KeyError:
        return None
    return shape_of(module.config)


def kept_by(module: Any) -> Kept:
    """What Body keeps of a position."""
    nets, layers = delta_nets(module), int(module.config.num_hidden_layers)
    if nets:
        state = math.prod(state_size(nets[0]))
        return Kept(layers - len(nets), len(nets), kept_width(nets[0]), state=state)
    shape = _shape(module)
    convolutions = 0 if shape is None else sum(shape.convolutions)
    if shape is None or not convolutions:
        return Kept(layers)
    return Kept(layers - convolutions, convolutions, shape.kept_width, shape.conv_taps)


class Body:
    """Everything between token ids and the LM head.

    module: taken over; its attention must be `paged` already. product: of adapters. kept: of a
    position. nets: its gated delta nets. adapters: beside the model; None for models of the generic
    path.
    """

    def __init__(self, module: PreTrainedModel, product: Grouped, dtype: torch.dtype) -> None:
        device = next(p.device for p in module.parameters() if p.device.type != "meta")
        embed: Any = module.get_input_embeddings()
        self._body = module.base_model
        self._table: torch.Tensor = embed.weight
        self.kept = kept_by(module)
        self.nets: Sequence[PagedDeltaNet] = delta_nets(module)
        if replace_convolutions(self._body):
            place_attention(self._body)
        self.adapters: LoraBank | None = None
        shape = _shape(module)
        if shape is not None:
            self.adapters = LoraBank(module, shape, dtype, device, product)
        # Gemma's scale, rounded as transformers' own embedding does.
        scale = getattr(embed, "embed_scale", None)
        self._scale = None if scale is None else scale.to(device=device, dtype=dtype)

    def __call__(
        self,
        token_ids: torch.Tensor,
        embeds: torch.Tensor | None,
        adapters: torch.Tensor | None,
        own_places: torch.Tensor | None,
        step: paged.PagedStep,
    ) -> torch.Tensor:
        """Last hidden states [R, hidden_size], after the final norm. Queues work, syncs nothing.

        token_ids: int32 [R]. embeds: [R, hidden_size], rows of the table that were gathered in CPU
        memory, in their place, own ones among them; None where the table is on the device.
        adapters: int32 [n, 3], lora_spans of the step, None in a step without adapters. own_places:
        int32 [R], OwnRows.embedding_places, None where no row has one. step: with its rows.
        """
        if self.adapters is not None:
            self.adapters.spans = adapters
            if embeds is None and own_places is not None:
                embeds = self.adapters.own.embed(self._table, token_ids, own_places)
        given: dict[str, torch.Tensor]
        if embeds is None:
            given = {"input_ids": token_ids[None]}
        else:
            embeds = embeds if self._scale is None else embeds * self._scale
            given = {"inputs_embeds": embeds[None]}
        assert step.rows is not None
        result = self._body(
            **given, position_ids=step.rows.positions[None], use_cache=False, paged=step
        )
        hidden: torch.Tensor = result.last_hidden_state[0]
        return hidden


def place_attention(body: Any) -> int:
    """Number the layers that attend, among others that do not, by their place in our cache; how
    many."""
    attending = [part for part in body.layers if hasattr(part, "self_attn")]
    for place, layer in enumerate(attending):
        layer.self_attn.layer_idx = place
    return len(attending)


class Float8Linear(nn.Module):
    """A linear layer in 8 bits: e4m3 with a scale for each output, times rows that are rounded to
    e4m3 with a scale each, by torch's scaled product (on CUDA cuBLASLt's, which gives bfloat16)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scales = _in_float8(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = scales.t()
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs], in x's dtype."""
        rows, scales = _in_float8(x.flatten(0, -2))
        y = torch._scaled_mm(
            rows, self.weight.t(), scale_a=scales, scale_b=self.scales, out_dtype=torch.bfloat16
        ).to(x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], y.shape[1])


def _in_float8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 like rows [n, k], float32 [n, 1] that each is to be multiplied by)."""
    wide = rows.float()
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / largest
    return (wide / scales).to(torch.float8_e4m3fn), scales


def narrow_layers(module: nn.Module) -> None:
    """Put a Float8Linear in the place of every linear layer of a module's layers; sizes that are
    no multiples of 16, which the product does not take, stay as they are."""
    for name, part in list(module.named_modules()):
        is_layer = isinstance(part, nn.Linear) and ".layers." in f".{name}"
        if is_layer and not (part.in_features % 16 or part.out_features % 16):
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, Float8Linear(part))
