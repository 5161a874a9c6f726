"""Weights in 8 and 4 bits: the rounding, a whole model against one with rounded weights, kernels.

The Triton half runs in the interpreter's process (tests/model/gpu/test_attention.py starts it).
"""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from server.errors import UnsupportedModelError
from server.model.cpu.integers import weights as of_cpu
from server.model.cpu.integers.forms import BY_NAME
from server.model.cpu.integers.packed import FORM_OF
from server.model.gpu.narrow import (
    FEW_ROWS,
    LEAST_CAPABILITY,
    NarrowWeight,
    multiply,
    narrowed,
    widened,
)
from server.types import NarrowForm
from tests.model import families, generic_models
from tests.model.batches import BatchBuilder, Pages, all_logprobs
from tests.model.gpu.ahead_of_time import compiled, stack_bytes
from tests.model.torch_runners import runner_over

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
V = families.VOCAB_SIZE
FORMS: list[NarrowForm] = ["int8", "fp8"]
IN_BLOCKS: list[NarrowForm] = ["int8-blocks", "int4"]


def random(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_the_nearest_of_its_form(form: NarrowForm) -> None:
    weight = random(5000, 24) * torch.logspace(-3, 3, 5000)[:, None]  # more than one chunk
    weight[7] = 0.0
    values, scales, _ = narrowed(weight, form)
    error = (values.float() * scales[:, None] - weight).abs()
    # Half a step of whole numbers, or half a unit of three bits behind the point.
    most = scales[:, None] / 2 if form == "int8" else weight.abs() / 16 + scales[:, None] * 2**-10
    assert (error <= most * 1.001).all()
    assert torch.isfinite(values.float()).all()


def hard(*size: int) -> torch.Tensor:
    """Rows of many sizes; a block of zeros, one of a single value, one that rounds to halves."""
    weight = random(*size) * torch.logspace(-6, 3, size[0])[:, None]
    weight[0, :32], weight[1, 32:64] = 0.0, 0.7
    weight[2, :32] = torch.arange(32) / 2 - 8
    return weight


@pytest.mark.parametrize("form", IN_BLOCKS)
@pytest.mark.parametrize("inputs", [96, 100])
def test_a_weight_in_blocks_is_a_cpu_s_number_for_number(form: NarrowForm, inputs: int) -> None:
    """Numbers, scales and least values, and what they stand for, to the bit; padded blocks too."""
    weight = hard(5000, inputs)  # more than one chunk
    got = narrowed(weight, form)
    want = of_cpu.quantised(BY_NAME[FORM_OF[form]], weight.numpy())
    numbers = torch.from_numpy(want.numbers)
    if form == "int4":
        halves = numbers.unflatten(1, (-1, 2, 16))
        numbers = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
        assert torch.equal(got.minima, torch.from_numpy(np.asarray(want.minima)))
    else:
        numbers = (numbers.to(torch.int16) - 128).to(torch.int8)
    assert torch.equal(got.values, numbers)
    assert torch.equal(got.scales, torch.from_numpy(want.scales))
    assert torch.equal(widened(got, torch.float32), torch.from_numpy(of_cpu.dequantised(want)))
    assert set(IN_BLOCKS) < set(LEAST_CAPABILITY)


@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "int8"), ("qwen2", "int8"), ("gemma3", "fp8"), ("lfm2", "int8"),
     ("llama", "int4"), ("qwen2", "int8-blocks"), ("lfm2", "int4")],
)  # fmt: skip
def test_a_model_is_the_one_with_the_rounded_weights(family: str, form: NarrowForm) -> None:
    """Biases, norms behind products, convolutions; a prompt of many rows and its last row alone."""
    module = families.build(family)
    rounded = copy.deepcopy(module)
    for name, linear in rounded.named_modules():
        if isinstance(linear, nn.Linear) and "layers" in name:
            own = narrowed(linear.weight.detach(), form)
            if own.in_blocks:
                matrix = widened(own, torch.float32)[:, : linear.in_features]
            else:
                matrix = own.values.float() * own.scales[:, None]
            linear.weight = nn.Parameter(matrix)
    runners = [
        runner_over(module, decoder="fused", weights=form), runner_over(rounded, decoder="fused")
    ]  # fmt: skip
    held = [m.weight.numel() for n, m in module.named_modules()
            if isinstance(m, nn.Linear) and "layers" in n]  # fmt: skip
    assert held and not any(held), "no weight is there twice"
    results = []
    for runner in runners:
        builder = BatchBuilder()
        for row in builder.add_rows(Pages(64).sequence(40), list(range(3, 43)), 0):
            builder.score(row, 0, V)
        runner.launch(builder.build())
        results.append(all_logprobs(runner.wait(), V))
        runner.close()
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=2e-4)


def test_what_has_no_decoder_of_ours_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="fp8 is for models that our own decoder comp"):
        runner_over(generic_models.build("gpt2"), weights="fp8")
    with pytest.raises(UnsupportedModelError, match="decoder: modules takes them as they are"):
        runner_over(families.build("llama"), decoder="modules", weights="int8")


