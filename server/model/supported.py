"""Decides which models are supported, and says why the others are refused.

Opened are architectures of a known family (families.py) whose every switch we compute, and dense
decoders that transformers computes with our attention (generic.py); a wrong answer is worse than
none. A refusal names the key, the reason and the nearest thing that works. This module does not
import torch: the command line uses it before it starts an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from server.errors import ModelError, UnsupportedModelError
from server.model import generic, nf4
from server.model.families import BY_ARCHITECTURE, FAMILIES, Family, told_by

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
    multimodal, of a file that check_raw let pass: it has one architecture, which is a family's or
    one that the generic path may try.
    """
    reasons = list(_reasons(config))
    if reasons:
        raise UnsupportedModelError(
            _refusal(config.architectures[0], reasons, str(config.model_type))
        )


def _refusal(name: str, reasons: list[str], model_type: str) -> str:
    told = "; ".join(reason[:300] for reason in reasons)
    return f"{name[:80]} is not supported: {told}. {nearest_to(model_type, reasons)}"


def _reasons(config: Any) -> Iterator[str]:
    family = BY_ARCHITECTURE.get(config.architectures[0])
    computed = generic.ALLOWED_KEYS if family is None else family.keys
    values = {key: getattr(config, key, None) for key in _REFUSED_KEYS if key not in computed}
    yield from _key_reasons(values)
    if family is None:
        recurrent = config.model_type in generic.RECURRENT
        yield from _unknown_layers(config, {"linear_attention"} if recurrent else set())
        yield from _rope_reasons(config, generic.ALLOWED_KEYS, frozenset())
        return
    if config.model_type != family.model_type:
        yield f"its model_type is {config.model_type!r} and not {family.model_type!r} (model_type)"
        return
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    activation = activation or family.activation
    if activation not in _ACTIVATIONS:
        kinds = ", ".join(sorted(_ACTIVATIONS))
        yield f"activation {activation!r} is none of {kinds} (hidden_act)"
    types = getattr(config, "layer_types", None)
    yield from _unknown_layers(config, family.layer_types)
    if types is not None and len(types) != config.num_hidden_layers:
        yield "layer_types and num_hidden_layers disagree (layer_types)"
    if "sliding_attention" in (types or ()) and not getattr(config, "sliding_window", None):
        yield "it has sliding layers and no sliding_window (layer_types)"
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
        value, reason = values.get(key), _REFUSED_KEYS[key]
        if not value or (key == "quantization_config" and nf4.is_read(value)):
            continue
        if key == "quantization_config":
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            if method is None:
                method = getattr(value, "quant_method", None)
            if method is not None:
                reason += f" with {str(getattr(method, 'value', method))[:40]}"
        keys.setdefault(reason, []).append(key)
    return [f"{reason} ({', '.join(named)})" for reason, named in keys.items()]


def _unknown_layers(config: Any, beside: Set[str]) -> Iterator[str]:
    """beside: types of layers that are computed beside the usual ones."""
    allowed = _LAYER_TYPES | beside
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - allowed)
    if unknown:
        kinds = ", ".join(sorted(allowed))
        yield f"layer type {unknown[0]!r} is none of {kinds} (layer_types)"


def _rope_reasons(config: Any, keys: frozenset[str], rope_types: frozenset[str]) -> Iterator[str]:
    """keys, rope_types: what is computed beside the usual."""
    rope = getattr(config, "rope_parameters", None) or {}
    allowed = _ROPE_TYPES | rope_types
    per_layer_type = bool(rope) and all(isinstance(value, dict) for value in rope.values())
    every = [*rope.values()] if per_layer_type else [rope]
    for parameters in every:
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
    shares = [one.get("partial_rotary_factor") for one in every]
    shares.append(getattr(config, "partial_rotary_factor", None))
    if "partial_rotary_factor" not in keys and any(share not in (None, 1.0) for share in shares):
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


def check_raw(raw: Mapping[str, Any]) -> None:
    """Refuse a config.json whose architecture is not on the list.

    Such a file must not even reach transformers' config classes, which may not know its type.
    Raises UnsupportedModelError, ModelError for sizes that cannot be.
    """
    for values in (raw, raw.get("text_config")):
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if value is None or not (key in _SIZES or key in _NUMBERS):
                continue
            if key in _SIZES:
                fits = type(value) is int and 1 <= value <= _SIZES[key]
                wanted = f"a whole number from 1 to {_SIZES[key]}"
            else:
                fits = type(value) in (int, float) and 0 < value <= _NUMBERS[key]
                wanted = f"a number above 0 and at most {_NUMBERS[key]:g}"
            if not fits:
                raise ModelError(f"config.json: {key} is {str(value)[:60]}, which is not {wanted}")
    names, kind = told_by(raw)
    name, model_type = str(names[0] if names else "a model")[:80], str(kind or "")[:80]
    family = BY_ARCHITECTURE.get(name) if len(names) == 1 else None
    if family is not None:
        if name in family.wrappers:
            _check_wrapper(name, raw, family)
        return
    is_generic = generic.is_generic(raw) and not reason_for(model_type, name)
    computed = generic.ALLOWED_KEYS if is_generic else frozenset()
    computed |= _OF_WRAPPERS if name in generic.WRAPPERS else frozenset()
    reasons = _key_reasons({key: raw[key] for key in raw if key not in computed})
    if is_generic and not reasons:
        return
    if len(names) != 1:
        reasons.append("its config.json names no single architecture (architectures)")
    elif not is_generic:
        known = reason_for(model_type, name)
        if not known and generic.source_of(model_type):
            known = "; transformers' class of it does not call the attention interface"
        reasons.append(f"it is none of the families that `tailor models list` shows{known}")
    raise UnsupportedModelError(_refusal(name, reasons, model_type))


