"""Random PEFT adapters of tiny models, saved as PEFT saves them, with PEFT's own model beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from server.engine.batch import Runner
from tests.model.batches import BatchBuilder, Pages, all_logprobs, run
from tests.model.families import VOCAB_SIZE, Logprobs
from vocab_store.enrichment import Enrichment


def lora(model: Any, folder: Path, seed: int = 1, scale: float = 0.1, **settings: Any) -> Any:
    """PEFT's model over `model` with a random LoRA, and random rows where the settings name some,
    which are saved into `folder`."""
    import peft

    torch.manual_seed(seed)  # peft draws A
    config = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **settings}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)
    wrapped.eval().save_pretrained(str(folder), save_embedding_layers=False)
    return wrapped


def with_tokens(
    model: Any, folder: Path, enrichment: Enrichment, seed: int = 1, scale: float = 0.1
) -> Any:
    """The same with the tokens of an enrichment, which have rows of embedding and head."""
    from server.commands.enrich import give_rows  # a bare machine lacks what commands import

    give_rows(model, dict(zip(enrichment.ids, enrichment.parts, strict=True)))
    rows = {table: list(enrichment.ids) for table in ("embed_tokens", "lm_head")}
    tuned = lora(model, folder, seed, scale, lora_alpha=16, trainable_token_indices=rows)
    enrichment.save(folder / "enrichment.json")
    return tuned


def enriched(model: Any, folder: Path, seed: int = 1, num: int = 5, tokenizer: str = "t") -> Any:
    """The same, with tokens for the pairs (3, 4), (4, 5), ..."""
    base = model.config.vocab_size
    parts = tuple((3 + i, 4 + i) for i in range(num))
    enrichment = Enrichment(tokenizer, base, tuple(range(base, base + num)), parts)
    return with_tokens(model, folder, enrichment, seed)


def logprobs(
    runner: Runner,
    builder: BatchBuilder,
    rows: Sequence[int],
    places: Sequence[int] | None,
    own: Mapping[int, int] = MappingProxyType({}),
) -> list[Logprobs]:
    """Log-softmax of the rows of a step, over the ids that each has.

    places: of a sequence's adapter, -1: the base; None: of a runner that knows no adapters. own:
    ids of its own that the adapter at a place brings."""
    for row in rows:
        place = -1 if places is None else places[builder.rows[row][2]]
        builder.score(row, 0, VOCAB_SIZE + own.get(place, 0))
    batch = builder.build()
    if places is not None:
        batch = replace(batch, seq_adapters=np.asarray(places, np.int32))
    drawn = run(runner, batch)
    return [all_logprobs(replace(drawn, score_top=[top]), len(top))[0] for top in drawn.score_top]


def prompt_logprobs(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    places: Sequence[int] | None,
    own: Mapping[int, int] = MappingProxyType({}),
) -> list[list[Logprobs]]:
    """The same of every row of every prompt, all of them in one step."""
    pages, builder = Pages(64, seed=3), BatchBuilder()
    rows = [builder.add_rows(pages.sequence(len(ids)), ids, 0) for ids in prompts]
    every = iter(logprobs(runner, builder, [row for part in rows for row in part], places, own))
    return [[next(every) for _ in part] for part in rows]
