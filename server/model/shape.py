"""ModelShape: a supported model's config as plain numbers, in one place.

The runners and the loader read a transformers config only through this. families.py has the
differences of families; supported.py decides whether a config is supported at all.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from server.model.families import (
    NormPlacement,
    QkNorm,
    WeightNames,
    family_of,
    layer_types,
    position_limit,
)

NO_ROPE = "no_rope"
"""The rope table of layers that do not rotate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and switches of a decoder. Defaults are those of a model without the switch.

    vocab_size: real ids; rows past it (a padded table) are never drawn. windows: per layer, the
    sliding window in positions (a row attends to positions > its own - window), 0 = all. rope_ids:
    per layer, which of rope_layer_types is its rope table. norms, qk_norm, interleaved: families.py
    has their meaning. norm_offset: 1.0 where the stored weight is added to one (Gemma).
    rotary_dim: leading dimensions of a head that rotate. embedding_scale: factor on gathered
    embeddings. residual_scale: on what attention and MLP add.
    logit_divisor: of the logits. attention_cap, logit_cap: soft-capping c * tanh(x / c), 0 = none.
    query_beta, query_period: q at position p is scaled by 1 + beta * log(1 + floor(p / period)).
    max_position_embeddings: positions unless more are asked for. longest_positions: the most that
    may be (families.position_limit).
    convolutions: per layer, whether it has a short convolution of conv_taps positions (LFM2)
    instead of attention, or a recurrence. kept_width: floats that such a layer keeps of a position.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    intermediate_size: int
    vocab_size: int
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float
    qk_norm: QkNorm = "none"
    norms: NormPlacement = "before"
    interleaved: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    query_beta: float = 0.0
    query_period: int = 1
    tied: bool
    windows: tuple[int, ...]
    rope_ids: tuple[int, ...]
    rope_layer_types: tuple[str | None, ...]
    max_position_embeddings: int
    longest_positions: int
    names: WeightNames = field(default_factory=WeightNames)
    convolutions: tuple[bool, ...]
    conv_taps: int = 0
    kept_width: int = 0


def _sizes(config: Any) -> dict[str, Any]:
    """Those fields of ModelShape that every transformers config of a decoder says."""
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    return {
        "family": str(config.model_type),
        "num_layers": int(config.num_hidden_layers),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": head_dim,
        "vocab_size": int(config.vocab_size),
        "attention_scale": head_dim**-0.5,
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
        "max_position_embeddings": position_limit(config),
        "longest_positions": position_limit(config, sys.maxsize),
    }


def shape_of(config: Any) -> ModelShape:
    """The ModelShape of a (supported, text-only) transformers config. Of the generic path it has
    the sizes alone, and the switches of a model without any: transformers' modules have them."""
    sizes = _sizes(config)
    layers = sizes["num_layers"]
    try:
        family = family_of(config)
    except KeyError:
        inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None)
        return ModelShape(
            **sizes,
            intermediate_size=int(inner or 4 * config.hidden_size),
            windows=(0,) * layers,
            rope_ids=(0,) * layers,
            rope_layer_types=(NO_ROPE,),
            convolutions=(False,) * layers,
        )
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
    eps = getattr(config, "rms_norm_eps", None)
    tables: list[str | None] = [
        NO_ROPE if not rotates else config.layer_types[i] if family.ropes_differ else None
        for i, rotates in enumerate(family.rotary(config))
    ]
    rope_layer_types = tuple(sorted(set(tables), key=lambda name: name or ""))
    rope = getattr(config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    if family.attention_scale is not None:
        sizes["attention_scale"] = float(family.attention_scale(config))
    embedding = 1.0 if family.embedding_scale is None else family.embedding_scale(config)
    inner = config.intermediate_size
    if family.intermediate_size is not None:
        inner = family.intermediate_size(config)
    return ModelShape(
        **sizes,
        rotary_dim=int(sizes["head_dim"] * float(share or 1.0)),
        intermediate_size=int(inner),
        norm_eps=float(config.norm_eps if eps is None else eps),
        norm_offset=family.norm_offset,
        activation="silu" if activation == "silu" else "gelu_tanh",
        qk_norm=family.qk_norm,
        norms=family.norms,
        interleaved=family.interleaved,
        embedding_scale=float(embedding),
        residual_scale=float(getattr(config, "residual_multiplier", None) or 1.0),
        logit_divisor=float(getattr(config, "logits_scaling", None) or 1.0),
        attention_cap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        query_beta=float(rope.get("llama_4_scaling_beta") or 0.0),
        query_period=int(rope.get("original_max_position_embeddings") or 1),
        windows=family.windows(config),
        rope_ids=tuple(rope_layer_types.index(name) for name in tables),
        rope_layer_types=rope_layer_types,
        names=family.names,
        convolutions=tuple(kind == "conv" for kind in layer_types(config)),
        conv_taps=int(getattr(config, "conv_L_cache", None) or 0),
        kept_width=int(config.hidden_size),
    )


def rope_tables(
    config: Any, shape: ModelShape, num_positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(cos, sin), each float32 [rope tables, num_positions, rotated dimensions / 2], from
    transformers' own rotary module, so that every rope scaling it knows (and we allow) is its own
    arithmetic. A table of layers that do not rotate is cos = 1, sin = 0. With `longrope` the number
    of positions decides between short and long factors, for all of them."""
    import torch

    module_name, class_name = family_of(config).rotary_class
    rotary_class = getattr(importlib.import_module(module_name), class_name)
    rotary = None if set(shape.rope_layer_types) == {NO_ROPE} else rotary_class(config)
    positions = torch.arange(num_positions)[None]
    probe = torch.zeros(1, dtype=torch.float32)
    tables: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None] = []
    half = shape.rotary_dim // 2
    with torch.no_grad():
        for layer_type in shape.rope_layer_types:
            if rotary is None or layer_type == NO_ROPE:
                tables.append(None)
                continue
            args = (probe, positions) if layer_type is None else (probe, positions, layer_type)
            cos, sin = rotary(*args)
            tables.append((cos[0, :, :half].float().numpy(), sin[0, :, :half].float().numpy()))
    still = np.ones((num_positions, half), np.float32), np.zeros((num_positions, half), np.float32)
    cos_tables, sin_tables = zip(*(table or still for table in tables), strict=True)
    return np.ascontiguousarray(np.stack(cos_tables)), np.ascontiguousarray(np.stack(sin_tables))


def query_scales(shape: ModelShape, num_positions: int) -> npt.NDArray[np.float32]:
    """float32 [num_positions], the factor on q; [0] where there is none (Llama 4's scaling)."""
    if not shape.query_beta:
        return np.zeros(0, np.float32)
    steps = np.floor(np.arange(num_positions, dtype=np.float32) / shape.query_period)
    scales: npt.NDArray[np.float32] = 1 + np.float32(shape.query_beta) * np.log(1 + steps)
    return scales.astype(np.float32)
