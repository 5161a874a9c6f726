"""What TorchRunner is made of, beside the sizes that ModelInfo tells everybody."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from server.model.gpu.attention import AttentionName
from server.types import NarrowForm

HEAD_BYTES = 512 << 20
PARTIAL_BYTES = 256 << 20
LOGIT_BYTES = 64
"""Peak bytes of one logit of a slab whose draws are processed: 4 for its float32, float64 copies,
sorted values with their indices and running sums; int64 order keys for logprobs."""


def graph_head_rows(head_rows: int, head_bytes: int, graph_rows: int) -> int:
    """Rows whose logits (float32 [rows, head_rows], kept beside a step's own) graphs compute: of
    graphs of at most graph_rows, and no more than head_bytes hold."""
    return min(head_bytes // (4 * head_rows), graph_rows)


class TorchModel(NamedTuple):
    """A model's weights, and which of them lie in CPU memory.

    module: a causal LM of transformers, in eval mode, on the runner's device; the runner takes it
    over and switches its attention. embedding: [rows, hidden_size] in CPU memory, from which a
    step's rows are gathered into its upload; None: the module's own, on the device. head: [rows,
    hidden_size] in CPU memory, where the full head stays; None: the module's own, on the device.
    What is given here may be on the meta device in the module. verify_on_cpu: `verify` multiplies
    there, instead of copying the head through the device; only with `head`.
    """

    module: PreTrainedModel
    embedding: torch.Tensor | None = None
    head: torch.Tensor | None = None
    verify_on_cpu: bool = False


class Ways(NamedTuple):
    """How a step is computed.

    attention: None is "triton" on CUDA and "torch" elsewhere. cuda_graphs:
    captured graphs are replayed for steps of few rows, trees included; needs "triton". head_bytes:
    memory that a slab of logits and the work on it may take; more rows go through the head in
    several slabs. partial_bytes: memory for split attention. weights: of the layers, in 8 bits
    (body.narrow_layers), or None as they are loaded.
    """

    attention: AttentionName | None = None
    cuda_graphs: bool = False
    head_bytes: int = HEAD_BYTES
    partial_bytes: int = PARTIAL_BYTES
    weights: NarrowForm | None = None
