"""Short convolutions on a GPU (LFM2): a module that reads each row's own ancestors.

As on a CPU (cpu/convolution.py), a layer's input B * x of a position is kept in its KV slot, so
that a tree row reads its own ancestors' and a rejected draft leaves nothing behind. Which slots
those are is the same in every layer and known on the host: `input_slots` says it once a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from server.engine.batch import Batch, Int32

NOTHING = -1
"""The slot of a position before the text."""


def input_slots(batch: Batch, taps: int, block_size: int) -> Int32:
    """int32 [R, taps]: the slots of a row's last positions on its path, its own last, or
    NOTHING."""
    last = batch.prefix_len + batch.path_len - 1
    at = last[:, None] - np.arange(taps - 1, -1, -1, dtype=np.int32)
    block = np.clip(at // block_size, 0, batch.block_tables.shape[1] - 1)
    slots = batch.block_tables[batch.seq_ids[:, None], block] * block_size + at % block_size
    if batch.path_slots.shape[0]:
        nth = at - batch.prefix_len[:, None]
        which = np.clip(batch.path_start[:, None] + nth, 0, batch.path_slots.shape[0] - 1)
        slots = np.where(nth >= 0, batch.path_slots[which], slots)
    return np.where(at < 0, NOTHING, slots).astype(np.int32)


class PagedConvolution(nn.Module):
    """A gated short convolution of transformers (Lfm2ShortConv) over inputs by slot: the forward's
    keyword `paged` carries them (attention.PagedStep). layer: its place among the convolutions."""

    def __init__(self, net: Any, layer: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = net.in_proj, net.out_proj
        self.layer = layer
        self.taps = net.conv.weight.detach().float()[:, 0].t().contiguous()  # of [H, 1, taps]
        self.bias = None if net.conv.bias is None else net.conv.bias.detach().float()

    def forward(self, hidden_states: torch.Tensor, *, paged: Any, **_: Any) -> torch.Tensor:
        """[1, R, H] to [1, R, H]; the rows' own inputs are kept first, and read with the others."""
        gate, scale, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        rows, kept = paged.rows, paged.cache.inputs[self.layer]
        kept.index_copy_(0, rows.slots.long(), gate * x)
        sources = rows.sources
        read = kept.index_select(0, sources.clamp(min=0).flatten()).float()
        read = read.view(*sources.shape, -1).masked_fill_((sources < 0)[..., None], 0.0)
        filtered = (read * self.taps).sum(dim=1)
        if self.bias is not None:
            filtered = filtered + self.bias
        out: torch.Tensor = self.out_proj((scale * filtered.to(x.dtype))[None])
        return out


def replace_convolutions(body: nn.Module) -> int:
    """Put a PagedConvolution in the place of every short convolution of transformers; how many."""
    num = 0
    for name, module in list(body.named_modules()):
        if type(module).__name__ == "Lfm2ShortConv":
            owner, _, leaf = name.rpartition(".")
            setattr(body.get_submodule(owner), leaf, PagedConvolution(module, num))
            num += 1
    return num
