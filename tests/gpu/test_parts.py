"""What stands in for a part of the CUDA path, on a real device: narrow weights, prompts' libraries.

In bfloat16 above all, whose products Triton's interpreter does not compute. Not collected without
CUDA (conftest.py).
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from server.errors import UnsupportedModelError
from server.model.gpu import attention
from server.model.gpu.narrow import LEAST_CAPABILITY, NarrowWeight, multiply, narrowed, widened
from server.model.gpu.prefill import library_of
from server.types import NarrowForm, PrefillChoice
from tests.model import attention_cases as cases
from tests.model.gpu.test_prefill import chunked, step_of

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
FORMS: tuple[NarrowForm, ...] = get_args(NarrowForm)
LIBRARIES: tuple[PrefillChoice, ...] = ("torch", "flashinfer")


def made(form: NarrowForm, outputs: int, inputs: int) -> NarrowWeight:
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability(CUDA) < LEAST_CAPABILITY[form]:
            pytest.skip(f"{form} needs compute capability {LEAST_CAPABILITY[form]}")
    seeds = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=seeds)
    on_device, own = narrowed(weight.to(CUDA), form), narrowed(weight, form)
    if own.in_blocks:  # a division of another rounding would show here
        for theirs, ours in zip(on_device, own, strict=True):
            assert (theirs is None) == (ours is None)
            assert theirs is None or ours is None or torch.equal(theirs.cpu(), ours)
    return on_device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 16, 17, 256, 300])
@pytest.mark.parametrize("form", FORMS)
def test_products_of_narrow_weights(form: NarrowForm, rows: int, dtype: torch.dtype) -> None:
    """Against float64 of the matrix that they stand for; the same bits for a row among others."""
    from server.model.gpu import narrow_kernels

    weight = made(form, 200, 300)
    if weight.in_blocks:
        assert torch.equal(narrow_kernels.widened(weight, dtype), widened(weight, dtype))
        exact = widened(weight, dtype)[:, :300].double()
    else:
        exact = weight.values.to(dtype).double() * weight.scales.double()[:, None]
    seeds = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 300, generator=seeds).to(device=CUDA, dtype=dtype)
    bias = torch.randn(200, generator=seeds).to(device=CUDA, dtype=dtype)
    want = x.double() @ exact.t() + bias.double()
    bound = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    for product in (narrow_kernels.multiply_few, multiply):
        got = product(x, weight, bias)
        assert float((got.double() - want).abs().max()) <= bound * float(want.abs().max())
    if 1 < rows <= 16:
        got = narrow_kernels.multiply_few(x, weight, bias)
        assert torch.equal(narrow_kernels.multiply_few(x[3:4], weight, bias), got[3:4])


@pytest.mark.parametrize("shape", ["grouped_by_3", "capped_wide"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("choice", LIBRARIES)
def test_a_library_s_chunks_attend_to_exactly_their_keys(
    choice: PrefillChoice, apart: bool, shape: str
) -> None:
    sizes = cases.SHAPES.get(shape) or cases.Shape(4, 2, 64, 40, 3.0)
    dtype = torch.bfloat16
    try:
        library: Any = library_of(
            choice, head_dim=sizes.head_dim, dtype=dtype, cap=sizes.cap, device=CUDA
        )
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    p = cases.problem(step_of(apart=apart), sizes, dtype, CUDA)
    want = cases.expected(p)
    both = chunked(p, attention.TorchAttention(p.batch, p.step, 16), library)
    keys, values = p.cache.layer(0)
    both.write(keys, values, p.key, p.value)
    for _ in range(2):  # planned again, and run twice
        masked = attention.Masked(p.scaling, sizes.window, sizes.cap)
        got = both.attend(p.query, keys, values, masked)
        torch.testing.assert_close(got.double().cpu(), want, rtol=4e-2, atol=4e-2)
