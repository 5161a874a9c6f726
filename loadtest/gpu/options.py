"""What a request or a configuration may ask for beside the plain path: adapters, tokens of
their own, weights in 8 bits.

Each is compared with another way to the same numbers on the same device (a model with the
adapter merged, weights as they are), and timed beside the plain way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from loadtest.gpu.correct import (
    PROMPT,
    SHAPES,
    Asked,
    apart_bound,
    build,
    random_ids,
    rows_of,
    run,
    runner_of,
)
from loadtest.gpu.steps import Case, batch_of, measure
from server.engine.batch import Batch
from server.model.adapter import TokenRows, linear_sizes
from server.model.gpu.adapters import GpuAdapter
from server.model.gpu.runner import TorchRunner
from server.model.shape import shape_of

RANK = 8
NEW = 40
"""Tokens of an adapter's own."""
_DECODED = Case("decode", 4, 1, 32)


def _runner(asked: Asked, module: Any, *, graphs: bool = True, **ways: Any) -> TorchRunner:
    graphs = graphs and asked.device.type == "cuda"
    most = SHAPES[asked.name].max_model_len
    return runner_of(module, asked.device, most, cuda_graphs=graphs, **ways)


def _prompt(asked: Asked) -> Batch:
    ids = random_ids(SHAPES[asked.name])
    return rows_of(ids[:PROMPT], 0, ids[1 : PROMPT + 1])


def _decoded(asked: Asked, places: list[int] | None) -> Batch:
    """A row of each of four sequences, scored. places: of their adapters."""
    batch = batch_of(_DECODED, SHAPES[asked.name].vocab_size)
    rows = np.arange(batch.num_rows, dtype=np.int32)
    return replace(
        batch, score_rows=rows, score_targets=rows, score_top=np.ones_like(rows),
        seq_adapters=None if places is None else np.array(places, np.int32),
    )  # fmt: skip


def adapters(asked: Asked) -> Iterator[dict[str, Any]]:
    """An adapter on all products of all layers against the model with it merged; rows beside it
    keep the bits that they have without one."""
    module = build(SHAPES[asked.name], asked.device, asked.dtype)
    adapter = _random_adapter(module)
    _merge(module, adapter)
    runner = _runner(asked, module)
    merged = run(runner, _prompt(asked)).score_logprobs
    runner.close()
    runner = _runner(asked, build(SHAPES[asked.name], asked.device, asked.dtype))
    plain = run(runner, _prompt(asked)).score_logprobs
    runner.hold_adapter(0, adapter)
    own = run(runner, replace(_prompt(asked), seq_adapters=np.zeros(1, np.int32))).score_logprobs
    before = run(runner, _decoded(asked, None)).score_logprobs  # over the same keys as `after`
    mixed = _decoded(asked, [0, -1, 0, -1])
    after = run(runner, mixed).score_logprobs
    apart, moved = float(np.abs(own - merged).max()), float(np.abs(own - plain).max())
    bound = apart_bound(asked.dtype, float(merged.std()))
    same = bool((after == before)[1::2].all() and (after != before)[::2].all())
    times = [measure(runner, b, asked.repeats) for b in (_decoded(asked, None), mixed)]
    runner.close()
    yield {
        "what": "adapter against merged", "shape": asked.name, "logprobs_apart": round(apart, 6),
        "moved_by": round(moved, 4), "bound": round(bound, 4), "others_same_bits": same,
        "decode_ms": times[0]["wall_ms"], "with_adapter_ms": times[1]["wall_ms"],
        "ok": apart <= bound < moved and same,
    }  # fmt: skip


def _random_adapter(module: Any) -> GpuAdapter:
    """As adapters.pack_adapter makes one, of every linear layer."""
    seeds = torch.Generator().manual_seed(7)
    parts = {}
    for name, (outputs, inputs) in linear_sizes(shape_of(module.config)).items():
        a = torch.randn((inputs, RANK), generator=seeds) * inputs**-0.5
        b = torch.randn((RANK, outputs), generator=seeds) * 0.05
        parts[name] = (a.to(module.dtype), b.to(module.dtype))
    return GpuAdapter(parts, 16, module.config.vocab_size, 0)


@torch.no_grad()
def _merge(module: Any, adapter: GpuAdapter) -> None:
    for name, (a, b) in adapter.parts.items():
        weight = module.get_parameter(name)
        added = (a.float() @ b.float()).t().to(weight.device)
        weight.copy_(weight.float() + added)


