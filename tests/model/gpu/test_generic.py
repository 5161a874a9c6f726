"""The generic path on TorchRunner, on its CPU stand-in: logits and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import UnsupportedModelError
from server.model.gpu.generic import take_over
from tests.model.cpu.test_generic import WithoutWindow
from tests.model.families import VOCAB_SIZE
from tests.model.generic_models import ON_CUDA, build
from tests.model.gpu.graph_stand_in import module_of
from tests.model.test_hf_equality import against
from tests.model.torch_runners import runner_over


@pytest.mark.parametrize("name", ON_CUDA)
def test_logits_are_those_of_transformers_in_chunks_and_trees(name: str) -> None:
    runner = runner_over(module_of(name))
    cases = against(runner, build(name))
    cases.chunks(60, 37)
    cases.tree(14)


def test_what_cannot_run_there_is_refused() -> None:
    module: Any = build("starcoder2")
    module.model.layers[1].self_attn.config = WithoutWindow(module.config)
    with pytest.raises(UnsupportedModelError, match="layer 1 asks for the window none and its"):
        take_over(module, VOCAB_SIZE)
