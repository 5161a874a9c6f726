"""The products of few rows with what stands between them: six launches a layer beside nine.

The layers of a shape with random weights, without attention: the kernels that read the residual
stream and add to it (server/model/gpu/stream_kernels.py), and cuBLAS with launches of their own for
norms and activation. On CUDA each is a graph of all layers, and the two are replayed in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from loadtest.gpu.correct import apart_bound
from loadtest.gpu.shapes import SHAPES, Asked, Shape
from loadtest.gpu.steps import timed
from server.model.gpu.decoder_ops import DecoderOps, Product, Residual, Rows, TorchOps

__all__ = ["check"]

ROWS = (1, 8, 16)
_EPS = 1e-6


def check(asked: Asked) -> Iterator[dict[str, Any]]:
    """A line for each number of rows: microseconds of all layers both ways, and how far apart the
    results are; of 16 rows together and the first of them alone, whether the bits are equal."""
    device = asked.device
    few: DecoderOps = TorchOps()
    separate: DecoderOps = TorchOps()
    if device.type == "cuda":
        from server.model.gpu.decoder_kernels import TritonOps

        few, separate = TritonOps(), TritonOps(few_rows=0)
    layers = _layers(asked)
    first: list[torch.Tensor] = []
    for rows in ROWS:
        runs = [_captured(ops, layers, asked, rows) for ops in (few, separate)]
        seconds = [float("inf")] * 2
        for _ in range(asked.repeats):
            for i, (run, _out) in enumerate(runs):
                seconds[i] = min(seconds[i], timed(run, device))
        own, other = (out.float() for _run, out in runs)
        first.append(own[0])
        apart, bound = float((own - other).abs().max()), 4 * apart_bound(asked.dtype, 1.0)
        same = device.type != "cuda" or torch.equal(first[0], own[0])
        yield {
            "what": "six launches a layer beside nine", "shape": asked.name, "rows": rows,
            "six_us": round(1e6 * seconds[0], 1), "nine_us": round(1e6 * seconds[1], 1),
            "apart": round(apart, 5), "bound": round(bound, 4), "first_row_same_bits": same,
            "ok": apart <= bound and same,
        }  # fmt: skip


def _layers(asked: Asked) -> list[list[Product]]:
    """mix, out, gate and up, down of each layer."""
    shape = SHAPES[asked.name]
    heads = shape.num_heads * shape.head_dim
    mixed = heads + 2 * shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = ((mixed, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner))
    torch.manual_seed(0)
    return [
        [
            Product(
                torch.randn(n, k, device=asked.device, dtype=asked.dtype) * (0.3 * k**-0.5), None
            )
            for n, k in sizes
        ]
        for _ in range(shape.num_layers)
    ]


def _captured(
    ops: DecoderOps, layers: list[list[Product]], asked: Asked, rows: int
) -> tuple[Callable[[], Any], torch.Tensor]:
    """(what computes all layers again, its result [rows, H])."""
    shape, device = SHAPES[asked.name], asked.device
    torch.manual_seed(1)
    table = torch.randn(max(ROWS), shape.hidden_size, device=device, dtype=asked.dtype)
    states = torch.randn(
        max(ROWS), shape.num_heads * shape.head_dim, device=device, dtype=asked.dtype
    )
    ids = torch.arange(rows, dtype=torch.int32, device=device)
    norm = torch.ones(shape.hidden_size, device=device)

    def run() -> torch.Tensor:
        return _run(ops, layers, shape, Rows(table, ids, 1.0), states[:rows], norm)

    out = run()
    if device.type != "cuda":
        return run, out
    graph = torch.cuda.CUDAGraph()
    run()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    return graph.replay, out


def _run(
    ops: DecoderOps,
    layers: list[list[Product]],
    shape: Shape,
    rows: Rows,
    states: torch.Tensor,
    norm: torch.Tensor,
) -> torch.Tensor:
    """All layers; `states` stand where attention's results do."""
    gelu = shape.family == "gemma3"
    after = Residual(norm if gelu else None, 1.0, norm, _EPS)
    stream = ops.enter(rows, norm, _EPS)
    for nth, (mix, out, gate_up, down) in enumerate(layers):
        x, _mixed = ops.read(stream, mix, None)
        stream = ops.add(x, states, out, after, None)
        x, gated = ops.gated(stream, gate_up, gelu, None)
        if nth + 1 < len(layers):
            stream = ops.add(x, gated, down, after, None)
    return ops.leave(x, gated, down, after, None)
