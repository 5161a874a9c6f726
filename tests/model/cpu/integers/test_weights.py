"""Weights in the integer forms: ggml's numbers, and what rounding costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from server.errors import ModelError
from server.model.cpu.integers.forms import BY_NAME, CHANNEL, FORMS
from server.model.cpu.integers.weights import dequantised, from_ggml, pack, quantised
from server.model.cpu.linear import Arena
from tests.model import families
from tests.model.cpu.integers.cases import GGML, ggml_rows, stored
from tests.model.cpu_models import cpu_runner


@pytest.mark.parametrize("name", GGML)
def test_a_files_numbers_are_what_ggml_says(name: str) -> None:
    raw = ggml_rows(name, 9, 1024, seed=1)
    want = quants.dequantize(raw, GGMLQuantizationType[name.upper()])
    assert np.array_equal(dequantised(from_ggml(name, raw)), want)


@pytest.mark.parametrize("name", ["q8_0", "q4_1"])
def test_rounding_is_as_good_as_ggmls_own(name: str) -> None:
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((16, 256), dtype=np.float32)
    kind = GGMLQuantizationType[name.upper()]
    theirs = quants.dequantize(quants.quantize(weight, kind), kind)
    ours = dequantised(quantised(BY_NAME[name], weight))
    error, known = (float(np.square(v - weight).mean()) for v in (ours, theirs))
    assert error <= known * 1.02


def test_one_scale_an_output_is_within_half_a_step() -> None:
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((7, 70), dtype=np.float32)
    weight[3] = 0.0
    got = dequantised(quantised(CHANNEL, weight))
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    assert (np.abs(got[:, :70] - weight) <= step * 0.501).all()
    assert not got[:, 70:].any()


def test_a_tensor_that_is_not_finite_is_named() -> None:
    module: Any = families.build("llama:1")
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight[1, 3] = float("nan")
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj\.weight: .*not finite"):
        cpu_runner(module, dtype="int8")


def test_memory_is_the_files() -> None:
    """But for K forms' sub-scales: 8 bits each instead of 6."""
    for form in FORMS:
        weights = stored(form.name, 64, 1024)
        size = pack(weights, Arena()).panels.nbytes
        if form.per_output:
            assert size == 64 * 1024 + 64 * 4
            continue
        own = ggml_rows(form.name, 64, 1024).nbytes
        assert own <= size <= own * 1.03, form.name


def test_rows_that_are_cut_short_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 34"):
        from_ggml("q8_0", np.zeros((2, 35), np.uint8))
