"""Small random models of the generic path, written as llama.cpp's converter writes them: the keys
of its classes Qwen3_5TextModel, StarCoder2Model, Phi2Model and GemmaModel, and their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tests.model.gguf_models import (
    WINDOW,
    GgufModel,
    Writer,
    add_tokenizer,
    head_lengths,
    named_tensors,
    write_tensors,
    zeros,
)

_LINEAR, _FULL = "linear_attention", "full_attention"


def _gemma(writer: Writer, config: Any) -> None:
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_lengths(writer, config)


def _qwen35(writer: Writer, config: Any) -> None:
    _gemma(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config.head_dim * share))
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if config.layer_types != [_LINEAR, _LINEAR, _LINEAR, _FULL]:  # newer files have the list
        recurrent = [kind == _LINEAR for kind in config.layer_types]
        writer.add_array("qwen35.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(4)


def _starcoder2(writer: Writer, config: Any) -> None:
    writer.add_layer_norm_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_sliding_window(config.sliding_window)


def _phi2(writer: Writer, config: Any) -> None:
    writer.add_layer_norm_eps(config.layer_norm_eps)
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(share * config.hidden_size) // config.num_attention_heads)


_NETS = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
    },
}

MODELS: dict[str, GgufModel] = {
    "gemma": GgufModel(
        "GemmaForCausalLM",
        "gemma",
        {"num_key_value_heads": 1, "head_dim": 32},
        norms=1.0,
        about=_gemma,
    ),
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
    "qwen3_5_text": GgufModel(
        "Qwen3_5ForCausalLM",
        "qwen35",
        {**_NETS, "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL]},
        norms=1.0,
        about=_qwen35,
    ),
    "starcoder2": GgufModel(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"sliding_window": WINDOW},
        about=_starcoder2,
    ),
}
"""By model_type."""


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


def _converted(model: GgufModel, module: Any) -> dict[str, np.ndarray]:
    """The tensors under llama.cpp's names, float32."""
    config = module.config
    found: dict[str, np.ndarray] = {}

    def known(name: str) -> str:
        return name.replace(".dt_bias", ".dt_proj.bias")

    for name, written, values in named_tensors(model.kind, module, known):
        part = name.partition(".linear_attn.")[2]
        if part:
            values = _delta_net(config, part, values)
        elif name.endswith("norm.weight"):
            values += np.float32(model.norms)
        found[written] = values[:, 0] if part == "conv1d.weight" else values
    return found


def write(
    model: GgufModel,
    module: Any,
    path: Path,
    form: str = "F32",
    extra: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """The file, its matrices in a form of ggml. extra: vectors beside the model's, by size; those
    of a layer behind its last one draft."""
    writer, config = Writer(path, model.kind), module.config
    layers = config.num_hidden_layers
    num_more = int(any(name.startswith(f"blk.{layers}.") for name in extra))
    writer.add_block_count(layers + num_more)
    if num_more:
        writer.add_uint32(f"{model.kind}.nextn_predict_layers", num_more)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    model.about(writer, config)
    add_tokenizer(writer, config.vocab_size)
    write_tensors(writer, _converted(model, module) | zeros(extra), form)
