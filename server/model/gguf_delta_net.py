"""Gated delta nets in a GGUF (Qwen3.5): the changes of llama.cpp's converter to them, undone.

Several value heads share a key head. transformers has those of one key head side by side; the file
has the first of every key head, then the second of every key head: its products repeat keys so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["restored", "stem_of"]

Floats = npt.NDArray[np.float32]


def stem_of(name: str) -> str:
    """The name that gguf's table of names has for a tensor, without `.weight` or `.bias`."""
    if name.endswith(".A_log"):
        return name
    stem, _, leaf = name.rpartition(".")
    return f"{stem}.dt_proj" if leaf == "dt_bias" else stem


def restored(config: Any, name: str, values: Floats) -> Floats:
    """A tensor of `linear_attn` as transformers' state dict has it, but for the axis of length one
    of the convolution. values: as stored, float32. config: transformers'."""
    key_heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    per_key, dim = config.linear_num_value_heads // key_heads, config.linear_value_head_dim
    part = name.partition(".linear_attn.")[2]
    if part == "A_log":
        values = np.log(-values)
    if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return _grouped(values, per_key, 1)
    if part == "in_proj_z.weight":
        return _grouped(values, per_key, dim)
    if part == "out_proj.weight":
        return np.ascontiguousarray(_grouped(values.T, per_key, dim).T)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        split = 2 * key_heads * key_dim
        return np.concatenate((values[:split], _grouped(values[split:], per_key, dim)))
    return values


def _grouped(rows: Floats, per_key: int, dim: int) -> Floats:
    """Rows of value heads, `dim` of each, in transformers' order."""
    parts = rows.reshape(per_key, -1, dim, *rows.shape[1:])
    return parts.swapaxes(0, 1).reshape(rows.shape)
