"""What a GGUF's metadata says of its model, as the values of transformers' config.

One function an architecture, by the names of llama.cpp (`general.architecture`), beside what all
have in common; the keys and what is left out of them follow llama.cpp's converter and loader. What
the file says is used where transformers has a default too, since defaults are one checkpoint's
values. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.errors import ModelError, UnsupportedModelError
from server.model.gguf_index import GgufIndex

PERMUTED = frozenset({"llama", "smollm3", "granite", "granitehybrid", "mistral3"})
"""Architectures whose rows of q and k are stored so that the rotation pairs neighbours, while
transformers' order pairs halves."""


_PARTIAL = frozenset({"phi3", "glm4", "qwen35", "phi2"})
"""Architectures of which a part of a head may rotate."""

_BY_LAYERS = frozenset({"granite", "granitehybrid", "lfm2"})
"""Architectures whose file may tell the heads of each layer."""


class _Metadata:
    """The keys of one file, without the architecture in front. Raises ModelError for a key that is
    missing, UnsupportedModelError by `refuse`."""

    def __init__(self, index: GgufIndex, source: str) -> None:
        self._fields = index.fields
        self._tensors = index.tensors
        self._source = source
        self.kind = str(index.fields.get("general.architecture"))

    def wrong(self, problem: str) -> ModelError:
        return ModelError(f"{self._source} is no complete GGUF: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self._fields.get(f"{self.kind}.{key}")
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self._source} lacks {self.kind}.{key}")
        return value

    def layers(self, key: str) -> tuple[Any, ...] | None:
        """One value for each layer, or None where the key is not there or is one for all."""
        value, num = self.get(key), self.need("block_count")
        if not isinstance(value, tuple):
            return None
        if len(value) != num:
            raise self.wrong(f"{self.kind}.{key} has {len(value)} values for {num} layers")
        return value

    def token(self, name: str) -> int | None:
        """An id; None for none, and for one that is none (gguf_tokenizer.py refuses those that
        matter)."""
        value = self._fields.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < self.vocab_size else None

    def has(self, tensor: str) -> bool:
        """Whether a tensor is there; of a layer, whether any layer has it."""
        if not tensor.startswith("blk."):
            return tensor in self._tensors
        return any(
            name.partition("blk.")[2].partition(".")[2] == tensor[4:] for name in self._tensors
        )

    def values(self, tensor: str) -> list[float] | None:
        """A vector's numbers, which are factors."""
        found = self._tensors.get(tensor)
        if found is None:
            return None
        values = found.data
        if (
            values.ndim != 1
            or values.dtype.kind != "f"
            or not (0 < values.min() <= values.max() < 1e9)
        ):
            raise self.wrong(f"{tensor} holds no factors")
        return [float(x) for x in values]

    @property
    def vocab_size(self) -> int:
        table = self._tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise ModelError(f"{self._source} lacks token_embd.weight")
        return table.shape[0]

    @property
    def head_dim(self) -> int:
        width: int = self.get("attention.key_length") or (
            self.need("embedding_length") // self.need("attention.head_count")
        )
        if width < 1:
            raise self.wrong(f"{self.kind}.attention.head_count is above embedding_length")
        return width

    @property
    def rotated_share(self) -> float:
        """Of a head's dimensions."""
        count: int = self.get("rope.dimension_count", self.head_dim)
        if count > self.head_dim:
            raise self.wrong(f"{self.kind}.rope.dimension_count is above a head's {self.head_dim}")
        return count / self.head_dim

    def refuse(self, reason: str, key: str, nearest: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._source} is not supported: {reason} ({self.kind}.{key}). "
            f"Nearest that works: {nearest}"
        )


# --- rope -----------------------------------------------------------------------------------------


