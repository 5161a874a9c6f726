"""What takes the place of transformers' modules whose bits depend on the number of rows.

torch's matrix products split sums by the number of rows, and its sines and cosines are other ones
in the last elements of an array. So products are ours (kernels/vectors.py), and rotary tables are
computed once, for all positions, and read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from server.model.cpu.generic.attention import DeltaSizes, StepHolder
from server.model.cpu.kernels import product
from server.model.cpu.linear import float_linear, pack_panels
from server.model.cpu.records import LANES, PANEL, Work
from server.model.cpu.tensors import as_stored
from server.model.states import DeltaNet

__all__ = ["HeldDeltaNet", "RowLinear", "packed", "replace_modules"]


def packed(weight: torch.Tensor, bf16: bool) -> Any:
    """[outputs, inputs] in panels (linear.py)."""
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
        product(rows.numpy(), rows.shape[0], self._record, out.numpy(), 0.0, self._work)
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


class HeldDeltaNet(DeltaNet):
    """A DeltaNet with our recurrence on the step that `holder` has.

    Raises ValueError for sizes that are no whole vectors.
    """

    sizes: DeltaSizes

    def __init__(self, net: Any, layer: int, holder: StepHolder) -> None:
        super().__init__(net, layer)
        if self.dk % LANES or self.dv % LANES:
            raise ValueError("the heads of its delta net are no whole vectors")
        self._holder = holder
        self.sizes = DeltaSizes(
            taps=self.taps.numpy(),
            rate=self.rate.numpy(),
            shift=self.shift.numpy(),
            key_heads=self.key_heads,
            dk=self.dk,
            dv=self.dv,
        )

    def recur(self, mixed: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        """See DeltaNet."""
        step = self._holder.step
        if step is None:
            raise RuntimeError("the module runs outside a step")
        return step.recur(self.layer, self.sizes, mixed)


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