# --- kinds of models that people try, each with the nearest thing that works ----------------------

_EXPERTS = "a mixture of experts", "a dense model of its size, such as Qwen3 0.6B to 8B"
_RECURRENT = (
    "a recurrent state instead of keys and values",
    "a model with attention: Qwen3, SmolLM3",
)
_HYBRID = (
    "layers with a recurrent state of a kind that is not computed",
    "a model with attention in every layer: Qwen3, or Granite 4.0 dense (not -h-); or Qwen3.5",
)
_LATENT = "multi-head latent attention", "a model with grouped queries: Qwen3, Llama 3.2"
_ALIBI = "ALiBi, biases by distance", "a model with a rotary embedding: Llama 3.2, Qwen3"
_ENCODER_DECODER = (
    "an encoder and a decoder",
    "a decoder of the same size, fine-tuned for the task: Qwen3 0.6B, SmolLM2",
)
_ENCODER = (
    "an encoder, which writes no text",
    "a decoder; for labels, a task with `choices` on /v1/decisions",
)
_PICTURES = "pictures or sound", "its text-only sister: Qwen3, Gemma 3, Llama 3.2 1B or 3B"
_OWN_ATTENTION = (
    "attention of its own, which does not call transformers' attention interface",
    "a model of Llama's build: Qwen3, SmolLM2, Llama 3.2",
)
_PER_LAYER = (
    "layers that share keys and values, and inputs of their own",
    "Gemma 3 270M, 1B or 4B",
)

_BY_TYPE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "phimoe", "granitemoe",
         "granitemoeshared", "ernie4_5_moe", "glm4_moe", "lfm2_moe", "hunyuan_v1_moe", "dbrx",
         "minimax", "llama4", "llama4_text"),
        _EXPERTS,
    ),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(
        ("qwen3_5_moe", "qwen3_next", "falcon_h1", "nemotron_h", "zamba2", "jamba",
         "bamba", "granitemoehybrid", "olmo_hybrid", "recurrent_gemma"),
        _HYBRID,
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash"), _LATENT),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "led", "t5gemma", "whisper", "marian"),
        _ENCODER_DECODER,
    ),
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "deberta-v2", "mpnet",
         "nomic_bert", "electra", "albert"),
        _ENCODER,
    ),
    **dict.fromkeys(
        ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm",
         "paligemma", "mllama", "internvl", "qwen2_audio", "phi4_multimodal", "clip"),
        _PICTURES,
    ),
    **dict.fromkeys(
        ("gpt_neo", "gptj", "stablelm", "falcon", "codegen"),
        _OWN_ATTENTION,
    ),
    "chatglm": ("code of its own", "GLM-4-0414 9B, which transformers has a class for"),
    "phi3_v": ("pictures or sound", "its text-only sister: Phi-3.5-mini, Phi-4-mini"),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), _PER_LAYER),
}  # fmt: skip

_UNQUANTISED = "its unquantised checkpoint, or a GGUF file of it"
# Where the type says nothing: what the reasons say.
_BY_REASON = (
    ("quantised", _UNQUANTISED),
    ("compressed", _UNQUANTISED),
    ("mixture of experts", _EXPERTS[1]),
    ("latent attention", _LATENT[1]),
    ("ALiBi", _ALIBI[1]),
    ("encoder-decoder", _ENCODER_DECODER[1]),
    ("multimodal", _PICTURES[1]),
    (
        "its own code",
        "a release of it that transformers has a class for, or a model of Llama's build: Qwen3, "
        "SmolLM2, Llama 3.2",
    ),
    ("rope type", "the checkpoint without its long-context scaling (rope_parameters)"),
    ("activation", "a model of Llama's build: Qwen3, SmolLM2, Llama 3.2"),
    ("linear_attention", _HYBRID[1]),
)
_HEADS = {
    "ForSequenceClassification": ("a head of class scores (a classifier or reranker)", _ENCODER[1]),
    "ForTokenClassification": ("a head of class scores (a tagger)", _ENCODER[1]),
    "ForMaskedLM": _ENCODER,
    "ForQuestionAnswering": ("a head of spans", _ENCODER[1]),
}


def reason_for(model_type: str, architecture: str) -> str:
    """ "; it has ..." for a known kind that is refused, or ""."""
    for ending, (what, _) in _HEADS.items():
        if architecture.endswith(ending):
            return f"; it has {what} (architectures)"
    if model_type in _BY_TYPE:
        return f"; it has {_BY_TYPE[model_type][0]} (model_type {model_type})"
    return ""


def nearest_to(model_type: str, reasons: Sequence[str]) -> str:
    """A sentence: the nearest thing that works."""
    text, named = "; ".join(reasons), _BY_TYPE.get(model_type)
    found = [thing for words, thing in _BY_REASON if words in text]
    if "head of" in text:
        found = [_ENCODER[1]]
    # A kind that is refused in any form comes first: unquantised, it would be refused as well.
    elif named and not (model_type in FAMILIES and _UNQUANTISED in found):
        found = [named[1]]
    default = "any family of `tailor models list`, such as Qwen3 or Llama 3.2"
    return f"Nearest that works: {found[0] if found else default}"
