"""Products of rows by their adapters' matrices, and what says which rows those are.

Grouped as in S-LoRA and Punica (arXiv 2311.03285, 2310.18547): rows of one adapter that follow each
other share a program and its reads of the adapter's matrix. `grouped_torch` is the reference of the
kernel in grouped_kernel.py. Adapters (lora.py) and their own head rows (own_rows.py) are added so.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from server.engine.batch import Int32
from server.model.adapter import adapter_spans

SPAN_ROWS = 16
"""Most rows of one span: those of one program's tile."""

SPAN_FIELDS = 3


def spans_of(places: Int32) -> Int32:
    """The same of places int32 [R], -1 for the base."""
    return np.array(adapter_spans(places, SPAN_ROWS), np.int32).reshape(-1, SPAN_FIELDS)


class Grouped(Protocol):
    """One grouped product: row r of a span of place p becomes x[r] @ w[p], times scales[p], written
    to y or, with `adds`, added to it and rounded once; other rows are left alone.

    x: [R, K]. spans: int32 [n, SPAN_FIELDS], of spans_of. w: [P, K, N] of any strides. y: [R, N].
    scales: float32 [P, N] or None. x and y may be strided except in their last dimension.
    """

    def __call__(
        self,
        x: torch.Tensor,
        spans: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        scales: torch.Tensor | None = None,
        *,
        adds: bool = False,
    ) -> None: ...


def grouped_torch(
    x: torch.Tensor,
    spans: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    scales: torch.Tensor | None = None,
    *,
    adds: bool = False,
) -> None:
    """Grouped in plain torch, span by span: the reference. The host waits for the spans."""
    for first, num, place in spans.tolist():
        rows = slice(first, first + num)
        # A row at a time: no library's product of several rows then decides a row's bits.
        for row in range(rows.start, rows.stop):
            product = x[row].float() @ w[place].float()
            if scales is not None:
                product = product * scales[place]
            y[row] = y[row].float() + product if adds else product


def grouped(attention: str) -> Grouped:
    """The one that goes with an attention (attention.AttentionName)."""
    if attention == "torch":
        return grouped_torch
    from server.model.gpu.grouped_kernel import grouped_triton

    return grouped_triton


def power_of_two(num: int) -> int:
    """The least one that is not below num."""
    return 1 << (num - 1).bit_length()
