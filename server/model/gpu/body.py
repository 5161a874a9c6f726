"""The body of a step on a GPU, by one of two ways: our own decoder, or transformers' modules.

It turns a step's token ids (or their embeddings) into the last hidden states, with paged attention.
FusedDecoder (decoder.py) computes the families of families.py in a few launches a layer; ModuleBody
runs any module whose attention goes through transformers' attention interface, some forty to eighty
launches a layer. body_run.py chooses rows, tiles and graphs; head_run.py has the LM head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from server.errors import UnsupportedModelError
from server.model.gpu import attention as paged
from server.model.gpu.decoder import FusedDecoder, Kept, not_covered
from server.model.gpu.decoder_ops import DecoderOps, TorchOps
from server.model.gpu.delta import PagedDeltaNet, kept_width, state_size
from server.model.gpu.lora import LoraBank
from server.model.shape import shape_of
from server.types import DecoderChoice, NarrowForm


@dataclass(frozen=True, slots=True, eq=False)
class StepIds:
    """What goes into a step: one row per position.

    token_ids: int32 [R]. adapters: int32 [n, 3], lora_spans of the step, None in a step without
    adapters. own_places: int32 [R], OwnRows.embedding_places, None where no row has one. embeds:
    [R, hidden_size], rows of the table that were gathered in CPU memory, in their place, own ones
    among them; None where the table is on the device.
    """

    token_ids: torch.Tensor
    embeds: torch.Tensor | None
    adapters: torch.Tensor | None = None
    own_places: torch.Tensor | None = None


class Body(Protocol):
    """Everything between token ids and the LM head. name: of Ways.decoder. kept: of a position.
    nets: its gated delta nets. adapters: beside the model; None where it computes none."""

    name: str
    kept: Kept
    nets: Sequence[PagedDeltaNet]
    adapters: LoraBank | None

    def __call__(
        self, ids: StepIds, step: paged.StepTensors, paged_step: paged.PagedStep
    ) -> torch.Tensor:
        """Last hidden states [R, hidden_size], after the final norm. Queues work, syncs nothing."""


def delta_nets(module: nn.Module) -> list[PagedDeltaNet]:
    """The gated delta nets of a module that was taken over (generic.take_over)."""
    return [part for part in module.modules() if isinstance(part, PagedDeltaNet)]


def kept_by_modules(module: Any) -> Kept:
    """What ModuleBody keeps of a position."""
    nets, layers = delta_nets(module), int(module.config.num_hidden_layers)
    if not nets:
        return Kept(layers)
    state = math.prod(state_size(nets[0]))
    return Kept(layers - len(nets), len(nets), kept_width(nets[0]), state=state)


class ModuleBody:
    """transformers' own modules. See server.model.gpu.attention for how they reach our cache."""

    name = "modules"
    adapters: LoraBank | None = None

    def __init__(self, module: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        embed: Any = module.get_input_embeddings()
        self._body = module.base_model
        self.kept = kept_by_modules(module)
        self.nets: Sequence[PagedDeltaNet] = delta_nets(module)
        # Gemma's scale, rounded as transformers' own embedding does.
        scale = getattr(embed, "embed_scale", None)
        self._scale = None if scale is None else scale.to(device=device, dtype=dtype)

    def __call__(
        self, ids: StepIds, step: paged.StepTensors, paged_step: paged.PagedStep
    ) -> torch.Tensor:
        """See Body."""
        given: dict[str, torch.Tensor]
        if ids.embeds is not None:
            embeds = ids.embeds if self._scale is None else ids.embeds * self._scale
            given = {"inputs_embeds": embeds[None]}
        else:
            given = {"input_ids": ids.token_ids[None]}
        result = self._body(
            **given, position_ids=step.positions[None], use_cache=False, paged=paged_step
        )
        hidden: torch.Tensor = result.last_hidden_state[0]
        return hidden


def body_of(
    module: PreTrainedModel,
    attention: paged.AttentionName,
    decoder: DecoderChoice,
    num_positions: int,
    dtype: torch.dtype,
    form: NarrowForm | None = None,
) -> Body:
    """The body that a runner uses. "auto" is our own decoder with Triton's attention, for models
    that it covers, and their modules elsewhere: they are the reference beside the torch attention,
    but where layers have short convolutions, which those keep in a way of their own.

    num_positions: the longest sequence. form: of the layers' weights; our own decoder has some. The
    module's weights become the decoder's. Raises UnsupportedModelError where a decoder, or a form,
    is asked for that does not compute the model.
    """
    device = next(p.device for p in module.parameters() if p.device.type != "meta")
    reason = not_covered(module)
    if form is not None and (decoder == "modules" or reason is not None):
        why = reason if decoder != "modules" else "decoder: modules takes them as they are"
        raise UnsupportedModelError(
            f"weights: {form} is for models that our own decoder computes, and {why}. Nearest that "
            "works: `weights: auto`"
        )
    needs_ours = reason is None and any(shape_of(module.config).convolutions)
    if needs_ours and decoder == "modules":
        raise UnsupportedModelError(
            f"decoder: modules does not compute {module.config.model_type}: its short convolutions "
            "keep inputs that only our own decoder has room for. `auto` and `fused` take that"
        )
    is_plain = decoder == "auto" and attention != "triton" and form is None
    if not needs_ours and (decoder == "modules" or is_plain):
        return ModuleBody(module, device, dtype)
    if reason is None:
        shape = shape_of(module.config)
        return FusedDecoder(module, shape, num_positions, _ops(attention, form), form)
    if decoder == "auto":
        return ModuleBody(module, device, dtype)
    raise UnsupportedModelError(
        f"decoder: fused does not compute {module.config.model_type}: {reason}. `auto` and "
        "`modules` take transformers' own layers for it"
    )


def _ops(attention: paged.AttentionName, form: NarrowForm | None) -> DecoderOps:
    if attention == "torch":
        return TorchOps()
    from server.model.gpu.decoder_kernels import TritonOps

    if form in ("int8-blocks", "int4"):
        return TritonOps(few_rows=0)  # products in blocks have a kernel of their own
    return TritonOps()
