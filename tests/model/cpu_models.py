"""CpuRunner over a module's own weights, for tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from server.model.cpu.integers.packed import FORM_OF, IntegerWeights
from server.model.cpu.runner import BLOCK_SIZE, CpuRunner
from server.model.cpu.tensors import Weights
from server.model.cpu.weights import PackedWeights, RunnerWeights
from server.model.shape import ModelShape, rope_tables, shape_of
from server.types import ModelInfo


class ModuleWeights:
    """A module's state dict as named tensors; a tied head is left out, as files leave it out."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._tensors = {name: t.detach() for name, t in module.state_dict().items()}
        if module.config.tie_word_embeddings:
            del self._tensors["lm_head.weight"]

    def names(self) -> list[str]:
        return list(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def packed(
    shape: ModelShape, weights: Weights, dtype: str, max_rows: int, head_in_file: bool = False
) -> RunnerWeights:
    """Weights of any kind: floats by dtype, integers by the name of `engine.weights`."""
    if dtype in FORM_OF:
        return IntegerWeights(
            shape, weights, form=dtype, max_rows=max_rows, head_in_file=head_in_file
        )
    return PackedWeights(shape, weights, dtype=dtype, head_in_file=head_in_file)


def cpu_runner(
    module: PreTrainedModel,
    *,
    num_blocks: int = 64,
    max_model_len: int = 256,
    max_rows: int = 256,
    num_threads: int = 2,
    dtype: str = "float32",
    kv_dtype: str = "float32",
    head_in_file: bool = False,
) -> CpuRunner:
    """A CpuRunner that computes what `module` does."""
    config: Any = module.config
    shape = shape_of(config)
    info = ModelInfo(
        name=shape.family,
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=(2,),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        device="cpu",
        dtype=dtype,
        fingerprint="test",
        max_num_seqs=8,
        max_num_batched_tokens=max_rows,
        kv_dtype=kv_dtype,
    )
    return CpuRunner(
        shape,
        packed(shape, ModuleWeights(module), dtype, max_rows, head_in_file),
        rope_tables(config, shape, max_model_len),
        info,
        num_threads=num_threads,
    )
