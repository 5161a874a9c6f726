"""A gated delta net of transformers (Qwen3.5) whose recurrence is ours: what both devices share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["DeltaNet", "replace_delta_nets"]


Net = TypeVar("Net", bound="DeltaNet")


class DeltaNet(nn.Module):
    """Projections, norm and gate are the net's own; `recur` is a device's.

    layer: its place among the recurrent layers. taps: float32 [taps, channels of q, k, v], the
    oldest first. rate, shift: float32 [heads], exp(A_log) and dt_bias. key_heads, dk, dv: sizes.
    Raises ValueError for another activation than SiLU.
    """

    taps: torch.Tensor
    rate: torch.Tensor
    shift: torch.Tensor

    def __init__(self, net: Any, layer: int) -> None:
        super().__init__()
        self.in_proj_qkv, self.in_proj_z = net.in_proj_qkv, net.in_proj_z
        self.in_proj_b, self.in_proj_a = net.in_proj_b, net.in_proj_a
        self.norm, self.out_proj = net.norm, net.out_proj
        if net.activation != "silu":
            raise ValueError("the activation of its delta net is not SiLU")
        self.layer = layer
        self.taps = net.conv1d.weight.detach().float()[:, 0].t().contiguous()
        self.rate = net.A_log.detach().float().exp()
        self.shift = net.dt_bias.detach().float()
        self.key_heads, self.dk = int(net.num_k_heads), int(net.head_k_dim)
        self.dv = int(net.head_v_dim)

    def recur(self, mixed: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        """[R, heads dv]: the reading of every row. mixed: [R, channels + 2 heads], q, k, v, b and
        a. given: further keywords of the forward."""
        raise NotImplementedError

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        """[1, R, H] to [1, R, H]."""
        parts = [self.in_proj_qkv, self.in_proj_b, self.in_proj_a]
        mixed = torch.cat([part(hidden_states)[0] for part in parts], dim=-1)
        read = self.recur(mixed, given)
        gate = self.in_proj_z(hidden_states).reshape(-1, self.dv)
        normed = self.norm(read.reshape(-1, self.dv), gate)
        out: torch.Tensor = self.out_proj(normed.reshape(1, hidden_states.shape[1], -1))
        return out


def replace_delta_nets(body: nn.Module, make: Callable[[Any, int], Net]) -> list[Net]:
    """Put what `make` gives of a net and its place in the place of every gated delta net."""
    found: list[Net] = []
    for name, module in list(body.named_modules()):
        if type(module).__name__ == "Qwen3_5GatedDeltaNet":
            owner, _, leaf = name.rpartition(".")
            found.append(make(module, len(found)))
            setattr(body.get_submodule(owner), leaf, found[-1])
    return found
