"""Tiny random models of the generic path: dense decoders of transformers that no row describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 199
MAX_LEN = 256
WINDOW = 8

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _of(architecture: str, **changes: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        model_class: Any = getattr(transformers, architecture)
        return model_class(model_class.config_class(**{**_SIZES, **changes}))

    return make


GENERIC: dict[str, tuple[str, Callable[[], PreTrainedModel]]] = {
    "apertus": ("Apertus", _of("ApertusForCausalLM", rope_parameters={"rope_theta": 1e4})),
    "arcee": ("Arcee AFM 4.5B", _of("ArceeForCausalLM")),
    "cohere": ("Command R", _of("CohereForCausalLM")),
    "cohere2": (
        "Command R7B, Command A",
        _of("Cohere2ForCausalLM", sliding_window=WINDOW, layer_types=_MIXED),
    ),
    "gemma": ("Gemma 1", _of("GemmaForCausalLM")),
    "gpt2": ("GPT-2", _of("GPT2LMHeadModel")),
    "gpt_neox": ("Pythia, GPT-NeoX", _of("GPTNeoXForCausalLM")),
    "helium": ("Helium", _of("HeliumForCausalLM")),
    "ministral": ("Ministral 8B (2410)", _of("MinistralForCausalLM", sliding_window=WINDOW)),
    "nemotron": ("Nemotron, Minitron", _of("NemotronForCausalLM")),
    "olmo": ("OLMo 1", _of("OlmoForCausalLM")),
    "opt": ("OPT", _of("OPTForCausalLM", ffn_dim=96, word_embed_proj_dim=64)),
    "phi": ("Phi-1.5, Phi-2", _of("PhiForCausalLM")),
    "qwen3_5_text": (
        "Qwen3.5 dense",
        _of(
            "Qwen3_5ForCausalLM",
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_key_head_dim=16,
            linear_value_head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        ),
    ),
    "seed_oss": ("Seed-OSS", _of("SeedOssForCausalLM")),
    "starcoder2": ("StarCoder2", _of("Starcoder2ForCausalLM", sliding_window=WINDOW)),
    "vaultgemma": (
        "VaultGemma",
        _of(
            "VaultGemmaForCausalLM",
            sliding_window=WINDOW,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=6.0,
        ),
    ),
}
"""model_type -> (the names that people know, a maker)."""


def build(name: str) -> PreTrainedModel:
    """A float32 model in eval mode, whose attention is far from uniform."""
    torch.manual_seed(0)
    module = GENERIC[name][1]()
    with torch.no_grad():
        for key, weight in module.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            elif key.endswith("conv1d.weight"):
                weight.normal_(0.0, 0.7)
            elif "embed" in key or "lm_head" in key or "wte" in key:
                weight.normal_(0.0, 0.2)
            elif "wpe" not in key:
                weight.normal_(0.0, 1.3 / weight.shape[1] ** 0.5)
    return module.eval()
