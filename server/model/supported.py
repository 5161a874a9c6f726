"""Decides which models are supported, and says why the others are refused.

Opened are architectures of a known family (families.py) whose every switch we compute, and dense
decoders that transformers computes with our attention (generic.py); a wrong answer is worse than
none. A refusal names the key, the reason and the nearest thing that works. This module does not
import torch: the command line uses it before it starts an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from server.errors import ModelError, UnsupportedModelError
from server.model import generic, nf4
from server.model.families import BY_ARCHITECTURE, Family
from server.model.refusals import nearest_to, reason_for

ARCHITECTURES: Mapping[str, Family] = BY_ARCHITECTURE
"""Allowed classes and their families."""

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
    "conv_bias": "its short convolutions have biases",
    "rope_interleaved": "its rotary embedding is interleaved",
}

_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 1 << 28,
    "sliding_window": 1 << 28,
    "conv_L_cache": 64,
}
"""Whole numbers of a config.json that are at least 1, and the most that each may be. What is in a
file is compared with them before anything of such a size is made."""
_NUMBERS = {
    "rms_norm_eps": 0.1,
    "norm_eps": 0.1,
    "layer_norm_eps": 0.1,
    "rope_theta": 1e12,
    "initializer_range": 1e6,
    "attention_multiplier": 1e3,
    "logits_scaling": 1e6,
}
"""Numbers above 0, and the most that each may be."""

_OF_WRAPPERS = frozenset({"text_config", "vision_config", "audio_config"})
"""Keys that a multimodal checkpoint has; those of a known wrapper are opened for their text."""


# --- what is supported ----------------------------------------------------------------------------


def check_supported(config: Any) -> None:
    """Raise UnsupportedModelError, with every reason, unless `config` is one we compute exactly.

    config: a transformers PretrainedConfig, of the language model where the checkpoint is
    multimodal.
    """
    reasons = list(_reasons(config))
    if reasons:
        name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
        raise UnsupportedModelError(_refusal(name, reasons, str(config.model_type)))


def _refusal(name: str, reasons: list[str], model_type: str) -> str:
    told = "; ".join(reason[:300] for reason in reasons)
    return f"{name[:80]} is not supported: {told}. {nearest_to(model_type, reasons)}"


def _reasons(config: Any) -> Iterator[str]:
    architectures = list(getattr(config, "architectures", None) or [])
    if len(architectures) != 1:
        yield "its config.json names no single architecture (architectures)"
        return
    family = BY_ARCHITECTURE.get(architectures[0])
    is_generic = generic.is_generic(config)
    computed = generic.ALLOWED_KEYS if family is None and is_generic else frozenset()
    computed = computed if family is None else family.keys
    values = {key: getattr(config, key, None) for key in _REFUSED_KEYS if key not in computed}
    yield from _key_reasons(values)
    if family is None:
        if is_generic:
            yield from generic.layer_reasons(config)
            yield from _rope_reasons(config, generic.ALLOWED_KEYS, frozenset())
        else:
            yield _unknown(architectures[0], str(config.model_type))
        return
    if config.model_type != family.model_type:
        yield f"its model_type is {config.model_type!r} and not {family.model_type!r} (model_type)"
        return
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    activation = activation or family.activation
    if activation not in _ACTIVATIONS:
        kinds = ", ".join(sorted(_ACTIVATIONS))
        yield f"activation {activation!r} is none of {kinds} (hidden_act)"
    yield from _layer_reasons(config, family)
    yield from _rope_reasons(config, family.keys, family.rope_types)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        yield f"{heads} heads cannot share {kv_heads} key-value heads (num_key_value_heads)"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim % 2:
        yield f"head_dim {head_dim} is odd (head_dim)"


def _key_reasons(values: Mapping[str, Any]) -> list[str]:
    """What keys that are set say against a model, each reason once with its keys."""
    keys: dict[str, list[str]] = {}
    for key in _REFUSED_KEYS:
        if values.get(key) and not (key == "quantization_config" and nf4.is_read(values[key])):
            keys.setdefault(_key_reason(key, values[key]), []).append(key)
    return [f"{reason} ({', '.join(named)})" for reason, named in keys.items()]


def _key_reason(key: str, value: Any) -> str:
    reason = _REFUSED_KEYS[key]
    if key == "quantization_config":
        method = value.get("quant_method") if isinstance(value, Mapping) else None
        if method is None:
            method = getattr(value, "quant_method", None)
        if method is not None:
            reason += f" with {str(getattr(method, 'value', method))[:40]}"
    return reason


def _unknown(architecture: str, model_type: str) -> str:
    known = reason_for(model_type, architecture)
    if not known and generic.has_class(model_type):
        known = "; transformers' class of it does not call the attention interface"
    return f"it is none of the families that `tailor models list` shows{known}"


def _layer_reasons(config: Any, family: Family) -> Iterator[str]:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return
    allowed = _LAYER_TYPES | family.layer_types
    unknown = sorted(set(layer_types) - allowed)
    if unknown:
        kinds = ", ".join(sorted(allowed))
        yield f"layer type {unknown[0]!r} is none of {kinds} (layer_types)"
    if len(layer_types) != config.num_hidden_layers:
        yield "layer_types and num_hidden_layers disagree (layer_types)"
    if "sliding_attention" in layer_types and not getattr(config, "sliding_window", None):
        yield "it has sliding layers and no sliding_window (layer_types)"


def _rope_reasons(config: Any, keys: frozenset[str], rope_types: frozenset[str]) -> Iterator[str]:
    """keys, rope_types: what is computed beside the usual."""
    rope = getattr(config, "rope_parameters", None) or {}
    allowed = _ROPE_TYPES | rope_types
    per_layer_type = bool(rope) and all(isinstance(value, dict) for value in rope.values())
    partial = "partial_rotary_factor" not in keys
    for parameters in rope.values() if per_layer_type else (rope,):
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        # Hunyuan calls a fixed stretch of the base, alpha, "dynamic".
        if kind == "dynamic" and parameters.get("alpha"):
            kind = "alpha"
        # Factors that are the same at every length: Llama 3's scaling as a GGUF has it.
        if kind == "longrope" and parameters.get("short_factor") == parameters.get("long_factor"):
            kind = "default"
        if kind not in allowed:
            # dynamic and longrope change all positions' angles with the longest one in the batch
            kinds = ", ".join(sorted(allowed - {"alpha"}))
            yield f"rope type {kind!r} is none of {kinds} (rope_parameters)"
        if partial and parameters.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
            yield "its rotary embedding covers a part of the head (partial_rotary_factor)"
    if partial and getattr(config, "partial_rotary_factor", None) not in (None, 1, 1.0):
        yield "its rotary embedding covers a part of the head (partial_rotary_factor)"


def _check_wrapper(name: str, raw: Mapping[str, Any], family: Family) -> None:
    """Check a multimodal config.json's keys beside text_config, which check_supported reads."""
    reasons = _key_reasons({key: raw[key] for key in raw if key not in _OF_WRAPPERS})
    text = raw.get("text_config")
    kind = family.model_type
    if isinstance(text, Mapping):
        kind = str(text.get("model_type", kind))[:80]
    if kind != family.model_type:
        told = f"its language model is {kind!r} and not {family.model_type!r}"
        reasons.append(f"{told} (text_config.model_type)")
    if reasons:
        raise UnsupportedModelError(_refusal(name, reasons, kind))


