"""Weights in 8 or 4 bits on a GPU.

`int8`, `fp8`: whole numbers or floats (e4m3) with a float32 scale for each output. `int8-blocks`,
`int4`: whole numbers with a float16 scale for 32 inputs of an output, `int4` with a least value
beside it: a CPU's forms of the same names, number for number (cpu/integers/forms.py: ggml's q8_0
and q4_1).

What: `narrowed` rounds a matrix of a decoder's layers; `multiply` is its product in plain torch, of
any number of rows; few rows go through the kernels in narrow_kernels.py, which read what is stored
and no more. Activations are not rounded, which a CPU does. A product with scales for outputs is
x @ values.T * scales, in float32, rounded once to x's dtype (twice for many rows); with blocks it
is x @ W.T, of W = values * scale + least, rounded once to x's dtype, whatever computes it.

Why not torchao (0.18): outside torch.compile its weight-only products of int8 and float8 make a
whole matrix in bfloat16 at each call, three times the traffic that they save, and its kernel for
int4 pads the inputs of every matrix to a multiple of 1,024 and converts on a GPU alone, so that
nothing of it can be tried without one. What it stores for int8 and float8 is what is here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from server.types import NarrowForm

FEW_ROWS = 256
"""Rows of a product that the kernel takes; a graph has no more (graphs.MAX_GRAPH_ROWS)."""

LEAST_CAPABILITY = {"int8": (8, 0), "fp8": (8, 9), "int8-blocks": (8, 0), "int4": (8, 0)}
"""Of a CUDA device: conversion of float8 is there from Ada and Hopper on."""

BLOCK = 32
"""Inputs that share a scale, in blocks."""

_CHUNK = 4096  # outputs whose float32 copy exists at once
_LARGEST = {"int8": 127.0, "fp8": 448.0}


class NarrowWeight(NamedTuple):
    """values: int8 or float8_e4m3fn [outputs, inputs]. scales: float32 [outputs].

    In blocks, inputs padded to whole ones: int8 [outputs, inputs], or uint8 [outputs, inputs / 2]
    with numbers j and 16 + j of a block in the low and the high half of its byte j; scales, minima
    (or None): float16 [outputs, blocks].
    """

    values: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None

    @property
    def in_blocks(self) -> bool:
        """Whether there is a scale for every BLOCK inputs."""
        return self.scales.dim() == 2


def narrowed(weight: torch.Tensor, form: NarrowForm) -> NarrowWeight:
    """The nearest of a weight [outputs, inputs], on its device. Values that are not finite are
    rounded to none that are promised."""
    num, inputs = weight.shape
    blocks = -(-inputs // BLOCK)
    kind = {"fp8": torch.float8_e4m3fn, "int4": torch.uint8}.get(form, torch.int8)
    width = {"int8-blocks": BLOCK * blocks, "int4": BLOCK // 2 * blocks}.get(form, inputs)

    def made(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=weight.device)

    values = made(num, width, dtype=kind)
    if form in _LARGEST:
        whole = NarrowWeight(values, made(num, dtype=torch.float32))
    else:
        scales, minima = (made(num, blocks, dtype=torch.float16) for _ in range(2))
        whole = NarrowWeight(values, scales, minima if form == "int4" else None)
    for start in range(0, num, _CHUNK):
        rows = slice(start, start + _CHUNK)
        exact = weight[rows].float()
        part = _by_outputs(exact, form) if form in _LARGEST else _by_blocks(exact, form)
        for to, of in zip(whole, part, strict=True):
            if to is not None and of is not None:
                to[rows] = of
    return whole


def _by_outputs(exact: torch.Tensor, form: NarrowForm) -> NarrowWeight:
    """Each output scaled by its largest value; float32 in the place of values."""
    scales = exact.abs().amax(dim=1).clamp(min=1e-12) / _LARGEST[form]
    exact = exact / scales[:, None]  # a new one: of float32 it was the weight itself
    return NarrowWeight(exact.round_() if form == "int8" else exact, scales)


def _by_blocks(exact: torch.Tensor, form: NarrowForm) -> NarrowWeight:
    """cpu/integers/weights.quantised, operation for operation."""
    num, inputs = exact.shape
    padded = functional.pad(exact, (0, -inputs % BLOCK)).view(num, -1, BLOCK)
    if form == "int8-blocks":
        scales = (padded.abs().amax(dim=2) / 127.0).half()
        numbers = _nearest(padded, scales).clamp_(-127, 127)
        return NarrowWeight(numbers.flatten(1).to(torch.int8), scales)
    low, high = padded.amin(dim=2), padded.amax(dim=2)
    minima, scales = low.half(), ((high - low) / 15.0).half()
    numbers = _nearest(padded - minima.float()[..., None], scales).clamp_(0, 15).to(torch.uint8)
    halves = numbers[..., : BLOCK // 2] | (numbers[..., BLOCK // 2 :] << 4)
    return NarrowWeight(halves.flatten(1), scales, minima)


def _nearest(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    whole = scales.float()
    inverse = torch.where(whole != 0, 1.0 / whole, 0.0)
    return (values * inverse[..., None]).round_()


def widened(weight: NarrowWeight, dtype: torch.dtype) -> torch.Tensor:
    """What a weight in blocks stands for: [outputs, padded inputs] in dtype, rounded once."""
    num, blocks = weight.scales.shape
    out = torch.empty((num, blocks * BLOCK), dtype=dtype, device=weight.values.device)
    for start in range(0, num, _CHUNK):
        rows = slice(start, start + _CHUNK)
        stored = weight.values[rows]
        stored = stored.view(stored.shape[0], blocks, -1)
        if stored.dtype == torch.uint8:
            stored = torch.cat((stored & 15, stored >> 4), dim=2)
        exact = stored.float().mul_(weight.scales[rows].float()[..., None])
        if weight.minima is not None:
            exact += weight.minima[rows].float()[..., None]
        out[rows] = exact.flatten(1)
    return out


def widest_product(module: nn.Module) -> int:
    """Bytes of the widest matrix of a module's layers in the module's dtype, which `multiply` makes
    again for many rows (of gate and up, two matrices)."""
    own = [
        linear.weight
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear) and ".layers." in name
    ]
    return 2 * max((weight.numel() * weight.element_size() for weight in own), default=0)


def multiply(
    x: torch.Tensor,
    weight: NarrowWeight,
    bias: torch.Tensor | None,
    matrix: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [R, inputs] @ weight.T + bias: [R, outputs] in x's dtype. bias: [outputs] or None.

    Makes the matrix in x's dtype, for the time of the product; 8 bits without blocks are exact.
    matrix: what `widened` makes, if it is there.
    """
    if weight.in_blocks:
        matrix = widened(weight, x.dtype) if matrix is None else matrix
        matrix = matrix[:, : x.shape[1]].t()
        return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)
    y = torch.mm(x, weight.values.to(x.dtype).t())
    y.mul_(weight.scales)
    return y if bias is None else y.add_(bias)
