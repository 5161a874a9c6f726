"""The integer kernels: the numbers of numpy's own arithmetic, to the last bit, on every path."""

from __future__ import annotations

import numpy as np
import pytest

from drafters.target import TARGETS, chosen, runs_here
from server.model.cpu.integers.forms import FORMS, PANEL
from server.model.cpu.integers.weights import Stored, spread
from server.model.cpu.linear import new_work
from server.model.cpu.records import INTEGER_KERNEL, ROW_SPAN, Float32, integer_kernel
from tests.model.cpu.integers import reference
from tests.model.cpu.integers.cases import inputs, largest, multiplied, stored
from tests.model.cpu.integers.other_cpus import said

NAMES = [form.name for form in FORMS]
PATHS = ("x86-64", "avx2", "avx-vnni", "avx512", "avx512-vnni")
"""Targets of this architecture."""


def _want(x: Float32, weights: Stored, factors: Float32 | None = None) -> Float32:
    """The reference's product. factors: of `int8`, what inputs are spread with."""
    rows = reference.inputs_of(x, per_row=weights.form.per_output, factors=factors)
    return reference.product(rows, weights)


@pytest.mark.parametrize("name", NAMES)
def test_products_have_the_references_bits_at_every_row_and_thread_count(name: str) -> None:
    weights = stored(name, 102, 512, seed=1)
    x = inputs(131, 512, seed=2)
    want = _want(x, weights)
    for rows in [*range(1, 15), 17, 24, 31, 38, 97, 131]:
        for threads in (1, 2):
            got = multiplied(x[:rows].copy(), [weights], threads)
            assert np.array_equal(got, want[:rows]), (rows, threads)


@pytest.mark.parametrize("name", ["int8", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize(
    ("outputs", "width"), [(33, 100), (64, 48), (7, 32), (200, 1536), (70, 192), (70, 224)]
)
def test_odd_sizes(name: str, outputs: int, width: int) -> None:
    """Also numbers of blocks that are no multiple of those that are added at once."""
    weights, x = stored(name, outputs, -(-width // 32) * 32, seed=3), inputs(75, width, seed=4)
    want = _want(x, weights)
    for rows in (5, 16, 32, 40, 75):
        assert np.array_equal(multiplied(x[:rows].copy(), [weights], 2), want[:rows]), rows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_numbers_overflow_no_sum(name: str, sign: int) -> None:
    weights = largest(name, 32, 512, sign)
    x = np.full((7, 512), 3.0, np.float32)
    x[1] = -3.0
    x[2, ::2] = -3.0
    want = _want(x, weights)
    for rows in (1, 2, 3, 7):
        assert np.array_equal(multiplied(x[:rows].copy(), [weights]), want[:rows]), rows


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
    want = _want(x, weights)
    assert np.array_equal(multiplied(x, [weights]), want, equal_nan=True)


def test_the_widest_kernel_that_a_cpu_has_is_chosen() -> None:
    both = frozenset({"avx2", "avx512f", "avx512bw", "avx512vnni", "avxvnni"})
    assert integer_kernel(both) == "avx512-vnni"
    assert integer_kernel(frozenset({"avx2", "avx512f", "avx512bw", "avxvnni"})) == "avx-vnni"
    assert integer_kernel(frozenset({"avx2", "avx512f", "avx512bw"})) == "avx512"
    assert integer_kernel(frozenset({"avx2", "avxvnni"})) == "avx-vnni"
    assert integer_kernel(frozenset({"avx2"})) == "avx2"
    assert integer_kernel(frozenset({"neon", "dotprod", "i8mm"})) == "neon-i8mm"
    assert integer_kernel(frozenset({"neon", "dotprod"})) == "neon-dotprod"
    assert integer_kernel(frozenset({"neon"})) == "plain"


def check_all(kernel: str) -> None:
    """In a process that chose it: the kernel of that name, every form, against the reference."""
    assert integer_kernel(TARGETS[kernel].features) == INTEGER_KERNEL
    room = new_work(1).pairs.shape[1]  # a span of rows, gate and up: floats' panels differ by CPU
    assert room >= 2 * PANEL * ROW_SPAN, (room, PANEL, ROW_SPAN)
    for seed, name in enumerate(NAMES):
        weights = stored(name, 70, 256, seed)
        x = inputs(19, 256, seed)
        want = _want(x, weights)
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
    want = _want(x, weights, factors)
    for threads in (1, 2):
        assert np.array_equal(multiplied(x, [weights], threads, factors), want)


def _factors(width: int) -> Float32:
    whole = -(-width // 32) * 32
    return np.exp(np.random.default_rng(width).normal(size=whole)).astype(np.float32)


@pytest.mark.parametrize("width", [32, 40, 250, 1536])
def test_inputs_are_spread_as_the_reference_does(width: int) -> None:
    check_spread(width)


def test_a_row_that_no_thread_has_room_for_is_refused() -> None:
    width = new_work(1).pairs.shape[1]
    with pytest.raises(ValueError, match="no room"):
        multiplied(inputs(1, width), [stored("int8", 32, width)])
    assert new_work(1, inputs=width).pairs.shape[1] >= width + 32


@pytest.mark.parametrize("kernel", PATHS)
def test_every_instruction_set_gives_the_same_bits(kernel: str) -> None:
    if not runs_here(TARGETS[kernel]):
        pytest.skip(f"this CPU is no {kernel}")
    if kernel == chosen().name:
        check_all(kernel)
        return
    told = said("test_kernels", f"test_kernels.check_all({kernel!r}); print('same')", kernel)
    assert told == "same"