def _rope(m: _Metadata) -> dict[str, Any]:
    """rope_parameters of layers that see everything."""
    theta = float(m.get("rope.freq_base", 10000.0))
    kind, factor = m.get("rope.scaling.type", "none"), float(m.get("rope.scaling.factor", 0.0))
    factors = m.values("rope_freqs.weight")
    if factors is not None:
        # The same at every length: Llama 3's scaling, of which a GGUF keeps no more than its result
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": m.need("context_length"),
        }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": m.need("rope.scaling.original_context_length"),
        }
        for name, key in (
            ("attention_factor", "yarn_attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if m.get(f"rope.scaling.{key}") is not None:
                rope[name] = float(m.get(f"rope.scaling.{key}"))
    elif kind == "linear" and factor not in (0.0, 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear", "longrope"):
        raise m.refuse(
            f"rope scaling {kind[:40]!r} is not computed", "rope.scaling.type", "its folder"
        )
    return rope


def _partial_rope(m: _Metadata) -> dict[str, Any]:
    """The same where a part of a head rotates."""
    return {**_rope(m), "partial_rotary_factor": m.rotated_share}


# --- what all have --------------------------------------------------------------------------------


def _common(m: _Metadata) -> dict[str, Any]:
    if m.get("expert_count", 0) > 1:
        raise m.refuse(
            "it is a mixture of experts", "expert_count", "a dense model of its size, such as Qwen3"
        )
    if m.get("pooling_type", 0):
        raise m.refuse("it is an embedding model", "pooling_type", "a model that writes text")
    if not m.get("attention.causal", True):
        raise m.refuse("its attention is not causal", "attention.causal", "Qwen3, Llama 3.2")
    sections = m.get("rope.dimension_sections", ())
    if any(sections if isinstance(sections, tuple) else (sections,)) and m.kind != "qwen35":
        raise m.refuse(
            "its rotary embedding is for pictures", "rope.dimension_sections", "its sister for text"
        )  # fmt: skip
    if m.rotated_share != 1.0 and m.kind not in _PARTIAL:
        raise m.refuse("it rotates a part of the head", "rope.dimension_count", "Llama 3.2, Qwen3")
    if isinstance(m.get("attention.head_count_kv"), tuple) and m.kind not in _BY_LAYERS:
        raise m.refuse("its layers differ in heads", "attention.head_count_kv", "Llama 3.2, Qwen3")
    heads = m.need("attention.head_count")
    eps = m.get("attention.layer_norm_epsilon")
    return {
        "vocab_size": m.vocab_size,
        "hidden_size": m.need("embedding_length"),
        "intermediate_size": m.need("feed_forward_length"),
        "num_hidden_layers": m.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": m.get("attention.head_count_kv", heads),
        "head_dim": m.head_dim,
        "max_position_embeddings": m.need("context_length"),
        "rms_norm_eps": m.need("attention.layer_norm_rms_epsilon") if eps is None else eps,
        "rope_parameters": _rope(m),
        "tie_word_embeddings": not m.has("output.weight"),
        "attention_bias": m.has("blk.attn_q.bias") or m.has("blk.attn_qkv.bias"),
        "bos_token_id": m.token("bos"),
        "eos_token_id": m.token("eos"),
        "pad_token_id": m.token("padding"),
        "unk_token_id": m.token("unknown"),
    }


def _windows(m: _Metadata, period: int) -> list[str]:
    """layer_types: the file's own pattern, a period or a list, else every layer slides but each
    `period`-th."""
    own = m.layers("attention.sliding_window_pattern")
    if own is None:
        every = m.get("attention.sliding_window_pattern", period) or 1  # 0: no layer slides
        own = tuple((i + 1) % every != 0 for i in range(m.need("block_count")))
    return ["sliding_attention" if slides else "full_attention" for slides in own]


# --- architectures --------------------------------------------------------------------------------


def _gemma(m: _Metadata, largest: int) -> dict[str, Any]:
    """largest: layers of the size whose scores are scaled by the hidden size."""
    wide = m.need("embedding_length") // m.need("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": wide if m.need("block_count") == largest else m.head_dim,
    }


def _gemma2(m: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        **_gemma(m, 46),
        "sliding_window": m.get("attention.sliding_window", 4096),
        "layer_types": _windows(m, 2),
        "attn_logit_softcapping": m.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": m.get("final_logit_softcapping", 30.0),
    }


def _gemma3(m: _Metadata) -> dict[str, Any]:
    local = {
        "rope_type": "default", "rope_theta": float(m.get("rope.freq_base_swa", 10000.0)),
    }  # fmt: skip
    return {
        "model_type": "gemma3_text",
        **_gemma(m, 62),
        "sliding_window": m.need("attention.sliding_window"),
        "layer_types": _windows(m, 6),
        "rope_parameters": {"full_attention": _rope(m), "sliding_attention": local},
        "final_logit_softcapping": m.get("final_logit_softcapping"),
    }


def _smollm3(m: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "smollm3",
        "mlp_bias": m.has("blk.ffn_down.bias"),
        "no_rope_layer_interval": 4,  # no key says it; llama.cpp has this number, too
        "use_sliding_window": False,
    }


def _phi3(m: _Metadata) -> dict[str, Any]:
    rope = _partial_rope(m)
    original = m.get("rope.scaling.original_context_length", m.need("context_length"))
    short, long = (m.values(f"rope_factors_{which}.weight") for which in ("short", "long"))
    if short is not None and long is not None:
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope["original_max_position_embeddings"] = original
        if m.get("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = float(m.get("rope.scaling.attn_factor"))
    return {
        "model_type": "phi3",
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": m.get("attention.sliding_window") or None,
    }


def _granite(m: _Metadata) -> dict[str, Any]:
    kv_heads: Any = m.get("attention.head_count_kv")
    by_layer = m.layers("attention.head_count_kv")
    if by_layer is not None:
        if len(set(by_layer)) > 1 or not by_layer[0]:
            raise m.refuse(
                "it has layers with a recurrent state", "attention.head_count_kv",
                "Granite 4.0 dense (not -h-)",
            )  # fmt: skip
        kv_heads = by_layer[0]
    if not m.get("rope.scaling.finetuned", True):
        raise m.refuse("it rotates nothing", "rope.scaling.finetuned", "its folder")
    return {
        "model_type": "granite",
        "num_key_value_heads": kv_heads,
        "embedding_multiplier": m.get("embedding_scale", 1.0),
        "attention_multiplier": m.get("attention.scale", m.head_dim**-0.5),
        "residual_multiplier": m.get("residual_scale", 1.0),
        "logits_scaling": m.get("logit_scale", 1.0),
        "mlp_bias": m.has("blk.ffn_down.bias"),
    }


def _olmo2(m: _Metadata) -> dict[str, Any]:
    window = m.get("attention.sliding_window", 0)
    if not window:
        return {"model_type": "olmo2"}
    rope = _rope(m)
    local = {"rope_type": "default", "rope_theta": m.get("rope.freq_base_swa", rope["rope_theta"])}
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _windows(m, 4),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _mistral3(m: _Metadata) -> dict[str, Any]:
    beta = m.get("attention.temperature_scale")
    if not beta:  # Mistral Small 3
        return {"model_type": "mistral", "sliding_window": None}
    log_mul = float(m.get("rope.scaling.yarn_log_multiplier", 1.0))
    scaled = {"mscale": 1.0, "mscale_all_dim": log_mul, "llama_4_scaling_beta": float(beta)}
    rope = {**_rope(m), **scaled}
    return {"model_type": "ministral3", "sliding_window": None, "rope_parameters": rope}


def _exaone4(m: _Metadata) -> dict[str, Any]:
    window = m.get("attention.sliding_window", 0)
    if not window:
        types = ["full_attention"] * m.need("block_count")
        return {"model_type": "exaone4", "sliding_window": None, "layer_types": types}
    return {"model_type": "exaone4", "sliding_window": window, "layer_types": _windows(m, 4)}


def _lfm2(m: _Metadata) -> dict[str, Any]:
    num = m.need("attention.head_count_kv")
    kv_heads = m.layers("attention.head_count_kv") or (num,) * m.need("block_count")
    if len(set(kv_heads) - {0}) != 1:
        raise m.wrong(f"{m.kind}.attention.head_count_kv is {str(set(kv_heads))[:60]}")
    if m.get("attention.sliding_window", 0):
        raise m.refuse("it has a sliding window", "attention.sliding_window", "its folder")
    return {
        "model_type": "lfm2",
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "norm_eps": m.need("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": m.need("shortconv.l_cache"),
        "conv_bias": m.has("blk.shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted width
    }


ARCHITECTURES: Mapping[str, Callable[[_Metadata], dict[str, Any]]] = {
    "llama": lambda m: {"model_type": "llama", "mlp_bias": m.has("blk.ffn_down.bias")},
    "qwen2": lambda _: {"model_type": "qwen2", "use_sliding_window": False},
    "qwen3": lambda _: {"model_type": "qwen3", "use_sliding_window": False},
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "granite": _granite,
    "granitehybrid": _granite,
    "olmo2": _olmo2,
    "mistral3": _mistral3,
    "ernie4_5": lambda m: {"model_type": "ernie4_5", "use_bias": m.has("blk.attn_q.bias")},
    # The base of its rope is stretched already.
    "hunyuan-dense": lambda _: {"model_type": "hunyuan_v1_dense"},
    "exaone4": _exaone4,
    "glm4": lambda m: {"model_type": "glm4", "rope_parameters": _partial_rope(m)},
    "lfm2": _lfm2,
}
"""`general.architecture` of files that are read -> what differs from the common values."""


def _qwen35(m: _Metadata) -> dict[str, Any]:
    layers = m.need("block_count") - m.get("nextn_predict_layers", 0)  # those draft
    if layers < 1:
        raise m.wrong("no layer is left beside those that draft")
    interval, own = m.get("full_attention_interval", 4), m.layers("attention.recurrent_layers")
    recurrent = [own[i] if own else (i + 1) % interval != 0 for i in range(layers)]
    value_heads = m.need("ssm.time_step_rank")
    rope = _partial_rope(m)
    sections = m.get("rope.dimension_sections")
    if isinstance(sections, tuple):
        rope["mrope_section"] = list(sections[:3])
    return {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if is_net else "full_attention" for is_net in recurrent],
        "rope_parameters": rope,
        "linear_conv_kernel_dim": m.need("ssm.conv_kernel"),
        "linear_key_head_dim": m.need("ssm.state_size"),
        "linear_num_key_heads": m.need("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": m.need("ssm.inner_size") // value_heads,
    }


def _starcoder2(m: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "starcoder2",
        "norm_epsilon": m.need("attention.layer_norm_epsilon"),
        "use_bias": m.has("blk.attn_q.bias"),
        "sliding_window": m.get("attention.sliding_window", 4096),  # the converter writes none
    }


def _phi2(m: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "phi",
        "layer_norm_eps": m.need("attention.layer_norm_epsilon"),
        "rope_parameters": _partial_rope(m),
    }


BY_TRANSFORMERS: Mapping[str, Callable[[_Metadata], dict[str, Any]]] = {
    "qwen35": _qwen35,
    "starcoder2": _starcoder2,
    "phi2": _phi2,
    "gemma": lambda _: {"model_type": "gemma"},
}
"""The same of models of the generic path (generic.py), which are served from floats."""

_IN_FOLDERS = frozenset(
    {"command-r", "cohere2", "gptneox", "gpt2", "nemotron", "seed_oss", "apertus", "arcee", "olmo"}
)
"""Those of other models of the generic path, whose files are not read."""


def config_values(index: GgufIndex, source: str) -> dict[str, Any]:
    """The values of transformers' config, model_type included. source: the file's name.

    Raises UnsupportedModelError, with the key, the reason and the nearest thing that works, and
    ModelError for metadata that is missing.
    """
    metadata = _Metadata(index, source)
    own = ARCHITECTURES.get(metadata.kind) or BY_TRANSFORMERS.get(metadata.kind)
    if own is None:
        nearest = "the model's folder in transformers' form, if `tailor models list` has the model"
        if metadata.kind in _IN_FOLDERS:
            nearest = (
                "its folder in transformers' form: transformers' own forward computes it, from "
                "safetensors"
            )
        raise UnsupportedModelError(
            f"{source} is not supported: its architecture is {metadata.kind[:40]!r} "
            f"(general.architecture); {', '.join((*ARCHITECTURES, *BY_TRANSFORMERS))} are "
            "read. Nearest that works: " + nearest
        )
    return {**_common(metadata), **own(metadata)}
