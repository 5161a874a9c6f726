"""Tiny random models of every supported family, saved as a real checkpoint would be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from server.model.cache_folder import MARKER
from server.model.catalog import CONVERTER_VERSION
from tests.api.tiny_tokenizers import unmerged_tokenizer
from tests.model.families import LLAMA3

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-scaled": ("LlamaConfig", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 10,
        },
    ),
}


def tiny_config(family: str, **changes: Any) -> Any:
    """A small config of a family."""
    name, extra = FAMILIES[family]
    return getattr(transformers, name)(**{**_SIZES, **extra, **changes})


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model, float32, with norms and biases that are not trivial."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim > 1 else 0.1
            offset = 1.0 if "norm" in name and "gemma" not in family else 0.0
            parameter.copy_(torch.randn_like(parameter) * scale + offset)
    return model.eval()


def save_tiny(folder: Path, family: str, seed: int = 0, **changes: Any) -> Any:
    """Save a tiny model and its tokenizer, of all bytes where it has ids for them, into `folder`;
    returns the model."""
    shard = changes.pop("max_shard_size", "1GB")
    model = tiny_model(family, seed, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer = unmerged_tokenizer(259 if changes.get("vocab_size", 0) > 259 else 128)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def save_built_in(cache: Path, name: str, family: str = "llama") -> Path:
    """The folder of a built-in model in a cache folder; it holds a tiny one."""
    folder = cache / "models" / f"{name}-v{CONVERTER_VERSION}"
    save_tiny(folder, family, vocab_size=260, max_position_embeddings=2048)
    (folder / MARKER).write_text(json.dumps({"source": f"{name}.gguf"}))
    return folder
