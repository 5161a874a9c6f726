"""Small random models of every family that GGUF files exist of, and of the generic path's, written
as llama.cpp's converter writes them (convert_hf_to_gguf.py): its metadata keys, its order of rows,
its names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import gguf
import numpy as np
import torch
import transformers
from gguf import quants
from tokenizers import pre_tokenizers

from tests.model.cpu.integers.cases import ggml_rows
from tests.model.families import FAMILIES, GRANITE, LLAMA3, MAX_LEN, WINDOW, randomised
from tests.model.generic_models import GENERIC

VOCAB_SIZE = 320

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

Writer = gguf.GGUFWriter


@dataclass(frozen=True)
class GgufModel:
    """A model and how its converter writes it.

    kind: `general.architecture`. permuted: whether rows of q and k are put in llama.cpp's order.
    about: writes the keys that the common ones lack. norms: what is added to them. of_nets: a
    tensor of a gated delta net as its converter writes it, by its name there.
    """

    architecture: str
    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    permuted: bool = False
    norms: float = 0.0
    about: Callable[[Writer, Any], None] = lambda writer, config: None
    of_nets: Callable[[Any, str, np.ndarray], np.ndarray] = lambda config, part, values: values

    def build(self) -> Any:
        """The model, float32."""
        model_class: Any = getattr(transformers, self.architecture)
        config = model_class.config_class(**{**_SIZES, **self.changes})
        torch.manual_seed(0)
        return randomised(model_class(config), zero_norms=bool(self.norms))


def like(name: str, kind: str, changes: dict[str, Any], **how: Any) -> GgufModel:
    """As the tests' models have it, but for some changes. how: of GgufModel."""
    maker = FAMILIES[name] if name in FAMILIES else GENERIC[name][1]
    return GgufModel(maker.architecture, kind, maker.changes | changes, **how)


# --- keys of some architectures -------------------------------------------------------------------


def _head_lengths(writer: Writer, config: Any) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def _rotated(writer: Writer, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)


def _granite(writer: Writer, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _windows(writer: Writer, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == _SLIDING for kind in config.layer_types])


def _gemma2(writer: Writer, config: Any) -> None:
    _head_lengths(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _gemma3(writer: Writer, config: Any) -> None:
    _head_lengths(writer, config)
    writer.add_sliding_window(config.sliding_window)


def _phi3(writer: Writer, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    rotated = int(rope["partial_rotary_factor"] * config.hidden_size) // config.num_attention_heads
    writer.add_rope_dimension_count(rotated)
    writer.add_sliding_window(config.sliding_window or 0)
    stretch = config.max_position_embeddings / rope["original_max_position_embeddings"]
    factor = np.log(stretch) / np.log(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + factor)))
    for which in ("long", "short"):
        factors = np.array(rope[f"{which}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{which}.weight", factors)


def _mistral3(writer: Writer, config: Any) -> None:
    _rotated(writer, config)
    writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


def _hunyuan(writer: Writer, config: Any) -> None:
    rope, dim = config.rope_parameters, config.head_dim
    writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)


def _exaone4(writer: Writer, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    if config.sliding_window is not None:
        _windows(writer, config)


def _glm4(writer: Writer, config: Any) -> None:
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config.head_dim * share))


