"""What takes the place of transformers' modules whose bits depend on the number of rows.

torch's matrix products split sums by the number of rows, and its sines and cosines are other ones
in the last elements of an array. So products are ours (kernels.py), and rotary tables are computed
once, for all positions, and read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from server.model.cpu.generic.attention import DeltaSizes, StepHolder
from server.model.cpu.kernels import PANEL, pack_panels
from server.model.cpu.linear import float_linear, product
from server.model.cpu.records import Work
from server.model.cpu.vector_ir import LANES

__all__ = ["DeltaNet", "RowLinear", "as_stored", "packed", "replace_delta_nets", "replace_modules"]


def as_stored(weight: torch.Tensor, bf16: bool) -> Any:
    """A float32 tensor as an array, or the bits of its bfloat16 rounding (uint16)."""
    if bf16:
        return weight.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return weight.float().numpy()


def packed(weight: torch.Tensor, bf16: bool) -> Any:
    """[outputs, inputs] in panels (kernels.py)."""
    stored = as_stored(weight.detach().contiguous(), bf16)
    num_panels = -(-stored.shape[0] // PANEL)
    arena = np.zeros(num_panels * stored.shape[1] * PANEL + 64, stored.dtype)
    skip = (-arena.ctypes.data % 64) // arena.itemsize
    size = num_panels * stored.shape[1] * PANEL
    panels = arena[skip : skip + size].reshape(num_panels, stored.shape[1], PANEL)
    pack_panels(stored, panels)
    return panels


class RowLinear(nn.Module):
    """nn.Linear with our product: each row has the same bits whatever rows are beside it.

    weight: [outputs, inputs], packed and let go. work: the threads. bf16: how it is kept.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, work: Work, *, bf16: bool
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.panels = packed(weight, bf16)
        self.bias = None if bias is None else bias.detach().float()
        self._record = float_linear(self.panels)
        self._work = work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs], float32."""
        rows = x.reshape(-1, self.in_features).contiguous()
        out = torch.empty((rows.shape[0], self.panels.shape[0] * PANEL), dtype=torch.float32)
        product(rows.numpy(), rows.shape[0], self._record, out.numpy(), self._work)
        result = out[:, : self.out_features]
        if self.bias is not None:
            result = result + self.bias
        return result.reshape(*x.shape[:-1], self.out_features)


class RotaryTables(nn.Module):
    """A rotary module whose tables for positions [0, num_positions) were computed once, by itself.

    Raises ValueError when it gives something else than tables by position.
    """

    def __init__(self, rotary: nn.Module, num_positions: int) -> None:
        super().__init__()
        self._rotary = rotary
        self._num_positions = num_positions
        self._tables: dict[Any, tuple[torch.Tensor, ...]] = {}

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *kinds: Any, **named: Any
    ) -> Any:
        """Rows of the tables. kinds, named: a layer type, where each has tables of its own."""
        key = (*kinds, *named.values())
        if key not in self._tables:
            every = torch.arange(self._num_positions)[None]
            tables = self._rotary(x, every, *kinds, **named)
            for table in tables:
                if not isinstance(table, torch.Tensor) or table.shape[1] != self._num_positions:
                    raise ValueError("its rotary module gives no tables by position")
            self._tables[key] = tuple(table[0].contiguous() for table in tables)
        if position_ids.ndim == 3:  # of text, height and width: for a text they are the same
            position_ids = position_ids[0]
        return tuple(table[position_ids] for table in self._tables[key])

    def __getattr__(self, name: str) -> Any:
        """What a model looks up on its rotary module (its config)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_rotary"), name)


class DeltaNet(nn.Module):
    """A gated delta net (Qwen3.5) with our recurrence; projections, norm and gate are its own.

    Raises ValueError for sizes that are no whole vectors. holder: where it finds a step.
    """

    def __init__(self, net: Any, layer: int, holder: StepHolder) -> None:
        super().__init__()
        self.in_proj_qkv, self.in_proj_z = net.in_proj_qkv, net.in_proj_z
        self.in_proj_b, self.in_proj_a = net.in_proj_b, net.in_proj_a
        self.norm, self.out_proj = net.norm, net.out_proj
        self.value_size = int(net.head_v_dim)
        if net.head_k_dim % LANES or net.head_v_dim % LANES or net.activation != "silu":
            raise ValueError("the heads of its delta net are no whole vectors, or not SiLU's")
        self._layer = layer
        self._holder = holder
        self.sizes = DeltaSizes(
            taps=np.ascontiguousarray(net.conv1d.weight.detach().float()[:, 0].numpy().T),
            rate=net.A_log.detach().float().exp().numpy(),
            shift=net.dt_bias.detach().float().numpy(),
            key_heads=int(net.num_k_heads),
            dk=int(net.head_k_dim),
            dv=int(net.head_v_dim),
        )

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> torch.Tensor:
        """[1, R, H] to [1, R, H]."""
        parts = [self.in_proj_qkv, self.in_proj_b, self.in_proj_a]
        mixed = torch.cat([part(hidden_states)[0] for part in parts], dim=-1)
        step = self._holder.step
        if step is None:
            raise RuntimeError("the module runs outside a step")
        read = step.recur(self._layer, self.sizes, mixed)
        gate = self.in_proj_z(hidden_states).reshape(-1, self.value_size)
        normed = self.norm(read.reshape(-1, self.value_size), gate)
        out: torch.Tensor = self.out_proj(normed.reshape(1, hidden_states.shape[1], -1))
        return out


def replace_delta_nets(body: nn.Module, holder: StepHolder) -> list[DeltaSizes]:
    """Put DeltaNet in the place of every gated delta net; their sizes, by layer."""
    found: list[DeltaSizes] = []
    for name, module in list(body.named_modules()):
        if type(module).__name__ == "Qwen3_5GatedDeltaNet":
            owner, _, leaf = name.rpartition(".")
            made = DeltaNet(module, len(found), holder)
            setattr(body.get_submodule(owner), leaf, made)
            found.append(made.sizes)
    return found


def replace_modules(body: nn.Module, work: Work, num_positions: int, *, bf16: bool) -> None:
    """Put RowLinear and RotaryTables in the place of what they replace, one by one: the peak is one
    matrix above the model."""
    for name, module in list(body.named_modules()):
        made: nn.Module
        if type(module) is nn.Linear:
            made = RowLinear(module.weight, module.bias, work, bf16=bf16)
        elif type(module) is Conv1D:
            made = RowLinear(module.weight.T, module.bias, work, bf16=bf16)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            made = RotaryTables(module, num_positions)
        else:
            continue
        owner, _, leaf = name.rpartition(".")
        setattr(body.get_submodule(owner), leaf, made)