@needs_interpreter
@pytest.mark.parametrize(("rows", "biased"), [(3, True), (70, False)])
def test_triton_multiplies_as_the_reference(rows: int, biased: bool) -> None:
    """Odd sizes, rows that lie apart; a row has the same bits beside others."""
    from server.model.gpu.narrow_kernels import multiply_few

    weight = narrowed(random(100, 72), "int8")
    x, bias = random(rows, 144, seed=2)[:, :72], random(100, seed=3) if biased else None
    got = multiply_few(x, weight, bias)
    torch.testing.assert_close(got, multiply(x, weight, bias), rtol=2e-5, atol=2e-5)
    if rows <= 16:
        assert torch.equal(multiply_few(x[1:2], weight, bias), got[1:2])


def exact_product(x: torch.Tensor, weight: NarrowWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """float64, of the matrix in x's dtype."""
    matrix = widened(weight, x.dtype)[:, : x.shape[1]].double()
    return x.double() @ matrix.t() + (0.0 if bias is None else bias.double())


@needs_interpreter
@pytest.mark.parametrize("form", IN_BLOCKS)
@pytest.mark.parametrize(("rows", "biased"), [(3, True), (70, False)])
def test_triton_multiplies_blocks_as_float64_does(
    form: NarrowForm, rows: int, biased: bool
) -> None:
    """Odd sizes, a block that is not whole, rows that lie apart; a row has the same bits beside
    others, and where others are not finite."""
    from server.model.gpu.narrow_kernels import multiply_few

    for dtype, bound in ((torch.float32, 2e-6), (torch.float16, 2**-11)):
        weight = narrowed(random(100, 150), form)
        x = random(rows, 300, seed=2)[:, :150].to(dtype)
        bias = random(100, seed=3).to(dtype) if biased else None
        got = multiply_few(x, weight, bias)
        want = exact_product(x, weight, bias)
        assert float((got.double() - want).abs().max()) <= bound * float(want.abs().max())
        if rows <= 16:
            assert torch.equal(multiply_few(x[1:2], weight, bias), got[1:2])
            x[0] = float("nan")
            assert torch.equal(multiply_few(x, weight, bias)[1:], got[1:])


@needs_interpreter
@pytest.mark.parametrize("form", IN_BLOCKS)
def test_triton_widens_to_the_bit(form: NarrowForm) -> None:
    from server.model.gpu import narrow_kernels

    for dtype in (torch.float32, torch.float16):  # the interpreter cuts bfloat16 off
        weight = narrowed(hard(40, 2100)[:33], form)
        assert torch.equal(narrow_kernels.widened(weight, dtype), widened(weight, dtype))
    x = random(FEW_ROWS + 1, 2100, seed=2)
    assert torch.equal(narrow_kernels.multiply_few(x, weight, None), multiply(x, weight, None))


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="compiles for a GPU")
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize(("form", "rows"), [("int4", 1), ("int4", FEW_ROWS), ("int8-blocks", 1)])
def test_product_in_blocks_compiles_for_a_gpu(
    form: str, rows: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to machine code, without a GPU; nothing spills."""
    from server.model.gpu import narrow_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    halves = form == "int4"
    shared: dict[str, Any] = {"BLOCKS": 2048 // 32, "HALVES": halves, "HAS_MIN": halves}
    constants = shared | {
        "N": 6144, "K": 2048, "HAS_BIAS": 1, "BLOCK_M": narrow_kernels.block_m(rows),
        "BLOCK_N": narrow_kernels._BLOCK_N, "BLOCK_BYTES": narrow_kernels._BLOCK_BYTES,
    }  # fmt: skip
    kinds = {
        "values": "*u8" if halves else "*i8", "scales": "*fp16", "minima": "*fp16",
        "num_rows": "i32", "stride_x": "i32",
    }  # fmt: skip
    for kernel, own in (
        (narrow_kernels._multiply_blocks, constants),
        (narrow_kernels._widen, shared | {"SIZE": narrow_kernels._WIDE_BYTES}),
    ):
        made = compiled(
            kernel, {k: v for k, v in kinds.items() if k in kernel.arg_names}, own,
            capability=capability, other="*bf16", num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        assert stack_bytes(made, tmp_path) == 0
        assert made.metadata.shared <= 99 << 10  # of compute capability 8.6 and 8.9


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="compiles for a GPU")
@pytest.mark.parametrize(
    ("form", "capability", "rows"),
    [("i8", 80, 1), ("i8", 80, FEW_ROWS), ("i8", 90, FEW_ROWS), ("fp8e4nv", 89, 1),
     ("fp8e4nv", 90, FEW_ROWS), ("fp8e4nv", 100, FEW_ROWS)],
)  # fmt: skip
def test_product_in_8_bits_compiles_for_a_gpu(
    form: str, capability: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to machine code, without a GPU; nothing spills."""
    from server.model.gpu import narrow_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants: dict[str, Any] = {
        "N": 6144, "K": 2048, "HAS_BIAS": 1, "BLOCK_M": narrow_kernels.block_m(rows),
        "BLOCK_N": narrow_kernels._BLOCK_N, "BLOCK_K": narrow_kernels._BLOCK_K,
    }  # fmt: skip
    kinds = {"values": f"*{form}", "scales": "*fp32", "num_rows": "i32", "stride_x": "i32"}
    made = compiled(
        narrow_kernels._multiply, kinds, constants,
        capability=capability, other="*bf16", num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    assert stack_bytes(made, tmp_path) == 0
    assert made.metadata.shared <= 99 << 10  # of compute capability 8.6 and 8.9
