"""The generic path on TorchRunner: is transformers' module sound on our attention, and its head.

TorchRunner runs transformers' modules anyway; what a family's row says of a module is tried here
instead, on a short text. Bits are not promised on a GPU (docs/DESIGN.md 1.1), so operations are not
looked at: only that our attention gets all that the module's own masks and scores are made of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from server.model.gpu.body import BodyRun
from server.model.gpu.device import warm_up_batch
from server.model.gpu.transfers import Upload
from server.model.inspection import (
    Inspected,
    check_logits,
    failing_as_refusal,
    heads_asked_for,
    inspected,
    probe_ids,
)
from server.model.interface import StepHolder
from server.model.states import replace_delta_nets
from server.types import ModelInfo

# Of log-probabilities: bfloat16 rounds what every layer adds.
_TOLERANCES = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.8}


def take_over(module: nn.Module, num_token_ids: int) -> Inspected:
    """Make a module's body give what our head and sampler need, once it is found to be sound.

    Raises UnsupportedModelError.
    """
    model: Any = module
    ids = probe_ids(num_token_ids).to(next(module.parameters()).device)
    found = inspected(module, ids)
    with failing_as_refusal(module):
        replace_delta_nets(model.base_model)
    # A config may name fewer KV heads than its model computes; the cache reads these.
    sizes = heads_asked_for(module, StepHolder(module), ids, found)
    model.config.num_key_value_heads, model.config.head_dim = sizes[1:]
    model.config.pad_token_id = None  # GPT-2 asks the device whether a text ends with it
    num, device, dtype = ids.shape[1], ids.device, next(module.parameters()).dtype
    info = ModelInfo("probe", num_token_ids, num, (), 1, num, str(device), "", "", 1, num)
    token_ids = ids[0].to("cpu", torch.int32).numpy()
    batch = replace(warm_up_batch(1, num, num, 1), token_ids=token_ids)
    with torch.no_grad(), failing_as_refusal(module):
        body = BodyRun(model, info, dtype, attention="torch", embedding=None, graph_rows=0)
        plan = body.plan(batch)
        hidden = body.run(batch, Upload(device, 1 << 16)(plan.arrays), plan)
    check_logits(module, hidden, found, _TOLERANCES.get(dtype, 1e-2))
    return found
