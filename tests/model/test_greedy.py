"""Greedy answers of every family are those of transformers' own `generate`, id by id.

The CPU runner steps all prompts together; transformers has a cache of its own. 32 ids from each, so
that windows, blocks and scales are passed at every depth.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from server.engine.batch import Runner
from tests.model import families
from tests.model.batches import BatchBuilder, Pages, decode_step, draw_params
from tests.model.cpu_models import cpu_runner

NUM_PROMPTS = 3
PROMPT_LEN = 13
NUM_TOKENS = 32


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return rng.integers(3, families.VOCAB_SIZE, (NUM_PROMPTS, PROMPT_LEN)).tolist()


def generated(module: Any) -> list[list[int]]:
    """transformers' greedy ids behind each prompt; no id ends an answer."""
    module.generation_config.eos_token_id = None
    with torch.no_grad():
        ids = torch.tensor(prompts())
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
        )
    result: list[list[int]] = out[:, PROMPT_LEN:].tolist()
    return result


def greedy_ids(runner: Runner) -> list[list[int]]:
    """The ids that a runner with 64 blocks draws for each of the prompts, all in one batch."""
    pages = Pages(64, seed=1)
    tables = [pages.sequence(PROMPT_LEN + NUM_TOKENS) for _ in range(NUM_PROMPTS)]
    builder = BatchBuilder()
    for table, ids in zip(tables, prompts(), strict=True):
        builder.draw(builder.add_rows(table, ids, 0)[-1], builder.add_params(draw_params()))
    batch, got = builder.build(), []
    for step in range(NUM_TOKENS):
        runner.launch(batch)
        got.append(runner.wait().token_ids.tolist())
        batch = decode_step(tables, got[-1], PROMPT_LEN + step)
    result: list[list[int]] = np.array(got).T.tolist()
    return result


@pytest.mark.parametrize("family", list(families.FAMILIES))
def test_greedy_ids_are_those_of_generate(family: str) -> None:
    want = generated(families.build(family))
    runner = cpu_runner(families.build(family), num_blocks=64)
    got = greedy_ids(runner)
    runner.close()
    assert got == want
