"""Attention of long prompt chunks by a library instead of our kernel: engine.prefill_attention.

What: `chunks_of` finds a step's runs of more than MAX_SPLIT_RUN prompt rows, which see all earlier
positions and no tree; a Library attends for them over our KV blocks. Decoded rows, trees and short
ends of prompts stay with our kernel, whatever is chosen, so that a drafted row and a decoded one
are computed alike. Both libraries are told not to split a history over programs, so that a chunk's
bits do not follow from how many others there are.

- TorchVarlen: torch.nn.attention.varlen (FlashAttention 2 inside torch). Its block tables take
  pages of a multiple of 256 slots alone, and ours have 16, so that prompts share them finely. So
  the keys and values that a step's chunks see are gathered, once a layer. Counted: a position has
  4 num_kv_heads * head_dim bytes in 16 bits, which are read and written once more; 2,048 rows
  behind 4,096 positions of Qwen3-4B are 50 MB a layer, 13 us at 4 TB/s, beside 170 GFLOP, 340 us
  at 500 TFLOP/s: predicted 4 %, and 13 % for 512 rows. Pages of 256 would cost every prompt up to
  255 shared positions.
- FlashInfer: its BatchPrefillWithPagedKVCacheWrapper (the package flashinfer-python, tried against
  0.7's source), which reads our blocks as its pages where they are. Imported when it is chosen.

Nothing of this has run on a GPU. tests/model/gpu/test_prefill.py has stand-ins of both that hold
the documented contracts; loadtest/gpu_check.py compares them with our kernel on a device.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from server.engine.batch import Batch, Int32
from server.errors import UnsupportedModelError
from server.model.gpu.attention import MAX_SPLIT_RUN, Attention, Masked, run_starts
from server.model.gpu.transfers import TURNS
from server.types import PrefillChoice

__all__ = ["ChunkedAttention", "Chunks", "FlashInfer", "Library", "TorchVarlen", "chunks_of",
           "library_of"]  # fmt: skip

WORKSPACE_BYTES = 128 << 20
"""Of FlashInfer's partial results: the size that its documentation recommends."""

Array = npt.NDArray[Any]
Varlen = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """A step's n long runs of prompt rows. of_runs: bool, which of all the step's runs they are.
    rows: int32, theirs in order; starts: int32 [n + 1], of each in `rows`. used: int32 [n],
    positions that a run's last row sees, its own included. tables: int32 [n, blocks]."""

    of_runs: npt.NDArray[np.bool_]
    rows: Int32
    starts: Int32
    used: Int32
    tables: Int32

    @property
    def span(self) -> slice | None:
        """The rows, where they lie together."""
        first, last = int(self.rows[0]), int(self.rows[-1]) + 1
        return slice(first, last) if last - first == self.rows.shape[0] else None

    def slots(self, block_size: int) -> Int32:
        """int32: the slots of all positions that are seen, run by run."""
        blocks = -(-self.used // block_size)
        return np.concatenate([
            (table[:num, None] * block_size + np.arange(block_size)).reshape(-1)[:used]
            for table, num, used in zip(self.tables, blocks, self.used, strict=True)
        ]).astype(np.int32)  # fmt: skip


def chunks_of(batch: Batch) -> Chunks | None:
    """The long runs of a step whose rows see what is before them and nothing else; None: none."""
    starts = run_starts(batch.seq_ids)
    lengths = np.diff(np.append(starts, batch.num_rows))
    nth = np.arange(batch.num_rows) - np.repeat(starts, lengths)
    ahead = np.repeat(batch.prefix_len[starts], lengths)
    plain = (batch.path_len == 0) & (batch.prefix_len == ahead + nth)
    plain &= batch.positions == batch.prefix_len - 1
    chosen = np.logical_and.reduceat(plain, starts) & (lengths > MAX_SPLIT_RUN)
    if not chosen.any():
        return None
    first, num = starts[chosen], lengths[chosen]
    return Chunks(
        of_runs=chosen,
        rows=np.flatnonzero(np.repeat(chosen, lengths)).astype(np.int32),
        starts=np.append(0, np.cumsum(num)).astype(np.int32),
        used=batch.prefix_len[first + num - 1],
        tables=batch.block_tables[batch.seq_ids[first]],
    )


class Library(Protocol):
    """Attends for chunks. One a runner; `begin` once a step. copies_keys: it takes memory for all
    that a step's chunks see."""

    name: PrefillChoice
    copies_keys: bool

    def arrays(self, chunks: Chunks, block_size: int) -> dict[str, Array]:
        """What it reads on the device, to be uploaded with the step."""

    def begin(self, chunks: Chunks, tensors: Mapping[str, torch.Tensor], block_size: int) -> None:
        """A step begins. tensors: `arrays` on the device."""

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, masked: Masked
    ) -> torch.Tensor:
        """[rows of the chunks, num_heads, head_dim] in query's dtype. query: theirs; keys, values:
        a layer's cache [num_slots + block_size, num_kv_heads, head_dim]."""


