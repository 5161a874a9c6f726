"""Weights in 8 bits on a GPU: whole numbers or floats (e4m3) with a float32 scale for each output.

What: `narrowed` rounds a matrix of a decoder's layers; `multiply` is its product in plain torch, of
any number of rows; few rows go through the kernel in narrow_kernels.py, which reads 8 bits a weight
and no more. Activations are not rounded: a product is x @ values.T * scales, in float32, rounded
once to x's dtype (twice for many rows).

Why not torchao (0.18): outside torch.compile its weight-only products of int8 and float8 make a
whole matrix in bfloat16 at each call, three times the traffic that they save, and its kernel for
int4 pads the inputs of every matrix to a multiple of 1,024 and converts on a GPU alone, so that
nothing of it can be tried without one. What it stores for int8 and float8 is what is here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from server.types import NarrowForm

FEW_ROWS = 256
"""Rows of a product that the kernel takes; a graph has no more (graphs.MAX_GRAPH_ROWS)."""

LEAST_CAPABILITY = {"int8": (8, 0), "fp8": (8, 9)}
"""Of a CUDA device: conversion of float8 is there from Ada and Hopper on."""

_CHUNK = 4096  # outputs whose float32 copy exists at once
_LARGEST = {"int8": 127.0, "fp8": 448.0}


class NarrowWeight(NamedTuple):
    """values: int8 or float8_e4m3fn [outputs, inputs]. scales: float32 [outputs]."""

    values: torch.Tensor
    scales: torch.Tensor


def narrowed(weight: torch.Tensor, form: NarrowForm) -> NarrowWeight:
    """The nearest of a weight [outputs, inputs], each output scaled by its largest value."""
    kind = torch.int8 if form == "int8" else torch.float8_e4m3fn
    values = torch.empty(weight.shape, dtype=kind, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], _CHUNK):
        rows = slice(start, start + _CHUNK)
        exact = weight[rows].float()
        scale = exact.abs().amax(dim=1).clamp(min=1e-12) / _LARGEST[form]
        exact = exact / scale[:, None]  # a new one: of float32 it was the weight itself
        values[rows] = (exact.round_() if form == "int8" else exact).to(kind)
        scales[rows] = scale
    return NarrowWeight(values, scales)


def widest_product(module: nn.Module) -> int:
    """Bytes of the widest matrix of a module's layers in the module's dtype, which `multiply` makes
    again for many rows (of gate and up, two matrices)."""
    own = [
        linear.weight
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear) and ".layers." in name
    ]
    return 2 * max((weight.numel() * weight.element_size() for weight in own), default=0)


def multiply(x: torch.Tensor, weight: NarrowWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [R, inputs] @ weight.T + bias: [R, outputs] in x's dtype. bias: [outputs] or None.

    Makes the matrix in x's dtype, which holds 8 bits exactly, for the time of the product.
    """
    y = torch.mm(x, weight.values.to(x.dtype).t())
    y.mul_(weight.scales)
    return y if bias is None else y.add_(bias)