def _check_size(key: str, value: Any) -> None:
    if value is None or not (key in _SIZES or key in _NUMBERS):
        return
    if key in _SIZES:
        fits = type(value) is int and 1 <= value <= _SIZES[key]
        wanted = f"a whole number from 1 to {_SIZES[key]}"
    else:
        fits = type(value) in (int, float) and 0 < value <= _NUMBERS[key]
        wanted = f"a number above 0 and at most {_NUMBERS[key]:g}"
    if not fits:
        raise ModelError(f"config.json: {key} is {str(value)[:60]}, which is not {wanted}")


def check_raw(raw: Mapping[str, Any]) -> None:
    """Refuse a config.json whose architecture is not on the list.

    Such a file must not even reach transformers' config classes, which may not know its type.
    Raises UnsupportedModelError, ModelError for sizes that cannot be.
    """
    for values in (raw, raw.get("text_config")):
        for key, value in values.items() if isinstance(values, Mapping) else ():
            _check_size(key, value)
    architectures = raw.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else "a model"
    family = BY_ARCHITECTURE.get(name) if isinstance(name, str) else None
    model_type = str(raw.get("model_type", ""))[:80]
    if isinstance(architectures, list) and len(architectures) == 1 and family is not None:
        if name in family.wrappers:
            _check_wrapper(name, raw, family)
        return
    is_generic = generic.is_generic(raw) and not reason_for(model_type, str(name))
    computed = generic.ALLOWED_KEYS if is_generic else frozenset()
    computed |= _OF_WRAPPERS if name in generic.WRAPPERS else frozenset()
    reasons = _key_reasons({key: raw[key] for key in raw if key not in computed})
    if is_generic and not reasons:
        return
    if not isinstance(architectures, list) or len(architectures) != 1:
        reasons.append("its config.json names no single architecture (architectures)")
    elif not is_generic:
        reasons.append(_unknown(str(name)[:80], model_type))
    raise UnsupportedModelError(_refusal(str(name)[:80], reasons, model_type))
