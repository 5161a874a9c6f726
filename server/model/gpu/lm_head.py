"""The full LM head: hidden states of rows that draw or are scored -> float32 logits over all ids.

LmHead has its weight where the hidden states are; StreamedHead has it in CPU memory and copies it
through two buffers on the device, a chunk being copied while the one before is multiplied. Slices
of the head: slices.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from server.model.gpu.sampler import argmax_ids
from server.model.gpu.transfers import Fence, HostTable, SideStream

_CPU_SLAB = 8192  # vocabulary rows upcast at once where there is no float32-output product
CHUNK_BYTES = 16 << 20
"""Bytes of one of StreamedHead's two buffers: long enough for a copy to run at full speed."""


def product(
    hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """hidden [n, K] times weight [rows, K], both of one dtype and device: float32 [n, rows].

    out: where it is written, or None. Never rounded to the weight's dtype: that would make ties,
    and ties go to the lowest id.
    """
    if weight.dtype == torch.float32:
        if out is None:
            return functional.linear(hidden, weight)
        return torch.mm(hidden, weight.t(), out=out)
    if weight.device.type == "cuda":
        # cuBLAS keeps its float32 accumulator (torch >= 2.8, CUDA only).
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    num_rows = weight.shape[0]
    if out is None:
        out = torch.empty((hidden.shape[0], num_rows), dtype=torch.float32)
    wide = hidden.float()
    for start in range(0, num_rows, _CPU_SLAB):
        rows = weight[start : start + _CPU_SLAB].float()
        torch.mm(wide, rows.t(), out=out[:, start : start + _CPU_SLAB])
    return out


def soft_capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap) of float32 logits, in place; 0 leaves them as they are."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


class FullHead(Protocol):
    """All rows of the head.

    vocab_size: ids that exist. is_streamed: whether every product reads the head over the bus, so
    that rows should share one. weight: [rows, hidden_size], on the device or in CPU memory; rows
    from vocab_size on are padding. bias: float32 [rows] on the device, or None. cap: logits are
    soft_capped by it, 0 = not.
    """

    vocab_size: int
    is_streamed: bool
    cap: float
    weight: torch.Tensor
    bias: torch.Tensor | None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] in the weight's dtype -> float32 [n, vocab_size]; no sync."""


def _check_size(weight: torch.Tensor, num_token_ids: int | None) -> int:
    num_rows = int(weight.shape[0])
    size = num_rows if num_token_ids is None else num_token_ids
    if not 0 < size <= num_rows:
        raise ValueError(f"{num_token_ids} token ids, but the head has {num_rows} rows")
    return size


class LmHead:
    """A head whose weight lies where the hidden states do.

    weight: [V, hidden_size], may be the tied embedding table (never copied). bias: [V] or None.
    num_token_ids: ids that exist; rows of the weight from there on are padding, multiplied (odd
    sizes are slow) but never shown, so that no such id can be drawn or listed.
    """

    is_streamed = False

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_token_ids: int | None = None,
        cap: float = 0.0,
    ) -> None:
        self.weight = weight
        self.cap = cap
        self.bias = None if bias is None else bias.float()
        self.vocab_size = _check_size(weight, num_token_ids)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See FullHead. out: float32 [n, rows of the weight], or None for memory of its own."""
        logits = product(hidden, self.weight, out)
        if self.bias is not None:
            logits += self.bias
        return soft_capped(logits[:, : self.vocab_size], self.cap)


class GraphHead:
    """What a CUDA graph computes behind the body: the full head and the likeliest ids.

    A step whose draws are all the argmax of the full head's logits (greedy decode and trees) is
    then one replay. Where more is drawn, the sampler reads the graph's logits and is launched
    behind it. Slices, and heads that are copied through the device, have the body's graph alone.
    head: on the device. num_rows: most rows of a graph that has it; the graphs share one buffer of
    logits, float32 [num_rows, rows of the head].
    """

    def __init__(self, head: LmHead, num_rows: int) -> None:
        self.num_rows = num_rows
        self._head = head
        shape = (num_rows, head.weight.shape[0])
        self._logits = torch.empty(shape, dtype=torch.float32, device=head.weight.device)

    def __call__(
        self, hidden: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits float32 [n, V], their argmax int32 [n], as in sampler.py) of rows int32 [n] of
        `hidden`. Both are overwritten by the next step."""
        states = hidden.index_select(0, rows)
        logits = self._head.logits(states, self._logits[: rows.shape[0]])
        return logits, argmax_ids(logits)


class StreamedHead:
    """A head that stays in CPU memory and is copied through two buffers at every product.

    table: its weight. bias: [V] on the device, or None. num_token_ids: as LmHead's; padding is not
    copied at all. side: the stream of the copies. The buffers are allocated at the first product.
    """

    is_streamed = True

    def __init__(
        self,
        table: HostTable,
        bias: torch.Tensor | None,
        num_token_ids: int | None,
        side: SideStream,
        *,
        cap: float = 0.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.cap = cap
        self.weight = table.tensor
        self.bias = None if bias is None else bias.float()
        self.vocab_size = _check_size(self.weight, num_token_ids)
        self._side = side
        row_bytes = self.weight.shape[1] * self.weight.element_size()
        self._chunk_rows = max(1, min(self.vocab_size, chunk_bytes // row_bytes))
        self._buffers: list[torch.Tensor] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See FullHead."""
        size, step = self.vocab_size, self._chunk_rows
        if not self._buffers:
            shape = (step, self.weight.shape[1])
            self._buffers = [
                torch.empty(shape, dtype=self.weight.dtype, device=hidden.device) for _ in range(2)
            ]
        logits = torch.empty((hidden.shape[0], size), dtype=torch.float32, device=hidden.device)
        starts = range(0, size, step)
        fences = [self._copy(i, start) for i, start in enumerate(starts[:2])]
        for i, start in enumerate(starts):
            end = min(start + step, size)
            fences[i].wait()
            logits[:, start:end] = product(hidden, self._buffers[i % 2][: end - start])
            if i + 2 < len(starts):
                # Queued behind the product that has just read this buffer, and not behind the next.
                fences.append(self._copy(i + 2, starts[i + 2]))
        if self.bias is not None:
            logits += self.bias[:size]
        return soft_capped(logits, self.cap)

    def _copy(self, nth: int, start: int) -> Fence:
        rows = self.weight[start : min(start + self._chunk_rows, self.vocab_size)]
        target = self._buffers[nth % 2][: rows.shape[0]]

        def copy() -> None:
            target.copy_(rows, non_blocking=True)

        return self._side.run(copy)
