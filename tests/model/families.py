"""Tiny random models of every supported family, with weights that make attention matter."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import PreTrainedModel

from server.engine.batch import Runner
from server.model.build import RunnerSpec, build_runner
from server.types import EngineSizes
from tests.model.batches import BatchBuilder, Pages, all_logprobs, run

Logprobs = npt.NDArray[np.float32]

VOCAB_SIZE = 199
WINDOW = 8
MAX_LEN = 256

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}


@dataclass(frozen=True)
class Maker:
    """Makes models of a class, from SIZES and what differs."""

    architecture: str
    changes: dict[str, Any]

    def __call__(self) -> PreTrainedModel:
        model_class: Any = getattr(transformers, self.architecture)
        return model_class(model_class.config_class(**{**SIZES, **_HEADS, **self.changes}))


def own(architecture: str, **changes: Any) -> Maker:
    """A family's by its class name."""
    return Maker(architecture, changes)


MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.7,
}
_LONG_FACTORS = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 4.0]}

FAMILIES: dict[str, Maker] = {
    # Grouped queries (3 per KV head), llama3 rope scaling, head not tied.
    "llama": own(
        "LlamaForCausalLM",
        num_attention_heads=6,
        head_dim=16,
        rope_parameters=LLAMA3,
        tie_word_embeddings=False,
    ),
    # q/k/v biases, tied head, the upper layers with a sliding window.
    "qwen2": own(
        "Qwen2ForCausalLM",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    # q/k norm, head_dim that is not hidden_size / num_heads.
    "qwen3": own("Qwen3ForCausalLM", num_key_value_heads=1, head_dim=32, tie_word_embeddings=True),
    # Sliding and global layers with their own rope, embedding scale, q/k norm, sandwich norms.
    "gemma3": own(
        "Gemma3ForCausalLM",
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=MIXED,
        tie_word_embeddings=True,
    ),
    # A sliding window in every layer.
    "mistral": own("MistralForCausalLM", sliding_window=WINDOW, tie_word_embeddings=False),
    "gemma2": own(
        "Gemma2ForCausalLM",
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=MIXED,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=6.0,
        tie_word_embeddings=True,
    ),
    # Layers without rotary, and a window on those.
    "smollm3": own(
        "SmolLM3ForCausalLM",
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=WINDOW,
        tie_word_embeddings=True,
    ),
    "phi3": own(
        "Phi3ForCausalLM",
        sliding_window=WINDOW,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            **_LONG_FACTORS,
        },
        max_position_embeddings=4 * MAX_LEN,
        original_max_position_embeddings=MAX_LEN,
    ),
    "granite": own("GraniteForCausalLM", **GRANITE),
    "granitemoehybrid": own(
        "GraniteMoeHybridForCausalLM",
        num_local_experts=0,
        shared_intermediate_size=96,
        layer_types=["full_attention"] * 3,
        position_embedding_type=None,
        mamba_n_heads=4,
        **GRANITE,
    ),
    "olmo2": own("Olmo2ForCausalLM"),
    "olmo3": own("Olmo3ForCausalLM", sliding_window=WINDOW, layer_types=MIXED),
    # A scale on q that grows with the position.
    "ministral3": own(
        "Ministral3ForCausalLM",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "ernie4_5": own("Ernie4_5ForCausalLM", tie_word_embeddings=True),
    "hunyuan_v1_dense": own(
        "HunYuanDenseV1ForCausalLM",
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 1.0,
            "alpha": 20.0,
        },
    ),
    "exaone4": own("Exaone4ForCausalLM", sliding_window=WINDOW, layer_types=MIXED),
    "glm4": own(
        "Glm4ForCausalLM",
        rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        attention_bias=True,
    ),
    # Short convolutions around one attention layer.
    "lfm2": own(
        "Lfm2ForCausalLM",
        layer_types=["conv", "full_attention", "conv"],
        block_multiple_of=8,
        tie_word_embeddings=True,
    ),
}


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model in eval mode, with random weights. "llama:1" has its first layer alone. It is
    the caller's own, and torch's next random numbers are the same whoever asked before."""
    return own_copy(_built, family, seed)


def own_copy(built: Callable[..., PreTrainedModel], *which: str | int) -> PreTrainedModel:
    """What `built` keeps, for one who may change it: a copy takes a fraction of making it anew."""
    made = copy.deepcopy(built(*which))
    torch.manual_seed(0)
    return made


@functools.cache
def _built(family: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    name, _, num_layers = family.partition(":")
    module: Any = randomised(FAMILIES[name](), zero_norms=name.startswith("gemma"))
    if num_layers:
        config, first = module.config, slice(int(num_layers))
        module.model.layers = module.model.layers[first]
        config.num_hidden_layers = int(num_layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[first]
    return module


def randomised(module: PreTrainedModel, *, zero_norms: bool) -> PreTrainedModel:
    """Matrices are scaled up so that attention is far from uniform, and norms and biases are
    random, so that a wrong one shows. zero_norms: norms are stored less 1, as Gemma's are."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(-0.5, 0.5) if "norm" in name else weight.normal_(0.0, 0.3)
                if "norm" in name and not zero_norms:
                    weight.add_(1.0)
            elif name.endswith("conv.conv.weight"):
                weight.normal_(0.0, 0.7)
            elif "embed" in name or "lm_head" in name:
                weight.normal_(0.0, 0.15 if zero_norms else 0.4)
            else:
                weight.normal_(0.0, 1.3 / weight.shape[1] ** 0.5)
    return module.eval()


def model_type(family: str) -> str:
    """transformers' model_type of a family of this table."""
    return "gemma3_text" if family == "gemma3" else family


def tokens(num: int, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Ids of a random text."""
    ids: list[int] = np.random.default_rng(seed).integers(3, vocab_size, num).tolist()
    return ids


def step(
    runner: Runner, builder: BatchBuilder, rows: list[int], vocab_size: int = VOCAB_SIZE
) -> Logprobs:
    """Run a batch; float32 [rows, V]: log-softmax of these rows."""
    for row in rows:
        builder.score(row, 0, vocab_size)
    return all_logprobs(run(runner, builder.build()), vocab_size)


def prefill(runner: Runner, ids: list[int], vocab_size: int = VOCAB_SIZE) -> Logprobs:
    """float32 [n, V]: log-softmax at every position of a text, which is one chunk."""
    builder = BatchBuilder()
    table = Pages(runner.info.num_blocks).sequence(len(ids))
    return step(runner, builder, builder.add_rows(table, ids, 0), vocab_size)


def served(folder: Path, ids: list[int], vocab_size: int = VOCAB_SIZE, **options: Any) -> Logprobs:
    """The same of a folder's model, opened as a server does. options: of RunnerSpec."""
    sizes = EngineSizes(max_num_seqs=2, max_num_batched_tokens=64, kv_bytes=8 << 20)
    given: dict[str, Any] = {"max_model_len": 96, **options}
    with closing(build_runner(RunnerSpec("tiny", str(folder), sizes=sizes, **given))) as runner:
        return prefill(runner, ids, vocab_size)


def truth(module: PreTrainedModel, ids: list[int]) -> Logprobs:
    """The same by transformers' own forward."""
    with torch.no_grad():
        logits = module(torch.tensor([ids]), use_cache=False).logits[0]
    result: Logprobs = torch.log_softmax(logits.float(), -1).numpy()
    return result
