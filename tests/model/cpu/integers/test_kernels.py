"""The integer kernels: the numbers of numpy's own arithmetic, to the last bit, on every path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
import pytest

from server.model.cpu.integers.forms import FORMS, PANEL
from server.model.cpu.integers.instructions import KERNEL, choose
from server.model.cpu.integers.product import ROW_SPAN
from server.model.cpu.integers.spread import spread, spread_weights
from server.model.cpu.linear import new_work
from tests.model.cpu.integers import reference
from tests.model.cpu.integers.cases import inputs, multiplied, stored

NAMES = [form.name for form in FORMS]
_AVX2 = "+avx,+avx2,+fma,+sse4.2,+sse4.1,+ssse3,+bmi,+bmi2,+f16c,+popcnt"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"
# Kernel -> (CPU that is compiled for, its features, those of the host that it takes).
PATHS = {
    "plain": ("x86-64", "+sse2", ()),
    "avx2": ("haswell", _AVX2, ("avx2",)),
    "avx-vnni": ("haswell", f"{_AVX2},+avxvnni", ("avxvnni",)),
    "avx512": ("skylake-avx512", _AVX512, ("avx512bw",)),
    "avx512-vnni": ("cascadelake", f"{_AVX512},+avx512vnni", ("avx512vnni",)),
}


@pytest.mark.parametrize("name", NAMES)
def test_products_have_the_references_bits_at_every_row_and_thread_count(name: str) -> None:
    weights = stored(name, 102, 512, seed=1)
    x = inputs(131, 512, seed=2)
    want = reference.product(reference.inputs_of(x, per_row=weights.form.per_output), weights)
    for rows in [*range(1, 15), 24, 31, 97, 131]:
        for threads in (1, 2):
            got = multiplied(x[:rows].copy(), [weights], threads)
            assert np.array_equal(got, want[:rows]), (rows, threads)


@pytest.mark.parametrize("name", ["int8", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize(("outputs", "width"), [(33, 100), (64, 48), (7, 32), (200, 1536)])
def test_odd_sizes(name: str, outputs: int, width: int) -> None:
    padded = -(-width // 32) * 32
    weights = stored(name, outputs, padded, seed=3)
    x = inputs(5, width, seed=4)
    want = reference.product(reference.inputs_of(x, per_row=weights.form.per_output), weights)
    assert np.array_equal(multiplied(x, [weights], 2), want)


def test_parts_of_different_forms_stand_side_by_side() -> None:
    parts = [stored("q5_0", 40, 512, 5), stored("q8_0", 64, 512, 6), stored("q6_k", 9, 512, 7)]
    x = inputs(17, 512, seed=8)
    rows = reference.inputs_of(x, per_row=False)
    want = np.concatenate([reference.product(rows, part) for part in parts], axis=1)
    assert np.array_equal(multiplied(x, parts, 2), want)


@pytest.mark.parametrize("name", ["int8", "q8_0", "q4_1"])
def test_a_row_that_is_not_finite_gives_nan_and_harms_no_other(name: str) -> None:
    weights = stored(name, 64, 96, seed=9)
    x = inputs(6, 96, seed=10)
    want = multiplied(x, [weights])
    for value in (np.nan, np.inf, -np.inf):
        x[3, 40] = value
        got = multiplied(x, [weights])
        assert np.isnan(got[3]).all()
        assert np.array_equal(np.delete(got, 3, 0), np.delete(want, 3, 0))


def test_tiny_and_huge_activations() -> None:
    weights = stored("q8_0", 32, 64, seed=11)
    x = inputs(5, 64, seed=12)
    x[0] *= np.float32(1e-38)
    x[1] *= np.float32(1e-33)
    x[2] = np.float32(1e-45)
    x[3] = np.float32(3e38)
    x[4] = 0.0
    want = reference.product(reference.inputs_of(x, per_row=False), weights)
    assert np.array_equal(multiplied(x, [weights]), want, equal_nan=True)


def test_the_widest_kernel_that_a_cpu_has_is_chosen() -> None:
    assert choose({"avx2", "avx512f", "avx512bw", "avx512vnni", "avxvnni"}) == "avx512-vnni"
    assert choose({"avx2", "avx512f", "avx512bw", "avxvnni"}) == "avx-vnni"
    assert choose({"avx2", "avx512f", "avx512bw"}) == "avx512"
    assert choose({"avx2", "avxvnni"}) == "avx-vnni"
    assert choose({"avx2"}) == "avx2"
    assert choose({"neon", "dotprod", "i8mm"}) == "neon-i8mm"
    assert choose({"neon", "dotprod"}) == "neon-dotprod"
    assert choose({"neon"}) == "plain"


def check_all(kernel: str) -> None:
    """In a process of its own: the kernel of that name, every form, against the reference."""
    assert kernel == KERNEL, f"{KERNEL} was chosen"
    room = new_work(1).pairs.shape[1]  # a span of rows, gate and up: floats' panels differ by CPU
    assert room >= 2 * PANEL * ROW_SPAN, (room, PANEL, ROW_SPAN)
    for seed, name in enumerate(NAMES):
        weights = stored(name, 70, 256, seed)
        x = inputs(19, 256, seed)
        want = reference.product(reference.inputs_of(x, per_row=weights.form.per_output), weights)
        for rows in (1, 2, 3, 7, 19):
            got = multiplied(x[:rows].copy(), [weights])
            assert np.array_equal(got, want[:rows]), (name, rows)
    check_spread(96)
    check_spread(250)


def check_spread(width: int) -> None:
    """Rows of that many inputs that are spread, and their product, against the reference."""
    factors = _factors(width)
    weights = stored("int8", 70, factors.shape[0], 3)
    x = inputs(19, width, 3)
    padded = np.pad(x, ((0, 0), (0, factors.shape[0] - width)))
    assert np.array_equal(spread(x, factors), reference.spread(padded, factors))
    want = reference.product(reference.inputs_of(x, per_row=True, factors=factors), weights)
    for threads in (1, 2):
        assert np.array_equal(multiplied(x, [weights], threads, factors), want)


def _factors(width: int) -> npt.NDArray[np.float32]:
    whole = -(-width // 32) * 32
    return np.exp(np.random.default_rng(width).normal(size=whole)).astype(np.float32)


@pytest.mark.parametrize("width", [32, 40, 250, 1536])
def test_inputs_are_spread_as_the_reference_does(width: int) -> None:
    check_spread(width)


def test_spread_inputs_and_weights_have_the_product_of_both() -> None:
    rng = np.random.default_rng(12)
    x, weight = inputs(7, 250, 12), rng.normal(size=(40, 250)).astype(np.float32)
    factors = _factors(250)
    got = spread(x, factors).astype(np.float64) @ spread_weights(weight, factors).T
    want = x.astype(np.float64) @ weight.T
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_a_row_that_no_thread_has_room_for_is_refused() -> None:
    width = new_work(1).pairs.shape[1]
    with pytest.raises(RuntimeError, match="failed"):
        multiplied(inputs(1, width), [stored("int8", 32, width)])
    assert new_work(1, inputs=width).pairs.shape[1] >= width + 32


@pytest.mark.parametrize("kernel", sorted(PATHS))
def test_every_instruction_set_gives_the_same_bits(kernel: str, other_cpu_s_code: Path) -> None:
    cpu, features, needed = PATHS[kernel]
    host = llvm.get_host_cpu_features()
    lacking = [name for name in needed if not host.get(name, False)]
    if lacking or "x86" not in llvm.get_process_triple():
        pytest.skip(f"this CPU has no {', '.join(lacking) or 'x86'}")
    env = {
        **os.environ,
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(other_cpu_s_code),
        "PYTHONPATH": str(Path(__file__).parents[4]),
    }
    code = (
        "from tests.model.cpu.integers.test_kernels import check_all; "
        f"check_all({kernel!r}); print('same')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "same"
