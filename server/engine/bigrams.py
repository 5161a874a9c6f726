"""The target model's own bigrams, for the drafter `grammys` (N-Grammys, arXiv 2411.03786).

The model is run on every id alone, behind its BOS where it has one, and the most probable next ids
are kept with their probabilities. This needs no data. It takes one row per id, two with a BOS: as
long as prefilling the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from drafters.published.grammys import BigramTable
from server.engine.engine import Engine
from server.types import Request, SamplingParams


def take_bigrams(
    engine: Engine,
    num_next: int = 10,
    *,
    bos_token_id: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BigramTable:
    """The table of `engine`'s model.

    num_next: ids kept for each, 1 to 20. bos_token_id: put before every id. progress: (done, all).
    The engine must be idle. Raises ValueError for num_next out of range, RuntimeError when the
    model cannot be run on some id.
    """
    if not 1 <= num_next <= 20:
        raise ValueError(f"num_next must be in 1..20, not {num_next}")
    num = engine.info.vocab_size
    num_next = min(num_next, num)
    next_ids = np.zeros((num, num_next), np.int32)
    chances = np.zeros((num, num_next), np.float32)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, num_logprobs=num_next)
    prefix = () if bos_token_id is None else (bos_token_id,)
    asked = done = 0
    while done < num:
        while asked < num and engine.num_open < engine.settings.max_num_seqs:
            engine.submit(
                Request(
                    request_id=f"bigrams-{asked}",
                    task="bigrams",
                    model=engine.info.name,
                    prompt_ids=(*prefix, asked),
                    sampling=sampling,
                )
            )
            asked += 1
        for delta in engine.step():
            if delta.finish_reason == "error":
                engine.abort_all()
                raise RuntimeError(f"the model cannot be run: {delta.error}")
            token = int(delta.request_id.rpartition("-")[2])
            top = delta.logprobs[0].top[:num_next]
            next_ids[token, : len(top)] = [i for i, _ in top]
            chances[token, : len(top)] = [math.exp(value) for _, value in top]
            done += 1
        if progress is not None:
            progress(done, num)
    engine.pool.drop_cache()
    return BigramTable(model_fingerprint(engine.info.fingerprint), next_ids, chances)


def model_fingerprint(fingerprint: str) -> str:
    """A model's fingerprint without the storage types of weights and KV cache, which hardly change
    its bigrams."""
    return fingerprint.partition(":")[0]
