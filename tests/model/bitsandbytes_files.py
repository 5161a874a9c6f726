"""Weights as bitsandbytes 0.50 writes them: NF4 with double quantisation."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from server.model.nf4 import BLOCK, NESTED_BLOCK, STATE, rounded


def tensors_of(name: str, weight: torch.Tensor, *, nested: bool = True) -> dict[str, torch.Tensor]:
    """The tensors that stand for one weight."""
    made = rounded(weight)
    state = {
        "quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(made.shape),
    }  # fmt: skip
    magnitudes = made.magnitudes
    parts = {".quant_map": made.levels}
    if nested:
        state |= {
            "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32",
            "nested_offset": made.offset,
        }  # fmt: skip
        parts |= {".nested_absmax": made.scales, ".nested_quant_map": made.map}
    else:
        at = torch.arange(len(magnitudes)) // NESTED_BLOCK
        magnitudes = made.map[magnitudes.int()] * made.scales[at] + made.offset
    parts |= {"": made.numbers[:, None], ".absmax": magnitudes}
    parts[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {f"{name}{part}": tensor for part, tensor in parts.items()}


def save_as_bitsandbytes(folder: Path) -> None:
    """Round the linear layers of a folder in transformers' form."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight"):
            del tensors[name]
            tensors |= tensors_of(name, tensor)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