def own_tokens(asked: Asked) -> Iterator[dict[str, Any]]:
    """Tokens of an adapter's own against a model with larger tables; a decode step of them and of
    rows of the base from a graph, to the bit of the plain path; the base's rows keep their bits."""
    size = SHAPES[asked.name].vocab_size
    ids = random_ids(SHAPES[asked.name])[: PROMPT + 1]
    ids[1::4] = [size + i % NEW for i in range(len(ids[1::4]))]
    prompt = rows_of(ids[:PROMPT], 0, ids[1:])
    module = build(SHAPES[asked.name], asked.device, asked.dtype)
    adapter = _with_tokens(module)
    assert adapter.head is not None
    module.resize_token_embeddings(size + NEW, mean_resizing=False)
    table: Any = module.get_submodule("model.embed_tokens")
    with torch.no_grad():
        table.weight[size:] = adapter.head.rows.to(asked.device)
    runner = _runner(asked, module)
    merged = run(runner, prompt).score_logprobs
    runner.close()
    del module
    places = np.array([0, -1, 0, -1], np.int32)
    greedy = replace(_decoded(asked, None), seq_adapters=places)
    greedy.token_ids[::2] = size + np.arange(2)
    none = greedy.score_rows[:0]
    greedy = replace(greedy, score_rows=none, score_targets=none, score_top=none)
    scored = replace(_decoded(asked, None), seq_adapters=places, token_ids=greedy.token_ids)
    drawn: list[list[int]] = []
    scores = []
    for graphs in (False, True):
        runner = _runner(asked, build(SHAPES[asked.name], asked.device, asked.dtype), graphs=graphs)
        runner.hold_adapter(0, adapter)
        own = run(runner, replace(prompt, seq_adapters=places[:1])).score_logprobs
        before = run(runner, _decoded(asked, None)).score_logprobs
        drawn += [run(runner, step).token_ids.tolist() for step in (greedy, greedy, scored)]
        scores.append(run(runner, scored).score_logprobs)
        same = bool((scores[-1] == before)[1::2].all() and (scores[-1] != before)[::2].all())
        figures = measure(runner, greedy, asked.repeats)
        runner.close()
    apart, bound = float(np.abs(own - merged).max()), apart_bound(asked.dtype, float(merged.std()))
    same_graphs = drawn == [drawn[0]] * 6 and bool((scores[0] == scores[1]).all())
    yield {
        "what": "own tokens against larger tables", "shape": asked.name,
        "logprobs_apart": round(apart, 6), "bound": round(bound, 4), "others_same_bits": same,
        "graph_same_bits": same_graphs, "decode_ms": figures["wall_ms"],
        "ok": apart <= bound and same and same_graphs,
    }  # fmt: skip


def _with_tokens(module: Any) -> GpuAdapter:
    """An adapter that changes no layer and brings NEW tokens after the base's, which often win."""
    size, width = module.config.vocab_size, module.config.hidden_size
    scale = 3 * float(module.get_input_embeddings().weight.detach().float().std())
    rows = torch.randn((NEW, width), generator=torch.Generator().manual_seed(7)) * scale
    own = TokenRows(np.arange(size, size + NEW), rows.to(module.dtype))
    return GpuAdapter({}, 16, size + NEW, 0, own, own)


def eight_bits(asked: Asked) -> Iterator[dict[str, Any]]:
    """`weights: fp8` beside weights as they are: how far logprobs are moved (by rounding, so not
    by much and not by nothing), and a decode step of both."""
    results, times = [], []
    for weights in (None, "fp8"):
        module = build(SHAPES[asked.name], asked.device, asked.dtype)
        runner = _runner(asked, module, weights=weights)
        results.append(run(runner, _prompt(asked)).score_logprobs)
        times.append(measure(runner, _decoded(asked, None), asked.repeats)["wall_ms"])
        runner.close()
    apart = float(np.abs(results[0] - results[1]).max())
    bound = apart_bound(torch.bfloat16, float(results[0].std())) * 4
    yield {
        "what": "weights in fp8", "shape": asked.name, "rounding": round(apart, 4),
        "bound": round(bound, 4), "decode_ms": times[1], "plain_ms": times[0],
        "ok": 0 < apart <= bound,
    }  # fmt: skip
