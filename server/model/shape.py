"""ModelShape: what a supported family's config says, as plain numbers, in one place.

The CPU runner and the loader read a transformers config only through this. Whether a config is
supported at all is the loader's question (loader.check_supported).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and switches of a decoder.

    vocab_size: real ids; rows past it (a padded table) are never drawn. windows: per layer, the
    sliding window in positions (a row attends to positions > its own - window), 0 = all. rope_ids:
    per layer, which rope table it uses. sandwich_norms: Gemma 3's norms after attention and MLP.
    norm_offset: 1.0 where the stored weight is added to one (Gemma). embedding_scale: factor on
    gathered embeddings.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    norm_offset: float
    activation: Literal["silu", "gelu_tanh"]
    attention_scale: float
    qk_norm: bool
    sandwich_norms: bool
    embedding_scale: float
    tied: bool
    windows: tuple[int, ...]
    rope_ids: tuple[int, ...]
    rope_layer_types: tuple[str | None, ...]
    max_position_embeddings: int


def shape_of(config: Any) -> ModelShape:
    """The ModelShape of a (supported, text-only) transformers config."""
    family = config.model_type
    num_layers = int(config.num_hidden_layers)
    gemma = family == "gemma3_text"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    if layer_types is not None:
        windows = tuple(window if t == "sliding_attention" else 0 for t in layer_types)
    elif family == "mistral":
        windows = (window,) * num_layers
    else:
        windows = (0,) * num_layers
    rope_types: tuple[str | None, ...] = (None,)
    rope_ids = (0,) * num_layers
    if gemma:
        rope_types = tuple(sorted(set(layer_types or ())))
        rope_ids = tuple(rope_types.index(t) for t in (layer_types or ()))
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    scalar = getattr(config, "query_pre_attn_scalar", None) if gemma else None
    return ModelShape(
        family=family,
        num_layers=num_layers,
        hidden_size=int(config.hidden_size),
        num_heads=int(config.num_attention_heads),
        num_kv_heads=int(config.num_key_value_heads),
        head_dim=int(head_dim),
        intermediate_size=int(config.intermediate_size),
        vocab_size=int(config.vocab_size),
        norm_eps=float(config.rms_norm_eps),
        norm_offset=1.0 if gemma else 0.0,
        activation="silu" if activation == "silu" else "gelu_tanh",
        attention_scale=float((scalar or head_dim) ** -0.5),
        qk_norm=family in ("qwen3", "gemma3_text"),
        sandwich_norms=gemma,
        embedding_scale=float(config.hidden_size**0.5) if gemma else 1.0,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        windows=windows,
        rope_ids=rope_ids,
        rope_layer_types=rope_types,
        max_position_embeddings=int(config.max_position_embeddings),
    )


_ROTARY = {
    "llama": "LlamaRotaryEmbedding",
    "mistral": "MistralRotaryEmbedding",
    "qwen2": "Qwen2RotaryEmbedding",
    "qwen3": "Qwen3RotaryEmbedding",
    "gemma3_text": "Gemma3RotaryEmbedding",
}


def rope_tables(
    config: Any, shape: ModelShape, num_positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(cos, sin), each float32 [rope tables, num_positions, head_dim / 2], from transformers' own
    rotary module, so that every rope scaling it knows (and we allow) is its own arithmetic."""
    import torch

    package = "gemma3" if shape.family == "gemma3_text" else shape.family
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    rotary = getattr(module, _ROTARY[shape.family])(config)
    positions = torch.arange(num_positions)[None]
    probe = torch.zeros(1, dtype=torch.float32)
    half = shape.head_dim // 2
    cos_tables, sin_tables = [], []
    with torch.no_grad():
        for layer_type in shape.rope_layer_types:
            args = (probe, positions) if layer_type is None else (probe, positions, layer_type)
            cos, sin = rotary(*args)
            cos_tables.append(cos[0, :, :half].float().numpy())
            sin_tables.append(sin[0, :, :half].float().numpy())
    return np.ascontiguousarray(np.stack(cos_tables)), np.ascontiguousarray(np.stack(sin_tables))
