"""Small random models of the generic path, written as llama.cpp's converter writes them: the keys
of its classes Qwen3_5TextModel, StarCoder2Model, Phi2Model and GemmaModel, and their tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.model.families import WINDOW
from tests.model.gguf_models import GgufModel, Writer

_LINEAR, _FULL = "linear_attention", "full_attention"


def _qwen35(writer: Writer, config: Any) -> None:
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
    writer.add_sliding_window(config.sliding_window)


def _phi2(writer: Writer, config: Any) -> None:
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(share * config.hidden_size) // config.num_attention_heads)


_NETS = {
    "num_hidden_layers": 4,
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


MODELS: dict[str, GgufModel] = {
    "gemma": GgufModel(
        "GemmaForCausalLM",
        "gemma",
        {"num_key_value_heads": 1, "head_dim": 32},
        norms=1.0,
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
        of_nets=_delta_net,
    ),
    "starcoder2": GgufModel(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"sliding_window": WINDOW},
        about=_starcoder2,
    ),
}
"""By model_type."""
