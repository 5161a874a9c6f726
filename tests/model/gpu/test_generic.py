"""The generic path on TorchRunner, on its CPU stand-in: logits and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from server.errors import UnsupportedModelError
from server.model.gpu.generic import take_over
from tests.model.batches import BatchBuilder, Pages
from tests.model.cpu import test_bits
from tests.model.generic_models import MAX_LEN, VOCAB_SIZE, build
from tests.model.torch_runners import runner_over


@pytest.mark.parametrize(
    "name", ["cohere2", "gpt2", "gpt_neox", "phi", "qwen3_5_text", "starcoder2", "vaultgemma"]
)
def test_logits_are_those_of_transformers_in_chunks_and_trees(name: str) -> None:
    ids = test_bits.tokens(60, 3)
    with torch.no_grad():
        want = torch.log_softmax(build(name)(torch.tensor([ids])).logits[0], -1).numpy()
    module: Any = build(name)
    take_over(module, VOCAB_SIZE)
    runner: Any = runner_over(module, max_model_len=MAX_LEN)
    table = Pages(64, seed=4).sequence(60)
    builder = BatchBuilder()
    got = [test_bits.step(runner, builder, builder.add_rows(table, ids[:37], 0))]
    builder = BatchBuilder()
    rows = [*builder.add_rows(table, ids[37:38], 37)]
    rows += builder.add_tree(table, 37, ids[38:], list(range(-1, 21)))
    got.append(test_bits.step(runner, builder, rows))
    runner.close()
    np.testing.assert_allclose(np.concatenate(got), want, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nemotron", "its forward raises"),
    ],
)
def test_what_cannot_run_there_is_refused(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        take_over(build(name), VOCAB_SIZE)
