"""LmHead: hidden states of the rows that draw or are scored -> float32 logits over vocabulary ids.

Only here may columns be anything but vocabulary ids: issue 4's VocabSlice cuts `weight` to the
slice's rows behind this class, and what leaves it stays indexed by global id or comes with its ids.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_CPU_SLAB = 8192  # vocabulary rows upcast at once where there is no float32-output product


class LmHead:
    """The head's weight and how it is multiplied.

    weight: [V, hidden_size], may be the tied embedding table (never copied). bias: [V] or None.
    num_token_ids: ids that exist; rows of the weight from there on are padding, multiplied (odd
    sizes are slow) but never shown, so that no such id can be drawn or listed. The logits are
    float32 whatever the weight's dtype: rounding them to bfloat16 would make ties, and ties go to
    the lowest id.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, num_token_ids: int | None = None
    ) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.float()
        num_rows = int(weight.shape[0])
        self.vocab_size = num_rows if num_token_ids is None else num_token_ids
        if not 0 < self.vocab_size <= num_rows:
            raise ValueError(f"{num_token_ids} token ids, but the head has {num_rows} rows")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] in the weight's dtype -> float32 [n, vocab_size]; no sync."""
        weight = self._weight
        if weight.dtype == torch.float32:
            logits = functional.linear(hidden, weight)
        elif weight.device.type == "cuda":
            # cuBLAS keeps its float32 accumulator (torch >= 2.8, CUDA only).
            logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        else:
            num_rows = weight.shape[0]
            logits = torch.empty((hidden.shape[0], num_rows), dtype=torch.float32)
            wide = hidden.float()
            for start in range(0, num_rows, _CPU_SLAB):
                rows = weight[start : start + _CPU_SLAB].float()
                torch.mm(wide, rows.t(), out=logits[:, start : start + _CPU_SLAB])
        if self._bias is not None:
            logits += self._bias
        return logits[:, : self.vocab_size]
