"""Attention of prompt chunks: our kernel beside torch's own, torch.nn.attention.varlen.varlen_attn.

torch's takes block tables from 2.12 on, in pages of a multiple of 256 slots (FlashAttention 2), no
soft-capped scores and no trees; our blocks have 16 slots, so that prompts share them finely. So it
is measured here, before the engine may use it: one layer, the same memory read as pages and as
blocks, which lie in the pages in order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from loadtest.gpu.shapes import BLOCK_SIZE, SHAPES, Asked
from loadtest.gpu.steps import timed
from server.engine.batch import Batch
from server.model.gpu import attention as paged
from server.model.gpu.spec import PARTIAL_BYTES
from server.model.gpu.warm_up import warm_up_batch

__all__ = ["PAGE", "check", "varlen_arguments", "varlen_reference"]

PAGE = 256
WINDOW = 512  # of Gemma 3's sliding layers
Varlen = Callable[..., Any]  # torch's may give more than a tensor, where it is asked to


def varlen_arguments(batch: Batch, window: int | None, device: torch.device) -> dict[str, Any]:
    """varlen_attn's keywords beside query, key, value and scale, for a step of prompt chunks whose
    block tables are of PAGE slots. Raises ValueError for rows that see a tree."""
    if batch.path_len.any():
        raise ValueError("varlen_attn computes no trees")
    starts = paged.run_starts(batch.seq_ids)
    ends = np.append(starts[1:], batch.num_rows)
    used = batch.prefix_len[ends - 1]

    def there(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)

    return {
        "cu_seq_q": there(np.append(0, ends)),
        "cu_seq_k": there(np.append(0, np.cumsum(used))),
        "max_q": int((ends - starts).max()),
        "max_k": int(used.max()),
        "window_size": (-1 if window is None else window - 1, 0),
        "enable_gqa": True,
        "seqused_k": there(used),
        "block_table": there(batch.block_tables[batch.seq_ids[starts]]),
        "num_splits": 1,  # a row's bits do not depend on its neighbours
    }


def varlen_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    **options: Any,
) -> torch.Tensor:
    """What varlen_attn computes with block tables, in float32, where there is no CUDA. Its own
    conditions are asserted."""
    page, used, table = key.shape[1], options["seqused_k"], options["block_table"]
    left, right = options["window_size"]
    assert page % PAGE == 0 and right == 0 and cu_seq_k is not None
    assert all(t.dtype == torch.int32 for t in (cu_seq_q, cu_seq_k, used, table))
    assert int(cu_seq_q.diff().max()) == max_q and int(used.max()) == max_k
    out = torch.empty_like(query)
    groups = query.shape[1] // key.shape[2]
    for i, num in enumerate(used.tolist()):
        rows = slice(int(cu_seq_q[i]), int(cu_seq_q[i + 1]))
        k, v = (
            part[table[i].long()].flatten(0, 1)[:num].float().repeat_interleave(groups, dim=1)
            for part in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), k) * options["scale"]
        at = torch.arange(num)
        row = torch.arange(num - (rows.stop - rows.start), num)[:, None]
        sees = (at <= row) & ((at >= row - left) if left >= 0 else at >= 0)
        shares = torch.softmax(scores.masked_fill(~sees, float("-inf")), dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", shares, v).to(out.dtype)
    return out


def _installed() -> Varlen | None:
    """varlen_attn, where it takes block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has_tables = "block_table" in inspect.signature(varlen_attn).parameters
    return varlen_attn if has_tables else None


