"""Attention of prompt chunks: our kernel beside the libraries of `engine.prefill_attention`, and
beside torch's with pages.

torch's takes block tables from 2.12 on, in pages of a multiple of 256 slots (FlashAttention 2), no
soft-capped scores and no trees; our blocks have 16 slots, so that prompts share them finely, and
the engine gathers keys for it. What that costs is measured here: one layer, the same memory read as
pages and as blocks, which lie in the pages in order. `auto` is our kernel until a device was here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from loadtest.gpu.shapes import BLOCK_SIZE, SHAPES, Asked
from loadtest.gpu.steps import timed
from server.engine.batch import Batch
from server.errors import UnsupportedModelError
from server.model.gpu import attention as paged
from server.model.gpu.prefill import Library, TorchVarlen, chunks_of, library_of
from server.model.gpu.spec import PARTIAL_BYTES
from server.model.gpu.warm_up import warm_up_batch
from server.types import PrefillChoice

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
    """What varlen_attn computes, with block tables or without, in float32, where there is no CUDA.
    Its own conditions are asserted."""
    assert cu_seq_k is not None and int(cu_seq_q[0]) == int(cu_seq_k[0]) == 0
    table = options.get("block_table")
    if table is None:
        assert options.get("seqused_k") is None and int(cu_seq_k[-1]) == key.shape[0]
        used, at = cu_seq_k.diff(), cu_seq_k.tolist()
    else:
        used = options["seqused_k"]
        assert key.shape[1] % PAGE == 0 and used.dtype == table.dtype == torch.int32
    left, right = options["window_size"]
    assert right == 0 and options["num_splits"] == 1 and key.shape == value.shape
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and key.dtype == query.dtype
    assert int(cu_seq_q.diff().max()) == max_q and int(used.max()) == max_k
    assert int(cu_seq_q[-1]) == query.shape[0]
    out = torch.empty_like(query)
    groups = query.shape[1] // key.shape[-2]
    assert groups == 1 or options["enable_gqa"]

    def of(part: torch.Tensor, i: int, num: int) -> torch.Tensor:
        return (
            part[at[i] : at[i + 1]] if table is None else part[table[i].long()].flatten(0, 1)[:num]
        )

    for i, num in enumerate(used.tolist()):
        rows = slice(int(cu_seq_q[i]), int(cu_seq_q[i + 1]))
        k, v = (of(part, i, num).float().repeat_interleave(groups, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), k) * options["scale"]
        position = torch.arange(num)
        row = torch.arange(num - (rows.stop - rows.start), num)[:, None]
        sees = (position <= row) & ((position >= row - left) if left >= 0 else position >= 0)
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


def _libraries(asked: Asked) -> tuple[list[Library], list[str]]:
    """(what serves the shape in the place of our kernel, why others do not)."""
    if asked.device.type != "cuda":
        return [TorchVarlen(varlen_reference)], []
    found: list[Library] = []
    lacking = []
    choices: tuple[PrefillChoice, ...] = ("torch", "flashinfer")
    for choice in choices:
        try:
            library = library_of(
                choice, head_dim=SHAPES[asked.name].head_dim, dtype=asked.dtype, cap=0.0,
                device=asked.device,
            )  # fmt: skip
        except UnsupportedModelError as error:
            lacking.append(str(error))
            continue
        assert library is not None
        found.append(library)
    return found, lacking


def check(asked: Asked) -> Iterator[dict[str, Any]]:
    """A line for each size of a chunk: how far apart the ways are, and their times."""
    libraries, lacking = _libraries(asked)
    for reason in lacking:
        yield {"what": "prompt chunks", "shape": asked.name, "missing": reason}
    varlen = _installed() if asked.device.type == "cuda" else varlen_reference
    if asked.device.type == "cuda" and asked.dtype.itemsize > 2:
        return
    is_tiny, shape = asked.name.startswith("tiny"), SHAPES[asked.name]
    sizes = ((130, 0), (140, 600)) if is_tiny else ((512, 0), (2048, 0), (512, 4096))
    for window in (None, WINDOW) if shape.family == "gemma3" else (None,):
        for rows, history in sizes:
            found = _compared(asked, _problem(asked, rows, history), window, varlen, libraries)
            yield {
                "what": "prompt chunks, ours and libraries'", "shape": asked.name, "rows": 2 * rows,
                "history": history, "window": window, **found,
            }  # fmt: skip


def _compared(
    asked: Asked, p: _Problem, window: int | None, varlen: Varlen | None, libraries: list[Library]
) -> dict[str, float | bool]:
    masked = paged.Masked(SHAPES[asked.name].head_dim ** -0.5, window)
    attention = _ours(asked, p.blocks)
    ways = {"own": partial(attention.attend, p.query, p.keys, p.values, masked)}
    chunks = chunks_of(p.blocks)
    assert chunks is not None
    for library in libraries:
        arrays = library.arrays(chunks, BLOCK_SIZE)
        there = {name: torch.from_numpy(a).to(asked.device) for name, a in arrays.items()}
        library.begin(chunks, there, BLOCK_SIZE)
        ways[library.name] = partial(library.attend, p.query, p.keys, p.values, masked)
    if varlen is not None:
        options = varlen_arguments(p.pages, window, asked.device)
        keys, values = (part.view(-1, PAGE, *part.shape[1:]) for part in (p.keys, p.values))
        ways["torch_pages"] = partial(
            varlen, p.query, keys, values, **options, scale=masked.scaling
        )
    bound = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[asked.dtype]
    want = ways["own"]().float()
    found: dict[str, float | bool] = {"ok": True}
    for name, way in ways.items():
        apart = float((way().float() - want).abs().max())
        seconds = min(timed(way, asked.device) for _ in range(asked.repeats))
        found |= {f"{name}_apart": round(apart, 6), f"{name}_ms": round(1e3 * seconds, 4)}
        found["ok"] = bool(found["ok"] and apart <= bound)
    return found
