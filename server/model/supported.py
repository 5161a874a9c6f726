"""Which models are computed right, and why the others are refused.

Only architectures that are on the allow-list, with configs whose every switch we compute, are
opened; a wrong answer is worse than none. No torch here: the command line asks before it starts
an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from server.errors import UnsupportedModelError

__all__ = ["ARCHITECTURES", "check_raw", "check_supported"]

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    "MistralForCausalLM": "mistral",
}
"""Allowed classes and the model_type of their configs."""

_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
_ACTIVATIONS = {"silu", "gelu_pytorch_tanh"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Config keys that mean something we do not compute whenever they are set, and what they mean.
_REFUSED_KEYS = {
    "quantization_config": "its weights are quantised",
    "compression_config": "its weights are compressed",
    "is_encoder_decoder": "it is an encoder-decoder",
    "vision_config": "it is multimodal",
    "audio_config": "it is multimodal",
    "text_config": "it is multimodal",
    "auto_map": "it brings its own code",
    "attn_logit_softcapping": "it soft-caps attention scores",
    "final_logit_softcapping": "it soft-caps logits",
    "logit_scale": "it scales its logits",
    "alibi": "it uses ALiBi",
    "use_bidirectional_attention": "its attention is not causal",
    "kv_lora_rank": "it uses multi-head latent attention",
    "q_lora_rank": "it uses multi-head latent attention",
    "num_experts": "it is a mixture of experts",
    "num_local_experts": "it is a mixture of experts",
    "n_routed_experts": "it is a mixture of experts",
    "attention_sinks": "it uses attention sinks",
    "use_attention_sinks": "it uses attention sinks",
    "attention_chunk_size": "it uses chunked attention",
    "rope_interleaved": "its rotary embedding is interleaved",
}


# --- what is supported ----------------------------------------------------------------------------


def check_supported(config: Any) -> None:
    """Raise UnsupportedModelError, with every reason, unless `config` is one we compute exactly.

    config: a transformers PretrainedConfig.
    """
    reasons = list(_reasons(config))
    if reasons:
        name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
        raise UnsupportedModelError(f"{name} is not supported: " + "; ".join(reasons))


def _reasons(config: Any) -> Iterator[str]:
    architectures = list(getattr(config, "architectures", None) or [])
    if len(architectures) != 1:
        yield "its config.json names no single architecture"
        return
    expected = ARCHITECTURES.get(architectures[0])
    for key, reason in _REFUSED_KEYS.items():
        if getattr(config, key, None):
            yield f"{reason} ({key})"
    if expected is None:
        yield f"supported architectures are {', '.join(ARCHITECTURES)}"
        return
    if config.model_type != expected:
        yield f"its model_type is {config.model_type!r} and not {expected!r}"
        return
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if activation not in _ACTIVATIONS:
        yield f"activation {activation!r} is none of {', '.join(sorted(_ACTIVATIONS))}"
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        unknown = sorted(set(layer_types) - _LAYER_TYPES)
        if unknown:
            yield f"layer type {unknown[0]!r} is none of {', '.join(sorted(_LAYER_TYPES))}"
        if len(layer_types) != config.num_hidden_layers:
            yield "layer_types and num_hidden_layers disagree"
        if "sliding_attention" in layer_types and not getattr(config, "sliding_window", None):
            yield "it has sliding layers and no sliding_window"
    yield from _rope_reasons(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        yield f"{heads} heads cannot share {kv_heads} key-value heads"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim % 2:
        yield f"head_dim {head_dim} is odd"


def _rope_reasons(config: Any) -> Iterator[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = bool(rope) and all(isinstance(value, dict) for value in rope.values())
    for parameters in rope.values() if per_layer_type else (rope,):
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in _ROPE_TYPES:
            # dynamic and longrope change all positions' angles with the longest one in the batch
            yield f"rope type {kind!r} is none of {', '.join(sorted(_ROPE_TYPES))}"
        if parameters.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
            yield "its rotary embedding covers a part of the head (partial_rotary_factor)"
    if getattr(config, "partial_rotary_factor", None) not in (None, 1, 1.0):
        yield "its rotary embedding covers a part of the head (partial_rotary_factor)"


def check_raw(raw: Mapping[str, Any]) -> None:
    """Refuse a config.json whose architecture is not on the list.

    Such a file must not even reach transformers' config classes, which may not know its type.
    Raises UnsupportedModelError.
    """
    architectures = raw.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or architectures[0] not in ARCHITECTURES
    ):
        name = architectures[0] if isinstance(architectures, list) and architectures else "a model"
        reasons = [f"{why} ({key})" for key, why in _REFUSED_KEYS.items() if raw.get(key)]
        reasons.append(f"supported architectures are {', '.join(ARCHITECTURES)}")
        raise UnsupportedModelError(f"{str(name)[:80]} is not supported: {'; '.join(reasons)}")