@dataclass(frozen=True)
class _Problem:
    """A chunk of each of two sequences. pages, blocks: the same step over pages of PAGE slots and
    over the engine's blocks. keys, values: [slots, num_kv_heads, head_dim]."""

    pages: Batch
    blocks: Batch
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def _problem(asked: Asked, rows: int, history: int) -> _Problem:
    shape = SHAPES[asked.name]
    num_pages = -(-(rows + history) // PAGE)
    batches = [warm_up_batch(2, rows, rows + history, n) for n in (num_pages, num_pages * 16)]
    order = np.random.default_rng(2).permutation(2 * num_pages).astype(np.int32)
    tables = order.reshape(2, num_pages)
    batches[0].block_tables[:] = tables
    each = PAGE // BLOCK_SIZE
    batches[1].block_tables[:] = np.reshape(
        tables[:, :, None] * each + np.arange(each, dtype=np.int32), (2, -1)
    )
    seeds = torch.Generator(asked.device).manual_seed(4)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=seeds, device=asked.device, dtype=asked.dtype)

    slots = order.shape[0] * PAGE
    keys, values = (random(slots, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    query = random(2 * rows, shape.num_heads, shape.head_dim)
    return _Problem(batches[0], batches[1], query, keys, values)


def _ours(asked: Asked, batch: Batch) -> paged.Attention:
    device, shape = asked.device, SHAPES[asked.name]

    def there(values: Any) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    names = "positions seq_ids slots prefix_len block_tables path_start path_len path_slots"
    step = paged.StepTensors(
        **{name: there(getattr(batch, name)) for name in names.split()},
        ancestors=there(paged.ancestor_bits(batch)),
    )
    if device.type != "cuda":
        return paged.TorchAttention(batch, step, BLOCK_SIZE)
    from server.model.gpu.triton_kernels import Partials, TritonAttention

    sizes = paged.TileShape.of(
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        max_model_len=shape.max_model_len, num_bytes=PARTIAL_BYTES, dtype=asked.dtype,
    )  # fmt: skip
    plan = paged.plan_tiles(batch, sizes)
    groups = [(there(g.tiles), g.block_m, g.num_splits) for g in plan.groups]
    partials = Partials(sizes, shape.num_heads, shape.head_dim, device)
    return TritonAttention(
        step, groups, there(plan.split_rows), plan.num_splits, sizes, partials, BLOCK_SIZE
    )


def check(asked: Asked) -> Iterator[dict[str, Any]]:
    """A line for each size of a chunk: how far apart the two are, and their times."""
    varlen = _installed() if asked.device.type == "cuda" else varlen_reference
    if varlen is None or (asked.device.type == "cuda" and asked.dtype.itemsize > 2):
        yield {"what": "prompt chunks", "shape": asked.name, "missing": "varlen_attn with tables"}
        return
    is_tiny, shape = asked.name.startswith("tiny"), SHAPES[asked.name]
    sizes = ((130, 0), (140, 600)) if is_tiny else ((512, 0), (2048, 0), (512, 4096))
    for window in (None, WINDOW) if shape.family == "gemma3" else (None,):
        for rows, history in sizes:
            found = _compared(asked, _problem(asked, rows, history), window, varlen)
            yield {
                "what": "prompt chunks, ours and torch's", "shape": asked.name, "rows": 2 * rows,
                "history": history, "window": window, **found,
            }  # fmt: skip


def _compared(
    asked: Asked, p: _Problem, window: int | None, varlen: Varlen
) -> dict[str, float | bool]:
    masked = paged.Masked(SHAPES[asked.name].head_dim ** -0.5, window)
    attention = _ours(asked, p.blocks)
    options = varlen_arguments(p.pages, window, asked.device)
    keys, values = (part.view(-1, PAGE, *part.shape[1:]) for part in (p.keys, p.values))

    def ours() -> torch.Tensor:
        return attention.attend(p.query, p.keys, p.values, masked)

    def torchs() -> torch.Tensor:
        out: torch.Tensor = varlen(p.query, keys, values, **options, scale=masked.scaling)
        return out

    apart = float((ours().float() - torchs().float()).abs().max())
    bound = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[asked.dtype]
    times = [min(timed(f, asked.device) for _ in range(asked.repeats)) for f in (ours, torchs)]
    return {
        "apart": round(apart, 6), "ms": round(1e3 * times[0], 4),
        "torch_ms": round(1e3 * times[1], 4), "ok": apart <= bound,
    }  # fmt: skip