class TorchVarlen:
    """Library by torch.nn.attention.varlen.varlen_attn. varlen: that function."""

    name: PrefillChoice = "torch"
    copies_keys = True

    def __init__(self, varlen: Varlen) -> None:
        self._varlen = varlen
        self._slots = torch.empty(0)
        self._given: dict[str, Any] = {}

    def arrays(self, chunks: Chunks, block_size: int) -> dict[str, Array]:
        """See Library."""
        return {
            "prefill.slots": chunks.slots(block_size),
            "prefill.starts": chunks.starts,
            "prefill.ends": np.append(0, np.cumsum(chunks.used)).astype(np.int32),
        }

    def begin(self, chunks: Chunks, tensors: Mapping[str, torch.Tensor], block_size: int) -> None:
        """See Library."""
        self._slots = tensors["prefill.slots"]
        self._given = {
            "cu_seq_q": tensors["prefill.starts"],
            "cu_seq_k": tensors["prefill.ends"],
            "max_q": int(np.diff(chunks.starts).max()),
            "max_k": int(chunks.used.max()),
        }

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, masked: Masked
    ) -> torch.Tensor:
        """See Library."""
        left = -1 if masked.window is None else masked.window - 1
        return self._varlen(
            query,
            keys.index_select(0, self._slots),
            values.index_select(0, self._slots),
            **self._given,
            scale=masked.scaling,
            window_size=(left, 0),
            enable_gqa=True,
            num_splits=1,
        )


class FlashInfer:
    """Library by flashinfer. wrapper: BatchPrefillWithPagedKVCacheWrapper; device: of its memory.

    A wrapper plans on the host, for one kind of mask, into page-locked memory that it copies from
    later: there are TURNS of each kind, and one is planned again when its copies have run.
    """

    name: PrefillChoice = "flashinfer"
    copies_keys = False

    def __init__(self, wrapper: Callable[..., Any], device: torch.device) -> None:
        self._make, self._device = wrapper, device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[int, Masked], tuple[Any, Any]] = {}
        self._planned: dict[Masked, Any] = {}
        self._turn = self._block_size = 0
        self._given: tuple[torch.Tensor, ...] = ()

    def arrays(self, chunks: Chunks, block_size: int) -> dict[str, Array]:
        """See Library: it copies its own."""
        return {}

    def begin(self, chunks: Chunks, tensors: Mapping[str, torch.Tensor], block_size: int) -> None:
        """See Library."""
        pages = -(-chunks.used // block_size)
        tables = [table[:num] for table, num in zip(chunks.tables, pages, strict=True)]
        arrays = (
            chunks.starts,
            np.append(0, np.cumsum(pages)),
            np.concatenate(tables),
            chunks.used - (pages - 1) * block_size,
        )
        self._given = tuple(torch.from_numpy(a.astype(np.int32)) for a in arrays)
        self._block_size, self._turn = block_size, (self._turn + 1) % TURNS
        self._planned = {}

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, masked: Masked
    ) -> torch.Tensor:
        """See Library."""
        if masked not in self._planned:
            self._planned[masked] = self._plan(query, keys, masked)
        caches = tuple(c.view(-1, self._block_size, *c.shape[1:]) for c in (keys, values))
        out: torch.Tensor = self._planned[masked].run(query, caches)
        return out

    def _plan(self, query: torch.Tensor, keys: torch.Tensor, masked: Masked) -> Any:
        """The wrapper of this mask, planned for the step."""
        wrapper, copied = self._wrappers.get((self._turn, masked), (None, None))
        if wrapper is None:
            wrapper = self._make(self._workspace, "NHD", backend="fa2")
        if copied is not None:
            copied.synchronize()  # of TURNS steps ago: over long since
        wrapper.plan(
            *self._given,
            query.shape[1],
            keys.shape[1],
            query.shape[2],
            self._block_size,
            causal=True,
            sm_scale=masked.scaling,
            window_left=-1 if masked.window is None else masked.window - 1,
            logits_soft_cap=masked.cap or None,
            q_data_type=query.dtype,
            kv_data_type=keys.dtype,
            disable_split_kv=True,
        )
        if self._device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._wrappers[self._turn, masked] = wrapper, copied
        return wrapper


