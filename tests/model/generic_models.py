"""Tiny random models of the generic path: dense decoders of transformers that no row describes."""

from __future__ import annotations

from functools import cache, partial

import torch
from transformers import PreTrainedModel

from tests.model.families import MIXED, WINDOW, Maker, own, own_copy

of = partial(own, hidden_size=64, head_dim=16)
"""A maker of a model by its class name, as families.own."""


GENERIC: dict[str, tuple[str, Maker]] = {
    "apertus": ("Apertus", of("ApertusForCausalLM", rope_parameters={"rope_theta": 1e4})),
    "arcee": ("Arcee AFM 4.5B", of("ArceeForCausalLM")),
    "cohere": ("Command R", of("CohereForCausalLM")),
    "cohere2": (
        "Command R7B, Command A",
        of("Cohere2ForCausalLM", sliding_window=WINDOW, layer_types=MIXED),
    ),
    "gemma": ("Gemma 1", of("GemmaForCausalLM")),
    "gpt2": ("GPT-2", of("GPT2LMHeadModel")),
    "gpt_neox": ("Pythia, GPT-NeoX", of("GPTNeoXForCausalLM")),
    "helium": ("Helium", of("HeliumForCausalLM")),
    "ministral": ("Ministral 8B (2410)", of("MinistralForCausalLM", sliding_window=WINDOW)),
    "nemotron": ("Nemotron, Minitron", of("NemotronForCausalLM")),
    "olmo": ("OLMo 1", of("OlmoForCausalLM")),
    "opt": ("OPT", of("OPTForCausalLM", ffn_dim=96, word_embed_proj_dim=64)),
    "phi": ("Phi-1.5, Phi-2", of("PhiForCausalLM")),
    "qwen3_5_text": (
        "Qwen3.5 dense",
        of(
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
    "seed_oss": ("Seed-OSS", of("SeedOssForCausalLM")),
    "starcoder2": ("StarCoder2", of("Starcoder2ForCausalLM", sliding_window=WINDOW)),
    "vaultgemma": (
        "VaultGemma",
        of(
            "VaultGemmaForCausalLM",
            sliding_window=WINDOW,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=6.0,
        ),
    ),
}
"""model_type -> (the names that people know, a maker)."""

ON_CUDA = ("cohere2", "gpt2", "gpt_neox", "phi", "qwen3_5_text", "starcoder2", "vaultgemma")
"""Those that are tested there: windows and scaled logits, learned positions, biases, recurrent
states, soft-capping."""


def build(name: str) -> PreTrainedModel:
    """A float32 model in eval mode, whose attention is far from uniform; the caller's own."""
    return own_copy(_built, name)


@cache
def _built(name: str) -> PreTrainedModel:
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
