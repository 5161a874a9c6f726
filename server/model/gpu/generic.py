"""The generic path on TorchRunner: is transformers' module sound on our attention, and its head.

TorchRunner runs transformers' modules anyway; what a family's row says of a module is tried here
instead, on a short text. Bits are not promised on a GPU (docs/DESIGN.md 1.1), so operations are not
looked at: only that our attention gets all that the module's own masks and scores are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from server.model.gpu import attention as paged
from server.model.gpu.body import place_attention
from server.model.gpu.device import warm_up_batch
from server.model.gpu.recurrent import DeltaStates, delta_torch
from server.model.inspection import (
    Inspected,
    check_logits,
    failing_as_refusal,
    heads_asked_for,
    inspected,
    probe_ids,
)
from server.model.interface import Call, StepHolder
from server.model.states import DeltaNet, replace_delta_nets

# Of log-probabilities: bfloat16 rounds what every layer adds.
_TOLERANCES = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.8}


class _Probe:
    """A Step of a text alone: the reference over the keys just given, which are all that there
    are."""

    def __init__(self, ids: torch.Tensor, nets: Sequence[DeltaNet]) -> None:
        num, device = ids.shape[1], ids.device
        batch = warm_up_batch(1, num, num, 1)  # one block of as many positions
        self._slots = torch.from_numpy(batch.slots).to(device)
        self._reference = paged.TorchAttention(batch, num, device)
        if nets:
            self._states = DeltaStates(nets, 1, num, delta_torch, device)
            self._items = self._states.plan(batch)

    def attend(
        self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See Step."""
        return self._reference.attend(query, key, value, call)

    def recur(self, net: DeltaNet, mixed: torch.Tensor) -> torch.Tensor:
        """See Step."""
        inputs = {net.layer: torch.empty_like(mixed)}
        return self._states.recur(self._items, self._slots, inputs, net, mixed)


def take_over(module: nn.Module, num_token_ids: int) -> Inspected:
    """Make a module's body give what our head and sampler need, once it is found to be sound.

    Raises UnsupportedModelError.
    """
    model: Any = module
    ids = probe_ids(num_token_ids).to(next(module.parameters()).device)
    found = inspected(module, ids)
    with failing_as_refusal(module):
        nets = replace_delta_nets(model.base_model)
    holder = StepHolder(module)
    # A config may name fewer KV heads than its model computes; the cache reads these.
    sizes = heads_asked_for(module, holder, ids, found)
    model.config.num_key_value_heads, model.config.head_dim = sizes[1:]
    if nets:
        place_attention(model.base_model)
    if found.factor != 1.0:  # the last states times what their logits are scaled by

        def scale(_module: Any, _args: Any, result: Any) -> Any:
            result.last_hidden_state = result.last_hidden_state * found.factor
            return result

        model.base_model.register_forward_hook(scale)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with torch.no_grad(), failing_as_refusal(module):
        probe = _Probe(ids, nets)
        hidden = holder.run(model.base_model, probe, input_ids=ids, position_ids=positions)
    check_logits(module, hidden, found, _TOLERANCES.get(hidden.dtype, 1e-2))
    return found