class ChunkedAttention:
    """Attention whose long prompt chunks a library attends for. own: of the other rows, which
    leaves the chunks' in its result to be written. tensors: of the step."""

    def __init__(
        self, own: Attention, library: Library, chunks: Chunks, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self.write = own.write
        self._own, self._library, self._span = own, library, chunks.span
        self._rows = tensors.get("prefill.rows")

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, masked: Masked
    ) -> torch.Tensor:
        """See Attention."""
        out = self._own.attend(query, keys, values, masked)
        if self._span is not None:
            out[self._span] = self._library.attend(query[self._span], keys, values, masked)
        else:
            assert self._rows is not None
            own = self._library.attend(query.index_select(0, self._rows), keys, values, masked)
            out.index_copy_(0, self._rows.long(), own)
        return out


def library_of(
    choice: PrefillChoice, *, head_dim: int, dtype: torch.dtype, cap: float, device: torch.device
) -> Library | None:
    """The library of a choice; None where our own kernel attends: `auto` takes it until a device
    has measured others.

    head_dim, dtype: of keys. cap: of scores. Raises UnsupportedModelError, which names what the
    library lacks.
    """
    if choice in ("auto", "own"):
        return None
    reason = None
    if dtype.itemsize != 2:
        reason = f"it computes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    elif choice == "torch" and cap:
        reason = "it has no soft-capped scores, which this model has"
    elif choice == "torch" and (head_dim > 256 or head_dim % 8):
        reason = f"it takes heads of a multiple of 8 up to 256, not of {head_dim}"
    elif choice == "flashinfer" and head_dim not in (64, 128, 256):
        reason = f"it takes heads of 64, 128 and 256, not of {head_dim}"
    found, lacks = (None, reason) if reason else _installed(choice)
    if lacks is not None:
        raise UnsupportedModelError(
            f"prefill_attention: {choice} does not serve this model here: {lacks}. Nearest that "
            "works: `prefill_attention: own`"
        )
    assert found is not None
    return TorchVarlen(found) if choice == "torch" else FlashInfer(found, device)


def _installed(choice: PrefillChoice) -> tuple[Callable[..., Any] | None, str | None]:
    """(what attends, None), or (None, why it is not there)."""
    module, name, needed, plans = {
        "torch": ("torch.nn.attention.varlen", "varlen_attn", ("enable_gqa", "num_splits"), ""),
        "flashinfer": (
            "flashinfer", "BatchPrefillWithPagedKVCacheWrapper", ("disable_split_kv",), "plan",
        ),
    }[choice]  # fmt: skip
    try:
        found = getattr(importlib.import_module(module), name)
        given = inspect.signature(getattr(found, plans) if plans else found).parameters
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        package = f" (torch {torch.__version__})" if choice == "torch" else ""
        return None, f"{module}.{name} is not there{package}: {str(error)[:200]}"
    missing = [parameter for parameter in needed if parameter not in given]
    if missing:
        return None, f"{module}.{name} has no {missing[0]}; a newer version has it"
    return found, None
