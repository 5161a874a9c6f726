"""Triton kernels of the products of few rows: a product reads the residual stream or adds to it.

A decode step's rows are few, and a product of few rows takes as long as its weights take from
memory and as its launch. So what stands between two products is computed in them:

- `read`: the residual stream's norm, a product of it (q, k and v; gate and up), and of gate and up
  their activation. Where a result is normed before it is added (Gemma, OLMo 2), it is added here:
  each program computes the sum for itself, and the first one writes it, to memory of its own.
- `add`: a product, added to the stream in place: a program has the outputs that it multiplies, so a
  value has one writer. Each program leaves the sum of squares of its outputs, and the next `read`
  adds these in one order: nobody waits for anybody, and there are no atomics.

So a layer is six launches: read, place, attend, add, read, add; one more where keys are split. A
row's result is a function of that row alone, the same in all steps of up to FEW_ROWS rows: tiles
have FEW_ROWS rows always, and blocks follow from the weights. Sums are float32. More rows go
through cuBLAS and the kernels of decoder_kernels.py: from there on each program would read more of
the rows than of the weights.

Predicted for one row on an H200 (bfloat16, 4.3 of 4.8 TB/s, 1.6 us for a launch in a graph that
waits for the one before it, and nothing of a launch's time hidden), not measured:

    model          layers  weights of layers  nine launches  six launches
    SmolLM2-135M       30       212 MB / 49 us        0.48 ms       0.34 ms
    Qwen3-0.6B         28       881 MB / 205 us       0.61 ms       0.47 ms
    Llama-3.2-1B       16      1946 MB / 453 us       0.68 ms       0.61 ms
    Gemma-3-270M       18       200 MB / 47 us        0.31 ms       0.22 ms
    Qwen3-4B           36      7265 MB / 1690 us      2.21 ms       2.04 ms

Three launches are 4.8 us a layer, whose weights take 1.6, 7.3, 28, 2.6 and 47 us: so our products
pay while they reach 25, 60, 86, 35 and 91 % of the bandwidth that cuBLAS's reach. That is likely
for the small models and open for Qwen3-4B. With 16 rows each program reads 16 rows of its inputs
too, from the second-level cache: of 2,048 inputs and in 256 programs 16 MB, about 3 us.

tests/model/gpu/test_streams.py compares the kernels with TorchOps in Triton's interpreter and
compiles them for sm_80 to sm_100; they were not run on a GPU, and their blocks not tuned on one.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from server.model.gpu.decoder_ops import Product, Residual, Stream
from server.model.gpu.narrow import NarrowWeight
from server.model.gpu.triton_kernels import FUSE

FEW_ROWS = 16
"""Rows of every tile: the least that a tensor core takes."""

_ROWS = tl.constexpr(FEW_ROWS)
_MANY_OUTPUTS = 4096  # from here on there are programs enough with wider blocks
_NUM_WARPS = 4


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """activation(gate) * up of float32."""
    logit = gate
    if GELU:
        # tanh(u) = 2 sigmoid(2 u) - 1, u = sqrt(2 / pi) (x + 0.044715 x^3)
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-logit)) * up


@triton.jit
def _factors(squares, size, eps):
    """1 / root of the mean square of each row, of sums of squares [rows, any number]."""
    return 1.0 / tl.sqrt(tl.sum(squares, axis=1) / size + eps)


@triton.jit
def _factors_of_parts(parts, r, in_rows, size, eps, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """_factors of what the programs of `add` have left: float32 [rows, NUM]."""
    p = tl.arange(0, BLOCK)
    mask = in_rows[:, None] & (p < NUM)[None, :]
    return _factors(tl.load(parts + r[:, None] * NUM + p[None, :], mask=mask, other=0.0), size, eps)


@triton.jit
def _stream(
    x, y, post, r, k, mask, factor, scale, SIZE: tl.constexpr, HAS_POST: tl.constexpr
):  # fmt: skip
    """Inputs k of the stream's rows, rounded as they are stored: x, with HAS_POST + norm(y)."""
    at = r[:, None] * SIZE + k[None, :]
    value = tl.load(x + at, mask=mask, other=0.0)
    if HAS_POST:
        added = tl.load(y + at, mask=mask, other=0.0).to(tl.float32) * factor[:, None]
        added = added * tl.load(post + k, mask=k < SIZE, other=0.0)[None, :]
        value = (value.to(tl.float32) + added * scale).to(value.dtype)
    return value


