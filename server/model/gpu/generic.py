"""The generic path on TorchRunner: is transformers' module sound on our attention, and its head.

TorchRunner runs transformers' modules anyway; what a family's row says of a module is tried here
instead, on a short text. Bits are not promised on a GPU (docs/DESIGN.md 1.1), so operations are not
looked at: only that our attention gets all that the module's own masks and scores are made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from server.model.delta_net import DeltaNet, replace_delta_nets
from server.model.gpu import attention as paged
from server.model.gpu.body import place_attention
from server.model.gpu.recurrent import (
    CONTINUES,
    RELOAD,
    ROW,
    SAVE,
    SOURCES,
    ZEROS,
    DeltaItems,
    DeltaMemory,
    PagedDeltaNet,
    delta_torch,
)
from server.model.inspection import (
    Inspected,
    check_logits,
    failing_as_refusal,
    inspected,
    probe_ids,
    refusal,
)

__all__ = ["take_over"]

# Of log-probabilities: bfloat16 rounds what every layer adds.
_TOLERANCES = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.8}


class _PlainAttention:
    """A cache and an Attention in one, for one text: causal attention over the keys just given.

    windows: those that were asked for, in the order of the calls. sizes: kv_heads, head_dim.
    """

    def __init__(self) -> None:
        self.windows: list[int] = []
        self.sizes = (0, 0)
        self.num_recurrent = 0
        self._key = self._value = torch.empty(0)

    def layer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """No memory."""
        if layer_id != len(self.windows):
            raise ValueError(f"layer {layer_id} attends out of turn")
        return self._key, self._value

    def write(self, keys: Any, values: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        """See Attention."""
        self._key, self._value = key, value
        self.sizes = int(key.shape[1]), int(key.shape[2])

    def attend(
        self, query: torch.Tensor, keys: Any, values: Any, masked: paged.Masked
    ) -> torch.Tensor:
        """See Attention."""
        self.windows.append(masked.window or 0)
        num, heads, _ = query.shape
        group = heads // self._key.shape[1]
        key, value = (part.repeat_interleave(group, 1) for part in (self._key, self._value))
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * masked.scaling
        if masked.cap:
            scores = masked.cap * torch.tanh(scores / masked.cap)
        behind = torch.arange(num)[:, None] - torch.arange(num)[None]
        hidden = (behind < 0) | (behind >= (masked.window or num))
        shares = scores.masked_fill(hidden.to(query.device), float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, value.float()).to(query.dtype).contiguous()

    def recur(self, net: DeltaNet, mixed: torch.Tensor) -> torch.Tensor:
        """See PagedStep: over the rows just given, from their first."""
        self.num_recurrent += 1
        num, taps = mixed.shape[0], net.taps.shape[0]
        behind = torch.arange(taps - 1, -1, -1)
        items = torch.full((num, SOURCES + taps), CONTINUES, dtype=torch.int32)
        items[:, ROW] = rows = torch.arange(num)
        items[0, RELOAD] = ZEROS
        items[:, SAVE] = -1
        items[:, SOURCES:] = (rows[:, None] - behind).clamp(min=-1)
        memory = DeltaMemory(rows.to(mixed.device), torch.empty_like(mixed), mixed[:0])
        return delta_torch(net, mixed, DeltaItems(items, None), memory)


def take_over(module: nn.Module, num_token_ids: int) -> Inspected:
    """Make a module's body give what our head and sampler need, once it is found to be sound.

    Raises UnsupportedModelError.
    """
    model: Any = module
    ids = probe_ids(num_token_ids).to(next(module.parameters()).device)
    found = inspected(module, ids)
    with failing_as_refusal(module):
        nets = replace_delta_nets(model.base_model, PagedDeltaNet)
    windows = found.windows
    if nets:
        windows = (0,) * place_attention(model.base_model)
    paged.register()
    model.config._attn_implementation = paged.NAME
    plain = _PlainAttention()
    step: Any = paged.PagedStep(plain, plain, recur=plain.recur)  # type: ignore[arg-type]
    if found.factor != 1.0:
        model.base_model.register_forward_hook(_scaled(found.factor))
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with torch.no_grad(), failing_as_refusal(module):
        result = model.base_model(
            input_ids=ids, position_ids=positions, use_cache=False, paged=step
        )
    if tuple(plain.windows) != windows or plain.num_recurrent != len(nets):
        raise refusal(module, "not every layer asks our attention for its own mask's window")
    # A config may name fewer KV heads than its model computes; the cache reads these.
    model.config.num_key_value_heads, model.config.head_dim = plain.sizes
    dtype = result.last_hidden_state.dtype
    check_logits(module, result.last_hidden_state[0], found, _TOLERANCES.get(dtype, 1e-2))
    return found


def _scaled(factor: float) -> Any:
    """A hook: the last states times what their logits are scaled by."""

    def hook(_module: Any, _args: Any, result: Any) -> Any:
        result.last_hidden_state = result.last_hidden_state * factor
        return result

    return hook
