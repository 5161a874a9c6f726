"""Greedy answers of every family are those of transformers' own forward, id by id.

The CPU runner steps all prompts together. 32 ids from each, so that windows, blocks and scales are
passed at every depth.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.model import families
from tests.model.batches import BatchBuilder, Pages, decode_step, draw_params
from tests.model.cpu_models import cpu_runner

NUM_PROMPTS = 3
PROMPT_LEN = 13
NUM_TOKENS = 32


@pytest.mark.parametrize("family", list(families.FAMILIES))
def test_greedy_ids_are_those_of_transformers(family: str) -> None:
    runner, module = cpu_runner(families.build(family), num_blocks=64), families.build(family)
    pages, builder = Pages(64, seed=1), BatchBuilder()
    tables = [pages.sequence(PROMPT_LEN + NUM_TOKENS) for _ in range(NUM_PROMPTS)]
    prompts = [families.tokens(PROMPT_LEN, seed) for seed in range(NUM_PROMPTS)]
    for table, ids in zip(tables, prompts, strict=True):
        builder.draw(builder.add_rows(table, ids, 0)[-1], builder.add_params(draw_params()))
    batch, got = builder.build(), []
    for step in range(NUM_TOKENS):
        runner.launch(batch)
        got.append(runner.wait().token_ids.tolist())
        batch = decode_step(tables, got[-1], PROMPT_LEN + step)
    runner.close()
    for prompt, answer in zip(prompts, np.array(got).T.tolist(), strict=True):
        # Where each id is the likeliest behind those before it, all of them are what it generates.
        rows = families.truth(module, [*prompt, *answer])[PROMPT_LEN - 1 : -1]
        assert answer == rows.argmax(axis=1).tolist()
