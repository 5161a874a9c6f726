"""A step asks the device for no number: it runs on torch's meta device, whose tensors have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from server.model.gpu import body
from server.model.gpu.head import Step
from server.model.gpu.recurrent import DeltaItems, DeltaMemory
from server.model.gpu.transfers import Array
from server.model.loader import finish_module
from tests.gpu.test_cuda import sampled_batch
from tests.model import families
from tests.model.batches import Pages, run
from tests.model.generic_models import ON_CUDA
from tests.model.gpu.graph_stand_in import module_of
from tests.model.gpu.test_attention import tree_steps
from tests.model.slice_cases import batch_of, make_slices
from tests.model.torch_runners import runner_over

META = torch.device("meta")


def uploaded(arrays: dict[str, Array]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()).to(META) for name, array in arrays.items()}


def of_kernel(net: Any, mixed: torch.Tensor, _: DeltaItems, memory: DeltaMemory) -> torch.Tensor:
    """In the place of the reference, which reads its items."""
    memory.inputs.index_copy_(0, memory.slots.long(), mixed)
    heads, _, dv = net.state_size
    return mixed.new_empty((mixed.shape[0], heads * dv))


@pytest.mark.parametrize("name", [*families.FAMILIES, *ON_CUDA])
def test_a_step_asks_the_device_for_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks would make `launch` wait, and end the capture of a graph. Of every model prompts
    and a tree; of one also every part of the sampler, slices and kept rows."""
    module = module_of(name)
    if name in families.FAMILIES:
        finish_module(module)
    for part in module.modules():
        for key, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor):
                setattr(part, key, value.to(META))
    monkeypatch.setattr(body, "delta_torch", of_kernel)
    for way_back in ("mark_end", "finish"):
        monkeypatch.setattr(Step, way_back, lambda *_, **__: None)
    runner = runner_over(module.to(META), device="meta")
    monkeypatch.setattr(runner, "_upload", uploaded)
    batches = tree_steps(Pages(64, seed=3))[:1]
    if name == "gemma2":
        sliced = replace(batch_of(8, 0, [0, 1, 2, -1] * 2), slices=tuple(make_slices(runner)))
        kept = replace(sliced, draw_keep=np.arange(8, dtype=np.int32))
        batches += [sampled_batch(Pages(64).sequence(64), 20), kept, replace(sliced, num_likely=3)]
    for batch in batches:
        run(runner, batch)  # raises what the step met