@triton.jit
def _weights(weight, n, k, in_outputs, K: tl.constexpr):
    """[inputs k, outputs n] of a matrix [outputs, K]."""
    mask = in_outputs[None, :] & (k < K)[:, None]
    return tl.load(weight + n[None, :].to(tl.int64) * K + k[:, None], mask=mask, other=0.0)


@triton.jit
def _finished(total, scales, bias, n, inside, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A product's sums with the scales and the bias of its outputs n."""
    if HAS_SCALES:
        total = total * tl.load(scales + n, mask=inside, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _read_stream(
    x, y, parts, post, norm, kept, normed, weight, scales, bias, out, num_rows, scale, eps,
    N: tl.constexpr, K: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    HAS_POST: tl.constexpr, HAS_NORM: tl.constexpr, KEEPS_NORMED: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, GATES: tl.constexpr, GELU: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (outputs): out = the stream's rows, normed, @ weight.T + bias; with GATES activated,
    of 2 N outputs. With HAS_POST the stream is x + norm(y): program 0 writes it to `kept`, and with
    KEEPS_NORMED the normed rows. `parts`: of y with HAS_POST, else of x."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, _ROWS)
    block = tl.arange(0, BLOCK_K)
    in_rows, inside = r < num_rows, n < N
    writes = r < tl.where(tl.program_id(0) == 0, num_rows, 0)
    kind: tl.constexpr = x.dtype.element_ty
    factor_y = tl.zeros((_ROWS,), tl.float32)
    factor = factor_y
    if HAS_POST:
        factor_y = _factors_of_parts(parts, r, in_rows, K, eps, NUM_PARTS, BLOCK_PARTS)
        if HAS_NORM:
            squares = tl.zeros((_ROWS, BLOCK_K), tl.float32)
            for start in range(0, K, BLOCK_K):
                k = start + block
                mask = in_rows[:, None] & (k < K)[None, :]
                value = _stream(x, y, post, r, k, mask, factor_y, scale, K, HAS_POST)
                value = value.to(tl.float32)
                squares += value * value
            factor = _factors(squares, K, eps)
    elif HAS_NORM:
        factor = _factors_of_parts(parts, r, in_rows, K, eps, NUM_PARTS, BLOCK_PARTS)
    total = tl.zeros((_ROWS, BLOCK_N), tl.float32)
    other = tl.zeros((_ROWS, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + block
        mask = in_rows[:, None] & (k < K)[None, :]
        states = _stream(x, y, post, r, k, mask, factor_y, scale, K, HAS_POST)
        at = r[:, None] * K + k[None, :]
        if HAS_POST:
            tl.store(kept + at, states, mask=writes[:, None] & (k < K)[None, :])
        if HAS_NORM:
            own = tl.load(norm + k, mask=k < K, other=0.0)
            states = (states.to(tl.float32) * factor[:, None] * own[None, :]).to(kind)
        if KEEPS_NORMED:
            tl.store(normed + at, states, mask=writes[:, None] & (k < K)[None, :])
        weights = _weights(weight, n, k, inside, K).to(kind)
        total = tl.dot(states, weights, total, input_precision="ieee")
        if GATES:
            weights = _weights(weight, N + n, k, inside, K).to(kind)
            other = tl.dot(states, weights, other, input_precision="ieee")
    total = _finished(total, scales, bias, n, inside, HAS_SCALES, HAS_BIAS)
    if GATES:
        other = _finished(other, scales + N, bias + N, n, inside, HAS_SCALES, HAS_BIAS)
        total = gated(total, other, GELU)
    mask = in_rows[:, None] & inside[None, :]
    tl.store(out + r[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_to_stream(
    states, x, y, parts, added, weight, scales, bias, num_rows, scale,
    N: tl.constexpr, K: tl.constexpr, HAS_POST: tl.constexpr, HAS_ADDED: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (outputs): x += states @ weight.T + bias (and `added`), or with HAS_POST y = that;
    the sums of squares of its outputs to parts [rows, programs]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, _ROWS)
    block = tl.arange(0, BLOCK_K)
    in_rows, inside = r < num_rows, n < N
    kind: tl.constexpr = x.dtype.element_ty
    total = tl.zeros((_ROWS, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + block
        mask = in_rows[:, None] & (k < K)[None, :]
        own = tl.load(states + r[:, None] * K + k[None, :], mask=mask, other=0.0)
        weights = _weights(weight, n, k, inside, K).to(kind)
        total = tl.dot(own, weights, total, input_precision="ieee")
    total = _finished(total, scales, bias, n, inside, HAS_SCALES, HAS_BIAS)
    at = r[:, None] * N + n[None, :]
    mask = in_rows[:, None] & inside[None, :]
    if HAS_ADDED:
        total += tl.load(added + at, mask=mask, other=0.0)
    if HAS_POST:
        value = total.to(kind)
        tl.store(y + at, value, mask=mask)
    else:
        before = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        value = (before + total * scale).to(kind)
        tl.store(x + at, value, mask=mask)
    value = tl.where(mask, value.to(tl.float32), 0.0)
    part = r * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts + part, tl.sum(value * value, axis=1), mask=in_rows)


def blocks(product: Product, gates: bool) -> dict[str, int]:
    """Launch options of a product: outputs and inputs of a block follow from its weights alone. Two
    blocks of weights stand beside each other for gate and up."""
    values = product.values
    wide = not gates and values.shape[0] > _MANY_OUTPUTS
    block_k = 64 if values.itemsize > 2 else 256
    return {
        "BLOCK_N": 32 if wide else 16,
        "BLOCK_K": max(16, min(block_k, triton.next_power_of_2(values.shape[1]))),
        "num_warps": _NUM_WARPS,
        "num_stages": 3 if wide or gates else 4,
    }


def _pointers(product: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, scales, bias): what is not there is not read; a pointer must be one."""
    values, weight, bias = product.values, product.weight, product.bias
    scales = weight.scales if isinstance(weight, NarrowWeight) else values
    return values, scales, scales if bias is None else bias


def _flags(product: Product) -> dict[str, Any]:
    has_scales = isinstance(product.weight, NarrowWeight)
    return {"HAS_SCALES": has_scales, "HAS_BIAS": product.bias is not None, **FUSE}


def read(
    stream: Stream,
    product: Product,
    out: torch.Tensor,
    gelu: bool | None = None,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = norm(stream) @ weight.T + bias, with gelu given gated; the stream's x behind it.

    out: [R, outputs], or half of them where gated; of any float. normed: [R, H], where the normed
    rows are to be left, if anybody needs them and nobody has them.
    """
    x, y, after = stream.x, stream.y, stream.after
    if stream.normed is not None or after is None:
        rows, after = x if stream.normed is None else stream.normed, Residual(None, 1.0, None, 0.0)
    else:
        rows = x
    has_post, has_norm = after.post is not None, after.following is not None
    kept = torch.empty_like(x) if has_post else x
    num_parts = 1 if stream.parts is None else stream.parts.shape[1]
    values, scales, bias = _pointers(product)
    size, options = out.shape[1], blocks(product, gelu is not None)
    _read_stream[(triton.cdiv(size, options["BLOCK_N"]),)](
        rows, rows if y is None else y, rows if stream.parts is None else stream.parts,
        rows if after.post is None else after.post,
        rows if after.following is None else after.following,
        kept, rows if normed is None else normed, values, scales, bias, out,
        out.shape[0], after.scale, after.eps, N=size, K=values.shape[1],
        NUM_PARTS=num_parts, BLOCK_PARTS=triton.next_power_of_2(num_parts),
        HAS_POST=has_post, HAS_NORM=has_norm, KEEPS_NORMED=normed is not None,
        GATES=gelu is not None, GELU=bool(gelu), **options, **_flags(product),
    )  # fmt: skip
    return kept


def add(
    x: torch.Tensor,
    states: torch.Tensor,
    product: Product,
    after: Residual,
    added: torch.Tensor | None,
) -> Stream:
    """The stream x with states @ weight.T + bias, and what float32 `added` [R, H] holds."""
    values, scales, bias = _pointers(product)
    num_rows, size = x.shape
    options = blocks(product, False)
    num_programs = triton.cdiv(size, options["BLOCK_N"])
    parts = torch.empty((num_rows, num_programs), dtype=torch.float32, device=x.device)
    y = None if after.post is None else torch.empty_like(x)
    _add_to_stream[(num_programs,)](
        states, x, x if y is None else y, parts, parts if added is None else added,
        values, scales, bias, num_rows, after.scale, N=size, K=values.shape[1],
        HAS_POST=y is not None, HAS_ADDED=added is not None, **options, **_flags(product),
    )  # fmt: skip
    return Stream(x, None, after, y, parts)
