"""Step times of a shape beside the memory floor: decode, trees, sampled rows, prompt chunks.

The floor is the bytes a step must read - every weight but the embedding table once, and the keys
and values of each sequence's history once - over the measured copy bandwidth (bytes read and
written a second). `wall` is the median over launch + wait, `launch` the host's part of it. All but
chunks are timed once plainly and once with CUDA graphs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from loadtest.gpu.correct import (
    SHAPES,
    Asked,
    Shape,
    build,
    runner_of,
    weight_bytes,
)
from server.engine.batch import Batch
from server.model.gpu.attention import Kept
from server.model.gpu.runner import TorchRunner
from server.types import SamplingParams
from tests.model.batches import BLOCK_SIZE, BatchBuilder, Pages, draw_params

MAX_ROWS = 2048
KV_HEADROOM = 4 << 30  # bytes left for logits, activations and partial attention results


@dataclass(frozen=True)
class Case:
    """num_seqs sequences with `rows` rows each over `history` positions. A tree's rows hang off
    one another in chains of four; a chunk's are a prompt's; "sampled" is decode at temperature 0.8
    and top_p 0.9, where the others are greedy."""

    kind: str
    num_seqs: int
    rows: int
    history: int


def cases(shape: str) -> list[Case]:
    """What is timed, in the order of the table."""
    if shape.startswith("tiny"):
        kinds = (("decode", 2, 1), ("tree", 1, 5), ("sampled", 2, 1), ("chunk", 1, 8))
        return [Case(kind, seqs, rows, 40) for kind, seqs, rows in kinds]
    histories = (256, 2048)
    result = [Case("decode", n, 1, h) for h in histories for n in (1, 8, 64)]
    result += [Case("tree", 1, n, h) for h in histories for n in (8, 16, 64)]
    result += [Case("tree", 8, 8, 2048), Case("decode", 1, 1, 8192), Case("tree", 1, 16, 8192)]
    result += [Case("sampled", n, 1, 256) for n in (1, 8)]
    result += [Case("chunk", 1, n, 0) for n in (512, 2048)]
    return result


def blocks_needed(case: Case) -> int:
    """KV blocks of a case."""
    return case.num_seqs * -(-(case.history + case.rows) // BLOCK_SIZE)


def batch_of(case: Case, vocab_size: int) -> Batch:
    """The step of a case: all its rows, a draw from each (from a chunk's last alone)."""
    pages, builder = Pages(blocks_needed(case)), BatchBuilder()
    sampled = SamplingParams(temperature=0.8, top_p=0.9) if case.kind == "sampled" else None
    params = builder.add_params(draw_params(sampled))
    shape = case.num_seqs, case.rows
    for ids in np.random.default_rng(1).integers(0, vocab_size, shape).tolist():
        table = pages.sequence(case.history + case.rows)
        rows = builder.add_rows(table, ids[: 1 if case.kind == "tree" else None], case.history)
        parents = [i - 1 if i % 4 else -1 for i in range(case.rows - len(rows))]
        rows += builder.add_tree(table, case.history, ids[len(rows) :], parents)
        for row in rows[-1:] if case.kind == "chunk" else rows:
            builder.draw(row, params)
    return builder.build()


def bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a copy on the device, the best of ten."""
    size = (1 << 30) if device.type == "cuda" else (1 << 26)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        best = min(best, timed(lambda: target.copy_(source), device))
    return 2 * size / best


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Wall seconds of `work` to its end on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def measure(runner: TorchRunner, batch: Batch, repeats: int) -> dict[str, float]:
    """Median milliseconds of launch and wait, of launch alone and of the head."""
    seconds = []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        runner.launch(batch)
        launched = time.perf_counter()
        drawn = runner.wait()
        seconds.append((time.perf_counter() - begin, launched - begin, drawn.head_s))
    medians = map(statistics.median, zip(*seconds[3:], strict=True))
    names = ("wall_ms", "launch_ms", "head_ms")
    return {name: round(1e3 * s, 4) for name, s in zip(names, medians, strict=True)}


def free_blocks(shape: Shape, device: torch.device, dtype: torch.dtype) -> int:
    """Most KV blocks that fit beside the weights."""
    kept = Kept(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    per_block = kept.block_bytes(BLOCK_SIZE, dtype)
    if device.type != "cuda":
        return 64
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, (free - KV_HEADROOM) // per_block - 1)


def time_shape(asked: Asked) -> Iterator[dict[str, Any]]:
    """Table rows of one shape; a case that does not fit has wall_ms None."""
    name, device, dtype = asked.name, asked.device, asked.dtype
    bytes_per_s = bandwidth(device)
    shape = SHAPES[name]
    module = build(shape, device, dtype)
    weights = weight_bytes(module)
    room = free_blocks(shape, device, dtype)
    key_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    for graphs in (False, True) if device.type == "cuda" else (False,):
        wanted = [c for c in cases(name) if not graphs or c.kind != "chunk"]
        fitting = [n for n in map(blocks_needed, wanted) if n <= room]
        runner = runner_of(
            module, device, shape.max_model_len, num_blocks=max(fitting, default=1), num_seqs=64,
            num_rows=MAX_ROWS, cuda_graphs=graphs,
        )  # fmt: skip
        for case in wanted:
            read = weights + case.num_seqs * case.history * key_bytes
            row: dict[str, Any] = {
                "shape": name,
                "kind": case.kind,
                "graphs": graphs,
                "num_seqs": case.num_seqs,
                "rows_per_seq": case.rows,
                "history": case.history,
                "floor_ms": round(1e3 * read / bytes_per_s, 4),
                "wall_ms": None,
            }
            if blocks_needed(case) <= room:
                try:
                    row |= measure(runner, batch_of(case, shape.vocab_size), asked.repeats)
                except Exception as error:  # Triton's own errors derive from nothing else
                    row["error"] = named(error)
            yield row
        runner.close()


def named(error: Exception) -> str:
    """An error in one short line."""
    return f"{type(error).__name__}: {error}"[:300]
