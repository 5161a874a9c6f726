"""Random paged-attention problems, and a float64 answer that follows batch.py's words row by row.

Shared by the CPU tests (torch reference, Triton's interpreter) and by tests/gpu.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch

from server.engine.batch import Batch
from server.model.gpu import attention
from server.model.gpu.attention import Kept, KvCache
from server.model.interface import Call
from tests.model.batches import BatchBuilder, Pages


@dataclass(frozen=True)
class Shape:
    """Heads of a model, its window and what its scores are soft-capped by."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    cap: float = 0.0


SHAPES = {
    "grouped_by_3": Shape(3, 1, 64, None),
    "mqa": Shape(4, 1, 32, None),
    "grouped_by_7": Shape(7, 1, 16, None),
    "mha": Shape(2, 2, 16, 2),  # the window ends within trees
    "odd_dim": Shape(4, 2, 24, 300),
    "wide": Shape(2, 1, 256, 40),
    "grouped_by_17": Shape(17, 1, 16, None),
    "capped": Shape(4, 2, 32, 40, 3.0),
}


FEW_KEYS = 64
"""Keys of a split that "few" is made for: what the interpreter takes, it takes for each key."""


def batch_of(kind: str) -> Batch:
    """A batch whose histories cross block, split and window edges. For the interpreter: "few", a
    row or more of each kind, whose splits are of FEW_KEYS; "prompt", a chunk that is split and one
    that is not."""
    pages = Pages(200, seed=3)
    builder = BatchBuilder()
    if kind == "few":
        for length in (17, FEW_KEYS + 1):
            builder.add_rows(pages.sequence(length), [1], length - 1)
        table = pages.sequence(96)
        builder.add_rows(table, [1], 76)
        builder.add_tree(table, 76, [1] * 5, [-1, 0, 1, -1, 3])
        builder.add_rows(pages.sequence(80), [1] * 3, FEW_KEYS - 1)
    if kind == "prompt":
        builder.add_rows(pages.sequence(260), [1] * 9, 250)
        table = pages.sequence(80)
        builder.add_rows(table, [1] * 70, 0)
        builder.add_tree(table, 69, [1] * 3, [-1, 0, -1])
    if kind in ("decode", "mixed"):
        for length in (1, 17, 256, 257, 600):
            builder.add_rows(pages.sequence(length), [1], length - 1)
    if kind in ("tree", "mixed"):
        for root in (5, 300):
            table = pages.sequence(root + 20)
            builder.add_rows(table, [1], root)
            builder.add_tree(table, root, [1] * 9, [-1, 0, 1, 2, 3, -1, 5, 5, 7])
    if kind in ("chunk", "mixed"):
        builder.add_rows(pages.sequence(300), [1] * 30, 250)
        table = pages.sequence(170)
        builder.add_rows(table, [1] * 150, 0)
        builder.add_tree(table, 149, [1] * 3, [-1, 0, -1])
    return builder.build()


@dataclass(frozen=True)
class Problem:
    """Inputs of one layer's attention on a device."""

    batch: Batch
    shape: Shape
    step: attention.StepTensors
    cache: KvCache
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def scaling(self) -> float:
        return self.shape.head_dim**-0.5


def problem(batch: Batch, shape: Shape, dtype: torch.dtype, device: torch.device) -> Problem:
    """Random history and rows. query, key and value are strided as transformers passes them."""
    generator = torch.Generator().manual_seed(0)
    cache = KvCache(Kept(1, shape.num_kv_heads, shape.head_dim), 200, 16, dtype, device)
    cache.memory.copy_(torch.randn(cache.memory.shape, generator=generator).to(dtype))

    def rows(num_heads: int) -> torch.Tensor:
        x = torch.randn((1, num_heads, batch.num_rows, shape.head_dim), generator=generator)
        return (1.5 * x).to(device=device, dtype=dtype)[0].transpose(0, 1)

    names = [n for n in attention.StepTensors.__slots__ if hasattr(batch, n)]
    arrays = {n: getattr(batch, n).copy() for n in names}
    arrays["ancestors"] = attention.ancestor_bits(batch)
    step = attention.StepTensors(**{n: torch.from_numpy(a).to(device) for n, a in arrays.items()})
    return Problem(
        batch,
        shape,
        step,
        cache,
        rows(shape.num_heads),
        rows(shape.num_kv_heads),
        rows(shape.num_kv_heads),
    )


