"""Sampled rows: the graph that draws them against the sampler launched kernel by kernel, which must
give the same ids, and the times of both.

Eight sequences decode, a bucket without padding, so that both have the same logits; each kind of
request takes a few steps with other seeds, of which the first one captures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from loadtest.gpu.shapes import SHAPES, Asked, build
from loadtest.gpu.steps import Case, batch_of, make_runner, measure
from server.engine.batch import Batch, DrawParams
from server.types import SamplingParams

__all__ = ["check"]

SEQUENCES = 8
STEPS = 5
KINDS = {
    "temperature": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k and min-p": SamplingParams(temperature=1.0, top_k=40, min_p=0.05),
    "flat top-p": SamplingParams(temperature=50.0, top_p=0.95),
    "penalties and biases": SamplingParams(
        temperature=0.9, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias=((7, 4.0),)
    ),
    "a mask": SamplingParams(temperature=1.0),
    "greedy with a penalty": SamplingParams(temperature=0.0, presence_penalty=0.7),
}


def _batch(kind: str, seed: int, vocab_size: int) -> Batch:
    """A decode step; its last row is greedy."""
    batch = batch_of(Case("sampled", SEQUENCES, 1, 32), vocab_size)
    seen = np.arange(20, 60, dtype=np.int32)
    ones, none = np.ones_like(seen), np.empty(0, np.int32)
    params = [
        DrawParams(replace(KINDS[kind], seed=seed), i, none, seen, ones, ones * (i % 2), 1)
        for i in range(SEQUENCES - 1)
    ]
    params.append(DrawParams(SamplingParams(temperature=0.0), 0, none, none, none, none, 1))
    batch = replace(batch, params=tuple(params), draw_params=np.arange(SEQUENCES, dtype=np.int32))
    if kind == "a mask":
        words = np.full((1, -(-vocab_size // 32)), 0x0F0F0F0F, np.uint32)
        batch = replace(batch, masks=words, draw_mask=np.arange(SEQUENCES, dtype=np.int32) % 2 - 1)
    return batch


def check(asked: Asked) -> Iterator[dict[str, Any]]:
    """A line for each kind of request."""
    name, device, dtype = asked.name, asked.device, asked.dtype
    size, on_gpu = SHAPES[name].vocab_size, asked.device.type == "cuda"
    case = Case("sampled", SEQUENCES, 1, 32)
    plain, graphs = (
        make_runner(name, build(SHAPES[name], device, dtype), [case], with_graphs)
        for with_graphs in (False, on_gpu)
    )
    for kind in KINDS:
        found: list[list[int]] = [[], []]
        for seed in range(STEPS):
            for ids, runner in zip(found, (plain, graphs), strict=True):
                runner.launch(_batch(kind, seed, size))
                ids += runner.wait().token_ids.tolist()
        times = [1e3 * measure(r, _batch(kind, 0, size), asked.repeats)[0] for r in (plain, graphs)]
        same = sum(a == b for a, b in zip(*found, strict=True))
        yield {
            "what": f"sampled, {kind}", "shape": name, "draws": len(found[0]), "same_ids": same,
            "different": len(set(found[0])), "plain_ms": round(times[0], 4),
            "graph_ms": round(times[1], 4), "ok": same == len(found[0]),
        }  # fmt: skip
    plain.close()
    graphs.close()
