"""GraphHead: what a CUDA graph computes behind the body: the full LM head and the likeliest ids.

A step whose draws are all the argmax of the full head's logits (greedy decode and trees) is then
one replay, whose results lie where the next step's rows and the copy to the host find them. Other
steps through the full head take the graph's logits and leave its ids: a second graph draws from
them, whatever the history is (graph_draws.py), or the sampler, launched kernel by kernel. Slices,
and heads that are copied through the device, have the body's graph alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from server.model.gpu.lm_head import LmHead
from server.model.gpu.sampler import argmax_ids

Widens = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""OwnRows.widened in a graph: (hidden, logits, cap) of the head's rows -> their wide logits."""


class GraphHead:
    """head: on the device. num_rows: most rows of a graph that has it; the graphs share one buffer
    of `logits`, float32 [num_rows, rows of the head]."""

    def __init__(self, head: LmHead, num_rows: int) -> None:
        self.num_rows = num_rows
        self._head = head
        shape = (num_rows, head.weight.shape[0])
        self.logits = torch.empty(shape, dtype=torch.float32, device=head.weight.device)

    def __call__(
        self, hidden: torch.Tensor, rows: torch.Tensor, widens: Widens | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits float32 [n, V], their argmax int32 [n], as in sampler.py) of rows int32 [n] of
        `hidden`. Both are overwritten by the next step. widens: where adapters have own rows."""
        states = hidden.index_select(0, rows)
        logits = self._head.logits(states, self.logits[: rows.shape[0]])
        if widens is not None:
            logits = widens(states, logits, self._head.cap)
        return logits, argmax_ids(logits)
