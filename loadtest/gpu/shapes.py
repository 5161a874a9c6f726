"""Shapes of public models, and modules of them with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers

from server.types import ModelInfo

__all__ = ["BLOCK_SIZE", "SHAPES", "Asked", "Shape", "build", "info_of", "weight_bytes"]

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Asked:
    """What a part of the check is run on. name: of SHAPES. repeats: of each timing."""

    name: str
    device: torch.device
    dtype: torch.dtype
    repeats: int


@dataclass(frozen=True)
class Shape:
    """A dense model's sizes. max_model_len: the runner's; attention plans for that many keys."""

    family: Literal["llama", "qwen3", "gemma3"]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int = 9216


SHAPES = {
    "smollm2-135m": Shape("llama", 576, 1536, 30, 9, 3, 64, 49152),
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936),
    "gemma-3-270m": Shape("gemma3", 640, 2048, 18, 4, 1, 256, 262144),
    "tiny": Shape("llama", 64, 128, 2, 4, 2, 16, 256, 256),
    "tiny-gemma": Shape("gemma3", 32, 64, 2, 2, 1, 16, 1024, 256),
}


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Random weights, made on the device, the same at every call; input and output are tied."""
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max(16384, shape.max_model_len),
        "tie_word_embeddings": True,
    }
    if shape.family == "gemma3":
        sizes |= {"query_pre_attn_scalar": shape.head_dim, "sliding_window": 512}
        every = range(shape.num_layers)
        sizes["layer_types"] = [
            "full_attention" if i % 6 == 5 else "sliding_attention" for i in every
        ]
    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }
    config, model = kinds[shape.family]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            module: transformers.PreTrainedModel = model(config(**sizes))
    finally:
        torch.set_default_dtype(before)
    module.eval()  # type: ignore[no-untyped-call]
    return module


def info_of(
    module: transformers.PreTrainedModel,
    device: torch.device,
    *,
    num_blocks: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> ModelInfo:
    """The sizes that a runner is made with; the others are the module's own."""
    dtype = str(module.dtype).removeprefix("torch.")
    return ModelInfo(
        name=module.config.model_type, vocab_size=module.config.vocab_size,
        max_model_len=max_model_len, eos_token_ids=(), num_blocks=num_blocks,
        block_size=BLOCK_SIZE, device=str(device), dtype=dtype, fingerprint="",
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, kv_dtype=dtype,
    )  # fmt: skip


def weight_bytes(module: transformers.PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all but the embedding table, unless it is the head."""
    head: Any = module.lm_head
    embedding: Any = module.get_input_embeddings()
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    if embedding.weight is head.weight:
        return total
    return total - int(embedding.weight.numel()) * int(embedding.weight.element_size())