def _lfm2(writer: Writer, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    size, multiple = int(2 * config.intermediate_size / 3), config.block_multiple_of
    size = multiple * -(-int(config.block_ffn_dim_multiplier * size) // multiple)
    writer.add_feed_forward_length(size)


MODELS: dict[str, GgufModel] = {
    "llama": GgufModel(
        "LlamaForCausalLM",
        "llama",
        {"rope_parameters": LLAMA3, "num_key_value_heads": 1},
        permuted=True,
        about=_rotated,
    ),
    # Of a window the file says nothing: it is Llama.
    "mistral": GgufModel(
        "MistralForCausalLM",
        "llama",
        {"sliding_window": None, "head_dim": 32, "tie_word_embeddings": True},
        permuted=True,
        about=_rotated,
    ),
    "qwen2": GgufModel("Qwen2ForCausalLM", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": GgufModel("Qwen3ForCausalLM", "qwen3", {"head_dim": 32, "rope_parameters": _YARN}),
    "gemma2": like("gemma2", "gemma2", {"query_pre_attn_scalar": 16}, norms=1.0, about=_gemma2),
    "gemma3_text": GgufModel(
        "Gemma3ForCausalLM",
        "gemma3",
        {
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        norms=1.0,
        about=_gemma3,
    ),
    "smollm3": GgufModel(
        "SmolLM3ForCausalLM",
        "smollm3",
        {
            "num_hidden_layers": 4,  # of which the last is without rotary
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 5e6},
        },
        permuted=True,
        about=_rotated,
    ),
    "phi3": GgufModel(
        "Phi3ForCausalLM",
        "phi3",
        {
            "sliding_window": WINDOW,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 1.8],
                "long_factor": [1.0, 2.0, 4.0, 5.0, 6.0, 7.0],
                "original_max_position_embeddings": MAX_LEN,
            },
            "max_position_embeddings": 4 * MAX_LEN,
            "original_max_position_embeddings": MAX_LEN,
        },
        about=_phi3,
    ),
    "granite": GgufModel("GraniteForCausalLM", "granite", GRANITE, permuted=True, about=_granite),
    # Dense, it is written as a Granite 3.
    "granitemoehybrid": like(
        "granitemoehybrid",
        "granite",
        {"position_embedding_type": "rope", "tie_word_embeddings": True},
        permuted=True,
        about=_granite,
    ),
    "olmo2": GgufModel("Olmo2ForCausalLM", "olmo2"),
    "olmo3": like(
        "olmo3",
        "olmo2",
        {
            "rope_parameters": {
                _FULL: {**_YARN, "attention_factor": 1.1, "beta_fast": 16.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        about=_windows,
    ),
    "ministral3": GgufModel(
        "Ministral3ForCausalLM",
        "mistral3",
        {
            "rope_parameters": {
                **_YARN,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "llama_4_scaling_beta": 0.5,
            }
        },
        permuted=True,
        about=_mistral3,
    ),
    "ernie4_5": GgufModel("Ernie4_5ForCausalLM", "ernie4_5", {"tie_word_embeddings": True}),
    "hunyuan_v1_dense": like("hunyuan_v1_dense", "hunyuan-dense", {}, about=_hunyuan),
    "exaone4": like("exaone4", "exaone4", {}, about=_exaone4),
    "glm4": like("glm4", "glm4", {}, about=_glm4),
    "lfm2": like("lfm2", "lfm2", {"intermediate_size": 144, "block_multiple_of": 32}, about=_lfm2),
}
"""By model_type."""


# --- models of the generic path -------------------------------------------------------------------


_NETS = [*["linear_attention"] * 3, _FULL]


def _qwen35(writer: Writer, config: Any) -> None:
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config.head_dim * share))
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if config.layer_types != _NETS:  # newer files have the list
        recurrent = [kind == _NETS[0] for kind in config.layer_types]
        writer.add_array("qwen35.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(4)


def _phi2(writer: Writer, config: Any) -> None:
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(share * config.hidden_size) // config.num_attention_heads)


def _delta_net(config: Any, part: str, values: np.ndarray) -> np.ndarray:
    """_LinearAttentionVReorderBase: value head j of key head i comes to place j * key heads + i."""
    heads, keys = config.linear_num_value_heads, config.linear_num_key_heads
    order = np.arange(heads).reshape(keys, -1).T.ravel()
    dim = config.linear_value_head_dim
    wide = (order[:, None] * dim + np.arange(dim)).ravel()
    behind = 2 * keys * config.linear_key_head_dim
    if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        values = values[order]
    elif part == "in_proj_z.weight":
        values = values[wide]
    elif part in ("in_proj_qkv.weight", "conv1d.weight"):
        values = values[np.concatenate((np.arange(behind), behind + wide))]
    elif part == "out_proj.weight":
        values = values[:, wide]
    return -np.exp(values) if part == "A_log" else values


OF_GENERIC: dict[str, GgufModel] = {
    "gemma": GgufModel("GemmaForCausalLM", "gemma", {"head_dim": 32}, norms=1.0),
    "phi": GgufModel(
        "PhiForCausalLM",
        "phi2",
        {
            "intermediate_size": 256,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        about=_phi2,
    ),
    "qwen3_5_text": like(
        "qwen3_5_text",
        "qwen35",
        {"num_hidden_layers": 4, "layer_types": _NETS, "linear_num_value_heads": 6},
        norms=1.0,
        about=_qwen35,
        of_nets=_delta_net,
    ),
    "starcoder2": GgufModel(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"sliding_window": WINDOW},
        about=lambda writer, config: writer.add_sliding_window(config.sliding_window),
    ),
}
"""By model_type."""


# --- writing --------------------------------------------------------------------------------------

_LAYER_NORMS = {"phi": "layer_norm_eps", "starcoder2": "norm_epsilon"}
"""Models whose norms are no RMSNorms -> their config's key of the epsilon."""


def _common(writer: Writer, config: Any, num_more: int = 0) -> None:
    """TextModel.set_gguf_parameters. num_more: layers that draft, behind the model's."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + num_more)
    writer.add_feed_forward_length(getattr(config, "shared_intermediate_size", 0) or config.intermediate_size)  # noqa: E501  # fmt: skip
    writer.add_head_count(config.num_attention_heads)
    kv_heads = config.num_key_value_heads
    if config.model_type == "lfm2":
        kv_heads = [0 if kind == "conv" else kv_heads for kind in config.layer_types]
    writer.add_head_count_kv(kv_heads)
    rope = config.rope_parameters
    rope, local = rope.get(_FULL, rope), rope.get(_SLIDING, {})
    if config.model_type not in ("gemma", "gemma2", "phi"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(key) is not None:
                add(rope[key])
    if config.model_type in _LAYER_NORMS:
        writer.add_layer_norm_eps(getattr(config, _LAYER_NORMS[config.model_type]))
        return
    eps = getattr(config, "rms_norm_eps", None)
    writer.add_layer_norm_rms_eps(config.norm_eps if eps is None else eps)
    if config.model_type not in ("gemma2", "phi3", "granite", "granitemoehybrid", "lfm2"):
        _head_lengths(writer, config)


def add_tokenizer(writer: Writer, vocab_size: int, pre: str = "smollm") -> None:
    """A byte-level BPE with two merges, as large as the vocabulary."""
    tokens = ["<|end|>", "<|start|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "Ġ1"]
    tokens += [f"<|x{i}|>" for i in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t.startswith("<|") else 1 for t in tokens])
    writer.add_token_merges(["Ġ Ġ", "Ġ 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)


def _llama3_factors(config: Any) -> np.ndarray:
    """LlamaModel.generate_extra_tensors: what the scaling divides each frequency by."""
    rope, dim = config.rope_parameters, config.head_dim
    freqs = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    length, low, high = (
        rope[key]
        for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    waves = 2 * np.pi / freqs
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def converted(model: GgufModel, module: Any) -> dict[str, np.ndarray]:
    """The tensors under llama.cpp's names, float32."""
    config = module.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[model.kind], config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        known = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        known = known.replace(".dt_bias", ".dt_proj.bias")
        written = cast("str", names.get_name(known, try_suffixes=(".weight", ".bias")))
        values = tensor.numpy().copy()
        part = name.partition(".linear_attn.")[2]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        num = heads.get(name.split(".")[-2])
        if model.permuted and num:
            parts = values.reshape(num, 2, values.shape[0] // num // 2, *values.shape[1:])
            values = parts.swapaxes(1, 2).reshape(values.shape)
        if part:
            values = model.of_nets(config, part, values)
        elif name.endswith("norm.weight"):
            values += np.float32(model.norms)
        if name.endswith(("conv.conv.weight", "conv1d.weight")):
            values = values[:, 0]
        if "shared_mlp.input_linear" in name:
            layer = name.split(".")[2]
            gate, up = np.split(values, 2)
            found |= {f"blk.{layer}.ffn_gate.weight": gate, f"blk.{layer}.ffn_up.weight": up}
        else:
            found[written] = values
    if config.rope_parameters.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3_factors(config)
    return found


def write(
    model: GgufModel,
    module: Any,
    path: Path,
    *forms: str,
    pre: str = "smollm",
    extra: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """The file; its tensors by llama.cpp's names.

    forms: of ggml, through which matrices take turns, F32 when none is given; of K forms, which
    gguf does not make, any numbers about as large; vectors and convolutions are in float32. pre:
    its pre-tokenizer. extra: vectors that the model has not, by size; those of a layer behind its
    last one draft.
    """
    writer, config = Writer(path, model.kind), module.config
    num_more = int(any(name.startswith(f"blk.{config.num_hidden_layers}.") for name in extra))
    if num_more:
        writer.add_uint32(f"{model.kind}.nextn_predict_layers", num_more)
    _common(writer, config, num_more)
    model.about(writer, config)
    add_tokenizer(writer, config.vocab_size, pre)
    tensors = converted(model, module)
    tensors |= {name: np.zeros(size, np.float32) for name, size in extra.items()}
    turns = cycle(forms or ("F32",))
    for name, values in tensors.items():
        if values.ndim == 1 or "conv.weight" in name or "conv1d" in name:
            form = "F32"
        else:
            form = next(turns)
        kind = gguf.GGMLQuantizationType[form]
        if form == "F32":
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            rows = _k_rows(form, values) if form.endswith("_K") else quants.quantize(values, kind)
            writer.add_tensor(name, rows, raw_dtype=kind)
    finish(writer)
    return tensors


def _k_rows(form: str, values: np.ndarray) -> np.ndarray:
    (outputs, inputs), kind = values.shape, gguf.GGMLQuantizationType[form]
    own = float(quants.dequantize(ggml_rows(form.lower(), outputs, inputs), kind).std())
    return ggml_rows(form.lower(), outputs, inputs, scale=0.01 * float(values.std()) / own)


def finish(writer: Writer) -> None:
    """Write what a file was given, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _two_ends(writer: Writer, config: Any) -> None:
    _rotated(writer, config)
    writer.add_eot_token_id(260)


LLAMA = GgufModel(
    "LlamaForCausalLM",
    "llama",
    {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True,
    },
    permuted=True,
    about=_two_ends,
)  # fmt: skip


def write_llama(path: Path, *forms: str, pre: str = "smollm") -> dict[str, np.ndarray]:
    """A tiny Llama of 300 ids with two ends, 0 and 260. Arguments and result: as `write` has
    them."""
    return write(LLAMA, LLAMA.build(), path, *forms, pre=pre)


BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Forms of 32 inputs."""

K_FORMS = ("Q4_K", "Q5_K", "Q6_K")
"""Forms of 256 inputs."""

WIDE = GgufModel(
    "Gemma3ForCausalLM",
    "gemma3",
    MODELS["gemma3_text"].changes
    | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2},
    norms=1.0,
    about=_gemma3,
)
"""Wide enough for K forms."""