def expected(p: Problem) -> torch.Tensor:
    """float64 [R, num_heads, head_dim] on the CPU: each row over the keys batch.py lists."""
    b = p.batch
    keys, values = (t.double().cpu() for t in p.cache.memory[0])
    keys[b.slots.tolist()] = p.key.double().cpu()
    values[b.slots.tolist()] = p.value.double().cpu()
    out = torch.zeros(p.query.shape, dtype=torch.float64)
    for r in range(b.num_rows):
        table = b.block_tables[b.seq_ids[r]]
        where = [(j, int(table[j // 16]) * 16 + j % 16) for j in range(b.prefix_len[r])]
        path = b.path_slots[b.path_start[r] : b.path_start[r] + b.path_len[r]].tolist()
        first = int(b.positions[r]) - len(path) + 1
        where += [(first + i, slot) for i, slot in enumerate(path)]
        if p.shape.window is not None:
            where = [(j, s) for j, s in where if int(b.positions[r]) - j < p.shape.window]
        slots = [s for _, s in where]
        query = p.query[r].double().cpu().unflatten(0, (p.shape.num_kv_heads, -1))
        score = torch.einsum("kgd,nkd->kgn", query, keys[slots]) * p.scaling
        if p.shape.cap:
            score = p.shape.cap * torch.tanh(score / p.shape.cap)
        share = torch.softmax(score, dim=-1)
        out[r] = torch.einsum("kgn,nkd->kgd", share, values[slots]).flatten(0, 1)
    return out


def run_torch(p: Problem) -> torch.Tensor:
    """The reference implementation."""
    return _run(p, attention.TorchAttention(p.batch, 16, p.query.device))


def run_triton(
    p: Problem, *, num_bytes: int = 64 << 20, split_size: int = attention.SPLIT_SIZE
) -> torch.Tensor:
    """The kernels, tiled and split as the runner does. num_bytes: memory for partial results.
    split_size: keys of a split."""
    from server.model.gpu import triton_kernels

    device = p.query.device
    shape = attention.TileShape.of(
        num_heads=p.shape.num_heads,
        num_kv_heads=p.shape.num_kv_heads,
        head_dim=p.shape.head_dim,
        max_model_len=1024,
        num_bytes=num_bytes,
    )
    shape = replace(shape, split_size=split_size)
    plan = attention.plan_tiles(p.batch, shape)
    made = triton_kernels.TritonAttention(
        p.step,
        torch.from_numpy(plan.short).to(device),
        torch.from_numpy(plan.long).to(device),
        plan.num_splits,
        torch.from_numpy(plan.split_rows).to(device),
        shape,
        triton_kernels.Partials(shape, p.shape.num_heads, p.shape.head_dim, device),
        16,
    )
    return _run(p, made)


def _run(p: Problem, made: attention.Attention) -> torch.Tensor:
    keys, values = p.cache.write(0, p.step.slots, p.key, p.value)
    slots = p.step.slots.long()
    assert torch.equal(keys[slots], p.key) and torch.equal(values[slots], p.value)
    call = Call(0, p.scaling, p.shape.window or 0, p.shape.cap)
    return made.attend(p.query, keys, values, call)


def check_rows_alone(whole: Problem, **options: int) -> torch.Tensor:
    """Every run of rows of one sequence has the bits that it has in a batch of its own. What the
    kernels give for all of them. options: of run_triton."""
    together = run_triton(whole, **options)
    starts = [*attention.run_starts(whole.batch.seq_ids).tolist(), whole.batch.num_rows]
    names = "token_ids positions seq_ids slots prefix_len path_start path_len".split()
    for start, end in itertools.pairwise(starts):
        own = slice(start, end)
        fields = {name: getattr(whole.batch, name) for name in Batch.__slots__}
        fields |= {n: np.ascontiguousarray(fields[n][own]) for n in names}
        p = problem(Batch(**fields), whole.shape, whole.query.dtype, whole.query.device)
        p.query.copy_(whole.query[own])
        p.key.copy_(whole.key[own])
        p.value.copy_(whole.value[own])
        assert torch.equal(run_triton(p, **options), together[own])
    return together
